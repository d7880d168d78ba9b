package house

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/testenv"
)

// TestNothingOfOneMachine: paths of somebody's checkout or home in a file are of no use to anybody else.
func TestNothingOfOneMachine(t *testing.T) {
	// Written in pieces, so that this file does not name them.
	foreign := regexp.MustCompile(`/wo` + `rk/(main|shared|\.)|/tmp/br` + `ief|/ro` + `ot/go/|/home/[a-z]+/(src|go|work|code)/`)
	root := testenv.Root(t)
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (entry.Name() == ".git" || entry.Name() == ".tools" || entry.Name() == "node_modules" || name == filepath.Join(root, "bin")) {
			return fs.SkipDir
		}
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() || info.Size() > 1<<20 {
			return err
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if bytes.IndexByte(text, 0) >= 0 {
			return nil // a binary
		}
		for _, match := range foreign.FindAll(text, -1) {
			t.Errorf("%s names %s…, a path of one machine", strings.TrimPrefix(name, root+"/"), match)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestScriptsAreExecutable: a checkout on another file system can lose the bit, and the Makefile calls them by name.
func TestScriptsAreExecutable(t *testing.T) {
	root := testenv.Root(t)
	for _, name := range []string{".ci/run", "scripts/go", "scripts/setup", "scripts/test-vm", "scripts/unprivileged", "scripts/vm-packages"} {
		info, err := os.Stat(filepath.Join(root, name))
		if err != nil {
			t.Error(err)
			continue
		}
		if info.Mode()&0o111 != 0o111 {
			t.Errorf("%s is not executable", name)
		}
	}
}
