// Package tree carries files and directories between two machines as tar streams: PAX, with times to the nanosecond,
// extended attributes, hard links and holes. Pack is used on both sides. Unpack is for the host's, and trusts nothing of
// the stream. What is unpacked in a guest is the agent's own business. The agent and the command line import it.
package tree

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// xattrPrefix is how tar archives carry extended attributes.
	xattrPrefix = "SCHILY.xattr."
	// maxLinks bounds the memory that recognizing hard links takes; beyond it they become files of their own.
	maxLinks = 100_000
	// maxDepth bounds nesting, which following links could make endless without a loop.
	maxDepth = 1000
)

// ErrLoop says that followed links lead back to a directory above them.
var ErrLoop = errors.New("its links lead back to a directory it is in")

// PackOptions say how.
type PackOptions struct {
	Follow bool              // what links point at instead of the links
	Count  func(name string) // called for every entry, with its path; may be nil
}

// Pack writes what is at path. Names are relative to path, which is the entry ".". Sockets are left out, as tar does, and
// what vanishes meanwhile. A file that shrinks is filled with zeros, one that grows is cut.
func Pack(ctx context.Context, w io.Writer, path string, o PackOptions) error {
	p := &packer{ctx: ctx, out: w, w: tar.NewWriter(w), o: o, links: map[id]string{}}
	if err := p.entry(path, "."); err != nil {
		return err
	}
	return p.w.Close()
}

type id struct{ dev, ino uint64 }

type packer struct {
	ctx   context.Context //nolint:containedctx // one call's
	out   io.Writer
	w     *tar.Writer
	o     PackOptions
	links map[id]string // name of the first
	above []id          // directories that are being packed
	buf   []byte
}

func (p *packer) stat(path string) (fs.FileInfo, error) {
	if p.o.Follow {
		info, err := os.Stat(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return info, err
		}
	}
	return os.Lstat(path) // also of a link to nothing, which is sent as it is
}

func (p *packer) entry(path, name string) error {
	if p.ctx.Err() != nil {
		return context.Cause(p.ctx)
	}
	info, err := p.stat(path)
	if errors.Is(err, fs.ErrNotExist) && name != "." {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket != 0 {
		return nil
	}
	if p.o.Count != nil {
		p.o.Count(path)
	}
	h, err := header(path, name, info)
	if err != nil {
		return err
	}
	switch st, _ := info.Sys().(*syscall.Stat_t); {
	case info.IsDir():
		return p.directory(path, name, h, st)
	case info.Mode().IsRegular():
		return p.file(path, h, st)
	default:
		h.PAXRecords = p.attributes(path, h)
		return p.w.WriteHeader(h)
	}
}

func header(path, name string, info fs.FileInfo) (*tar.Header, error) {
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		var err error
		if target, err = os.Readlink(path); err != nil {
			return nil, err
		}
	}
	h, err := tar.FileInfoHeader(numeric{info}, target)
	if err != nil {
		return nil, err
	}
	h.Name = name
	if info.IsDir() {
		h.Name += "/"
	}
	h.Format = tar.FormatPAX
	h.AccessTime, h.ChangeTime = time.Time{}, time.Time{}
	return h, nil
}

// numeric hides the file's owner names: looking them up would read databases for every entry.
type numeric struct{ fs.FileInfo }

func (numeric) Uname() (string, error) { return "", nil }
func (numeric) Gname() (string, error) { return "", nil }

func (p *packer) directory(path, name string, h *tar.Header, st *syscall.Stat_t) error {
	self := id{st.Dev, st.Ino}
	if slices.Contains(p.above, self) {
		return &fs.PathError{Op: "pack", Path: path, Err: ErrLoop}
	}
	if len(p.above) >= maxDepth {
		return &fs.PathError{Op: "pack", Path: path, Err: fmt.Errorf("more than %d directories deep", maxDepth)}
	}
	p.above = append(p.above, self)
	defer func() { p.above = p.above[:len(p.above)-1] }()
	entries, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) && name != "." {
		return nil
	}
	if err != nil {
		return err
	}
	h.PAXRecords = p.attributes(path, h)
	if err := p.w.WriteHeader(h); err != nil {
		return err
	}
	for _, e := range entries {
		below := e.Name()
		if name != "." {
			below = name + "/" + below
		}
		if err := p.entry(filepath.Join(path, e.Name()), below); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) file(path string, h *tar.Header, st *syscall.Stat_t) error {
	if st.Nlink > 1 && !p.o.Follow {
		self := id{st.Dev, st.Ino}
		if first, seen := p.links[self]; seen {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return p.w.WriteHeader(h)
		}
		if len(p.links) < maxLinks {
			p.links[self] = h.Name
		}
	}
	flags := unix.O_NONBLOCK | unix.O_NOFOLLOW
	if p.o.Follow {
		flags = unix.O_NONBLOCK
	}
	f, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) {
		return nil // gone, or became something else
	}
	if err != nil {
		return err
	}
	defer f.Close()
	h.PAXRecords = p.attributes(path, h)
	if extents, sparse := data(f, st); sparse {
		err = p.sparse(f, h, extents)
	} else if err = p.w.WriteHeader(h); err == nil {
		err = p.copy(p.w, f, h.Size)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// copy sends size bytes, whatever happens to the file.
func (p *packer) copy(w io.Writer, r io.Reader, size int64) error {
	if p.buf == nil {
		p.buf = make([]byte, 64<<10)
	}
	for size > 0 {
		if p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
		block := p.buf[:min(size, int64(len(p.buf)))]
		n, err := io.ReadFull(r, block)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return err
		}
		clear(block[n:])
		if _, err := w.Write(block); err != nil {
			return err
		}
		size -= int64(len(block))
	}
	return nil
}

