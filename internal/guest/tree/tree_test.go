package tree

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func packed(t *testing.T, path string, o PackOptions) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	must(t, Pack(t.Context(), &b, path, o))
	return &b
}

// TestRoundTrip: what a tree has, its copy has.
func TestRoundTrip(t *testing.T) {
	src, dst := filepath.Join(t.TempDir(), "src"), filepath.Join(t.TempDir(), "dst")
	when := time.Unix(1_600_000_000, 123_456_789)
	in := func(name string) string { return filepath.Join(src, name) }
	must(t,
		os.MkdirAll(in("a/empty"), 0o755), os.MkdirAll(in("closed"), 0o755),
		os.WriteFile(in("a/file"), []byte("text"), 0o640), os.Link(in("a/file"), in("a/same")),
		os.WriteFile(in("closed/x"), nil, 0o400), os.Symlink("/etc/passwd", in("link")), os.Symlink("nothing", in("dangling")),
		os.WriteFile(in("caf\xe9 \n\x1b[31m"), []byte("odd"), 0o644), os.WriteFile(in(strings.Repeat("l", 255)), nil, 0o644),
		unix.Mkfifo(in("pipe"), 0o644),
	)
	sparse, err := os.Create(in("sparse"))
	must(t, err)
	_, err = sparse.WriteAt([]byte("middle"), 3<<20)
	must(t, err, sparse.Truncate(1<<30), sparse.Close())
	hasAttrs := unix.Setxattr(in("a/file"), "user.test", []byte("v\x00\xff"), 0) == nil
	ts, _ := unix.TimeToTimespec(when)
	for _, name := range []string{"link", "a/file", "a/empty", "a", "closed", "."} {
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, in(name), []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
	}
	must(t, os.Chmod(in("closed"), 0o500))
	defer func() { _ = os.Chmod(in("closed"), 0o700) }()

	stream := packed(t, src, PackOptions{})
	if stream.Len() > 1<<20 {
		t.Errorf("%d bytes for a tree of some", stream.Len())
	}
	var skipped []string
	must(t, Unpack(t.Context(), dst, stream, UnpackOptions{Skipped: func(name, _ string) { skipped = append(skipped, name) }}))
	defer func() { _ = os.Chmod(filepath.Join(dst, "closed"), 0o700) }()
	if !slices.Equal(skipped, []string{"pipe"}) {
		t.Errorf("%q", skipped)
	}
	must(t, os.Remove(in("pipe")), os.Chtimes(src, when, when))
	want, got := describe(t, src), describe(t, dst)
	if !slices.Equal(want, got) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	var a, b syscall.Stat_t
	must(t, syscall.Stat(filepath.Join(dst, "a/file"), &a), syscall.Stat(filepath.Join(dst, "a/same"), &b))
	if a.Ino != b.Ino {
		t.Error("hard links are no more")
	}
	must(t, syscall.Stat(filepath.Join(dst, "sparse"), &a))
	if a.Blocks*512 > 1<<20 {
		t.Errorf("the hole takes %d bytes", a.Blocks*512)
	}
	if hasAttrs {
		value := make([]byte, 100)
		if n, err := unix.Getxattr(filepath.Join(dst, "a/file"), "user.test", value); err != nil || string(value[:n]) != "v\x00\xff" {
			t.Errorf("attribute: %q %v", value[:max(n, 0)], err)
		}
	}
	// Again, over what is there.
	must(t, os.Chmod(filepath.Join(dst, "closed"), 0o700), Unpack(t.Context(), dst, packed(t, src, PackOptions{}), UnpackOptions{}))
	if got := describe(t, dst); len(got) != len(want) {
		t.Errorf("%q", got)
	}
}

