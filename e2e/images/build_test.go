package images

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// entry is a member of a layer: a header, and content that need not be in memory.
type entry struct {
	tar.Header
	content func() io.Reader // nil: none
}

// config is what the tests set of an image's configuration.
type config struct {
	User         string              `json:",omitempty"`
	Env          []string            `json:",omitempty"`
	Entrypoint   []string            `json:",omitempty"`
	Cmd          []string            `json:",omitempty"`
	WorkingDir   string              `json:",omitempty"`
	Labels       map[string]string   `json:",omitempty"`
	ExposedPorts map[string]struct{} `json:",omitempty"`
}

// layer writes a layer as a tar file.
type layer func(io.Writer) error

// family is an image that the tests build.
type family struct {
	name   string
	layers []layer
	config config
	pack   string // how layers are compressed: "", "gzip", "zstd"
}

var then = time.Unix(1_600_000_000, 123_000_000)

func dir(name string, mode int64) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode, ModTime: then}}
}

func file(name string, mode int64, text string) entry {
	return entry{
		Header:  tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, ModTime: then, Size: int64(len(text))},
		content: func() io.Reader { return strings.NewReader(text) },
	}
}

func symlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777, ModTime: then}}
}

func hardlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644, ModTime: then}}
}

func device(kind byte, name string, mode, major, minor int64) entry {
	return entry{Header: tar.Header{Typeflag: kind, Name: name, Mode: mode, Devmajor: major, Devminor: minor, ModTime: then}}
}

func whiteout(name string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: filepath.Join(filepath.Dir(name), ".wh."+filepath.Base(name))}}
}

func opaque(name string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: filepath.Join(name, ".wh..wh..opq")}}
}

func (e entry) owned(uid, gid int) entry {
	e.Uid, e.Gid = uid, gid
	return e
}

func (e entry) with(attribute, value string) entry {
	records := map[string]string{"SCHILY.xattr." + attribute: value}
	maps.Copy(records, e.PAXRecords)
	e.PAXRecords = records
	return e
}

// of is a layer of these entries.
func of(entries ...entry) layer {
	return func(w io.Writer) error {
		t := tar.NewWriter(w)
		for _, e := range entries {
			h := e.Header
			if h.Format == 0 {
				h.Format = tar.FormatPAX
			}
			if err := t.WriteHeader(&h); err != nil {
				return err
			}
			if e.content != nil {
				if _, err := io.Copy(t, e.content()); err != nil {
					return err
				}
			}
		}
		return t.Close()
	}
}

