package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/image/flatten"
	"forkd.dev/forkd/internal/image/oci"
)

// rootTar is a tar file of a small root file system; a name that ends in a slash is a directory.
func rootTar(t testing.TB, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range sortedKeys(files) {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(files[name]))}
		if strings.HasSuffix(name, "/") {
			h.Typeflag, h.Size = tar.TypeDir, 0
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, files[name]); err != nil && h.Size > 0 {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// planOf resolves a recipe on a tar file.
func planOf(t testing.TB, recipe string, root map[string]string, files fstest.MapFS) (*Plan, error) {
	t.Helper()
	r, err := ParseRecipe("recipe.yaml", []byte("base: tar:root.tar\n"+recipe))
	if err != nil {
		t.Fatal(err)
	}
	if files == nil {
		files = fstest.MapFS{}
	}
	if root != nil {
		files[LocalFile] = &fstest.MapFile{Data: rootTar(t, root)}
	}
	p, err := Resolve(t.Context(), r, files, Host{CacheDir: t.TempDir(), Arch: "amd64"})
	if err != nil {
		return nil, err
	}
	t.Cleanup(p.Close)
	return p, nil
}

// members are what a plan's stream has: "mode owner content" by name.
func members(t testing.TB, p *Plan) map[string]string {
	t.Helper()
	if err := p.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := p.WriteRootfs(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	r := tar.NewReader(&out)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		found[h.Name] = fmt.Sprintf("%o %d:%d %s", h.Mode, h.Uid, h.Gid, content)
	}
}

const testPasswd = "root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n"

func TestForeignImage(t *testing.T) {
	root := map[string]string{
		"etc/passwd": testPasswd, "etc/group": "root:x:0:\nextra:x:2000:\n", "bin/sh": "x", "opt/old": "old", "etc/forkd/image.json": "the image's own",
	}
	files := fstest.MapFS{"app/run": {Data: []byte("script"), Mode: 0o755}, "app/sub/data": {Data: []byte("data")}}
	p, err := planOf(t, `user: app:extra
workdir: /srv/work
env: {A: "1"}
files:
  - {source: app, path: /srv/app, owner: app}
  - {content: text, path: /opt/old, mode: "0640", owner: "app:extra"}
  - {content: text, path: /etc/new/deep, owner: "7:8"}
`, root, files)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(Config{Env: map[string]string{"A": "1"}, WorkDir: "/srv/work", User: "app:extra"}, p.Config); d != "" {
		t.Error(d)
	}
	config := "{\n\t\"env\": {\n\t\t\"A\": \"1\"\n\t},\n\t\"workdir\": \"/srv/work\",\n\t\"user\": \"app:extra\"\n}\n"
	want := map[string]string{
		"./": "755 0:0 ", "bin/": "755 0:0 ", "bin/sh": "755 0:0 x", "dev/": "755 0:0 ", "etc/": "755 0:0 ", "etc/forkd/": "755 0:0 ",
		"etc/forkd/image.json": "644 0:0 " + config, "etc/group": "755 0:0 root:x:0:\nextra:x:2000:\n", "etc/new/": "755 0:0 ",
		"etc/new/deep": "644 7:8 text", "etc/passwd": "755 0:0 " + testPasswd, "opt/": "755 0:0 ", "opt/old": "640 1000:2000 text",
		"proc/": "755 0:0 ", "run/": "755 0:0 ", "srv/": "755 0:0 ", "srv/app/": "755 1000:1001 ", "srv/app/run": "755 1000:1001 script",
		"srv/app/sub/": "755 1000:1001 ", "srv/app/sub/data": "644 1000:1001 data", "srv/work/": "755 0:0 ", "sys/": "755 0:0 ", "tmp/": "1777 0:0 ", "var/": "755 0:0 ",
	}
	if d := cmp.Diff(want, members(t, p)); d != "" {
		t.Error(d)
	}
	if p.DiskBytes() != DefaultDiskBytes {
		t.Errorf("a disk of %d bytes", p.DiskBytes())
	}
	again, err := planOf(t, "user: app:extra\n", root, nil)
	if err != nil || again.Digest == p.Digest {
		t.Error("another recipe is the same image", err)
	}
}

func TestForeignRefused(t *testing.T) {
	root := map[string]string{"etc/passwd": testPasswd}
	big := map[string]string{"f": strings.Repeat("x", 3<<20), "g": strings.Repeat("y", 3<<20)}
	for _, c := range []struct {
		name, recipe string
		root         map[string]string
		want         string
	}{
		{"nothing sent", "", nil, "the command line reads what is on your machine"},
		{"no shell", "run: [x]\n", root, "no /bin/sh"},
		{"unknown user", "user: nobody-here\n", root, `no user "nobody-here"`},
		{"unknown owner", "files: [{content: x, path: /x, owner: who}]\n", root, `no user "who"`},
		{"unknown group", "files: [{content: x, path: /x, owner: 'app:who'}]\n", root, `no group "who"`},
		{"below a file", "files: [{content: x, path: /etc/passwd/x}]\n", root, "not a directory"},
		{"a file for a mount point", "", map[string]string{"proc": "x"}, "/proc must be a directory"},
		{"a file for /var", "", map[string]string{"var": "x"}, "not a directory"},
		{"no tar", "", map[string]string{"../x": "x"}, "leads upwards"},
	} {
		p, err := planOf(t, c.recipe, c.root, nil)
		if err == nil {
			err = p.Prepare(t.Context())
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// A file of the recipe that changes between its digest and its use.
	files := fstest.MapFS{"f": {Data: []byte("before")}}
	p, err := planOf(t, "files: [{source: f, path: /f}]\n", root, files)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	files["f"] = &fstest.MapFile{Data: []byte("behind")}
	if err := p.WriteRootfs(t.Context(), io.Discard); err == nil || !strings.Contains(err.Error(), "it changed") {
		t.Errorf("a file that changed: %v", err)
	}
	p, err = planOf(t, "machine: {disk: 1GiB}\n", big, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Prepare(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestDiskFits(t *testing.T) {
	for _, c := range []struct {
		size  flatten.Size
		given int64
		want  int64
	}{
		{flatten.Size{Bytes: 100 << 20, Files: 1000}, 0, 8 << 30},
		{flatten.Size{Bytes: 20 << 30, Files: 1000}, 0, 28 << 30},
		{flatten.Size{Bytes: 1 << 20, Files: 2_000_000}, 0, 22 << 30},
		{flatten.Size{Bytes: 100 << 20, Files: 1000}, 1 << 30, 1 << 30},
		{flatten.Size{Bytes: 1 << 30, Files: 1000}, 1 << 30, 0},
		{flatten.Size{Bytes: 1 << 20, Files: 200_000}, 1 << 30, 0},
	} {
		m := Machine{DiskBytes: DefaultDiskBytes}
		if c.given > 0 {
			m.DiskBytes, m.DiskGiven = c.given, true
		}
		got, err := m.fit(c.size)
		if got != c.want || (err == nil) != (c.want > 0) {
			t.Errorf("%+v in %d: %d %v", c.size, c.given, got>>30, err)
		}
	}
}

func TestReadConfig(t *testing.T) {
	got, notes, err := readConfig(&oci.Config{
		User: "1000", Env: []string{"A=b=c", "PATH=/x", "A=last", "no-value", "=x"}, WorkingDir: "rel/../app", Entrypoint: []string{"a"}, Cmd: []string{"b"},
		ExposedPorts: map[string]struct{}{"80/tcp": {}, "53/udp": {}}, Labels: map[string]string{"a": "b", "z": strings.Repeat("x", 300<<10)},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		Env: map[string]string{"A": "last", "PATH": "/x"}, User: "1000", WorkDir: "/app", Entrypoint: []string{"a"}, Cmd: []string{"b"},
		Labels: map[string]string{"a": "b"}, Ports: []string{"53/udp", "80/tcp"},
	}
	if d := cmp.Diff(want, got); d != "" || len(notes) != 1 {
		t.Error(d, notes)
	}
	for name, bad := range map[string]oci.Config{
		"NUL":        {Cmd: []string{"a\x00b"}},
		"long":       {Env: []string{"A=" + strings.Repeat("x", 200<<10)}},
		"many":       {Cmd: make([]string, 2000)},
		"NUL in env": {Env: []string{"A=\x00"}},
	} {
		if _, _, err := readConfig(&bad); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}