func describe(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	must(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		target, _ := os.Readlink(path)
		when := ""
		if rel == "." || slices.Contains([]string{"link", "a/file", "a/same", "a/empty", "a", "closed"}, rel) {
			when = info.ModTime().UTC().Format(time.RFC3339Nano)
		}
		size := info.Size()
		if info.IsDir() {
			size = 0
		}
		text := []byte{}
		if info.Mode().IsRegular() && size < 1<<20 {
			text, _ = os.ReadFile(path)
		}
		mode := info.Mode()
		if rel == "." {
			mode = 0
		}
		out = append(out, fmt.Sprintf("%q %v %d %s %s %q", rel, mode, size, target, when, text))
		return nil
	}))
	return out
}

func TestPackOptions(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "d/sub"), 0o755), os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644),
		os.Symlink("../f", filepath.Join(dir, "d/link")), os.Symlink("sub", filepath.Join(dir, "d/dirlink")), os.Symlink("no", filepath.Join(dir, "d/dangling")))
	names := func(path string, o PackOptions) string {
		var list []string
		r := tar.NewReader(packed(t, path, o))
		for {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				return strings.Join(list, " ")
			}
			must(t, err)
			list = append(list, string(h.Typeflag)+h.Name)
		}
	}
	for _, tt := range []struct {
		path string
		o    PackOptions
		want string
	}{
		{"d", PackOptions{}, "5./ 2dangling 2dirlink 2link 5sub/"},
		{"d", PackOptions{NoRoot: true}, "2dangling 2dirlink 2link 5sub/"},
		{"d", PackOptions{Name: "n"}, "5n/ 2n/dangling 2n/dirlink 2n/link 5n/sub/"},
		{"d", PackOptions{Follow: true}, "5./ 2dangling 5dirlink/ 0link 5sub/"},
		{"f", PackOptions{}, "0."},
		{"f", PackOptions{Name: "g"}, "0g"},
		{"d/link", PackOptions{}, "2."},
		{"d/link", PackOptions{Follow: true}, "0."},
	} {
		if got := names(filepath.Join(dir, tt.path), tt.o); got != tt.want {
			t.Errorf("%s %+v: %s", tt.path, tt.o, got)
		}
	}
	must(t, os.Symlink("..", filepath.Join(dir, "d/sub/up")))
	if err := Pack(t.Context(), io.Discard, filepath.Join(dir, "d"), PackOptions{Follow: true}); !errors.Is(err, ErrLoop) || !strings.Contains(err.Error(), "/up") {
		t.Error(err)
	}
	if err := Pack(t.Context(), io.Discard, filepath.Join(dir, "no"), PackOptions{}); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Pack(cancelled, io.Discard, dir, PackOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestUnpackOne(t *testing.T) {
	dir := t.TempDir()
	src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
	must(t, os.WriteFile(src, []byte("text"), 0o750), os.WriteFile(dst, []byte("old"), 0o600))
	must(t, Unpack(t.Context(), dst, packed(t, src, PackOptions{}), UnpackOptions{}))
	info, err := os.Stat(dst)
	must(t, err)
	if info.Mode() != 0o750 || info.Size() != 4 {
		t.Errorf("%v", info)
	}
	must(t, os.Symlink("src", filepath.Join(dir, "link")))
	must(t, Unpack(t.Context(), filepath.Join(dir, "copy"), packed(t, filepath.Join(dir, "link"), PackOptions{}), UnpackOptions{}))
	if target, err := os.Readlink(filepath.Join(dir, "copy")); err != nil || target != "src" {
		t.Errorf("%s %v", target, err)
	}
	whole := packed(t, src, PackOptions{}).Bytes()
	if err := Unpack(t.Context(), dst, bytes.NewReader(whole[:len(whole)-1024-510]), UnpackOptions{}); err == nil {
		t.Error("half a file")
	}
	if left, _ := filepath.Glob(dir + "/.forkd*"); len(left) > 0 {
		t.Errorf("%q", left)
	}
	if b, _ := os.ReadFile(dst); string(b) != "text" {
		t.Errorf("a copy that broke off changed the file: %q", b)
	}
}

// entries make a hostile stream.
func entries(t *testing.T, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		h.Format = tar.FormatPAX
		content := ""
		if h.Typeflag == tar.TypeReg && h.Size == 0 {
			content, h.Size = "hostile", 7
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		must(t, w.WriteHeader(&h))
		_, err := io.WriteString(w, content)
		must(t, err)
	}
	_ = w.Close() // sizes may lie
	return b.Bytes()
}

// TestHostile: whatever a guest sends, nothing outside the destination is touched.
func TestHostile(t *testing.T) {
	root := tar.Header{Name: "./", Typeflag: tar.TypeDir}
	reg := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg} }
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	hard := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeLink}
	}
	dir := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir} }
	tests := map[string][]tar.Header{
		"upwards":                  {root, reg("../evil")},
		"upwards inside":           {root, dir("a"), reg("a/../../evil")},
		"upwards, harmless":        {root, dir("a"), reg("a/../b")},
		"absolute":                 {root, reg("/OUT/evil")},
		"through a link":           {root, link("l", "OUT"), reg("l/evil")},
		"through a relative link":  {root, link("l", "../out"), reg("l/evil")},
		"through two links":        {root, link("a", ".."), link("b", "a/out"), reg("b/evil")},
		"through a link, deep":     {root, dir("d"), link("d/l", "../../out"), dir("d/l/x"), reg("d/l/x/evil")},
		"directory over a link":    {root, link("l", "OUT"), dir("l"), reg("l/evil")},
		"hard link out":            {root, hard("h", "../out/secret"), reg("h")},
		"hard link, absolute":      {root, hard("h", "/OUT/secret")},
		"hard link through a link": {root, link("l", "OUT"), hard("h", "l/secret")},
		"root is a link":           {link(".", "OUT"), reg("evil")},
		"root is a link, twice":    {link(".", "OUT"), root, reg("evil")},
		"root again":               {root, link("x", "OUT"), link(".", "OUT"), reg("evil")},
		"no root":                  {reg("evil")},
		"empty name":               {root, reg("")},
		"root is a hard link":      {hard(".", "../out/secret")},
		"mode of a link's target":  {root, dir("d"), link("d2", "OUT")},
	}
	for name, headers := range tests {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			out, dst := filepath.Join(base, "out"), filepath.Join(base, "dst")
			must(t, os.Mkdir(out, 0o755), os.WriteFile(filepath.Join(out, "secret"), []byte("secret"), 0o600))
			for i := range headers {
				headers[i].Name = strings.Replace(headers[i].Name, "/OUT", out, 1)
				headers[i].Linkname = strings.Replace(strings.Replace(headers[i].Linkname, "/OUT", out, 1), "OUT", out, 1)
			}
			before := outside(t, base)
			err := Unpack(t.Context(), dst, bytes.NewReader(entries(t, headers...)), UnpackOptions{})
			if after := outside(t, base); !slices.Equal(before, after) {
				t.Errorf("outside of the destination: %q, was %q", after, before)
			}
			if err == nil && name != "mode of a link's target" {
				t.Error("not refused")
			}
		})
	}
	t.Run("counts, sizes, kinds", func(t *testing.T) {
		dst := filepath.Join(t.TempDir(), "dst")
		for name, headers := range map[string][]tar.Header{
			"short":   {root, {Name: "f", Typeflag: tar.TypeReg, Size: 1 << 40}},
			"holes":   {root, {Name: "f", Typeflag: tar.TypeReg, Size: 7, PAXRecords: map[string]string{wire.SparseSize: "10", wire.SparseHoles: "0+4"}}},
			"holes 2": {root, {Name: "f", Typeflag: tar.TypeReg, Size: 0, PAXRecords: map[string]string{wire.SparseSize: "-1"}}},
			"huge":    {root, {Name: "f", Typeflag: tar.TypeReg, PAXRecords: map[string]string{wire.SparseSize: "9223372036854775807", wire.SparseHoles: "7+9223372036854775800"}}},
			"kind":    {root, {Name: "f", Typeflag: 'Z'}},
		} {
			if err := Unpack(t.Context(), dst, bytes.NewReader(entries(t, headers...)), UnpackOptions{}); err == nil || !strings.Contains(err.Error(), "f") {
				t.Errorf("%s: %v", name, err)
			}
		}
		// A header in GNU's way of sparse files, which says that zeros follow for years.
		sparse := entries(t, root, tar.Header{Name: "f", Typeflag: tar.TypeReg, Size: 7, PAXRecords: map[string]string{
			"XNU.sparse.major": "0", "XNU.sparse.minor": "1", "XNU.sparse.size": "4611686018427387904", "XNU.sparse.numblocks": "1", "XNU.sparse.map": "0,7",
		}})
		sparse = bytes.ReplaceAll(sparse, []byte("XNU."), []byte("GNU."))
		if err := Unpack(t.Context(), dst, bytes.NewReader(sparse), UnpackOptions{}); !errors.Is(err, ErrHostile) {
			t.Errorf("zeros for years: %v", err)
		}
		endless := io.MultiReader(bytes.NewReader(entries(t, root)), zeros{})
		if err := Unpack(t.Context(), dst, endless, UnpackOptions{}); !errors.Is(err, ErrHostile) {
			t.Error(err)
		}
	})
	t.Run("devices and bits", func(t *testing.T) {
		dst := filepath.Join(t.TempDir(), "dst")
		must(t, Unpack(t.Context(), dst, bytes.NewReader(entries(t, root, tar.Header{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3},
			tar.Header{Name: "su", Typeflag: tar.TypeReg, Mode: 0o6755, PAXRecords: map[string]string{xattrPrefix + "security.capability": "x", xattrPrefix + "trusted.x": "y"}})), UnpackOptions{}))
		info, err := os.Lstat(filepath.Join(dst, "su"))
		must(t, err)
		if info.Mode() != 0o755 {
			t.Errorf("%v", info.Mode())
		}
		if n, err := unix.Listxattr(filepath.Join(dst, "su"), make([]byte, 100)); err == nil && n > 0 {
			t.Error("attributes of the system's came along")
		}
		if _, err := os.Lstat(filepath.Join(dst, "null")); !errors.Is(err, fs.ErrNotExist) {
			t.Error("a device came along")
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// outside is everything but the destination.
func outside(t *testing.T, base string) []string {
	t.Helper()
	var out []string
	must(t, filepath.WalkDir(base, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if filepath.Base(path) == "dst" && filepath.Dir(path) == base {
			if d.IsDir() {
				return filepath.SkipDir
			}
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		must(t, syscall.Lstat(path, &st))
		text := ""
		if info.Mode().IsRegular() {
			b, err := os.ReadFile(path)
			must(t, err)
			text = string(b)
		}
		links := st.Nlink
		if info.IsDir() {
			links = 0
		}
		if path != base {
			out = append(out, fmt.Sprint(path, info.Mode(), links, text))
		}
		return nil
	}))
	return out
}

func FuzzUnpack(f *testing.F) {
	t := &testing.T{}
	f.Add(entries(t, tar.Header{Name: "./", Typeflag: tar.TypeDir}, tar.Header{Name: "a", Linkname: "..", Typeflag: tar.TypeSymlink}, tar.Header{Name: "a/evil", Typeflag: tar.TypeReg}))
	f.Add(entries(t, tar.Header{Name: ".", Typeflag: tar.TypeReg}))
	f.Add(entries(t, tar.Header{Name: "./", Typeflag: tar.TypeDir}, tar.Header{Name: "s", Typeflag: tar.TypeReg, Size: 7, PAXRecords: map[string]string{wire.SparseSize: "100", wire.SparseHoles: "7+93"}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		base := t.TempDir()
		_ = Unpack(t.Context(), filepath.Join(base, "dst"), bytes.NewReader(b), UnpackOptions{})
		if left := outside(t, base); len(left) > 0 {
			t.Errorf("outside: %q", left)
		}
	})
}