// layout is a directory in the OCI image layout.
type layout struct {
	t   testing.TB
	dir string
	all []descriptor
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

const (
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

func newLayout(t testing.TB, dir string) *layout {
	t.Helper()
	l := &layout{t: t, dir: dir}
	l.must(os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o755))
	l.must(os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
	return l
}

func (l *layout) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// blob stores bytes under their digest.
func (l *layout) blob(mediaType string, data []byte) descriptor {
	l.t.Helper()
	sum := sha256.Sum256(data)
	name := hex.EncodeToString(sum[:])
	l.must(os.WriteFile(filepath.Join(l.dir, "blobs", "sha256", name), data, 0o644))
	return descriptor{MediaType: mediaType, Digest: "sha256:" + name, Size: int64(len(data))}
}

func (l *layout) json(mediaType string, v any) descriptor {
	l.t.Helper()
	data, err := json.Marshal(v)
	l.must(err)
	return l.blob(mediaType, data)
}

// layer stores a layer and returns its descriptor and the digest of what it unpacks to.
func (l *layout) layer(content layer, pack string) (d descriptor, diffID string) {
	l.t.Helper()
	f, err := os.Create(filepath.Join(l.dir, "blobs", "sha256", "new"))
	l.must(err)
	packed, plain := sha256.New(), sha256.New()
	out := io.MultiWriter(f, packed)
	d.MediaType = typeLayer
	var z io.WriteCloser
	switch pack {
	case "gzip":
		z, d.MediaType = gzip.NewWriter(out), typeLayer+"+gzip"
	case "zstd":
		z, err = zstd.NewWriter(out)
		l.must(err)
		d.MediaType = typeLayer + "+zstd"
	default:
		z = nopCloser{out}
	}
	l.must(content(io.MultiWriter(z, plain)))
	l.must(z.Close())
	d.Size, err = f.Seek(0, io.SeekCurrent)
	l.must(err)
	l.must(f.Close())
	name := hex.EncodeToString(packed.Sum(nil))
	l.must(os.Rename(f.Name(), filepath.Join(l.dir, "blobs", "sha256", name)))
	d.Digest = "sha256:" + name
	return d, "sha256:" + hex.EncodeToString(plain.Sum(nil))
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// image stores an image and returns its manifest's descriptor.
func (l *layout) image(f *family, arch string) descriptor {
	l.t.Helper()
	var layers []descriptor
	var diffIDs []string
	for _, content := range f.layers {
		d, id := l.layer(content, f.pack)
		layers, diffIDs = append(layers, d), append(diffIDs, id)
	}
	cfg := l.json(typeConfig, map[string]any{
		"architecture": arch, "os": "linux", "config": f.config, "rootfs": map[string]any{"type": "layers", "diff_ids": diffIDs},
	})
	return l.json(typeManifest, map[string]any{
		"schemaVersion": 2, "mediaType": typeManifest, "config": cfg, "layers": layers,
	})
}

// add stores an image and names it.
func (l *layout) add(f *family) descriptor {
	l.t.Helper()
	d := l.image(f, runtime.GOARCH)
	d.Annotations = map[string]string{"org.opencontainers.image.ref.name": f.name}
	l.all = append(l.all, d)
	data, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": l.all})
	l.must(err)
	l.must(os.WriteFile(filepath.Join(l.dir, "index.json"), data, 0o644))
	return d
}

// program is a static executable of less than 300 bytes that prints a text and ends.
func program(text string) []byte {
	var code []byte
	le := binary.LittleEndian
	machine := uint16(amd64)
	if runtime.GOARCH == "arm64" {
		machine = 183
		const there = 7 * 4 // from the instruction that asks for the text's address
		for _, i := range []uint32{
			0xd2800020,                        // mov x0, #1
			0x10000001 | there>>2<<5,          // adr x1, text
			0xd2800002 | uint32(len(text))<<5, // mov x2, #length
			0xd2800808, 0xd4000001,            // mov x8, #64 (write); svc
			0xd2800000, 0xd2800ba8, 0xd4000001, // mov x0, #0; mov x8, #93 (exit); svc
		} {
			code = le.AppendUint32(code, i)
		}
	} else {
		code = append(code, 0xb8, 1, 0, 0, 0, 0xbf, 1, 0, 0, 0) // mov eax, 1 (write); mov edi, 1
		code = append(code, 0x48, 0x8d, 0x35, 17, 0, 0, 0)      // lea rsi, [rip+text]
		code = append(code, 0xba)                               // mov edx, length
		code = le.AppendUint32(code, uint32(len(text)))
		code = append(code, 0x0f, 0x05, 0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05, 0x90) // syscall; exit(0); nop
	}
	return executable(machine, append(code, text...))
}

// executable is a static program whose code is loaded wherever it is linked to, which begins with its first byte.
func executable(machine uint16, code []byte) []byte {
	const base, header = 0x400000, 64 + 56
	total := uint64(header + len(code))
	var b bytes.Buffer
	b.WriteString("\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 9))
	for _, v := range []any{
		uint16(2), machine, uint32(1), uint64(base + header), uint64(64), uint64(0), uint32(0), uint16(64), uint16(56), uint16(1),
		uint16(0), uint16(0), uint16(0),
		uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), total, total, uint64(0x1000),
	} {
		_ = binary.Write(&b, binary.LittleEndian, v)
	}
	b.Write(code)
	return b.Bytes()
}

const amd64 = 62

// exitsWithUser is a program for amd64 that ends with its effective user's number modulo 256.
func exitsWithUser() string {
	return string(executable(amd64, []byte{
		0xb8, 107, 0, 0, 0, 0x0f, 0x05, // geteuid
		0x89, 0xc7, 0xb8, 60, 0, 0, 0, 0x0f, 0x05, // exit
	}))
}

// needsRawSocket is one that ends with 0 when it may open a raw socket.
func needsRawSocket() string {
	return string(executable(amd64, []byte{
		0xb8, 41, 0, 0, 0, 0xbf, 2, 0, 0, 0, 0xbe, 3, 0, 0, 0, 0xba, 1, 0, 0, 0, 0x0f, 0x05, // socket(AF_INET, SOCK_RAW, ICMP)
		0xc1, 0xe8, 31, // the sign
		0x89, 0xc7, 0xb8, 60, 0, 0, 0, 0x0f, 0x05, // exit
	}))
}
