package layout

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFind(t *testing.T) {
	env := func(pairs ...string) func(string) string {
		return func(k string) string {
			for i := 0; i < len(pairs); i += 2 {
				if pairs[i] == k {
					return pairs[i+1]
				}
			}
			return ""
		}
	}
	tests := []struct {
		name, explicit string
		uid            int
		env            func(string) string
		root, socket   string
		wantErr        bool
	}{
		{"root", "", 0, env(), "/var/lib/forkd", "/run/forkd/forkd.sock", false},
		{"user", "", 1000, env("HOME", "/home/u", "XDG_RUNTIME_DIR", "/run/user/1000"), "/home/u/.local/share/forkd", "/run/user/1000/forkd/forkd.sock", false},
		{"data home", "", 1000, env("XDG_DATA_HOME", "/d", "XDG_RUNTIME_DIR", "/r"), "/d/forkd", "/r/forkd/forkd.sock", false},
		{"explicit", "/srv/a", 1000, env(), "/srv/a", "/srv/a/forkd.sock", false},
		{"homeless", "", 1000, env(), "", "", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h, err := Find(tt.explicit, tt.uid, tt.env)
			if (err != nil) != tt.wantErr || h.Root != tt.root || h.Socket != tt.socket {
				t.Errorf("got %+v, %v", h, err)
			}
		})
	}
}

func TestLongSocketPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("x/", 80))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	l, err := ListenSocket(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			err = c.Close()
		}
		accepted <- err
	}()
	c, err := DialSocket(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	if err := <-accepted; err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket is %v, %v", info, err)
	}
}

func TestAdverts(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, a AdvertFile) string {
		b, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := AdvertFile{Host: "unix:///a", PID: os.Getpid(), UID: os.Getuid(), Tags: []string{"x"}}
	if _, ok := readAdvert(write("good", good)); !ok {
		t.Error("a good one does not count")
	}
	liar := good
	liar.UID++
	if _, ok := readAdvert(write("liar", liar)); ok {
		t.Error("one whose owner is not who it says counts")
	}
	gone := good
	gone.PID = 1 << 30
	if _, ok := readAdvert(write("gone", gone)); ok {
		t.Error("one of a daemon that is gone counts")
	}
	if got := WithTag([]AdvertFile{good}, "x", "unix:///a"); len(got) != 0 {
		t.Errorf("the daemon asked names itself: %v", got)
	}
	if got := WithTag([]AdvertFile{good}, "x", "unix:///b"); len(got) != 1 {
		t.Errorf("got %v", got)
	}
}

// TestRuntimeDirectoryOfSomeoneElse: in a shared temporary directory our place may have been taken.
func TestRuntimeDirectoryOfSomeoneElse(t *testing.T) {
	target := t.TempDir()
	link := filepath.Join(t.TempDir(), "forkd-1000")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	if err := makePrivate(link); err == nil || !strings.Contains(err.Error(), "someone else") {
		t.Errorf("a link in its place: %v", err)
	}
	if entries, err := os.ReadDir(target); err != nil || len(entries) != 0 {
		t.Errorf("something was made behind the link: %v, %v", entries, err)
	}
}
