package client

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestOpen(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	pin := "sha256//" + strings.Repeat("A", 43) + "="
	for _, tt := range []struct {
		cfg  Config
		says string // "": it opens
	}{
		{Config{Address: "unix:///run/x"}, ""},
		{Config{Address: "unix:///run/x", Token: "t"}, ""},
		{Config{Address: "unix://x"}, "absolute"},
		{Config{Address: "http://192.0.2.1:1"}, ""},
		{Config{Address: "http://192.0.2.1:1", Token: "t"}, "unencrypted"},
		{Config{Address: "http://localhost.example:1", Token: "t"}, "unencrypted"},
		{Config{Address: "http://127.0.0.1.example:1", Token: "t"}, "unencrypted"},
		{Config{Address: "http://localhost:1", Token: "t"}, ""},
		{Config{Address: "http://127.9.9.9", Token: "t"}, ""},
		{Config{Address: "http://[::1]:1", Token: "t"}, ""},
		{Config{Address: "http://[::ffff:127.0.0.1]:1", Token: "t"}, ""},
		{Config{Address: "http://localhost:1", Fingerprint: pin}, "https"},
		{Config{Address: "https://192.0.2.1", Token: "t"}, ""},
		{Config{Address: "https://192.0.2.1:1", Fingerprint: pin}, ""},
		{Config{Address: "https://192.0.2.1:1", Fingerprint: "sha256//x"}, "fingerprint"},
		{Config{Address: "https://192.0.2.1:1", CA: empty}, "no certificate"},
		{Config{Address: "https://192.0.2.1:1", CA: empty + "x"}, "no such file"},
		{Config{Address: "192.0.2.1:1"}, "https://host:port"},
		{Config{Address: "ftp://192.0.2.1"}, "https://host:port"},
		{Config{Address: "https://"}, "https://host:port"},
		{Config{Address: ""}, "https://host:port"},
		{Config{Address: "https://user:secret@192.0.2.1:1"}, "https://host:port"},
	} {
		c, err := Open(tt.cfg)
		if (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%+v: %v, want %q", tt.cfg, err, tt.says)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Error(err)
		}
		if c != nil {
			c.Close()
		}
	}
}