// extent is a part of a file that is no hole.
type extent struct{ offset, length int64 }

// maxExtents bounds the map of a sparse file; one with more is sent whole.
const maxExtents = 8192

// data finds a sparse file's extents.
func data(f *os.File, st *syscall.Stat_t) ([]extent, bool) {
	if st.Blocks*512 >= st.Size || st.Size < 64<<10 {
		return nil, false
	}
	var extents []extent
	fd := int(f.Fd())
	for at := int64(0); at < st.Size; {
		from, err := unix.Seek(fd, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return nil, false
		}
		to, err := unix.Seek(fd, from, unix.SEEK_HOLE)
		if err != nil || len(extents) >= maxExtents {
			return nil, false
		}
		from, to = min(from, st.Size), min(to, st.Size)
		if to > from {
			extents = append(extents, extent{from, to - from})
		}
		if to <= at {
			break
		}
		at = to
	}
	// The end of a file that ends in a hole.
	return append(extents, extent{st.Size, 0}), true
}

// sparse writes a file with holes in GNU's PAX format 1.0, which package archive/tar reads but does not write.
func (p *packer) sparse(f *os.File, h *tar.Header, extents []extent) error {
	var table bytes.Buffer
	stored := int64(0)
	fmt.Fprintf(&table, "%d\n", len(extents))
	for _, e := range extents {
		fmt.Fprintf(&table, "%d\n%d\n", e.offset, e.length)
		stored += e.length
	}
	table.Write(make([]byte, padding(int64(table.Len()))))
	records := map[string]string{
		"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": h.Name,
		"GNU.sparse.realsize": strconv.FormatInt(h.Size, 10),
		"size":                strconv.FormatInt(int64(table.Len())+stored, 10),
		"mtime":               fmt.Sprintf("%d.%09d", h.ModTime.Unix(), h.ModTime.Nanosecond()),
		"uid":                 strconv.Itoa(h.Uid), "gid": strconv.Itoa(h.Gid),
	}
	if h.ModTime.Unix() < 0 {
		delete(records, "mtime") // its fraction would count the other way
	}
	maps.Copy(records, h.PAXRecords)
	if err := p.w.Flush(); err != nil {
		return err
	}
	body := encodeRecords(records)
	out := ustar("GNUSparseFile.0/pax", 'x', 0o644, int64(len(body)), h)
	out = append(out, body...)
	out = append(out, make([]byte, padding(int64(len(body))))...)
	out = append(out, ustar("GNUSparseFile.0/file", '0', h.Mode, int64(table.Len())+stored, h)...)
	out = append(out, table.Bytes()...)
	if _, err := p.out.Write(out); err != nil {
		return err
	}
	for _, e := range extents {
		if err := p.copy(p.out, io.NewSectionReader(f, e.offset, e.length), e.length); err != nil {
			return err
		}
	}
	_, err := p.out.Write(make([]byte, padding(stored)))
	return err
}

func padding(n int64) int64 { return -n & 511 }

func encodeRecords(records map[string]string) []byte {
	var b []byte
	for _, k := range slices.Sorted(maps.Keys(records)) {
		body := " " + k + "=" + records[k] + "\n"
		n := len(body)
		for n != len(body)+len(strconv.Itoa(n)) { // the length counts its own digits
			n = len(body) + len(strconv.Itoa(n))
		}
		b = append(b, strconv.Itoa(n)+body...)
	}
	return b
}

// ustar is one header block. What does not fit into its fields stands in the records before it.
func ustar(name string, kind byte, mode, size int64, h *tar.Header) []byte {
	b := make([]byte, 512)
	octal := func(at, width int, v int64) {
		if v < 0 || v >= 1<<(3*(width-1)) {
			v = 0
		}
		copy(b[at:], fmt.Sprintf("%0*o", width-1, v))
	}
	copy(b, name)
	octal(100, 8, mode&0o7777)
	octal(108, 8, int64(h.Uid))
	octal(116, 8, int64(h.Gid))
	octal(124, 12, size)
	octal(136, 12, h.ModTime.Unix())
	b[156] = kind
	copy(b[257:], "ustar\x0000")
	copy(b[148:], "        ")
	sum := int64(0)
	for _, c := range b {
		sum += int64(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// attributes are extended attributes as PAX records; nil when there are none or they cannot be read.
func (p *packer) attributes(path string, h *tar.Header) map[string]string {
	if h.Typeflag == tar.TypeSymlink {
		return nil // a link can have no attribute that a user could set
	}
	list, get := unix.Llistxattr, unix.Lgetxattr
	if p.o.Follow {
		list, get = unix.Listxattr, unix.Getxattr
	}
	var names [4096]byte
	n, err := list(path, names[:])
	if err != nil || n == 0 {
		return nil
	}
	records := map[string]string{}
	value := make([]byte, 64<<10)
	for attr := range strings.SplitSeq(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		n, err := get(path, attr, value)
		if err != nil || strings.Contains(attr, "=") {
			continue
		}
		records[xattrPrefix+attr] = string(value[:n])
	}
	return records
}
