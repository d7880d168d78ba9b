package images

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/image/debian"
	"forkd.dev/forkd/internal/testenv"
)

// zeros is so many zero bytes.
func zeros(n int64) io.Reader { return io.LimitReader(zeroReader{}, n) }

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// packages are files of Debian's packages, for images that need somebody's libraries or a shell.
type packages struct {
	t       testing.TB
	archive *debian.Archive
}

func openPackages(t testing.TB, cache string) *packages {
	t.Helper()
	testenv.Need(t, "net", "keyring")
	base, err := debian.BaseByName("debian:bookworm")
	if err != nil {
		t.Fatal(err)
	}
	cfg := debian.Config{Root: os.DirFS("/"), CacheDir: cache, Arch: "amd64", Now: time.Now}
	a, err := debian.Open(t.Context(), cfg, base)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return &packages{t, a}
}

// files are the members of a package that are wanted, in the package's order, as entries of a layer.
func (p *packages) files(name string, want func(path string) bool) []entry {
	p.t.Helper()
	list, err := p.archive.Lookup(p.t.Context(), name)
	if err != nil {
		p.t.Fatal(err)
	}
	for _, pkg := range list {
		if pkg.Name == name {
			return p.members(pkg, want)
		}
	}
	p.t.Fatalf("no package %s", name)
	return nil
}

func (p *packages) members(pkg *debian.Package, want func(string) bool) []entry {
	p.t.Helper()
	f, err := p.archive.OpenPackage(p.t.Context(), pkg)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	deb, err := debian.ReadDeb(f)
	if err != nil {
		p.t.Fatal(err)
	}
	var found []entry
	data := deb.Data()
	for {
		h, err := data.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			p.t.Fatal(err)
		}
		name := path.Clean("/" + h.Name)[1:]
		if name == "" || h.Typeflag != tar.TypeDir && !want(name) {
			continue
		}
		content, err := io.ReadAll(data)
		if err != nil {
			p.t.Fatal(err)
		}
		e := entry{Header: *h}
		e.Format = tar.FormatPAX
		e.Name = name
		if h.Typeflag == tar.TypeDir {
			e.Name += "/"
		}
		if h.Typeflag == tar.TypeReg {
			e.content = func() io.Reader { return bytes.NewReader(content) }
		}
		found = append(found, e)
	}
}

// busybox is a layer with a static shell and the applets that the tests use.
func (p *packages) busybox() []entry {
	p.t.Helper()
	entries := []entry{dir("bin", 0o755)}
	for _, e := range p.files("busybox-static", func(name string) bool { return strings.HasSuffix(name, "bin/busybox") }) {
		if e.Typeflag == tar.TypeReg {
			e.Name = "bin/busybox"
			entries = append(entries, e)
		}
	}
	if len(entries) != 2 {
		p.t.Fatal("busybox-static has no busybox")
	}
	for _, applet := range []string{"sh", "id", "cat", "ls", "pwd", "env", "grep", "adduser", "head"} {
		entries = append(entries, hardlink("bin/"+applet, "bin/busybox"))
	}
	return entries
}

