package access

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestSeed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "seed")
	first, err := OpenSeed(path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := OpenSeed(path)
	if err != nil {
		t.Fatal(err)
	}
	token := first.Token("envd", "sb-a")
	if token != again.Token("envd", "sb-a") || len(token) != 64 {
		t.Errorf("%s, and after reading it again %s", token, again.Token("envd", "sb-a"))
	}
	for _, other := range []string{first.Token("envd", "sb-b"), first.Token("traffic", "sb-a"), "", token[:63], token + "0"} {
		if first.Is(other, "envd", "sb-a") {
			t.Errorf("%q passes for another's", other)
		}
	}
	if !again.Is(token, "envd", "sb-a") {
		t.Error("its own is refused")
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others may read it: %v, %v", info.Mode(), err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("files are left: %v, %v", left, err)
	}
}

func TestDamagedSeed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "seed")
	if err := os.WriteFile(path, []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenSeed(path); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a damaged seed: %v", err)
	}
}
