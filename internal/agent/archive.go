package agent

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// maxLinks bounds the memory that recognizing hard links takes; beyond it they are archived as files of their own.
const maxLinks = 100_000

// archive sends a file or directory as a tar stream. Sockets are left out, as tar does.
func (a *Agent) archive(ctx context.Context, s *wire.Stream, request []byte) error {
	req := &wire.ArchiveRequest{}
	if err := decode(request, req); err != nil {
		return err
	}
	if !filepath.IsAbs(req.Path) {
		return wire.Errorf(wire.CodeInvalid, "archive %q: an absolute path is needed", req.Path)
	}
	w := bufio.NewWriterSize(s.Data(wire.KindData), wire.MaxPayload)
	err := pack(ctx, filepath.Clean(req.Path), w)
	if err == nil {
		err = w.Flush()
	}
	return tarError("archive "+req.Path, err)
}

type packer struct {
	w     *tar.Writer
	base  string
	links map[[2]uint64]string
}

func pack(ctx context.Context, path string, w io.Writer) error {
	p := &packer{w: tar.NewWriter(w), base: filepath.Dir(path), links: map[[2]uint64]string{}}
	err := filepath.WalkDir(path, func(name string, _ fs.DirEntry, err error) error {
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, fs.ErrNotExist) && name != path:
			return nil // removed meanwhile
		case err != nil:
			return err
		}
		return p.entry(name)
	})
	if err != nil {
		return err
	}
	return p.w.Close()
}

func (p *packer) entry(name string) error {
	info, err := os.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket != 0 {
		return nil
	}
	rel, err := filepath.Rel(p.base, name)
	if err != nil {
		return err
	}
	if rel == "." || p.base == name {
		rel = "."
	}
	var target string
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(name); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(numeric{info}, target)
	if err != nil {
		return err
	}
	h.Name = rel
	if info.IsDir() {
		h.Name += "/"
	}
	h.Format = tar.FormatPAX
	if st, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode().IsRegular() && st.Nlink > 1 {
		id := [2]uint64{st.Dev, st.Ino}
		if first, seen := p.links[id]; seen {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return p.w.WriteHeader(h)
		}
		if len(p.links) < maxLinks {
			p.links[id] = h.Name
		}
	}
	if info.Mode().IsRegular() {
		return p.file(name, h)
	}
	h.PAXRecords = attributes(name)
	return p.w.WriteHeader(h)
}

// numeric hides the file's owner names: looking them up would read the guest's databases for every entry.
type numeric struct{ fs.FileInfo }

func (numeric) Uname() (string, error) { return "", nil }
func (numeric) Gname() (string, error) { return "", nil }

// file writes a regular file. One that shrinks meanwhile is filled with zeros, one that grows is cut, as tar does.
func (p *packer) file(name string, h *tar.Header) error {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) {
		return nil // gone, or became something else
	}
	if err != nil {
		return err
	}
	defer f.Close()
	h.PAXRecords = attributes(name)
	if err := p.w.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.Copy(p.w, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size {
		_, err = io.CopyN(p.w, zeros{}, h.Size-n)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// attributes are a file's extended attributes as PAX records; nil when there are none or they cannot be read.
func attributes(name string) map[string]string {
	var list [4096]byte
	n, err := unix.Llistxattr(name, list[:])
	if err != nil || n == 0 {
		return nil
	}
	records := map[string]string{}
	for attr := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(name, attr, value)
		if err != nil || strings.Contains(attr, "=") {
			continue
		}
		records[xattrPrefix+attr] = string(value[:n])
	}
	return records
}
