package dockerfile

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// memory is a spool.
type memory struct{ b []byte }

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	if need := int(off) + len(p); need > len(m.b) {
		m.b = append(m.b, make([]byte, need-len(m.b))...)
	}
	return copy(m.b[off:], p), nil
}

func (m *memory) ReadAt(p []byte, off int64) (int, error) { return bytes.NewReader(m.b).ReadAt(p, off) }
func (m *memory) Close() error                            { return nil }

// contextOf makes one of names with contents; "name@" is a link, "name/" a directory, "name*" executable.
func contextOf(t testing.TB, entries ...string) *Context {
	t.Helper()
	c := NewContext(&memory{})
	for _, e := range entries {
		name, content, _ := strings.Cut(e, "=")
		h := &tar.Header{Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content)), ModTime: time.Unix(1e9, 0)}
		switch {
		case strings.HasSuffix(name, "/"):
			h.Typeflag, h.Mode, h.Size = tar.TypeDir, 0o750, 0
		case strings.HasSuffix(name, "@"):
			h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, content, 0
		case strings.HasSuffix(name, "*"):
			h.Mode = 0o755
		}
		if err := c.Add(strings.TrimRight(name, "/@*"), h, strings.NewReader(content)); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// written lists what a copy writes.
func written(t testing.TB, c *Context, cp *Copy, destIsDir bool) []string {
	t.Helper()
	s, err := c.Select(cp)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := s.Write(t.Context(), &b, destIsDir, Owner{5, 6}); err != nil {
		t.Fatal(err)
	}
	return listed(t, &b)
}

func listed(t testing.TB, r io.Reader) []string {
	t.Helper()
	var list []string
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, fmt.Sprintf("%s %o %d:%d %s%s", h.Name, h.Mode, h.Uid, h.Gid, content, h.Linkname))
	}
}

