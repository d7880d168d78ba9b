package layout

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// FuzzAdvert: what another user of the host says of its daemon is taken only if it is his, and that runs.
func FuzzAdvert(f *testing.F) {
	text, err := json.Marshal(AdvertFile{Host: "unix:///x", PID: os.Getpid(), UID: os.Getuid(), Tags: []string{"t"}})
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{string(text), "", "null", "{}", `{"pid":1,"uid":-1}`, `{"pid":-5}`, `{"tags":[null]}`, string(text[:20])} {
		f.Add([]byte(seed))
	}
	path := filepath.Join(f.TempDir(), "1.json")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		a, ok := readAdvert(path)
		if ok && (a.UID != os.Getuid() || a.PID < 1 || !alive(a.PID)) {
			t.Errorf("%q was believed: %+v", text, a)
		}
		WithTag([]AdvertFile{a}, "t", "unix:///y")
	})
}
