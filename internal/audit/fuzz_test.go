package audit

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzWhatIsThere: whatever a crash, a full disk or another program has left in the file, an entry is a line of its own, what
// was there is still there, and it is rotated as it would be.
func FuzzWhatIsThere(f *testing.F) {
	for _, seed := range []string{"", "{}\n", `{"time":"2026`, "\n\n", "\x00\x00\x00", strings.Repeat("x", 300), strings.Repeat("y\n", 150)} {
		f.Add([]byte(seed), "sh", "req-1")
	}
	f.Add([]byte("torn"), "new\nline\x00\xff", "a\u2028b")
	const most = 600
	f.Fuzz(func(t *testing.T, there []byte, word, id string) {
		path := filepath.Join(t.TempDir(), "audit.log")
		if err := os.WriteFile(path, there, 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := Open(Config{Path: path, MaxBytes: most, Keep: 1, Trouble: func(err error) { t.Errorf("trouble: %v", err) }})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Write(Entry{RequestID: id, Argv: []string{word}}); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		older, err := os.ReadFile(path + ".1")
		if err == nil { // Rotated: what was there is there, whole.
			if !bytes.Equal(older, there) || len(there) == 0 {
				t.Errorf("%q was rotated, and is %q now", there, older)
			}
			there = nil
		}
		rest, ok := bytes.CutPrefix(text, there)
		if !ok {
			t.Fatalf("%q is in the place of %q", text, there)
		}
		if len(there) > 0 && there[len(there)-1] != '\n' {
			if rest, ok = bytes.CutPrefix(rest, []byte("\n")); !ok {
				t.Fatalf("%q goes on with the line that was there", text)
			}
		}
		var e Entry
		line, end := bytes.CutSuffix(rest, []byte("\n"))
		if err := json.Unmarshal(line, &e); err != nil || !end || bytes.ContainsAny(line, "\n\r") {
			t.Fatalf("the entry is %q: %v", rest, err)
		}
		if utf8.ValidString(id) && e.RequestID != id {
			t.Errorf("the id is %q, want %q", e.RequestID, id)
		}
	})
}