func TestCopy(t *testing.T) {
	c := contextOf(t, "a=A", "b*=B", "d/", "d/x=X", "d/sub/y=Y", "d/l@=x", "e/z=Z", "la@=a", "ld@=d", "out@=/../../a")
	tests := []struct {
		name string
		cp   Copy
		dir  bool
		want []string
	}{
		{"a file to a name", Copy{Sources: []string{"a"}, Dest: "/p/q"}, false, []string{"p/ 755 5:6 ", "p/q 644 5:6 A"}},
		{"a file to what is a directory", Copy{Sources: []string{"a"}, Dest: "/p/q"}, true, []string{"p/ 755 5:6 ", "p/q/ 755 5:6 ", "p/q/a 644 5:6 A"}},
		{"a file into a directory", Copy{Sources: []string{"./b"}, Dest: "/p/"}, false, []string{"p/ 755 5:6 ", "p/b 755 5:6 B"}},
		{"two files", Copy{Sources: []string{"/a", "b"}, Dest: "/"}, false, []string{"a 644 5:6 A", "b 755 5:6 B"}},
		{"a directory's content", Copy{Sources: []string{"d"}, Dest: "/p"}, false, []string{
			"p/ 755 5:6 ", "p/l 777 5:6 x", "p/sub/ 755 5:6 ", "p/sub/y 644 5:6 Y", "p/x 644 5:6 X",
		}},
		{"a pattern", Copy{Sources: []string{"[de]/*"}, Dest: "/p/"}, false, []string{
			"p/ 755 5:6 ", "p/l 644 5:6 X", "p/x 644 5:6 X", "p/z 644 5:6 Z", "p/y 644 5:6 Y",
		}},
		{"modes", Copy{Sources: []string{"e"}, Dest: "/p/", Chmod: 0o700}, false, []string{"p/ 755 5:6 ", "p/z 700 5:6 Z"}},
		{"a link is followed", Copy{Sources: []string{"la"}, Dest: "/p/"}, false, []string{"p/ 755 5:6 ", "p/la 644 5:6 A"}},
		{"also to a directory", Copy{Sources: []string{"ld/sub"}, Dest: "/p/"}, false, []string{"p/ 755 5:6 ", "p/y 644 5:6 Y"}},
		{"and never leads out", Copy{Sources: []string{"out"}, Dest: "/p"}, false, []string{"p 644 5:6 A"}},
		{"documents", Copy{Inline: []Inline{{"n", "text"}}, Dest: "/p/"}, false, []string{"p/ 755 5:6 ", "p/n 644 5:6 text"}},
		{"everything", Copy{Sources: []string{"."}, Dest: "/p/"}, false, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := written(t, c, &tt.cp, tt.dir)
			if tt.want == nil {
				if len(got) != 13 {
					t.Errorf("%d entries: %q", len(got), got)
				}
				return
			}
			if tt.name == "a directory's content" { // links have no mode of their own
				for i := range got {
					got[i] = strings.Replace(got[i], "l 644", "l 777", 1)
				}
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
	for src, want := range map[string]string{"none": "not in the build's context", "d/*.no": "matches nothing", "../a": "", "[": "not a pattern", "*": "end it with a slash"} {
		_, err := c.Select(&Copy{Sources: []string{src}, Dest: "/p"})
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", src, err, want)
		}
	}
}

func TestAddUnpacks(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	w := tar.NewWriter(z)
	for _, h := range []*tar.Header{
		{Typeflag: tar.TypeDir, Name: "./in/", Mode: 0o711, Uid: 7, Gid: 8},
		{Typeflag: tar.TypeReg, Name: "in/f", Mode: 0o4755, Uid: 7, Gid: 8, Size: 1},
		{Typeflag: tar.TypeLink, Name: "in/h", Linkname: "in/f"},
		{Typeflag: tar.TypeReg, Name: "../../up", Mode: 0o600, Size: 1},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	c := contextOf(t, "a.tgz="+packed.String(), "text=not packed")
	want := []string{"p/ 755 5:6 ", "p/text 644 5:6 not packed", "p/in/ 711 7:8 ", "p/in/f 4755 7:8 x", "p/in/h 0 0:0 p/in/f", "p/up 600 0:0 x"}
	if d := cmp.Diff(want, written(t, c, &Copy{Sources: []string{"a.tgz", "text"}, Dest: "/p/", Add: true}, false)); d != "" {
		t.Error(d)
	}
	if got := written(t, c, &Copy{Sources: []string{"a.tgz"}, Dest: "/p/"}, false); len(got) != 2 {
		t.Errorf("COPY unpacked: %q", got)
	}
	if got := written(t, c, &Copy{Sources: []string{"a.tgz"}, Dest: "/p/", Add: true, Chown: "x"}, false); got[1] != "p/in/ 711 5:6 " {
		t.Errorf("with another owner: %q", got)
	}
}

// TestDigest: what determines a copy's result is in its digest, times are not.
func TestDigest(t *testing.T) {
	digest := func(cp Copy, entries ...string) string {
		s, err := contextOf(t, entries...).Select(&cp)
		if err != nil {
			t.Fatal(err)
		}
		return s.Digest()
	}
	cp := Copy{Sources: []string{"d"}, Dest: "/p"}
	base := digest(cp, "d/a=1", "d/l@=a", "other=x")
	if digest(cp, "d/a=1", "d/l@=a", "other=y", "more=z") != base {
		t.Error("a file that is not copied counts")
	}
	later := contextOf(t, "d/a=1", "d/l@=a")
	later.entries["d/a"].ModTime = time.Unix(5, 0)
	if s, err := later.Select(&cp); err != nil || s.Digest() != base {
		t.Errorf("a time counts (%v)", err)
	}
	for name, entries := range map[string][]string{
		"content": {"d/a=2", "d/l@=a"}, "mode": {"d/a*=1", "d/l@=a"}, "link": {"d/a=1", "d/l@=b"}, "name": {"d/b=1", "d/l@=a"},
		"one more": {"d/a=1", "d/l@=a", "d/e/"}, "kind": {"d/a=1", "d/l=a"},
	} {
		if digest(cp, entries...) == base {
			t.Errorf("%s does not count", name)
		}
	}
	if digest(Copy{Inline: []Inline{{"n", "a"}}}) == digest(Copy{Inline: []Inline{{"n", "b"}}}) {
		t.Error("a document's content does not count")
	}
}

func TestContextRefuses(t *testing.T) {
	for name, h := range map[string]*tar.Header{
		"/abs":   {Typeflag: tar.TypeReg},
		"../up":  {Typeflag: tar.TypeReg},
		"a/../b": {Typeflag: tar.TypeReg},
		"":       {Typeflag: tar.TypeReg},
		"dev":    {Typeflag: tar.TypeChar},
		"there":  {Typeflag: tar.TypeReg},
		"file/x": {Typeflag: tar.TypeReg},
		"short":  {Typeflag: tar.TypeReg, Size: 5},
	} {
		c := contextOf(t, "there=1", "file=2")
		if err := c.Add(name, h, strings.NewReader("")); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
}

func TestAddArchive(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []*tar.Header{
		{Typeflag: tar.TypeDir, Name: "out/", Mode: 0o755},
		{Typeflag: tar.TypeReg, Name: "out/a", Size: 1, Mode: 0o640, Uid: 9},
		{Typeflag: tar.TypeLink, Name: "out/b", Linkname: "out/a"},
		{Typeflag: tar.TypeChar, Name: "out/c"},
		{Typeflag: tar.TypeSymlink, Name: "out/l", Linkname: "a"},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			_, _ = w.Write([]byte("x"))
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	c := NewContext(&memory{})
	if err := c.AddArchive("srv", bytes.NewReader(b.Bytes())); err != nil {
		t.Fatal(err)
	}
	want := []string{"p/ 755 5:6 ", "p/a 640 5:6 x", "p/b 640 5:6 x", "p/l 0 5:6 a"}
	if d := cmp.Diff(want, written(t, c, &Copy{Sources: []string{"/srv/out"}, Dest: "/p/"}, false)); d != "" {
		t.Error(d)
	}
}

func TestIgnore(t *testing.T) {
	ig := ParseIgnore([]byte("# comment\n*.log\n/build\n**/node_modules\nsecret?\ndocs/*\n!docs/keep.md\na/**/z\n[xy].c\n.git/\n"))
	for name, want := range map[string]bool{
		"x.log": true, "sub/x.log": false, "build": true, "build/deep/file": true, "sub/build": false, "node_modules/a": true,
		"a/b/node_modules": true, "secret1": true, "secret": false, "docs/a": true, "docs/keep.md": false, "docs": false, "a/z": true,
		"a/b/c/z": true, "x.c": true, "z.c": false, ".git": true, ".git/config": true, ".gitignore": false,
	} {
		if got := ig.Match(name); got != want {
			t.Errorf("%s is left out: %v, want %v", name, got, want)
		}
	}
	all := ParseIgnore([]byte("*\n!app\n"))
	if all.Match("app/x") || !all.Match("other/x") || !all.Exceptions() {
		t.Error("an exception for a directory")
	}
	if ParseIgnore(nil).Match("x") || ParseIgnore([]byte("x")).Exceptions() {
		t.Error("without rules")
	}
}

func FuzzIgnore(f *testing.F) {
	f.Add("*.log\n!a/**\n[x", "a/b.log")
	f.Add("**/a?[^b-c]\\", "x/ay")
	f.Fuzz(func(_ *testing.T, text, name string) { ParseIgnore([]byte(text)).Match(strings.Trim(name, "/")) })
}
