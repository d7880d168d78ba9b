package flatten

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// Opener opens a content from its beginning. It may be called several times, for the same bytes.
type Opener func(ctx context.Context) (io.ReadCloser, error)

// Layer is a tar file, compressed or not.
type Layer struct {
	Name   string // for messages
	Digest string // sha256:… of the file, "" when not known; verified while it is read the first time
	DiffID string // sha256:… of what it unpacks to, likewise
	Open   Opener
}

// xattrPrefix is how tar archives carry extended attributes.
const xattrPrefix = "SCHILY.xattr."

// Runs of zeros from this length on are not sent: the file has a hole there.
const (
	blockSize = 64 << 10
	minHole   = 1 << 20
	maxHoles  = 4096 // of one file: a header with more of them would be refused
)

// Add reads a layer and lays it over those before. After an error the tree is of no use.
func (t *Tree) Add(ctx context.Context, l Layer) error {
	if len(t.layers) >= t.limits.Layers {
		return fmt.Errorf("%w: more than %d layers", ErrLimit, t.limits.Layers)
	}
	number := int32(len(t.layers))
	t.layers = append(t.layers, &l)
	entries, err := t.index(ctx, number, &l)
	if err == nil {
		err = t.apply(entries)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", l.Name, err)
	}
	return nil
}

// index reads a layer's headers, looks for holes in its contents and verifies its digests.
func (t *Tree) index(ctx context.Context, number int32, l *Layer) (entries []entry, err error) {
	r, err := openLayer(ctx, l)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	limit := &limited{r: r, left: &t.stream, most: t.limits.Stream, ctx: ctx}
	archive := tar.NewReader(limit)
	scan := &scanner{tree: t, buf: make([]byte, blockSize), ctx: ctx}
	for n := int32(0); ; n++ {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, readError(err)
		}
		if t.entries++; t.entries > t.limits.Entries {
			return nil, fmt.Errorf("%w: more than %d entries", ErrLimit, t.limits.Entries)
		}
		e, ok, err := t.header(h)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if e.kind == tar.TypeReg {
			e.layer, e.entry, e.size = number, n, h.Size
			if err := scan.content(e.inode, archive, isAccount(e.name)); err != nil {
				return nil, fmt.Errorf("%s: %w", show(e.name), readError(err))
			}
		}
		entries = append(entries, e)
	}
	// Padding after the archive's end belongs to what the digests are of.
	if _, err := io.CopyBuffer(io.Discard, limit, scan.buf); err != nil {
		return nil, readError(err)
	}
	return entries, r.verify(l)
}

// isAccount reports whether the host has to know a file's content: names of owners mean what it says.
func isAccount(name string) bool { return name == "etc/passwd" || name == "etc/group" }

