package house

import (
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/testenv"
)

// TestPackageDocs: every package says, in exactly one place, what it is.
func TestPackageDocs(t *testing.T) {
	docs := map[string][]string{} // package → files with a doc comment
	for _, s := range sources(t, token.NewFileSet()) {
		if s.isTest() {
			continue
		}
		if _, ok := docs[s.pkg()]; !ok {
			docs[s.pkg()] = nil
		}
		if s.file.Doc == nil {
			continue
		}
		docs[s.pkg()] = append(docs[s.pkg()], s.path)
		want := "Package " + s.file.Name.Name + " "
		if s.file.Name.Name == "main" {
			want = "Command " + filepath.Base(s.pkg()) + " "
		}
		if text := s.file.Doc.Text(); !strings.HasPrefix(text, want) {
			first, _, _ := strings.Cut(text, "\n")
			t.Errorf("%s: the package's doc comment starts with %q, want %q (is it a licence header?)", s.path, first, want)
		}
	}
	for pkg, files := range docs {
		switch len(files) {
		case 1:
		case 0:
			t.Errorf("%s: no doc comment: say what the package is, what it is not, and who may import it", pkg)
		default:
			t.Errorf("%s: %d doc comments, want one: %s", pkg, len(files), strings.Join(files, ", "))
		}
	}
}

// TestDecisions: every module we chose has its reason written down, and no module that is gone.
func TestDecisions(t *testing.T) {
	root := testenv.Root(t)
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs/decisions/0001-dependencies.md"))
	if err != nil {
		t.Fatal(err)
	}
	required := map[string]bool{}
	for line := range strings.Lines(string(mod)) {
		fields := strings.Fields(strings.TrimPrefix(line, "require "))
		if len(fields) < 2 || !strings.Contains(fields[0], ".") || !strings.HasPrefix(fields[1], "v") {
			continue
		}
		required[fields[0]] = true
		if len(fields) == 2 && !strings.Contains(string(page), "| `"+fields[0]+"` |") {
			t.Errorf("go.mod requires %s, whose reason docs/decisions/0001-dependencies.md does not give", fields[0])
		}
	}
	for line := range strings.Lines(string(page)) {
		name, ok := strings.CutPrefix(line, "| `")
		if name, _, _ := strings.Cut(name, "`"); ok && !required[name] {
			t.Errorf("docs/decisions/0001-dependencies.md gives a reason for %s, which go.mod does not require", name)
		}
	}
}
