package standin

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// What the archives have. Installed, each says Says.
const (
	Package = "forkd-standin"
	Module  = "example.com/standin"
	Version = "1.0.0"
	Says    = "from the stand-in"
	// Repository is cloned from here.
	Repository = "https://go.googlesource.com/standin"
)

func sites() (map[string]http.Handler, error) {
	all := map[string]http.Handler{}
	for _, add := range []func(map[string]http.Handler) error{pypi, npm, debian, goProxy, git} {
		if err := add(all); err != nil {
			return nil, err
		}
	}
	return all, nil
}

type file struct {
	name string
	text []byte
	mode int64
}

func tarGz(list []file) ([]byte, error) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	t := tar.NewWriter(z)
	for _, f := range list {
		h := &tar.Header{Name: f.name, Size: int64(len(f.text)), Mode: f.mode, ModTime: time.Unix(1_700_000_000, 0), Typeflag: tar.TypeReg}
		if f.text == nil {
			h.Typeflag = tar.TypeDir
		}
		if err := t.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := t.Write(f.text); err != nil {
			return nil, err
		}
	}
	if err := t.Close(); err != nil {
		return nil, err
	}
	err := z.Close()
	return b.Bytes(), err
}

func zipped(list []file) ([]byte, error) {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range list {
		w, err := z.Create(f.name)
		if err != nil {
			return nil, err
		}
		if _, err := w.Write(f.text); err != nil {
			return nil, err
		}
	}
	err := z.Close()
	return b.Bytes(), err
}

// pypi has a wheel.
func pypi(all map[string]http.Handler) error {
	const name, info = "forkd_standin-1.0.0-py3-none-any.whl", "forkd_standin-1.0.0.dist-info/"
	contents := []file{
		{name: "forkd_standin/__init__.py", text: []byte("says = '" + Says + "'\n")},
		{name: info + "METADATA", text: []byte("Metadata-Version: 2.1\nName: forkd-standin\nVersion: 1.0.0\n")},
		{name: info + "WHEEL", text: []byte("Wheel-Version: 1.0\nGenerator: forkd\nRoot-Is-Purelib: true\nTag: py3-none-any\n")},
	}
	var record bytes.Buffer
	for _, f := range contents {
		sum := sha256.Sum256(f.text)
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f.name, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.text))
	}
	record.WriteString(info + "RECORD,,\n")
	contents = append(contents, file{name: info + "RECORD", text: record.Bytes()})
	wheel, err := zipped(contents)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(wheel)
	page := fmt.Sprintf("<!DOCTYPE html><html><body><a href=\"https://files.pythonhosted.org/packages/%s#sha256=%x\">%s</a></body></html>\n", name, sum, name)
	all["pypi.org"] = files{"/simple/" + Package + "/": []byte(page)}
	all["files.pythonhosted.org"] = files{"/packages/" + name: wheel}
	return nil
}

// npm has a package.
func npm(all map[string]http.Handler) error {
	text := []byte(`{"name": "forkd-standin", "version": "1.0.0", "main": "index.js"}`)
	tarball, err := tarGz([]file{
		{name: "package/package.json", text: text, mode: 0o644},
		{name: "package/index.js", text: []byte("module.exports = '" + Says + "';\n"), mode: 0o644},
	})
	if err != nil {
		return err
	}
	path := "/" + Package + "/-/" + Package + "-" + Version + ".tgz"
	short, long := sha1.Sum(tarball), sha512.Sum512(tarball) //nolint:gosec // As npm wants it.
	about, err := json.Marshal(map[string]any{
		"name": Package, "dist-tags": map[string]string{"latest": Version},
		"versions": map[string]any{Version: map[string]any{"name": Package, "version": Version, "main": "index.js", "dist": map[string]string{
			"tarball": "https://registry.npmjs.org" + path, "shasum": hex.EncodeToString(short[:]),
			"integrity": "sha512-" + base64.StdEncoding.EncodeToString(long[:]),
		}}},
	})
	all["registry.npmjs.org"] = files{"/" + Package: about, path: tarball}
	return err
}