// readError says that an error is the layer's fault, unless it is known whose it is.
func readError(err error) error {
	switch {
	case errors.Is(err, ErrLimit), errors.Is(err, ErrFormat), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%w: %w", ErrFormat, err)
}

// header checks a header. ok is false for one that says nothing of the file system.
func (t *Tree) header(h *tar.Header) (e entry, ok bool, err error) {
	name, err := cleanName(h.Name)
	if err != nil {
		return entry{}, false, err
	}
	fail := func(format string, args ...any) (entry, bool, error) {
		return entry{}, false, fmt.Errorf("%s: %w: %s", show(name), ErrFormat, fmt.Sprintf(format, args...))
	}
	if h.Uid < 0 || h.Uid > maxOwner || h.Gid < 0 || h.Gid > maxOwner {
		return fail("owner %d:%d", h.Uid, h.Gid)
	}
	e = entry{name: name, inode: &inode{
		kind: h.Typeflag, mode: h.Mode & 0o7777, uid: h.Uid, gid: h.Gid, mtime: h.ModTime, layer: -1,
	}}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		e.kind = tar.TypeReg
		if h.Size < 0 || h.Size > t.limits.Stream {
			return entry{}, false, fmt.Errorf("%s: %w: a file of %d bytes", show(name), ErrLimit, h.Size)
		}
	case tar.TypeDir, tar.TypeFifo:
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) > maxLink {
			return fail("a symbolic link whose target has %d bytes", len(h.Linkname))
		}
		e.link = h.Linkname
	case tar.TypeLink:
		if e.target, err = cleanName(h.Linkname); err != nil {
			return fail("a hard link to %s", show(h.Linkname))
		}
	case tar.TypeChar, tar.TypeBlock:
		if h.Devmajor < 0 || h.Devmajor > 1<<12-1 || h.Devminor < 0 || h.Devminor > 1<<20-1 {
			return fail("device number %d:%d", h.Devmajor, h.Devminor)
		}
		e.major, e.minor = h.Devmajor, h.Devminor
	case tar.TypeXGlobalHeader:
		return entry{}, false, nil
	default:
		return fail("unknown kind %q of file", h.Typeflag)
	}
	size := 0
	for key, value := range h.PAXRecords {
		attr, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok {
			continue
		}
		if size += len(attr) + len(value); attr == "" || len(attr) > maxName || size > maxXattrs {
			return fail("extended attributes of more than %d bytes", maxXattrs)
		}
		if e.xattrs == nil {
			e.xattrs = map[string]string{}
		}
		e.xattrs[attr] = value
	}
	if t.names += int64(len(name) + len(e.link) + len(e.target) + size); t.names > t.limits.Names {
		return entry{}, false, fmt.Errorf("%w: names of more than %d MiB", ErrLimit, t.limits.Names>>20)
	}
	return e, true, nil
}

// cleanName makes a name of an archive relative to the root. One that leads upwards is refused: no tool writes it by
// accident.
func cleanName(name string) (string, error) {
	clean := path.Clean("/" + name)[1:]
	parts := strings.Split(name, "/")
	switch {
	case slices.Contains(parts, ".."):
		return "", fmt.Errorf("%w: the name %s leads upwards", ErrFormat, show(name))
	case len(clean) > maxPath || slices.ContainsFunc(parts, func(s string) bool { return len(s) > maxName }):
		return "", fmt.Errorf("%w: the name %s is too long", ErrFormat, show(name))
	}
	return clean, nil
}

// show is a name for a message.
func show(name string) string {
	if len(name) > 120 {
		name = name[:120] + "…"
	}
	return fmt.Sprintf("%q", "/"+strings.TrimLeft(name, "/"))
}

// scanner reads contents for what the index must know of them.
type scanner struct {
	tree *Tree
	buf  []byte
	ctx  context.Context //nolint:containedctx // of the one call of index that made it
}

// content finds the holes of a file, and keeps its bytes if they are wanted.
func (s *scanner) content(i *inode, r io.Reader, keep bool) error {
	var off, zeros int64 // zeros: length of the run that ends at off
	end := func() {
		if zeros >= minHole && !keep && len(i.holes) < maxHoles {
			i.holes = append(i.holes, hole{off - zeros, zeros})
			s.tree.content -= zeros
		}
		zeros = 0
	}
	for off < i.size {
		n, err := io.ReadFull(r, s.buf[:min(int64(len(s.buf)), i.size-off)])
		if err != nil {
			return err
		}
		if err := s.ctx.Err(); err != nil {
			return context.Cause(s.ctx)
		}
		block := s.buf[:n]
		if keep && i.size <= maxKept {
			i.inline = append(i.inline, block...)
		}
		if s.tree.files += int64(n); s.tree.files > s.tree.limits.Stream {
			return fmt.Errorf("%w: files of more than %d GiB, most of it zeros", ErrLimit, s.tree.limits.Stream>>30)
		}
		if allZero(block) {
			zeros += int64(n)
		} else {
			end()
		}
		off += int64(n)
		if s.tree.content += int64(n); s.tree.content-zeros > s.tree.limits.Content {
			return fmt.Errorf("%w: files of more than %d MiB", ErrLimit, s.tree.limits.Content>>20)
		}
	}
	end()
	return nil
}

