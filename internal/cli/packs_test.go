package cli

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestPackOutput: what cannot be written, or would be lost, is refused before anything is packed.
func TestPackOutput(t *testing.T) {
	dir := t.TempDir()
	file, pipe, link := filepath.Join(dir, "file"), filepath.Join(dir, "pipe"), filepath.Join(dir, "link")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		out   string
		force bool
		want  string // in the error; "": none
	}{
		{"-", false, ""},
		{filepath.Join(dir, "new"), false, ""},
		{filepath.Join(dir, "new"), true, ""},
		{file, true, ""},
		{link, true, ""},
		{file, false, "is there already"},
		{link, false, "is there already"},
		{dir, true, "is a directory"},
		{pipe, true, "is no regular file"},
		{pipe, false, "is no regular file"},
		{filepath.Join(dir, "none", "new"), true, "none: no such file or directory"},
		{filepath.Join(file, "new"), true, "file is no directory"},
	} {
		err := checkOutput(row.out, row.force)
		if row.want == "" && err != nil || row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)) {
			t.Errorf("-o %s, force %t: %v, want %q", row.out, row.force, err, row.want)
		}
	}
}
