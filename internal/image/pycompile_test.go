package image

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/testenv"
)

// TestPythonCompile runs both scripts on a directory: what packages name is compiled, tests and broken files are not.
func TestPythonCompile(t *testing.T) {
	testenv.Need(t, "python3")
	dir := t.TempDir()
	local := func(script string) string {
		return strings.NewReplacer("/usr/lib/python3/dist-packages", dir+"/dist", "/"+buildDir, dir+"/build").Replace(script)
	}
	for name, text := range map[string]string{
		"dist/a.py": "x = 1\n", "dist/p/__init__.py": "", "dist/p/tests/test_a.py": "x = 1\n", "dist/broken.py": "print 1\n",
		"share/app/m.py": "y = 2\n", "share/other/n.py": "", "share/single.py": "z = 3\n", "build/x": "",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := shell(t, dir, nil, "-ec", local(compileScript)); err != nil || len(compiled(t, dir)) != 0 {
		t.Fatalf("without any package: %v: %s", err, out)
	}
	for _, args := range [][]string{{"-p", "python3-a"}, {"-p", "app:amd64", dir + "/share/app", "-V", "3.2-"}, {dir + "/share/single.py"}} {
		if out, err := shell(t, dir, nil, append([]string{"-ec", local(py3compileHelper), "py3compile"}, args...)...); err != nil {
			t.Fatalf("py3compile %q: %v: %s", args, err, out)
		}
	}
	if out, err := shell(t, dir, nil, "-ec", local(compileScript)); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got, want := strings.Join(compiled(t, dir), " "), "dist/a dist/p/__init__ share/app/m share/single"; got != want {
		t.Errorf("compiled %s, want %s", got, want)
	}
}

// compiled are the modules below dir that have been compiled.
func compiled(t *testing.T, dir string) []string {
	t.Helper()
	var modules []string
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if strings.HasSuffix(path, ".pyc") {
			rel, _ := filepath.Rel(dir, path)
			stem, _, _ := strings.Cut(strings.Replace(rel, "__pycache__/", "", 1), ".")
			modules = append(modules, stem)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(modules)
	return modules
}
