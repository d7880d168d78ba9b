package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/testenv"
)

const module = "forkd.dev/forkd"

// source is one Go file of ours.
type source struct {
	path string // from the root, with slashes
	file *ast.File
	text string
}

func (s *source) isTest() bool { return strings.HasSuffix(s.path, "_test.go") }
func (s *source) pkg() string  { return path.Dir(s.path) }

// skipped are directories that hold nothing of ours, or nothing that is Go.
func skipped(name string) bool {
	switch name {
	case "testdata", "bin", "node_modules", "tools":
		return true
	}
	return strings.HasPrefix(name, ".")
}

// sources parses every Go file of the module.
func sources(t *testing.T, files *token.FileSet) []*source {
	root := testenv.Root(t)
	var all []*source
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && name != root && skipped(entry.Name()) {
			return fs.SkipDir
		}
		if entry.IsDir() || !strings.HasSuffix(name, ".go") {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(files, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		all = append(all, &source{path: filepath.ToSlash(relative), file: file, text: string(text)})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 20 {
		t.Fatalf("only %d Go files found below %s", len(all), root)
	}
	return all
}