// maxKept bounds the files whose content is kept.
const maxKept = 4 << 20

func allZero(b []byte) bool { return b[0] == 0 && bytes.Equal(b[:len(b)-1], b[1:]) }

// limited ends a stream that is too long.
type limited struct {
	r    io.Reader
	left *int64 // counts what all layers had
	most int64
	ctx  context.Context //nolint:containedctx // a reader has no other way to be cancelled
}

func (l *limited) Read(p []byte) (int, error) {
	if l.ctx.Err() != nil {
		return 0, context.Cause(l.ctx)
	}
	n, err := l.r.Read(p)
	if *l.left += int64(n); *l.left > l.most {
		return 0, fmt.Errorf("%w: its layers unpack to more than %d GiB", ErrLimit, l.most>>30)
	}
	return n, err
}

// opened is a layer being read: the file, and what it unpacks to.
type opened struct {
	io.Reader
	file       io.Closer
	raw        io.Reader
	sum, plain hash.Hash // nil: nobody asks
	done       func()
}

func openLayer(ctx context.Context, l *Layer) (*opened, error) {
	file, err := l.Open(ctx)
	if err != nil {
		return nil, err
	}
	o := &opened{file: file, raw: file}
	if l.Digest != "" {
		o.sum = sha256.New()
		o.raw = io.TeeReader(file, o.sum)
	}
	plain, done, err := Decompress(o.raw)
	if err != nil {
		file.Close()
		return nil, readError(err)
	}
	o.Reader, o.done = plain, done
	if l.DiffID != "" {
		o.plain = sha256.New()
		o.Reader = io.TeeReader(plain, o.plain)
	}
	return o, nil
}

// Close closes the file.
func (o *opened) Close() {
	o.done()
	o.file.Close()
}

// verify compares digests, once everything was read.
func (o *opened) verify(l *Layer) error {
	if o.plain != nil {
		if got := "sha256:" + hex.EncodeToString(o.plain.Sum(nil)); got != l.DiffID {
			return fmt.Errorf("%w: it unpacks to %s, the image's configuration says %s", ErrFormat, got, l.DiffID)
		}
	}
	if o.sum != nil {
		if _, err := io.Copy(io.Discard, o.raw); err != nil {
			return err
		}
		if got := "sha256:" + hex.EncodeToString(o.sum.Sum(nil)); got != l.Digest {
			return fmt.Errorf("%w: its digest is %s, not %s", ErrFormat, got, l.Digest)
		}
	}
	return nil
}

// maxWindow is what a zstd layer may make its reader hold: what `zstd --ultra --long=27` needs.
const maxWindow = 128 << 20

// Decompress reads gzip, zstd, xz and bzip2, which it recognises, and what is none of them as it is. done frees what the
// reader holds.
func Decompress(r io.Reader) (plain io.Reader, done func(), err error) {
	b := bufio.NewReaderSize(r, 256<<10)
	head, err := b.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	nothing := func() {}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(b)
		return z, nothing, err
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}), isSkippable(head):
		z, err := zstd.NewReader(b, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, nil, err
		}
		return z, z.Close, nil
	case bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		z, err := xz.ReaderConfig{DictCap: maxWindow}.NewReader(b)
		return z, nothing, err
	case bytes.HasPrefix(head, []byte("BZh")):
		return bzip2.NewReader(b), nothing, nil
	}
	return b, nothing, nil
}

// isSkippable recognises a zstd frame that carries something else, with which such files may begin.
func isSkippable(head []byte) bool {
	return len(head) >= 4 && head[0]&0xf0 == 0x50 && head[1] == 0x2a && head[2] == 0x4d && head[3] == 0x18
}
