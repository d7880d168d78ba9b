package daemon

import (
	"net"
	"path/filepath"
	"testing"
)

func TestNotify(t *testing.T) {
	if err := notify(t.Context(), "", tellReady); err != nil {
		t.Errorf("where nobody listens: %v", err)
	}
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := notify(t.Context(), path, tellReady); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 64)
	if n, err := l.Read(b); err != nil || string(b[:n]) != "READY=1" {
		t.Errorf("it was told %q, %v", b[:n], err)
	}
	if err := notify(t.Context(), path+"x", tellReady); err == nil {
		t.Error("a socket that is not there was told")
	}
}