// musl is the C library of Alpine and a program that needs it.
func (p *packages) musl() []entry {
	p.t.Helper()
	var lib entry
	for _, e := range p.files("musl", func(name string) bool { return strings.Contains(name, "musl") }) {
		if e.Typeflag == tar.TypeReg && strings.HasSuffix(e.Name, ".so") {
			lib = e
		}
	}
	if lib.content == nil {
		p.t.Fatal("musl has no library")
	}
	work := p.t.TempDir()
	so, source, out := filepath.Join(work, "libc.so"), filepath.Join(work, "x.c"), filepath.Join(work, "x")
	content, err := io.ReadAll(lib.content())
	if err != nil {
		p.t.Fatal(err)
	}
	const program = "int puts(const char *); void exit(int);\nvoid _start(void) { puts(\"hello from musl\"); exit(0); }\n"
	if err := errors.Join(os.WriteFile(so, content, 0o755), os.WriteFile(source, []byte(program), 0o644)); err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(p.t.Context(), testenv.Timeout(time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, "gcc", "-nostdlib", "-fno-stack-protector", "-mstackrealign", "-no-pie", "-O1", "-o", out, source, "-L"+work, "-l:libc.so",
		"-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1")
	if text, err := cmd.CombinedOutput(); err != nil {
		p.t.Fatalf("gcc: %v: %s", err, text)
	}
	binary, err := os.ReadFile(out)
	if err != nil {
		p.t.Fatal(err)
	}
	return []entry{
		dir("lib", 0o755), file("lib/libc.musl-x86_64.so.1", 0o755, string(content)), symlink("lib/ld-musl-x86_64.so.1", "libc.musl-x86_64.so.1"),
		symlink("lib/libc.so", "libc.musl-x86_64.so.1"), dir("app", 0o755), file("app/hello", 0o755, string(binary)),
	}
}

const (
	passwd = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\napp:x:1000:1000::/home/app:/bin/sh\n"
	group  = "root:x:0:\nnogroup:x:65534:\napp:x:1000:\nextra:x:2000:app\n"
)

func etc() []entry {
	return []entry{
		dir("etc", 0o755), file("etc/passwd", 0o644, passwd), file("etc/group", 0o644, group), dir("home", 0o755),
		dir("home/app", 0o750).owned(1000, 1000), dir("tmp", 0o1777),
	}
}

func join2(lists ...[]entry) []entry {
	var all []entry
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// capNetRaw is security.capability with cap_net_raw permitted and effective.
const capNetRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// booted are the families of which real machines are made.
func booted(p *packages) []*family {
	glibc := p.files("libc6", func(name string) bool {
		return strings.Contains(name, ".so") && !strings.Contains(name, "/gconv/")
	})
	dash := p.files("dash", func(name string) bool { return strings.Contains(name, "bin/") })
	hello := p.files("hello", func(name string) bool { return name == "usr/bin/hello" })
	forty := []layer{of(join2(p.busybox(), etc())...)}
	for i := 1; i < 40; i++ {
		forty = append(forty, of(
			file("state", 0o644, fmt.Sprintf("layer %d\n", i)), file(fmt.Sprintf("each/%02d", i), 0o600, fmt.Sprint(i)),
			whiteout(fmt.Sprintf("each/%02d", i-3)), file(fmt.Sprintf("own/%02d/file", i), 0o644, "x"), whiteout(fmt.Sprintf("own/%02d", i-1)),
		))
	}
	return []*family{
		{
			name: "static", pack: "gzip", layers: []layer{of(file("hello", 0o755, string(program("hello from nothing else\n"))))},
			config: config{Entrypoint: []string{"/hello"}},
		},
		{name: "distroless", pack: "zstd", layers: []layer{
			of(join2(etc(), []entry{file("etc/ssl/certs/ca.pem", 0o644, "no certificate\n"), dir("var/run", 0o755)})...),
			of(file("app/server", 0o755, string(program("served\n"))).owned(65532, 65532)),
		}, config: config{
			User: "65532:65532", WorkingDir: "/app", Cmd: []string{"/app/server"}, Env: []string{"PATH=/app", "SSL_CERT_FILE=/etc/ssl/certs/ca.pem"},
			Labels: map[string]string{"org.example.what": "a test"}, ExposedPorts: map[string]struct{}{"8080/tcp": {}},
		}},
		{name: "glibc", pack: "gzip", layers: []layer{
			of(join2([]entry{
				dir("usr/bin", 0o755), dir("usr/sbin", 0o755), dir("usr/lib", 0o755), dir("usr/lib64", 0o755), symlink("bin", "usr/bin"), symlink("sbin", "usr/sbin"),
				symlink("lib", "usr/lib"), symlink("lib64", "usr/lib64"),
			}, etc())...),
			of(withoutLinked(glibc)...), of(withoutLinked(dash)...), of(hello...),
		}, config: config{User: "app", Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{"hello; echo $HOME $GREETING"}, Env: []string{"GREETING=grüß"}}},
		{name: "musl", layers: []layer{of(p.musl()...)}, config: config{Cmd: []string{"/app/hello"}}},
		{
			name: "busybox", pack: "gzip", layers: []layer{of(join2(p.busybox(), etc())...)},
			config: config{User: "app:extra", WorkingDir: "/work/made", Cmd: []string{"sh", "-c", "id; pwd"}},
		},
		{name: "forty-layers", layers: forty, config: config{Cmd: []string{"cat", "/state"}}},
		{name: "numeric-user", layers: []layer{of(p.busybox()...)}, config: config{User: "12345", Cmd: []string{"id"}}},
		{name: "privileged-files", layers: []layer{of(join2(p.busybox(), etc(), []entry{
			file("bin/who", 0o4755, exitsWithUser()), file("bin/who-plain", 0o755, exitsWithUser()),
			file("bin/raw", 0o755, needsRawSocket()).with("security.capability", capNetRaw), file("bin/raw-plain", 0o755, needsRawSocket()),
			dir("shared", 0o2775).owned(0, 2000), file("shared/f", 0o2755, "x").owned(0, 2000), dir("sticky", 0o1777),
		})...)}, config: config{User: "app", Cmd: []string{"sh", "-c", "for p in who who-plain raw raw-plain; do $p; echo $p $?; done"}}},
		{name: "gigabyte", pack: "gzip", layers: []layer{of(join2(p.busybox(), []entry{{
			Header: tar.Header{Typeflag: tar.TypeReg, Name: "big", Mode: 0o644, Size: 1 << 30, ModTime: then},
			content: func() io.Reader {
				return io.MultiReader(zeros(300<<20), strings.NewReader("needle"), zeros(1<<30-300<<20-6))
			},
		}})...)}, config: config{Cmd: []string{"ls", "-l", "/big"}}},
	}
}

// withoutLinked are a package's files without the entries of directories that are links in a merged /usr.
func withoutLinked(entries []entry) []entry {
	var kept []entry
	for _, e := range entries {
		switch e.Name {
		case "bin/", "sbin/", "lib/", "lib64/":
		default:
			kept = append(kept, e)
		}
	}
	return kept
}

// compared are the families whose trees are compared, unpacked by a machine's agent as it would be for an image.
func compared() []*family {
	many := []entry{}
	for i := range 2000 {
		many = append(many, file(fmt.Sprintf("many/%02d/%04d", i%50, i), 0o640, strings.Repeat("x", i)))
	}
	deep := []entry{}
	for i, name := 0, "d"; i < 60; i, name = i+1, name+"/d" {
		deep = append(deep, dir(name, 0o755), file(name+"/f", 0o644, name))
	}
	acl := "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x02\x00\x04\x00\xe8\x03\x00\x00\x04\x00\x04\x00\xff\xff\xff\xff\x10\x00\x06\x00\xff\xff\xff\xff\x20\x00\x04\x00\xff\xff\xff\xff"
	fifo := entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "run-me/fifo", Mode: 0o622, ModTime: then}}
	long := strings.Repeat("long-name-", 25) + "12345"
	gnu := func(e entry) entry { e.Format = tar.FormatGNU; e.ModTime = time.Unix(1_500_000_000, 0); return e }
	ustar := func(e entry) entry { e.Format = tar.FormatUSTAR; e.ModTime = time.Unix(1_500_000_000, 0); return e }
	at := func(e entry, t time.Time) entry { e.ModTime = t; return e }
	return []*family{
		{name: "hidden-files", layers: []layer{
			of(file("a/1", 0o644, "1"), file("a/2", 0o644, "2"), file("b/c/d", 0o644, "d"), file("b/e", 0o644, "e"), symlink("l", "a")),
			of(whiteout("a/1"), whiteout("b/c"), whiteout("never-was"), whiteout("l"), file("a/3", 0o644, "3")),
		}},
		{name: "opaque", layers: []layer{
			of(dir("a", 0o711), file("a/1", 0o644, "1"), file("a/b/2", 0o644, "2"), file("c/3", 0o644, "3")),
			of(file("a/new", 0o644, "n"), opaque("a"), dir("c", 0o700), opaque("c"), file("c/b/x", 0o644, "x")),
		}},
		{name: "hidden-and-made-anew", layers: []layer{
			of(file("d/old", 0o600, "old"), file("f", 0o600, "old")),
			of(file("d/new", 0o644, "new"), whiteout("d"), whiteout("f"), file("f", 0o644, "new")),
			of(whiteout("d"), dir("d", 0o750), file("d/newest", 0o644, "!")),
		}},
		{name: "hard-links", layers: []layer{
			of(file("x/a", 0o640, "one").owned(1, 2), hardlink("b", "x/a"), hardlink("x/c", "b"), file("z", 0o644, "z")),
			of(hardlink("y/d", "x/a"), file("x/a", 0o600, "another"), hardlink("z2", "z")),
			of(whiteout("b"), hardlink("0", "z2"), symlink("s", "z"), hardlink("s2", "s")),
		}},
		{name: "devices", layers: []layer{of(
			device(tar.TypeChar, "d/null", 0o666, 1, 3), device(tar.TypeBlock, "d/disk", 0o660, 253, 1).owned(0, 6), device(tar.TypeChar, "d/zero-zero", 0o600, 0, 0), fifo,
			device(tar.TypeBlock, "d/large", 0o600, 4000, 1000000),
		)}},
		{name: "names", layers: []layer{of(
			file("grüße/日本語/🎉", 0o644, "utf-8"), file("latin/caf\xe9/\xff\xfe", 0o644, "not utf-8"), file("new\nline/tab\t\"quote\"", 0o644, "x"),
			file(long, 0o644, "255 bytes"), symlink("to\xe9", "caf\xe9/\xff"), file("-rf", 0o644, ""), file(" ", 0o644, "blank"), file("...", 0o644, "dots"),
			hardlink("hard\xe9", "latin/caf\xe9/\xff\xfe"), file("back\\slash", 0o644, "x"),
		)}},
		{name: "linked-parents", layers: []layer{
			of(file("bin/a", 0o755, "a"), file("usr/bin/b", 0o755, "b")),
			of(whiteout("bin"), symlink("bin", "usr/bin")),
			of(file("bin/c", 0o755, "c"), symlink("opt", "/srv/opt"), file("opt/x/y", 0o644, "through a link to nothing"), whiteout("bin/b")),
			of(symlink("up", "../../usr"), file("up/lib/z", 0o644, "above the root is the root")),
		}},
		{name: "kinds-change", layers: []layer{
			of(file("a/b/c", 0o644, "c"), file("f", 0o644, "f"), symlink("l", "a"), dir("e", 0o755), device(tar.TypeChar, "n", 0o600, 1, 5)),
			of(file("a", 0o644, "now a file"), dir("f", 0o700), file("f/g", 0o644, "g"), dir("l", 0o755), file("l/m", 0o644, "m"), symlink("e", "nowhere"), file("n", 0o644, "n")),
		}},
		{name: "attributes", layers: []layer{
			of(file("caps", 0o755, "x").with("security.capability", capNetRaw), file("user", 0o644, "x").with("user.name", "value").with("user.binary", "\x00\xff\n=").with("user.empty", ""),
				dir("d", 0o755).with("user.dir", "yes"), file("acl", 0o664, "x").with("system.posix_acl_access", acl),
				symlink("link", "user").with("trusted.of-a-link", "kept"), entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o600, ModTime: then}}.with("trusted.of-a-fifo", "kept"),
				file("large", 0o644, "x").with("user.large", strings.Repeat("v", 3000)), file("trusted", 0o644, "x").with("trusted.overlay.opaque", "y")),
			of(file("user", 0o644, "y").with("user.name", "new"), dir("d", 0o700).with("user.dir", "no")),
		}},
		{name: "owners", layers: []layer{of(
			file("a", 0o644, "x").owned(4294967294, 4294967294), file("b", 0o644, "x").owned(65536, 2097152), dir("c", 0o755).owned(1_000_000_000, 7),
			symlink("d", "a").owned(123456, 654321), device(tar.TypeChar, "e", 0o600, 1, 3).owned(5, 6),
		)}},
		{name: "modes", layers: []layer{of(
			file("suid", 0o4711, "x").owned(1, 1), file("sgid", 0o2755, "x").owned(1, 1), file("both", 0o6750, "x"), dir("sticky", 0o1777), dir("sgid-dir", 0o2770).owned(0, 50),
			file("sgid-dir/inherits-not", 0o644, "x").owned(3, 4), file("none", 0, "x"), dir("closed", 0), file("closed/in", 0o644, "x"),
		)}},
		{name: "sparse", layers: []layer{
			func(w io.Writer) error { _, err := w.Write(gnuSparse("old-gnu", 40<<20, 20<<20)); return err },
			of(entry{
				Header:  tar.Header{Typeflag: tar.TypeReg, Name: "ends-in-zeros", Mode: 0o644, Size: 5<<20 + 77, ModTime: then},
				content: func() io.Reader { return io.MultiReader(strings.NewReader("begin"), zeros(5<<20+72)) },
			},
				entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "only-zeros", Mode: 0o644, Size: 3 << 20, ModTime: then}, content: func() io.Reader { return zeros(3 << 20) }},
				entry{
					Header: tar.Header{Typeflag: tar.TypeReg, Name: "unaligned", Mode: 0o644, Size: 7<<20 + 1, ModTime: then},
					content: func() io.Reader {
						return io.MultiReader(strings.NewReader("x"), zeros(2<<20+333), strings.NewReader("middle"), zeros(5<<20-340), strings.NewReader("z"))
					},
				}),
		}},
		{name: "gnu-tar", pack: "gzip", layers: []layer{of(
			gnu(file(long+"/"+long, 0o644, "a long name")), gnu(symlink("l", strings.Repeat("long/", 40))), gnu(file("big-owner", 0o644, "x").owned(3_000_000, 3_000_001)),
		)}},
		{name: "ustar", layers: []layer{of(ustar(file(strings.Repeat("p", 90)+"/"+strings.Repeat("n", 90), 0o644, "prefix")), ustar(file("./dot/slash", 0o644, "x")), ustar(file("/from/the/root", 0o644, "x")), ustar(dir(".", 0o751)))}},
		{name: "many-and-deep", pack: "zstd", layers: []layer{of(many...), of(deep...)}},
		{name: "empty-and-twice", pack: "gzip", layers: []layer{of(), of(file("a", 0o644, "first"), file("a", 0o600, "second"), dir("d", 0o700), file("d/x", 0o644, "x"), dir("d", 0o755)), of(), of(file("z", 0o644, ""))}},
		{name: "times", layers: []layer{of(
			at(file("fraction", 0o644, "x"), time.Unix(1_600_000_000, 123_456_789)), at(file("epoch", 0o644, "x"), time.Unix(0, 0)), at(file("future", 0o644, "x"), time.Unix(1<<33, 0)),
			at(file("before", 0o644, "x"), time.Unix(-1_000_000, 0)), at(symlink("link", "x"), time.Unix(1, 1)),
		)}},
	}
}

