package agent

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestMappedFiles(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if files := mappedFiles(os.Getpid()); !slices.Contains(files, self) {
		t.Errorf("our own program %s is not among %v", self, files)
	}
	if files := mappedFiles(1 << 30); files != nil {
		t.Errorf("a process that is gone has %v mapped", files)
	}
}

func TestReadInIsBounded(t *testing.T) {
	name := filepath.Join(t.TempDir(), "library")
	if err := os.WriteFile(name, make([]byte, 10_000), 0o600); err != nil {
		t.Fatal(err)
	}
	for most, want := range map[int64]int64{100: 100, 20_000: 10_000} {
		if got := readIn(name, most); got != want {
			t.Errorf("read %d bytes of at most %d, want %d", got, most, want)
		}
	}
	if got := readIn(name+"missing", 1); got != 0 {
		t.Errorf("read %d bytes of a file that is not there", got)
	}
}
