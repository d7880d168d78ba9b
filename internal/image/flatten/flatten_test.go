package flatten

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/guest/wire"
)

// member is an entry of a layer in a test.
type member struct {
	tar.Header
	content string
}

func dir(name string, mode int64) member {
	return member{Header: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}}
}

func file(name, content string) member {
	return member{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}, content}
}

func symlink(name, target string) member {
	return member{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}}
}

func hardlink(name, target string) member {
	return member{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}}
}

func pack(t testing.TB, members ...member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		m.Format = tar.FormatPAX
		if err := w.WriteHeader(&m.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, m.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func layerOf(data []byte) Layer {
	return Layer{Name: "layer", Open: func(context.Context) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(data)), nil
	}}
}

func testLimits() Limits {
	return Limits{Layers: 50, Entries: 10_000, Names: 1 << 20, Content: 64 << 20, Stream: 256 << 20}
}

func add(ctx context.Context, tree *Tree, layers ...[]byte) error {
	for _, l := range layers {
		if err := tree.Add(ctx, layerOf(l)); err != nil {
			return err
		}
	}
	return nil
}

// listing describes a stream, a line an entry, and fails for one that could not be unpacked without care.
func listing(t testing.TB, stream []byte) []string {
	t.Helper()
	var lines []string
	kinds := map[string]byte{"": tar.TypeDir}
	r := tar.NewReader(bytes.NewReader(stream))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			slices.Sort(lines)
			return lines
		}
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		if name == "." {
			name = ""
		}
		parent, _ := split(name)
		if _, twice := kinds[name]; twice && name != "" {
			t.Errorf("%s is there twice", h.Name)
		}
		if kinds[parent] != tar.TypeDir {
			t.Errorf("%s comes before its parent, or that is no directory", h.Name)
		}
		kinds[name] = h.Typeflag
		line := fmt.Sprintf("%c %s %o", h.Typeflag, name, h.Mode)
		if h.Uid+h.Gid > 0 {
			line += fmt.Sprintf(" %d:%d", h.Uid, h.Gid)
		}
		switch h.Typeflag {
		case tar.TypeReg:
			content, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			content = fill(t, h, content)
			if len(content) > 60 {
				sum := sha256.Sum256(content)
				content = fmt.Appendf(nil, "%d bytes, %x", len(content), sum[:4])
			}
			line += " " + string(content)
		case tar.TypeSymlink:
			line = fmt.Sprintf("%c %s -> %s", h.Typeflag, name, h.Linkname)
		case tar.TypeLink:
			if kind := kinds[h.Linkname]; kind == 0 || kind == tar.TypeDir {
				t.Errorf("%s is a link to %s, which is not before it", h.Name, h.Linkname)
			}
			line = fmt.Sprintf("%c %s = %s", h.Typeflag, name, h.Linkname)
		case tar.TypeChar, tar.TypeBlock:
			line += fmt.Sprintf(" %d,%d", h.Devmajor, h.Devminor)
		}
		parts := []string{line}
		for _, key := range sortedKeys(h.PAXRecords) {
			if attr, ok := strings.CutPrefix(key, xattrPrefix); ok {
				parts = append(parts, fmt.Sprintf("%s=%q", attr, h.PAXRecords[key]))
			}
		}
		lines = append(lines, strings.Join(parts, " "))
	}
}

func sortedKeys(m map[string]string) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// fill puts the zeros back that the stream leaves out.
func fill(t testing.TB, h *tar.Header, data []byte) []byte {
	t.Helper()
	text, ok := h.PAXRecords[wire.SparseSize]
	if !ok {
		return data
	}
	size, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	out := make([]byte, 0, size)
	for field := range strings.FieldsSeq(h.PAXRecords[wire.SparseHoles]) {
		var offset, length int
		if _, err := fmt.Sscanf(field, "%d+%d", &offset, &length); err != nil {
			t.Fatal(err)
		}
		n := offset - len(out)
		out = append(out, data[:n]...)
		data = data[n:]
		out = append(out, make([]byte, length)...)
	}
	return append(out, data...)
}

