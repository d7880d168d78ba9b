package e2b

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"forkd.dev/forkd/internal/image/debian"
	"forkd.dev/forkd/internal/testenv"
)

// layerFiles is a layer of an image in the making.
type layerFiles struct {
	t   *testing.T
	buf bytes.Buffer
	tar *tar.Writer
}

func newLayerFiles(t *testing.T) *layerFiles {
	t.Helper()
	l := &layerFiles{t: t}
	l.tar = tar.NewWriter(&l.buf)
	return l
}

func (l *layerFiles) add(h tar.Header, content string) {
	l.t.Helper()
	h.Size, h.ModTime = int64(len(content)), time.Unix(1_700_000_000, 0)
	if err := l.tar.WriteHeader(&h); err != nil {
		l.t.Fatal(err)
	}
	if _, err := io.WriteString(l.tar, content); err != nil {
		l.t.Fatal(err)
	}
}

func (l *layerFiles) file(name string, mode int64, content string) {
	l.add(tar.Header{Name: name, Mode: mode}, content)
}

func (l *layerFiles) dir(name string, mode int64) {
	l.add(tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}, "")
}

func (l *layerFiles) link(name, target string) {
	l.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, "")
}

// debian adds those files of a Debian package that are wanted, below /usr where Debian has merged them.
func (l *layerFiles) debian(archive *debian.Archive, pkg string, want func(name string) bool) {
	l.t.Helper()
	list, err := archive.Lookup(l.t.Context(), pkg)
	if err != nil {
		l.t.Fatal(err)
	}
	at := slices.IndexFunc(list, func(p *debian.Package) bool { return p.Name == pkg })
	if at < 0 {
		l.t.Fatalf("no package %s", pkg)
	}
	f, err := archive.OpenPackage(l.t.Context(), list[at])
	if err != nil {
		l.t.Fatal(err)
	}
	defer f.Close()
	deb, err := debian.ReadDeb(f)
	if err != nil {
		l.t.Fatal(err)
	}
	data := deb.Data()
	for {
		h, err := data.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			l.t.Fatal(err)
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if h.Typeflag == tar.TypeDir || !want(name) {
			continue
		}
		if !strings.HasPrefix(name, "usr/") {
			name = "usr/" + name
		}
		content, err := io.ReadAll(data)
		if err != nil {
			l.t.Fatal(err)
		}
		l.add(tar.Header{Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Mode: h.Mode}, string(content))
	}
}

func (l *layerFiles) layer() v1.Layer {
	l.t.Helper()
	if err := l.tar.Close(); err != nil {
		l.t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(l.buf.Bytes())), nil })
	if err != nil {
		l.t.Fatal(err)
	}
	return layer
}

// applets are what busybox is in the image.
const applets = "sh ls cat id mkdir rm mv ln cp chmod chown grep sleep env pwd seq true false head tail touch adduser addgroup stat " +
	"readlink find wc sort cut tr nc ps kill uname date test dirname basename"

// newRegistry is a registry on the loopback with images of busybox and bash, of the size that can be booted in no time: small:v1,
// and small:bare that has no bash. It returns its address.
func newRegistry(t *testing.T, cache string) string {
	t.Helper()
	testenv.Need(t, "net", "keyring")
	base, err := debian.BaseByName("debian:bookworm")
	if err != nil {
		t.Fatal(err)
	}
	archive, err := debian.Open(t.Context(), debian.Config{Root: os.DirFS("/"), CacheDir: cache, Arch: "amd64", Now: time.Now}, base)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	box := newLayerFiles(t)
	for _, dir := range []string{"usr", "usr/bin", "usr/lib", "usr/lib64", "usr/sbin", "etc", "home"} {
		box.dir(dir, 0o755)
	}
	for _, dir := range []string{"bin", "lib", "lib64", "sbin"} {
		box.link(dir, "usr/"+dir)
	}
	box.dir("root", 0o700)
	box.dir("tmp", 0o1777)
	box.file("etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/bash\n")
	box.file("etc/group", 0o644, "root:x:0:\n")
	box.file("etc/profile", 0o644, "export PROFILE=read\n")
	box.debian(archive, "busybox-static", func(name string) bool { return name == "bin/busybox" })
	for applet := range strings.FieldsSeq(applets) {
		box.link("usr/bin/"+applet, "busybox")
	}
	box.file("usr/bin/pgrep", 0o755, "#!/bin/sh\ngrep -qsx \"$1\" /proc/[0-9]*/comm\n") // this busybox has none
	shell := newLayerFiles(t)
	shell.debian(archive, "libc6", func(name string) bool { return strings.Contains(name, ".so") && !strings.Contains(name, "/gconv/") })
	shell.debian(archive, "libtinfo6", func(name string) bool { return strings.Contains(name, ".so") })
	shell.debian(archive, "bash", func(name string) bool { return name == "bin/bash" })

	server := httptest.NewServer(registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelError))))
	t.Cleanup(server.Close)
	address := strings.TrimPrefix(server.URL, "http://")
	bare := box.layer()
	for tag, layers := range map[string][]v1.Layer{"bare": {bare}, "v1": {bare, shell.layer()}} {
		ref, err := name.ParseReference(address + "/small:" + tag)
		if err != nil {
			t.Fatal(err)
		}
		image, err := mutate.AppendLayers(empty.Image, layers...)
		if err != nil {
			t.Fatal(err)
		}
		image, err = mutate.ConfigFile(image, &v1.ConfigFile{
			Architecture: "amd64", OS: "linux", RootFS: v1.RootFS{Type: "layers", DiffIDs: diffIDs(t, layers)},
			Config: v1.Config{Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin", "FROM_IMAGE=yes"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := remote.Write(ref, image, remote.WithContext(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	return address
}

func diffIDs(t *testing.T, layers []v1.Layer) (ids []v1.Hash) {
	t.Helper()
	for _, l := range layers {
		id, err := l.DiffID()
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	return ids
}
