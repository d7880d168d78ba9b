package debian

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadControl(t *testing.T) {
	const text = "# a comment\nPackage: a\nDescription: one\n two\n .\n  three\n# another\nEmpty:\n\n\nPackage: b\nx-Y:  z \n"
	var got []Paragraph
	err := ReadControl(strings.NewReader(text), func(p Paragraph) error {
		got = append(got, p)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []Paragraph{
		{{"Package", "a"}, {"Description", "one\ntwo\n.\n three"}, {"Empty", ""}},
		{{"Package", "b"}, {"x-Y", "z"}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got[1].Get("X-y") != "z" {
		t.Error("field names are not compared without case")
	}
}

func TestReadControlKeepsOnlyWhatIsAsked(t *testing.T) {
	var got []Paragraph
	keep := func(name []byte) bool { return string(name) == "B" }
	err := readControl(strings.NewReader("A: 1\n more\nB: 2\n more\nC: 3\n\nA: 4\n"), keep, func(p Paragraph) error {
		got = append(got, p)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]Paragraph{{{"B", "2\nmore"}}, nil}, got); d != "" {
		t.Error(d)
	}
}

func TestReadControlFaults(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"no colon", "A: b\nnonsense\n", "line 2"},
		{"continuation first", " x\n", "line 1: continuation"},
		{"blank in name", "A b: c\n", "not a field"},
		{"long line", "A: " + strings.Repeat("x", maxControlLine+1), "longer than"},
		{"large paragraph", strings.Repeat("A: "+strings.Repeat("x", maxControlLine/2)+"\n", 40), "larger than"},
		{"many fields", strings.Repeat("A: b\n", maxParagraphFields+1), "more than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := ReadControl(strings.NewReader(c.text), func(Paragraph) error { return nil })
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func FuzzReadControl(f *testing.F) {
	f.Add("Package: a\nDescription: b\n c\n\nPackage: d\n")
	f.Add("# c\n\n\n x\n")
	f.Add("A:\x00\r\n B")
	f.Fuzz(func(t *testing.T, text string) {
		_ = ReadControl(strings.NewReader(text), func(p Paragraph) error {
			for _, field := range p {
				if field.Name == "" {
					t.Error("field without a name")
				}
			}
			_, _ = packageOf(p)
			return nil
		})
	})
}

func TestCompareVersions(t *testing.T) {
	ordered := []string{
		"~~", "~~a", "~", "0", "0.0~rc1", "0.0", "1.0~beta1~svn1245", "1.0~beta1", "1.0", "1.0-0.1", "1.0-1", "1.0-1+deb12u1", "1.0-10",
		"1.0a-1", "1.0+b1-1", "1.1-1", "2.0", "10.0", "100000000000000000000000000000", "1:0.1", "2:0",
	}
	for i, a := range ordered {
		for j, b := range ordered {
			got := CompareVersions(a, b)
			if got < 0 != (i < j) || got > 0 != (i > j) {
				t.Errorf("CompareVersions(%q, %q) = %d", a, b, got)
			}
		}
	}
	for _, equal := range [][2]string{{"0:1.0", "1.0"}, {"1.0-0", "1.0"}, {"1.00", "1.0"}, {"1.0-01", "1.0-1"}} {
		if CompareVersions(equal[0], equal[1]) != 0 {
			t.Errorf("%v differ", equal)
		}
	}
}

func TestParseDependencies(t *testing.T) {
	got, err := ParseDependencies("a, b (>= 1:2-3) | c:any (<< 4~) , d(=1)\n, e (< 1)")
	if err != nil {
		t.Fatal(err)
	}
	want := [][]Dependency{
		{{Name: "a"}},
		{{Name: "b", Op: ">=", Version: "1:2-3"}, {Name: "c", Arch: "any", Op: "<<", Version: "4~"}},
		{{Name: "d", Op: "=", Version: "1"}},
		{{Name: "e", Op: "<=", Version: "1"}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"a (", "a (>=)", "a (>> )", "a (~ 1)", "a [amd64]", "a <!nocheck>", "a b", "| a", "../x", "a (= 1) b"} {
		if got, err := ParseDependencies(bad); err == nil {
			t.Errorf("%q was read as %v", bad, got)
		}
	}
}

func FuzzParseDependencies(f *testing.F) {
	f.Add("a, b (>= 1) | c:any (<< 4~)")
	f.Add("a (")
	f.Fuzz(func(t *testing.T, text string) {
		groups, err := ParseDependencies(text)
		if err != nil {
			return
		}
		for _, g := range groups {
			for _, d := range g {
				if !ValidName(d.Name) || d.Op != "" && d.Version == "" {
					t.Errorf("%q gave %+v", text, d)
				}
				d.Satisfies("1.0-1")
			}
		}
	})
}