func write(t testing.TB, tree *Tree) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := tree.Write(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestFlatten(t *testing.T) {
	owned := file("f", "x")
	owned.Uid, owned.Gid, owned.Mode = 4294967294, 123456789, 0o6755
	odd := file("caf\xe9/\xff\n", "x")
	attributes := file("f", "x")
	attributes.PAXRecords = map[string]string{
		xattrPrefix + "security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		xattrPrefix + "user.empty":          "",
		"other.record":                      "dropped",
	}
	node := member{Header: tar.Header{Typeflag: tar.TypeChar, Name: "null", Mode: 0o666, Devmajor: 1, Devminor: 3}}
	for _, c := range []struct {
		name   string
		layers [][]member
		want   []string // without the root
	}{
		{"nothing", [][]member{{}}, nil},
		{"the root's own entry", [][]member{{dir(".", 0o711)}}, []string{}},
		{"implied parents", [][]member{{file("a/b/c", "x")}}, []string{"0 a/b/c 644 x", "5 a 755", "5 a/b 755"}},
		{"a later layer wins", [][]member{{file("a", "old")}, {file("a", "new")}}, []string{"0 a 644 new"}},
		{"the last of a layer wins", [][]member{{file("a", "old"), file("./a", "new")}}, []string{"0 a 644 new"}},
		{"a directory's new mode", [][]member{{dir("a", 0o755), file("a/b", "x")}, {dir("a", 0o700)}}, []string{"0 a/b 644 x", "5 a 700"}},
		{"a file for a directory", [][]member{{file("a/b/c", "x")}, {file("a", "y")}}, []string{"0 a 644 y"}},
		{"a directory for a file", [][]member{{file("a", "x")}, {dir("a", 0o700), file("a/b", "y")}}, []string{"0 a/b 644 y", "5 a 700"}},
		{"a directory for a link", [][]member{{dir("t", 0o755), symlink("a", "t")}, {dir("a", 0o700), file("a/b", "y")}}, []string{
			"0 a/b 644 y", "5 a 700", "5 t 755",
		}},
		{"whiteout", [][]member{{file("a/b", "x"), file("a/c", "x")}, {file("a/.wh.b", "")}}, []string{"0 a/c 644 x", "5 a 755"}},
		{"whiteout of a directory", [][]member{{file("a/b", "x")}, {file(".wh.a", "")}}, nil},
		{"whiteout of what is not there", [][]member{{file("b/.wh.a", ""), file(".wh.x", "")}}, nil},
		{"whiteout, then anew", [][]member{{file("a/b", "x")}, {file(".wh.a", ""), file("a/c", "y")}}, []string{"0 a/c 644 y", "5 a 755"}},
		{"anew, then whiteout", [][]member{{file("a/b", "x")}, {file("a/c", "y"), file(".wh.a", "")}}, []string{"0 a/c 644 y", "5 a 755"}},
		{"opaque", [][]member{{dir("a", 0o711), file("a/b/c", "x")}, {file("a/d", "y"), file("a/.wh..wh..opq", "")}}, []string{
			"0 a/d 644 y", "5 a 711",
		}},
		{"whiteout through a link", [][]member{{file("usr/lib/x", "x"), symlink("lib", "usr/lib")}, {file("lib/.wh.x", "")}}, []string{
			"2 lib -> usr/lib", "5 usr 755", "5 usr/lib 755",
		}},
		{"bookkeeping of aufs", [][]member{{file(".wh..wh.plnk/1.2", "x"), file(".wh..wh.aufs", "x")}}, []string{"0 .wh..wh.plnk/1.2 644 x", "5 .wh..wh.plnk 755"}},
		{"through a link", [][]member{{dir("usr/bin", 0o755), symlink("bin", "/usr/bin")}, {file("bin/sh", "x")}}, []string{
			"0 usr/bin/sh 644 x", "2 bin -> /usr/bin", "5 usr 755", "5 usr/bin 755",
		}},
		{"through a link that leads nowhere yet", [][]member{{symlink("var/run", "../run")}, {file("var/run/x", "x")}}, []string{
			"0 run/x 644 x", "2 var/run -> ../run", "5 run 755", "5 var 755",
		}},
		{"a link that leads out stays inside", [][]member{{symlink("a", "../../../etc"), file("a/x", "x")}}, []string{
			"0 etc/x 644 x", "2 a -> ../../../etc", "5 etc 755",
		}},
		{"absolute names", [][]member{{file("/etc/x", "x"), file("//etc//y", "y")}}, []string{"0 etc/x 644 x", "0 etc/y 644 y", "5 etc 755"}},
		{"hard links", [][]member{{file("a", "x"), hardlink("b", "a"), hardlink("c", "/b")}}, []string{"0 a 644 x", "1 b = a", "1 c = a"}},
		{"hard link across layers", [][]member{{file("b", "x")}, {hardlink("a", "b")}}, []string{"0 a 644 x", "1 b = a"}},
		{"one name of a hard link replaced", [][]member{{file("a", "x"), hardlink("b", "a"), hardlink("c", "a")}, {file("a", "y")}}, []string{
			"0 a 644 y", "0 b 644 x", "1 c = b",
		}},
		{"one name of a hard link hidden", [][]member{{file("a", "x"), hardlink("b", "a")}, {file(".wh.a", "")}}, []string{"0 b 644 x"}},
		{"hard link to itself", [][]member{{file("a", "x"), hardlink("a", "a")}}, []string{"0 a 644 x"}},
		{"hard link to a link", [][]member{{symlink("a", "x"), hardlink("b", "a")}}, []string{"1 b = a", "2 a -> x"}},
		{"hard link through a link", [][]member{{file("d/a", "x"), symlink("e", "d"), hardlink("b", "e/a")}}, []string{
			"0 b 644 x", "1 d/a = b", "2 e -> d", "5 d 755",
		}},
		{"owners and modes", [][]member{{owned}}, []string{"0 f 6755 4294967294:123456789 x"}},
		{"names that are not text", [][]member{{odd}}, []string{"0 caf\xe9/\xff\n 644 x", "5 caf\xe9 755"}},
		{"attributes", [][]member{{attributes}}, []string{
			`0 f 644 x security.capability="\x01\x00\x00\x02\x00 \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" user.empty=""`,
		}},
		{"devices and fifos", [][]member{{node, {Header: tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o600}}}}, []string{
			"3 null 666 1,3", "6 fifo 600",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tree := New(testLimits())
			for _, l := range c.layers {
				if err := add(t.Context(), tree, pack(t, l...)); err != nil {
					t.Fatal(err)
				}
			}
			got := slices.DeleteFunc(listing(t, write(t, tree)), func(s string) bool { return strings.HasPrefix(s, "5  ") })
			slices.Sort(c.want)
			if d := cmp.Diff(slices.Clip(c.want), got, cmp.Transformer("", func(s []string) string { return strings.Join(s, "\n") })); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	long := strings.Repeat("x", 256)
	deep := strings.Repeat("d/", 2100)
	big := file("f", "")
	big.PAXRecords = map[string]string{xattrPrefix + "user.x": strings.Repeat("x", 4000)}
	loop := []member{symlink("a", "b"), symlink("b", "a"), file("a/x", "")}
	many := make([]member, 0, 10_001)
	for i := range cap(many) {
		many = append(many, file(fmt.Sprint(i), ""))
	}
	names := make([]member, 0, 300)
	for i := range cap(names) {
		names = append(names, symlink(fmt.Sprint(i), strings.Repeat("t", 3900)))
	}
	far := file("f", "x")
	far.Uid = 1<<32 - 1
	for _, c := range []struct {
		name   string
		layer  []member
		want   error
		needle string
	}{
		{"a name that leads up", []member{file("../../etc/passwd", "x")}, ErrFormat, `"/../../etc/passwd" leads upwards`},
		{"up in the middle", []member{file("a/../b", "x")}, ErrFormat, "leads upwards"},
		{"a hard link that leads up", []member{hardlink("a", "../x")}, ErrFormat, "a hard link to"},
		{"a hard link to nothing", []member{hardlink("a", "b")}, ErrFormat, "is not there"},
		{"a hard link to a directory", []member{dir("b", 0o755), hardlink("a", "b")}, ErrFormat, "is a directory"},
		{"a long component", []member{file(long, "x")}, ErrFormat, "too long"},
		{"a long name", []member{file(deep+"x", "x")}, ErrFormat, "too long"},
		{"below a file", []member{file("a", "x"), file("a/b", "x")}, ErrFormat, "directory"},
		{"a loop of links", loop, ErrFormat, "too many symbolic links"},
		{"an empty link", []member{symlink("a", "")}, ErrFormat, "symbolic link"},
		{"the root as a file", []member{symlink(".", "x")}, ErrFormat, "root is not a directory"},
		{"whiteout of nothing", []member{file("a/.wh.", "")}, ErrFormat, "hides nothing"},
		{"whiteout of the parent", []member{file("a/.wh...", "")}, ErrFormat, "hides nothing"},
		{"an owner that means none", []member{far}, ErrFormat, "owner"},
		{"an unknown kind", []member{{Header: tar.Header{Typeflag: 'Z', Name: "z"}}}, ErrFormat, "unknown kind"},
		{"attributes that fit no block", []member{big}, ErrFormat, "extended attributes"},
		{"too many entries", many, ErrLimit, "more than 10000 entries"},
		{"too long names", names, ErrLimit, "names of more than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := add(t.Context(), New(testLimits()), pack(t, c.layer...))
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.needle) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// zeros is a reader of so many zero bytes.
func zeros(n int64) io.Reader { return io.LimitReader(zeroReader{}, n) }

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// bomb packs a file of zeros into a few bytes.
func bomb(t *testing.T, size int64) []byte {
	t.Helper()
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "zeros", Size: size}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(w, zeros(size)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestBombs(t *testing.T) {
	if err := add(t.Context(), New(testLimits()), bomb(t, 300<<20)); !errors.Is(err, ErrLimit) {
		t.Errorf("a stream without end: %v", err)
	}
	noise := make([]byte, 33<<20)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(noise)
	one := pack(t, file("a", string(noise)))
	if err := add(t.Context(), New(testLimits()), one, one); !errors.Is(err, ErrLimit) || !strings.Contains(err.Error(), "64 MiB") {
		t.Errorf("more than the disk holds: %v", err)
	}
	// An old sparse file may claim any size without a byte of it.
	sparse := tar.Header{Typeflag: tar.TypeGNUSparse, Name: "huge", Mode: 0o644, Format: tar.FormatGNU}
	block := gnuSparse(t, &sparse, 1<<40)
	if err := add(t.Context(), New(testLimits()), block); !errors.Is(err, ErrLimit) {
		t.Errorf("a sparse file of a TiB: %v", err)
	}
	layers := make([][]byte, 51)
	for i := range layers {
		layers[i] = pack(t)
	}
	if err := add(t.Context(), New(testLimits()), layers...); !errors.Is(err, ErrLimit) {
		t.Errorf("too many layers: %v", err)
	}
}

// gnuSparse is a header of GNU tar's old format for a file without data.
func gnuSparse(t *testing.T, h *tar.Header, size int64) []byte {
	t.Helper()
	b := make([]byte, 1536)
	copy(b, h.Name)
	copy(b[100:], "0000644\x00")
	copy(b[108:], "0000000\x00")
	copy(b[116:], "0000000\x00")
	copy(b[124:], "00000000000\x00")
	copy(b[136:], "00000000000\x00")
	b[156] = tar.TypeGNUSparse
	copy(b[257:], "ustar  \x00")
	copy(b[386:], fmt.Sprintf("%011o\x00%011o\x00", 0, 0))
	size12 := b[483:495]
	size12[0] = 0x80
	for i := 11; i > 0; i-- {
		size12[i] = byte(size)
		size >>= 8
	}
	copy(b[148:], "        ")
	sum := 0
	for _, c := range b[:512] {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// Runs of zeros are left out of the stream, and nothing else.
func TestHoles(t *testing.T) {
	content := make([]byte, 9<<20+12345)
	rng := rand.NewChaCha8([32]byte{2})
	for _, at := range []int{0, 3 << 20, 3<<20 + 200_000, len(content) - 1} {
		_, _ = rng.Read(content[at:min(len(content), at+1000)])
	}
	tree := New(testLimits())
	layer := pack(t, file("sparse", string(content)), file("zeros", string(make([]byte, 5<<20))), file("small", string(make([]byte, 1000))))
	if err := add(t.Context(), tree, layer); err != nil {
		t.Fatal(err)
	}
	stream := write(t, tree)
	if len(stream) > 1<<20 {
		t.Errorf("the stream has %d bytes", len(stream))
	}
	sum := sha256.Sum256(content)
	want := fmt.Sprintf("0 sparse 644 %d bytes, %x", len(content), sum[:4])
	if got := listing(t, stream); !slices.Contains(got, want) {
		t.Errorf("%q is not in %q", want, got)
	}
	if size := tree.Size(); size.Bytes > 1<<20 || size.Files != 4 {
		t.Errorf("%+v", size)
	}
}

func TestDigests(t *testing.T) {
	plain := pack(t, file("a", "x"))
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = z.Write(plain)
	z.Close()
	sum := func(b []byte) string {
		s := sha256.Sum256(b)
		return "sha256:" + hex.EncodeToString(s[:])
	}
	l := layerOf(packed.Bytes())
	l.Digest, l.DiffID = sum(packed.Bytes()), sum(plain)
	if err := New(testLimits()).Add(t.Context(), l); err != nil {
		t.Error(err)
	}
	l.Digest = sum(plain)
	if err := New(testLimits()).Add(t.Context(), l); !errors.Is(err, ErrFormat) {
		t.Errorf("another digest: %v", err)
	}
	l.Digest, l.DiffID = sum(packed.Bytes()), sum(nil)
	if err := New(testLimits()).Add(t.Context(), l); !errors.Is(err, ErrFormat) {
		t.Errorf("another content: %v", err)
	}
	for name, data := range map[string][]byte{
		"cut short":         packed.Bytes()[:packed.Len()-10],
		"cut in the header": plain[:100],
		"no tar":            []byte(strings.Repeat("no tar ", 200)),
		"damaged":           append([]byte{0x1f, 0x8b}, plain...),
	} {
		if err := New(testLimits()).Add(t.Context(), layerOf(data)); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := add(ctx, New(testLimits()), pack(t, file("a", "x"))); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestPut(t *testing.T) {
	tree := New(testLimits())
	layer := pack(t, file("usr/etc/app.conf", "old"), symlink("etc", "usr/etc"), symlink("temporary", "var/t"), dir("data", 0o700), file("opt", "a file"), file("etc/passwd", "u:x:1:2::/:\n"))
	if err := add(t.Context(), tree, layer); err != nil {
		t.Fatal(err)
	}
	for _, f := range []File{
		{Name: "/etc/app.conf", Mode: 0o600, UID: 5, GID: 6, Content: []byte("new")},
		{Name: "/etc/app.d/x", Mode: 0o644, Content: []byte{}},
		{Name: "/data", Mode: 0o755, Dir: true},
		{Name: "/made/here", Mode: 0o750, Dir: true},
		{Name: "big", Mode: 0o755, Size: 3, Open: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("abc")), nil }},
	} {
		if err := tree.Put(f); err != nil {
			t.Fatal(err)
		}
	}
	if err := tree.Put(File{Name: "/opt/x", Content: []byte("x")}); err == nil {
		t.Error("a file below a file")
	}
	if err := tree.Reach("/opt"); err == nil {
		t.Error("a directory where a file is")
	}
	if err := tree.Reach("/temporary/x"); err != nil {
		t.Error(err)
	}
	if err := tree.Mount("opt"); err == nil {
		t.Error("a mount on a file")
	}
	if string(tree.Account("etc/passwd")) != "u:x:1:2::/:\n" {
		t.Errorf("passwd is %q", tree.Account("etc/passwd"))
	}
	if !tree.Executable("/big") || tree.Executable("/etc/app.conf") || tree.Executable("/none") || !tree.Exists("/etc") || tree.Exists("/none") {
		t.Error("what is there and executable")
	}
	want := []string{
		"0 big 755 abc", "0 opt 644 a file", "0 usr/etc/app.conf 600 5:6 new", "0 usr/etc/app.d/x 644 ", "0 usr/etc/passwd 644 u:x:1:2::/:\n",
		"2 etc -> usr/etc", "2 temporary -> var/t", "5  755", "5 data 700", "5 made 755", "5 made/here 750", "5 usr 755", "5 usr/etc 755", "5 usr/etc/app.d 755",
		"5 var 755", "5 var/t 755",
	}
	if d := cmp.Diff(want, listing(t, write(t, tree))); d != "" {
		t.Error(d)
	}
}

// Times with fractions, before 1970 and in the far future pass.
func TestTimes(t *testing.T) {
	var layer []member
	times := map[string]time.Time{
		"fraction": time.Unix(1_600_000_000, 123_456_789), "before": time.Unix(-5, 0), "far": time.Unix(1<<34, 0),
	}
	for name, at := range times {
		m := file(name, "")
		m.ModTime = at
		layer = append(layer, m)
	}
	tree := New(testLimits())
	if err := add(t.Context(), tree, pack(t, layer...)); err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(bytes.NewReader(write(t, tree)))
	for h, err := r.Next(); err == nil; h, err = r.Next() {
		if want, ok := times[h.Name]; ok && !h.ModTime.Equal(want) {
			t.Errorf("%s: %s, want %s", h.Name, h.ModTime, want)
		}
	}
}

// FuzzFlatten lays arbitrary bytes over a real layer: what comes out can be unpacked without care, or nothing does.
func FuzzFlatten(f *testing.F) {
	base := pack(f, dir("usr/bin", 0o755), symlink("bin", "usr/bin"), file("usr/bin/sh", "x"), hardlink("usr/bin/ash", "usr/bin/sh"), symlink("loop", "loop"))
	f.Add(pack(f, file("bin/.wh.sh", ""), file("a/../b", "")))
	f.Add(pack(f, file(".wh.usr", ""), hardlink("b", "usr/bin/ash"), symlink("usr", "/proc/self/root")))
	f.Add(pack(f, file("usr/bin/.wh..wh..opq", ""), file("loop/x", ""), file("bin/caf\xe9", "y")))
	f.Add([]byte("\x1f\x8b\x08\x00\x00\x00\x00\x00"))
	f.Add([]byte("(\xb5/\xfd\x04\x00"))
	f.Add(base[:700])
	f.Fuzz(func(t *testing.T, layer []byte) {
		limits := Limits{Layers: 3, Entries: 100, Names: 10_000, Content: 1 << 20, Stream: 4 << 20}
		tree := New(limits)
		if err := add(t.Context(), tree, base, layer); err != nil {
			return
		}
		var out bytes.Buffer
		if err := tree.Write(t.Context(), &out); err != nil {
			return
		}
		again := New(Limits{Layers: 1, Entries: 1000, Names: 1 << 20, Content: 1 << 24, Stream: 1 << 24})
		if err := add(t.Context(), again, out.Bytes()); err != nil {
			t.Fatalf("its own stream is refused: %v", err)
		}
		listing(t, out.Bytes())
	})
}
