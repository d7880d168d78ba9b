package debian

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// indexOf makes an index of lines "name version; Field: value; …".
func indexOf(t *testing.T, lines ...string) *Index {
	t.Helper()
	x := NewIndex()
	for _, line := range lines {
		head, fields, _ := strings.Cut(line, ";")
		name, version, _ := strings.Cut(head, " ")
		text := fmt.Sprintf("Package: %s\nVersion: %s\nFilename: pool/%s.deb\nSize: 1\nSHA256: %064d\n", name, version, name, 1)
		text += strings.TrimLeft(strings.ReplaceAll(fields, ";", "\n")+"\n", "\n")
		if err := x.Add(strings.NewReader(text), "http://m", "s"); err != nil {
			t.Fatal(err)
		}
	}
	if err := x.Finish(); err != nil {
		t.Fatal(err)
	}
	return x
}

func TestResolve(t *testing.T) {
	tests := []struct {
		name   string
		index  []string
		wanted string
		want   string // packages in order, or a part of the error after "!"
	}{
		{"alone", []string{"a 1"}, "a", "a"},
		{"chain", []string{"a 1;Depends: b", "b 1;Pre-Depends: c", "c 1"}, "a", "a b c"},
		{"pre-depends first", []string{"a 1;Depends: b;Pre-Depends: c", "b 1", "c 1"}, "a", "a c b"},
		{"cycle", []string{"a 1;Depends: b", "b 1;Depends: a"}, "a", "a b"},
		{"no recommends", []string{"a 1;Recommends: b", "b 1"}, "a", "a"},
		{"first alternative", []string{"a 1;Depends: b | c", "b 1", "c 1"}, "a", "a b"},
		{"chosen alternative", []string{"a 1;Depends: b | c", "b 1", "c 1"}, "c a", "c a"},
		{"missing first alternative", []string{"a 1;Depends: x | c", "c 1"}, "a", "a c"},
		{"version selects alternative", []string{"a 1;Depends: b (>= 2) | c", "b 1", "c 1"}, "a", "a c"},
		{"newest version", []string{"a 1", "a 1.1;Depends: b", "a 1.0~x", "b 1"}, "a", "a b"},
		{"qualified", []string{"a 1;Depends: python3:any (>= 1)", "python3 1"}, "a", "a python3"},
		{"virtual", []string{"a 1;Depends: v", "z 1;Provides: v", "b 1;Provides: v"}, "a", "a b"},
		{"virtual by priority", []string{"a 1;Depends: v", "b 1;Provides: v;Priority: optional", "z 1;Provides: v;Priority: required"}, "a", "a z"},
		{"chosen provider", []string{"a 1;Depends: v", "z 1;Provides: v", "b 1;Provides: v"}, "z a", "z a"},
		{"versioned provides", []string{"a 1;Depends: v (>= 2)", "b 1;Provides: v", "c 1;Provides: v (= 3)"}, "a", "a c"},
		{"real before virtual", []string{"a 1;Depends: v", "b 1;Provides: v", "v 1"}, "a", "a v"},
		{"virtual wanted", []string{"b 1;Provides: v"}, "v", "b"},
		{"ambiguous virtual wanted", []string{"b 1;Provides: v", "c 1;Provides: v"}, "v", "!virtual; name one that provides it: b, c"},
		{"conflict steers", []string{"a 1;Depends: b | c;Conflicts: b", "b 1", "c 1"}, "a", "a c"},
		{"unsatisfiable", []string{"a 1;Depends: b (>= 2)", "b 1"}, "a", "!a 1 needs b (>= 2) [the archive has 1], which the archive cannot satisfy"},
		{"conflict", []string{"a 1;Conflicts: b", "b 1"}, "a b", "!a 1 and b 1 cannot be installed together"},
		{"breaks by version", []string{"a 1;Breaks: b (<< 2)", "b 2"}, "a b", "a b"},
		{"conflict with provided", []string{"a 1;Conflicts: v", "b 1;Provides: v"}, "a b", "!cannot be installed together"},
		{"own provided name", []string{"a 1;Conflicts: v;Provides: v"}, "a", "a"},
		{"unknown", []string{"python3 1", "python3-numpy 1", "numpy-doc 1"}, "pyton3", `!package "pyton3" is not in s1, s2; similar names: python3`},
		{"unknown part", []string{"python3-numpy 1", "x 1"}, "numpy", "!similar names: python3-numpy"},
		{"bad field", []string{"a 1;Depends: ((("}, "a", "!dependencies of a 1"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			list, err := Resolve(indexOf(t, c.index...), strings.Fields(c.wanted), []string{"s1", "s2"})
			if fault, bad := strings.CutPrefix(c.want, "!"); bad {
				if err == nil || !strings.Contains(err.Error(), fault) {
					t.Fatalf("got %v, want %q", err, fault)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, p := range list {
				names = append(names, p.Name)
			}
			if d := cmp.Diff(strings.Fields(c.want), names); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestUnknownPackageIsAnUnknownPackageError(t *testing.T) {
	_, err := Resolve(indexOf(t, "a 1"), []string{"nope"}, []string{"s"})
	if u, ok := errors.AsType[*UnknownPackageError](err); !ok || u.Name != "nope" {
		t.Errorf("got %#v", err)
	}
}

func TestIndexRefusesHostileEntries(t *testing.T) {
	const good = "Package: a\nVersion: 1\nFilename: pool/a.deb\nSize: 1\nSHA256: %064d\n"
	ok := fmt.Sprintf(good, 1)
	for _, c := range []struct{ name, old, new string }{
		{"name", "Package: a", "Package: ../a"},
		{"no name", "Package: a\n", ""},
		{"version", "Version: 1", "Version: 1/../2"},
		{"file leaves archive", "pool/a.deb", "../a.deb"},
		{"absolute file", "pool/a.deb", "/a.deb"},
		{"query", "pool/a.deb", "pool/a.deb?x"},
		{"negative size", "Size: 1", "Size: -1"},
		{"huge size", "Size: 1", "Size: 99999999999999"},
		{"no size", "Size: 1\n", ""},
		{"short digest", "SHA256: 0", "SHA256: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := NewIndex().Add(strings.NewReader(strings.Replace(ok, c.old, c.new, 1)), "m", "s"); err == nil {
				t.Error("it was accepted")
			}
		})
	}
	if err := NewIndex().Add(strings.NewReader(ok), "m", "s"); err != nil {
		t.Error(err)
	}
}
