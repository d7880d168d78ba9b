// Package tree carries files and directories between two machines as tar streams: PAX, with times to the nanosecond,
// extended attributes, hard links and holes (wire.SparseHoles). Pack is used on both sides. Unpack is for the host's, and trusts nothing of
// the stream. What is unpacked in a guest is the agent's own business. The agent and the command line import it.
package tree

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
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
	Name   string            // of path itself; default "."
	NoRoot bool              // the entries of the directory, without itself
	Count  func(path string) // called for every entry; may be nil
}

// Pack writes what is at path. Names are relative to path, which is the entry ".". Sockets are left out, as tar does, and
// what vanishes meanwhile. A file that shrinks is filled with zeros, one that grows is cut.
func Pack(ctx context.Context, w io.Writer, path string, o PackOptions) error {
	if o.Name == "" {
		o.Name = "."
	}
	p := &packer{ctx: ctx, w: tar.NewWriter(w), o: o, links: map[id]string{}}
	if err := p.entry(path, o.Name, true); err != nil {
		return err
	}
	return p.w.Close()
}

type id struct{ dev, ino uint64 }

type packer struct {
	ctx   context.Context //nolint:containedctx // one call's
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

func (p *packer) entry(path, name string, top bool) error {
	if p.ctx.Err() != nil {
		return context.Cause(p.ctx)
	}
	info, err := p.stat(path)
	if errors.Is(err, fs.ErrNotExist) && !top {
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
		return p.directory(path, name, h, st, top)
	case info.Mode().IsRegular():
		return p.file(path, h, st)
	default:
		h.PAXRecords = p.attributes(path)
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

func (p *packer) directory(path, name string, h *tar.Header, st *syscall.Stat_t, top bool) error {
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
	if errors.Is(err, fs.ErrNotExist) && !top {
		return nil
	}
	if err != nil {
		return err
	}
	h.PAXRecords = p.attributes(path)
	if !top || !p.o.NoRoot {
		if err := p.w.WriteHeader(h); err != nil {
			return err
		}
	}
	for _, e := range entries {
		below := e.Name()
		if name != "." {
			below = name + "/" + below
		}
		if err := p.entry(filepath.Join(path, e.Name()), below, false); err != nil {
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
	h.PAXRecords = p.attributes(path)
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
		if err != nil || to <= from || len(extents) >= maxExtents {
			return nil, false
		}
		if from >= st.Size { // it has grown
			break
		}
		to = min(to, st.Size)
		extents = append(extents, extent{from, to - from})
		at = to
	}
	return extents, true
}

// sparse writes a file with holes.
func (p *packer) sparse(f *os.File, h *tar.Header, extents []extent) error {
	var holes strings.Builder
	size, end, stored := h.Size, int64(0), int64(0)
	hole := func(to int64) {
		if to > end {
			fmt.Fprintf(&holes, "%d+%d ", end, to-end)
		}
	}
	for _, e := range extents {
		hole(e.offset)
		end = e.offset + e.length
		stored += e.length
	}
	hole(size)
	if h.PAXRecords == nil {
		h.PAXRecords = map[string]string{}
	}
	h.PAXRecords[wire.SparseSize] = strconv.FormatInt(size, 10)
	h.PAXRecords[wire.SparseHoles] = strings.TrimSuffix(holes.String(), " ")
	h.Size = stored
	if err := p.w.WriteHeader(h); err != nil {
		return err
	}
	for _, e := range extents {
		if err := p.copy(p.w, io.NewSectionReader(f, e.offset, e.length), e.length); err != nil {
			return err
		}
	}
	return nil
}

// attributes are extended attributes as PAX records; nil when there are none or they cannot be read.
func (p *packer) attributes(path string) map[string]string {
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