// gnuSparse is an archive with one file in GNU tar's old format of sparse files: a block of data at an offset.
func gnuSparse(name string, size, at int64) []byte {
	b := make([]byte, 512)
	field := func(offset int, text string) { copy(b[offset:], text) }
	field(0, name)
	field(100, "0000644\x00")
	field(108, "0000000\x00")
	field(116, "0000000\x00")
	field(124, fmt.Sprintf("%011o\x00", 512))
	field(136, fmt.Sprintf("%011o\x00", 1_500_000_000))
	b[156] = tar.TypeGNUSparse
	field(257, "ustar  \x00")
	field(386, fmt.Sprintf("%011o\x00%011o\x00", at, 512))
	field(410, fmt.Sprintf("%011o\x00%011o\x00", size, 0))
	field(483, fmt.Sprintf("%011o\x00", size))
	field(148, "        ")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	field(148, fmt.Sprintf("%06o\x00 ", sum))
	return slices.Concat(b, bytes.Repeat([]byte("data"), 128), make([]byte, 1024))
}

func TestFamiliesAreMany(t *testing.T) {
	// The booted ones need packages; their number is part of TestBooted.
	if n := len(compared()); n < 16 {
		t.Errorf("%d families are compared", n)
	}
	for _, f := range compared() {
		if _, err := f.reference(); err != nil {
			t.Errorf("%s: %v", f.name, err)
		}
	}
}
