package debian

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/image/debian/debiantest"
)

func testDeb(t testing.TB) []byte {
	t.Helper()
	return debiantest.Package{
		Name: "hello", Version: "1-1", Scripts: map[string]string{"postinst": "#!/bin/sh\n"},
		Files: []debiantest.File{{Name: "./", Mode: 0o755}, {Name: "./usr/bin/hello", Mode: 0o4755, Data: "hi"}},
	}.Deb(t)
}

func readAll(deb *Deb) ([]string, error) {
	var got []string
	tr := deb.Data()
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return got, nil
		}
		if err != nil {
			return nil, err
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			return nil, err
		}
		got = append(got, h.Name+" "+string(data))
	}
}

func TestReadDeb(t *testing.T) {
	deb, err := ReadDeb(bytes.NewReader(testDeb(t)))
	if err != nil {
		t.Fatal(err)
	}
	if deb.Control.Get("Package") != "hello" || string(deb.Files["postinst"].Data) != "#!/bin/sh\n" || deb.Files["postinst"].Mode != 0o755 {
		t.Errorf("read %+v", deb.Files)
	}
	got, err := readAll(deb)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"./ ", "./usr/bin/hello hi"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestRepack(t *testing.T) {
	deb, err := ReadDeb(bytes.NewReader(testDeb(t)))
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "x.deb"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := deb.Repack(f); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	again, err := ReadDeb(f)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(deb.Files, again.Files); d != "" {
		t.Error(d)
	}
	if got, err := readAll(again); err != nil || len(got) != 2 || got[1] != "./usr/bin/hello hi" {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestReadDebFaults(t *testing.T) {
	good := testDeb(t)
	member := func(parts ...any) []byte {
		var b bytes.Buffer
		b.WriteString("!<arch>\n")
		for i := 0; i < len(parts); i += 2 {
			debiantest.Member(&b, parts[i].(string), parts[i+1].([]byte))
		}
		return b.Bytes()
	}
	version := []byte("2.0\n")
	control := debiantest.Tar(t, []debiantest.File{{Name: "./control", Data: "Package: x\n"}})
	for _, c := range []struct {
		name, want string
		data       []byte
	}{
		{"empty", "no ar header", nil},
		{"truncated header", "ar member header", good[:30]},
		{"truncated control", "unexpected EOF", good[:200]},
		{"not a deb", "first member", member("x", version)},
		{"future version", "unknown .deb version", member("debian-binary", []byte("3.0\n"))},
		{"no control", "second member", member("debian-binary", version, "data.tar", control)},
		{"no data", "ar member header", member("debian-binary", version, "control.tar", control)},
		{"unknown packing", "unknown compression", member("debian-binary", version, "control.tar.lzma", control)},
		{"negative size", "bad size", bytes.Replace(good, []byte("4         `"), []byte("-4        `"), 1)},
		{
			"control file in a directory", "unexpected member", member("debian-binary", version, "control.tar",
				debiantest.Tar(t, []debiantest.File{{Name: "./../../etc/passwd", Data: "x"}})),
		},
		{
			"two paragraphs", "more than one", member("debian-binary", version, "control.tar",
				debiantest.Tar(t, []debiantest.File{{Name: "./control", Data: "A: b\n\nA: b\n"}})),
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := ReadDeb(bytes.NewReader(c.data)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestCleanName(t *testing.T) {
	for name, want := range map[string]string{
		"./": ".", ".": ".", "./usr/bin/": "usr/bin", "/etc/x": "etc/x", "a//b": "a/b", "./..data": "..data",
		"..": "!", "./a/../../b": "!", "a/..": "!", "a\x00b": "!", strings.Repeat("x", 5000): "!",
	} {
		got, err := CleanName(name)
		if err != nil {
			got = "!"
		}
		if got != want {
			t.Errorf("CleanName(%.20q) = %q, want %q", name, got, want)
		}
	}
}

func FuzzReadDeb(f *testing.F) {
	f.Add(testDeb(f))
	f.Add([]byte("!<arch>\ndebian-binary   0           0     0     100644  4         `\n2.0\n"))
	f.Fuzz(func(_ *testing.T, data []byte) {
		deb, err := ReadDeb(bytes.NewReader(data))
		if err != nil {
			return
		}
		tr := deb.Data()
		for range 100 {
			h, err := tr.Next()
			if err != nil {
				return
			}
			_, _ = CleanName(h.Name)
		}
	})
}

// TestDataIsForgotten: what has been read of a package is kept by nobody, as its decompressor has megabytes.
func TestDataIsForgotten(t *testing.T) {
	deb, err := ReadDeb(bytes.NewReader(testDeb(t)))
	if err != nil {
		t.Fatal(err)
	}
	data := deb.data
	if _, err := deb.Data().Next(); err != nil {
		t.Fatal(err)
	}
	if deb.data == data {
		t.Error("it still has its data part")
	}
	if _, err := deb.Data().Next(); !errors.Is(err, io.EOF) {
		t.Errorf("read again: %v, want EOF", err)
	}
}
