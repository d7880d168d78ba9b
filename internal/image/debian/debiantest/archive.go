// Package debiantest makes small Debian archives for tests: packages, indexes and a signed Release, served in-process,
// and the root directory of a host whose apt uses them. It is no archive for anything else. Only tests of package
// image and of its debian package may import it.
package debiantest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/clearsign"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/ulikunitz/xz"
)

// Now is the instant at which test archives are made, so that nothing in a test expires by itself.
func Now() time.Time { return time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC) }

// File is a member of a package's data part.
type File struct {
	Name string // "./usr/bin/x"
	Type byte   // tar type; 0: a regular file, or a directory when Name ends with a slash
	Mode int64
	UID  int
	Link string
	Data string
	PAX  map[string]string
}

// Package is a package to put into an archive.
type Package struct {
	Name, Version string
	Fields        string            // further control fields, one a line
	Scripts       map[string]string // further control files
	Files         []File
}

// Deb packs it as a .deb with xz parts.
func (p Package) Deb(t testing.TB) []byte {
	t.Helper()
	control := map[string]string{"control": p.control()}
	maps.Copy(control, p.Scripts)
	var members []File
	for _, name := range slices.Sorted(maps.Keys(control)) {
		members = append(members, File{Name: "./" + name, Mode: 0o755, Data: control[name]})
	}
	var b bytes.Buffer
	b.WriteString("!<arch>\n")
	Member(&b, "debian-binary", []byte("2.0\n"))
	Member(&b, "control.tar.xz", compress(t, Tar(t, members)))
	Member(&b, "data.tar.xz", compress(t, Tar(t, p.Files)))
	return b.Bytes()
}

func (p Package) control() string {
	text := "Package: " + p.Name + "\nVersion: " + p.Version + "\nMaintainer: T <t@example.org>\n"
	if !strings.Contains(p.Fields, "Architecture:") {
		text += "Architecture: amd64\n"
	}
	if p.Fields != "" {
		text += strings.TrimRight(p.Fields, "\n") + "\n"
	}
	return text + "Description: test package\n with a second line\n"
}

