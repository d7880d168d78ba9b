package debian

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// Bounds on a .deb. Its digest was signed, but a mirror of the user's own may hold anything.
const (
	maxControlTar   = 64 << 20
	maxControlFiles = 1000
	maxDataTar      = 16 << 30
	maxDictionary   = 128 << 20
)

// Deb is an opened .deb: the control part is in memory, the data part is streamed.
type Deb struct {
	Control Paragraph
	Files   map[string]ControlFile // of the control part: "control", "preinst", "md5sums", …
	data    io.Reader
}

// ControlFile is a file of the control part.
type ControlFile struct {
	Mode int64
	Data []byte
}

// ReadDeb reads the control part of the .deb in r. The data part is read through Data afterwards, from the same r.
func ReadDeb(r io.Reader) (*Deb, error) {
	// The xz decoder reads byte by byte.
	r = bufio.NewReaderSize(r, 256<<10)
	var magic [8]byte
	if _, err := io.ReadFull(r, magic[:]); err != nil || string(magic[:]) != "!<arch>\n" {
		return nil, errors.New("not a .deb: no ar header")
	}
	name, size, err := arMember(r)
	if err != nil {
		return nil, err
	}
	if name != "debian-binary" || size > 64 {
		return nil, fmt.Errorf("not a .deb: first member is %q", clip(name))
	}
	version, err := readMember(r, size)
	if err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(version, []byte("2.")) {
		return nil, fmt.Errorf("unknown .deb version %q", clip(string(version)))
	}
	if name, size, err = arMember(r); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(name, "control.tar") || size > maxControlTar {
		return nil, fmt.Errorf("not a .deb: second member is %q", clip(name))
	}
	packed, err := readMember(r, size)
	if err != nil {
		return nil, err
	}
	d := &Deb{}
	if err := d.readControl(bytes.NewReader(packed), name); err != nil {
		return nil, err
	}
	if name, size, err = arMember(r); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(name, "data.tar") {
		return nil, fmt.Errorf("not a .deb: third member is %q", clip(name))
	}
	data, err := unpackMember(io.LimitReader(r, size), name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	d.data = io.LimitReader(data, maxDataTar)
	return d, nil
}

// Data is the data part, to be read once. Names in it are as the package has them: see CleanName. The Deb forgets it: a decompressor
// keeps its dictionary, 8 MiB mostly, for as long as somebody knows it, and an image has hundreds of packages.
func (d *Deb) Data() *tar.Reader {
	data := d.data
	d.data = strings.NewReader("")
	return tar.NewReader(data)
}

// arMember reads a member header of the common ar format. Debian uses short names only, and no symbol tables.
func arMember(r io.Reader) (name string, size int64, err error) {
	var h [60]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return "", 0, fmt.Errorf("ar member header: %w", err)
	}
	if h[58] != '`' || h[59] != '\n' {
		return "", 0, errors.New("ar member header: no end mark")
	}
	name = strings.TrimSuffix(strings.TrimRight(string(h[:16]), " "), "/")
	size, err = strconv.ParseInt(strings.TrimRight(string(h[48:58]), " "), 10, 64)
	if err != nil || size < 0 {
		return "", 0, fmt.Errorf("ar member %q: bad size", clip(name))
	}
	return name, size, nil
}

// readMember reads a small member whole, with the padding byte after an odd one.
func readMember(r io.Reader, size int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, size))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) != size {
		return nil, io.ErrUnexpectedEOF
	}
	if size%2 == 1 {
		if _, err := io.CopyN(io.Discard, r, 1); err != nil {
			return nil, err
		}
	}
	return data, nil
}

func unpackMember(r io.Reader, name string) (io.Reader, error) {
	switch path.Ext(name) {
	case ".tar":
		return r, nil
	case ".gz":
		return gzip.NewReader(r)
	case ".xz":
		return xz.ReaderConfig{DictCap: 8 << 20}.NewReader(r)
	case ".zst":
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxDictionary))
		if err != nil {
			return nil, err
		}
		return z, nil
	default:
		return nil, fmt.Errorf("unknown compression of %s", clip(name))
	}
}

func (d *Deb) readControl(r io.Reader, name string) error {
	r, err := unpackMember(r, name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	d.Files = map[string]ControlFile{}
	tr := tar.NewReader(io.LimitReader(r, maxControlTar))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		file := path.Clean(strings.TrimPrefix(h.Name, "./"))
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if strings.Contains(file, "/") || file == ".." || len(d.Files) >= maxControlFiles {
			return fmt.Errorf("%s: unexpected member %q", name, clip(h.Name))
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		d.Files[file] = ControlFile{Mode: h.Mode & 0o777, Data: data}
	}
	return ReadControl(bytes.NewReader(d.Files["control"].Data), func(p Paragraph) error {
		if d.Control != nil {
			return errors.New("control: more than one paragraph")
		}
		d.Control = p
		return nil
	})
}

// CleanName turns a member name of a data part into a slash-separated path relative to the root, "." for the root
// itself. A name that leaves the root is an error.
func CleanName(name string) (string, error) {
	if strings.ContainsRune(name, 0) || len(name) > 4096 {
		return "", fmt.Errorf("bad file name %q", clip(name))
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", fmt.Errorf("file name %q leaves the package", clip(name))
		}
	}
	clean := path.Clean("/" + name)[1:]
	if clean == "" {
		return ".", nil
	}
	return clean, nil
}

// Repack writes the package as a .deb whose parts are not compressed. It consumes Data.
func (d *Deb) Repack(w io.WriteSeeker) error {
	var control bytes.Buffer
	tw := tar.NewWriter(&control)
	for _, name := range slices.Sorted(maps.Keys(d.Files)) {
		f := d.Files[name]
		h := &tar.Header{Typeflag: tar.TypeReg, Name: "./" + name, Mode: f.Mode, Size: int64(len(f.Data)), ModTime: time.Unix(0, 0)}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if _, err := tw.Write(f.Data); err != nil {
			return err
		}
	}
	if err := tw.Close(); err != nil {
		return err
	}
	var head bytes.Buffer
	head.WriteString("!<arch>\n")
	writeMember(&head, "debian-binary", 4)
	head.WriteString("2.0\n")
	writeMember(&head, "control.tar", int64(control.Len()))
	head.Write(control.Bytes()) // a tar is a multiple of 512 bytes: no padding.
	sizeAt := int64(head.Len())
	writeMember(&head, "data.tar", 0)
	if _, err := w.Write(head.Bytes()); err != nil {
		return err
	}
	n, err := io.Copy(w, d.data)
	if err != nil {
		return err
	}
	if n%2 == 1 {
		if _, err := w.Write([]byte{'\n'}); err != nil {
			return err
		}
	}
	if _, err := w.Seek(sizeAt, io.SeekStart); err != nil {
		return err
	}
	head.Reset()
	writeMember(&head, "data.tar", n)
	_, err = w.Write(head.Bytes())
	return err
}

func writeMember(b *bytes.Buffer, name string, size int64) {
	fmt.Fprintf(b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", name, 0, 0, 0, "100644", size)
}