// debian has a package in a release of its own. It is not signed: whose key could it be.
func debian(all map[string]http.Handler) error {
	control, err := tarGz([]file{
		{name: "./", mode: 0o755},
		{name: "./control", mode: 0o644, text: []byte("Package: forkd-standin\nVersion: 1.0.0\nArchitecture: all\nMaintainer: nobody <nobody@example.com>\n" +
			"Description: says where it comes from\n")},
	})
	if err != nil {
		return err
	}
	data, err := tarGz([]file{
		{name: "./", mode: 0o755},
		{name: "./usr/", mode: 0o755},
		{name: "./usr/bin/", mode: 0o755},
		{name: "./usr/bin/forkd-standin", mode: 0o755, text: []byte("#!/bin/sh\necho '" + Says + "'\n")},
	})
	if err != nil {
		return err
	}
	deb := ar([]file{{name: "debian-binary", text: []byte("2.0\n")}, {name: "control.tar.gz", text: control}, {name: "data.tar.gz", text: data}})
	const pool = "pool/main/f/forkd-standin/forkd-standin_1.0.0_all.deb"
	packages := []byte(fmt.Sprintf("Package: forkd-standin\nVersion: 1.0.0\nArchitecture: all\nMaintainer: nobody <nobody@example.com>\n"+
		"Filename: %s\nSize: %d\nMD5sum: %x\nSHA256: %x\nDescription: says where it comes from\n\n",
		pool, len(deb), md5.Sum(deb), sha256.Sum256(deb))) //nolint:gosec // As the format has it.
	site := files{"/debian/" + pool: deb}
	release := bytes.NewBufferString("Origin: Debian\nLabel: Debian\nSuite: standin\nCodename: standin\nDate: Tue, 14 Nov 2023 22:13:20 UTC\nArchitectures: all amd64 arm64\n" +
		"Components: main\nSHA256:\n")
	for _, arch := range []string{"all", "amd64", "arm64"} {
		path := "main/binary-" + arch + "/Packages"
		list := packages
		if arch != "all" {
			list = nil
		}
		site["/debian/dists/standin/"+path] = list
		fmt.Fprintf(release, " %x %d %s\n", sha256.Sum256(list), len(list), path)
	}
	site["/debian/dists/standin/Release"] = release.Bytes()
	all["deb.debian.org"] = site
	return nil
}

// ar is the archive that a Debian package is.
func ar(list []file) []byte {
	b := bytes.NewBufferString("!<arch>\n")
	for _, f := range list {
		fmt.Fprintf(b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", f.name, 1_700_000_000, 0, 0, "100644", len(f.text))
		b.Write(f.text)
		if len(f.text)%2 == 1 {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}

// goProxy has a module.
func goProxy(all map[string]http.Handler) error {
	mod := []byte("module " + Module + "\n\ngo 1.19\n")
	const prefix = Module + "@v" + Version + "/"
	archive, err := zipped([]file{
		{name: prefix + "go.mod", text: mod},
		{name: prefix + "standin.go", text: []byte("package standin\n\nconst Says = \"" + Says + "\"\n")},
	})
	const base = "/" + Module + "/@v/"
	about := []byte(`{"Version": "v1.0.0", "Time": "2023-11-14T22:13:20Z"}`)
	all["proxy.golang.org"] = files{
		base + "list": []byte("v" + Version + "\n"), base + "v" + Version + ".info": about, base + "v" + Version + ".mod": mod,
		base + "v" + Version + ".zip": archive, "/" + Module + "/@latest": about,
	}
	return err
}

// git has a repository of one commit, served as plain files.
func git(all map[string]http.Handler) error {
	site := files{}
	const base = "/standin/"
	add := func(kind string, body []byte) (string, error) {
		text := append([]byte(fmt.Sprintf("%s %d\x00", kind, len(body))), body...)
		sum := sha1.Sum(text) //nolint:gosec // That is git's name for it.
		id := hex.EncodeToString(sum[:])
		var b bytes.Buffer
		z := zlib.NewWriter(&b)
		if _, err := z.Write(text); err != nil {
			return "", err
		}
		err := z.Close()
		site[base+"objects/"+id[:2]+"/"+id[2:]] = b.Bytes()
		return id, err
	}
	blob, err := add("blob", []byte(Says+"\n"))
	if err != nil {
		return err
	}
	raw, err := hex.DecodeString(blob)
	if err != nil {
		return err
	}
	tree, err := add("tree", append([]byte("100644 README\x00"), raw...))
	if err != nil {
		return err
	}
	commit, err := add("commit", []byte("tree "+tree+"\nauthor a <a@example.com> 1700000000 +0000\ncommitter a <a@example.com> 1700000000 +0000\n\nfirst\n"))
	site[base+"HEAD"] = []byte("ref: refs/heads/main\n")
	site[base+"info/refs"] = []byte(commit + "\trefs/heads/main\n")
	site[base+"objects/info/packs"] = []byte("\n")
	all["go.googlesource.com"] = site
	return err
}