// Member appends an ar member.
func Member(b *bytes.Buffer, name string, data []byte) {
	fmt.Fprintf(b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", name, 0, 0, 0, "100644", len(data))
	b.Write(data)
	if len(data)%2 == 1 {
		b.WriteByte('\n')
	}
}

// Tar packs files in their order.
func Tar(t testing.TB, files []File) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{
			Typeflag: f.Type, Name: f.Name, Mode: f.Mode, Uid: f.UID, Linkname: f.Link, ModTime: Now(), PAXRecords: f.PAX,
			Uname: "somebody",
		}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(f.Name, "/") {
				h.Typeflag = tar.TypeDir
			}
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(f.Data))
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(f.Data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func compress(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := xz.WriterConfig{DictCap: 64 << 10}.NewWriter(&b)
	if err == nil {
		_, err = w.Write(data)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Key makes a signing key at the given time.
func Key(t testing.TB, made time.Time) *openpgp.Entity {
	t.Helper()
	e, err := openpgp.NewEntity("test archive", "", "archive@example.org", keyConfig(made))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func keyConfig(at time.Time) *packet.Config {
	return &packet.Config{Algorithm: packet.PubKeyAlgoEdDSA, DefaultHash: crypto.SHA256, Time: func() time.Time { return at }}
}

// Sign clear-signs text at the given time.
func Sign(t testing.TB, key *openpgp.Entity, text string, at time.Time) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := clearsign.Encode(&b, key.PrivateKey, keyConfig(at))
	if err == nil {
		_, err = w.Write([]byte(text))
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// Keyring is the public part of keys.
func Keyring(t testing.TB, keys ...*openpgp.Entity) []byte {
	t.Helper()
	var b bytes.Buffer
	for _, k := range keys {
		if err := k.Serialize(&b); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// Archive is a served archive. Files may be changed while it is served, under its lock (see Set).
type Archive struct {
	URL string
	Key *openpgp.Entity

	mu       sync.Mutex
	files    map[string][]byte
	requests map[string]int
	failures map[string][]int // statuses to answer before the file
}

// Serve starts an empty archive that ends with the test.
func Serve(t testing.TB) *Archive {
	t.Helper()
	a := &Archive{
		Key: Key(t, Now().Add(-time.Hour)), files: map[string][]byte{}, requests: map[string]int{}, failures: map[string][]int{},
	}
	server := httptest.NewServer(a)
	t.Cleanup(server.Close)
	a.URL = server.URL + "/debian"
	return a
}

// ServeHTTP answers with a file of the archive.
func (a *Archive) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	a.requests[r.URL.Path]++
	data, ok := a.files[r.URL.Path]
	status := 0
	if queue := a.failures[r.URL.Path]; len(queue) > 0 {
		status, a.failures[r.URL.Path] = queue[0], queue[1:]
	}
	a.mu.Unlock()
	switch {
	case status != 0:
		w.WriteHeader(status)
	case !ok:
		http.NotFound(w, r)
	default:
		_, _ = w.Write(data)
	}
}

// Set makes name (below the archive's URL) have the content; nil removes it.
func (a *Archive) Set(name string, data []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if data == nil {
		delete(a.files, "/debian/"+name)
		return
	}
	a.files["/debian/"+name] = data
}

// Get is the content of a file.
func (a *Archive) Get(name string) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.files["/debian/"+name]
}

// FailFirst makes the next requests for name answer with the given statuses.
func (a *Archive) FailFirst(name string, statuses ...int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failures["/debian/"+name] = statuses
}

// Requests is how often name was asked for.
func (a *Archive) Requests(name string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests["/debian/"+name]
}

// Suite publishes packages as a suite for amd64, with the given fields in its Release ("" for the usual ones).
func (a *Archive) Suite(t testing.TB, codename, fields string, packages ...Package) {
	t.Helper()
	var index bytes.Buffer
	for _, p := range packages {
		deb := p.Deb(t)
		name := "pool/main/" + p.Name + "_" + strings.ReplaceAll(p.Version, ":", "%3a") + ".deb"
		a.Set(strings.ReplaceAll(name, "%3a", ":"), deb)
		fmt.Fprintf(&index, "%sFilename: %s\nSize: %d\nSHA256: %x\n\n", p.control(), strings.ReplaceAll(name, "%3a", ":"), len(deb), sha256.Sum256(deb))
	}
	a.SuiteOf(t, codename, fields, index.Bytes())
}

// SuiteOf publishes a suite with the given Packages file.
func (a *Archive) SuiteOf(t testing.TB, codename, fields string, index []byte) {
	t.Helper()
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write(index); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if fields == "" {
		fields = "Origin: Debian\nSuite: stable\nCodename: " + codename + "\n"
	}
	const name = "main/binary-amd64/Packages.gz"
	release := fmt.Sprintf("%sDate: %s\nSHA256:\n %x %d %s\n", fields, Now().Format(time.RFC1123), sha256.Sum256(packed.Bytes()), packed.Len(), name)
	a.Set("dists/"+codename+"/"+name, packed.Bytes())
	a.Set("dists/"+codename+"/InRelease", Sign(t, a.Key, release, Now()))
}

// Host is the root directory of a host whose apt knows the archive as its Debian mirror and whose keyring has its key.
func (a *Archive) Host(t testing.TB) fstest.MapFS {
	t.Helper()
	sources := fmt.Sprintf("Types: deb\nURIs: %s\nSuites: bookworm bookworm-updates bookworm-security\nComponents: main\n", a.URL)
	return fstest.MapFS{
		"etc/apt/sources.list.d/debian.sources":         {Data: []byte(sources), Mode: 0o644},
		"etc/apt/apt.conf.d/99direct":                   {Data: []byte(`Acquire::http::Proxy "DIRECT";` + "\n"), Mode: 0o644},
		"usr/share/keyrings/debian-archive-keyring.gpg": {Data: Keyring(t, a.Key), Mode: fs.FileMode(0o644)},
	}
}
