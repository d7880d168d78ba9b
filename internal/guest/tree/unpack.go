package tree

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// maxEntries bounds a stream.
const maxEntries = 2_000_000

// ErrHostile says that a stream asked for something that no tree contains.
var ErrHostile = errors.New("the archive is not one of a tree")

// UnpackOptions say what to tell.
type UnpackOptions struct {
	Count   func(name string)      // called for every entry; may be nil
	Skipped func(name, why string) // called for what is left out; may be nil
}

// Unpack makes at dst what a stream of Pack describes: a directory, into which entries go if it is there already, or one
// file or link, which replaces what has that name. Nothing outside dst is read or written, whatever the stream says and
// whatever links are in it or were there before. Devices, pipes and set-user-ID bits stay behind; owners become the
// caller. An error names the entry.
func Unpack(ctx context.Context, dst string, r io.Reader, o UnpackOptions) error {
	t := tar.NewReader(r)
	h, err := t.Next()
	if err != nil {
		return unexpected(err)
	}
	if name, err := entryName(h.Name); err != nil || name != "." {
		return fmt.Errorf("%w: it begins with %q", ErrHostile, h.Name)
	}
	if h.Typeflag != tar.TypeDir {
		return unpackOne(ctx, dst, r, t, h, o)
	}
	_, err = os.Stat(dst)
	made := errors.Is(err, fs.ErrNotExist)
	if made {
		err = os.Mkdir(dst, 0o700)
	}
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		return err
	}
	u := &unpacker{ctx: ctx, root: root, o: o}
	defer u.close()
	if made {
		u.later(h, ".")
	}
	for n := 1; ; n++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return errors.Join(drain(r), u.finish())
		}
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if n >= maxEntries {
			return fmt.Errorf("%w: more than %d entries", ErrHostile, maxEntries)
		}
		if err := u.entry(h, t); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
}

// unpackOne is Unpack of what is no directory. A file appears when it is complete.
func unpackOne(ctx context.Context, dst string, r io.Reader, t *tar.Reader, h *tar.Header, o UnpackOptions) error {
	root, err := os.OpenRoot(filepath.Dir(dst))
	if err != nil {
		return err
	}
	u := &unpacker{ctx: ctx, root: root, o: o}
	defer u.close()
	base, temp := filepath.Base(dst), ""
	if h.Typeflag == tar.TypeReg {
		f, err := os.CreateTemp(filepath.Dir(dst), ".forkd-cp-")
		if err != nil {
			return err
		}
		temp = filepath.Base(f.Name())
		if err := f.Close(); err != nil {
			return err
		}
		defer func() { _ = root.Remove(temp) }() // gone when all went well
	}
	name := base
	if temp != "" {
		name = temp
	}
	if h.Typeflag == tar.TypeLink {
		return fmt.Errorf("%w: a hard link to nothing", ErrHostile)
	}
	if err := u.place(h, name, t); err != nil {
		return err
	}
	if _, err := t.Next(); !errors.Is(err, io.EOF) {
		return errors.Join(fmt.Errorf("%w: more than one entry", ErrHostile), err)
	}
	if err := drain(r); err != nil {
		return err
	}
	if temp == "" {
		return nil
	}
	return root.Rename(temp, base)
}

// drain reads what follows the archive's end: padding, and whether the sender is content.
func drain(r io.Reader) error {
	const most = 1 << 20
	n, err := io.Copy(io.Discard, io.LimitReader(r, most))
	if n == most {
		return fmt.Errorf("%w: it goes on after its end", ErrHostile)
	}
	return err
}

type unpacker struct {
	ctx  context.Context //nolint:containedctx // one call's
	root *os.Root
	o    UnpackOptions
	dirs []dirEntry
	buf  []byte

	parent     *os.File // directory of the link before
	parentName string
}

// dirEntry is a directory whose mode and time are set at the end: it may not let its entries be made, and making them
// changes its time.
type dirEntry struct {
	name  string
	mode  fs.FileMode
	mtime time.Time
	attrs map[string]string
}

func (u *unpacker) close() {
	if u.parent != nil {
		_ = u.parent.Close()
	}
	_ = u.root.Close()
}

func (u *unpacker) later(h *tar.Header, name string) {
	u.dirs = append(u.dirs, dirEntry{name, fs.FileMode(h.Mode).Perm(), h.ModTime, userAttributes(h)})
}

// entryName is a name below the root, without "..". A stream of ours has no others.
func entryName(name string) (string, error) {
	if name == "" || strings.HasPrefix(name, "/") || strings.ContainsRune(name, 0) {
		return "", fmt.Errorf("%w: a name like %.100q", ErrHostile, name)
	}
	clean := path.Clean(name)
	if !filepath.IsLocal(clean) || slices.Contains(strings.Split(name, "/"), "..") {
		return "", fmt.Errorf("%w: a name like %.100q", ErrHostile, name)
	}
	return clean, nil
}

func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	name, err := entryName(h.Name)
	if err != nil {
		return err
	}
	if name == "." {
		return fmt.Errorf("%w: a second root", ErrHostile)
	}
	if u.o.Count != nil {
		u.o.Count(name)
	}
	return u.place(h, name, content)
}

func (u *unpacker) place(h *tar.Header, name string, content io.Reader) error {
	switch h.Typeflag {
	case tar.TypeDir:
		return u.directory(h, name)
	case tar.TypeReg:
		if h.PAXRecords["GNU.sparse.realsize"] != "" || h.PAXRecords["GNU.sparse.size"] != "" {
			break
		}
		return u.file(h, name, content)
	case tar.TypeSymlink:
		if err := u.clear(name); err != nil {
			return err
		}
		if err := u.root.Symlink(h.Linkname, name); err != nil {
			return err
		}
		return u.linkTime(name, h.ModTime)
	case tar.TypeLink:
		target, err := entryName(h.Linkname)
		if err != nil {
			return err
		}
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Link(target, name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		if u.o.Skipped != nil {
			u.o.Skipped(name, "a device or pipe")
		}
		return nil
	}
	// Other ways to write sparse files among them: package archive/tar makes zeros of their holes, a few bytes of archive
	// to be read for years.
	return fmt.Errorf("%w: an entry of kind %q", ErrHostile, h.Typeflag)
}

// directory makes a directory or takes the one that is there; not one behind a link.
func (u *unpacker) directory(h *tar.Header, name string) error {
	err := u.root.Mkdir(name, 0o700)
	if errors.Is(err, fs.ErrExist) {
		info, err := u.root.Lstat(name)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return errors.New("there is a file of that name, which a directory does not replace")
		}
		return nil // its mode and time are not ours
	}
	if err == nil {
		u.later(h, name)
	}
	return err
}

// clear makes room for what is no directory.
func (u *unpacker) clear(name string) error {
	info, err := u.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.IsDir() {
		return errors.New("there is a directory of that name, which a file does not replace")
	}
	return u.root.Remove(name)
}

func (u *unpacker) file(h *tar.Header, name string, content io.Reader) error {
	if err := u.clear(name); err != nil {
		return err
	}
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = u.content(f, h, content)
	if err == nil {
		err = f.Chmod(fs.FileMode(h.Mode).Perm())
	}
	if err == nil {
		setAttributes(f, userAttributes(h))
		err = setTime(int(f.Fd()), "", h.ModTime)
	}
	return errors.Join(err, f.Close())
}

// content writes a file, leaving holes where the stream has some or blocks are zero.
func (u *unpacker) content(f *os.File, h *tar.Header, r io.Reader) error {
	size, holes, err := holesOf(h)
	if err != nil {
		return err
	}
	at := int64(0)
	for _, hole := range holes {
		if err := u.copy(f, at, hole.offset, r); err != nil {
			return err
		}
		at = hole.offset + hole.length
	}
	if err := u.copy(f, at, size, r); err != nil {
		return err
	}
	return f.Truncate(size) // it may end in a hole
}

func (u *unpacker) copy(f *os.File, from, to int64, r io.Reader) error {
	if u.buf == nil {
		u.buf = make([]byte, 64<<10)
	}
	for from < to {
		if u.ctx.Err() != nil {
			return context.Cause(u.ctx)
		}
		n, err := io.ReadFull(r, u.buf[:min(int64(len(u.buf)), to-from)])
		if err != nil {
			return unexpected(err)
		}
		if block := u.buf[:n]; n < 4096 || !allZero(block) {
			if _, err := f.WriteAt(block, from); err != nil {
				return err
			}
		}
		from += int64(n)
	}
	return nil
}

// holesOf are the parts of a file that the stream leaves out.
func holesOf(h *tar.Header) (size int64, holes []extent, err error) {
	text, ok := h.PAXRecords[wire.SparseSize]
	if !ok {
		return h.Size, nil, nil
	}
	malformed := fmt.Errorf("%w: malformed list of holes", ErrHostile)
	if size, err = strconv.ParseInt(text, 10, 64); err != nil || size < 0 {
		return 0, nil, malformed
	}
	var end, left int64
	for field := range strings.FieldsSeq(h.PAXRecords[wire.SparseHoles]) {
		offset, length, _ := strings.Cut(field, "+")
		var e extent
		var errs [2]error
		e.offset, errs[0] = strconv.ParseInt(offset, 10, 64)
		e.length, errs[1] = strconv.ParseInt(length, 10, 64)
		if errors.Join(errs[:]...) != nil || e.length <= 0 || e.offset < end || e.offset > size || e.length > size-e.offset {
			return 0, nil, malformed
		}
		left += e.offset - end
		end = e.offset + e.length
		holes = append(holes, e)
	}
	if left+size-end != h.Size {
		return 0, nil, malformed
	}
	return size, holes, nil
}

func allZero(b []byte) bool { return b[0] == 0 && bytes.Equal(b[:len(b)-1], b[1:]) }

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// userAttributes are the extended attributes that a user may set. Others would need rights, or give some.
func userAttributes(h *tar.Header) map[string]string {
	var attrs map[string]string
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok || !strings.HasPrefix(name, "user.") {
			continue
		}
		if attrs == nil {
			attrs = map[string]string{}
		}
		attrs[name] = value
	}
	return attrs
}

// setAttributes sets what can be set: file systems differ in what they take.
func setAttributes(f *os.File, attrs map[string]string) {
	for name, value := range attrs {
		_ = unix.Fsetxattr(int(f.Fd()), name, []byte(value), 0)
	}
}

// linkTime sets a link's own time.
func (u *unpacker) linkTime(name string, t time.Time) error {
	dir := path.Dir(name)
	if u.parent == nil || u.parentName != dir {
		if u.parent != nil {
			_ = u.parent.Close()
		}
		f, err := u.root.Open(dir)
		if err != nil {
			u.parent = nil
			return err
		}
		u.parent, u.parentName = f, dir
	}
	return setTime(int(u.parent.Fd()), path.Base(name), t)
}

// setTime sets the time of a name in a directory, or of the file itself.
func setTime(fd int, name string, t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil || t.IsZero() {
		return nil //nolint:nilerr // a time that the system cannot express is left at now
	}
	flags := unix.AT_SYMLINK_NOFOLLOW
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	return unix.UtimesNanoAt(fd, name, []unix.Timespec{ts, ts}, flags)
}

// finish completes directories, the innermost first.
func (u *unpacker) finish() error {
	for _, d := range slices.Backward(u.dirs) {
		info, err := u.root.Lstat(d.name)
		if err != nil || !info.IsDir() {
			continue // a later entry is there instead
		}
		f, err := u.root.Open(d.name)
		if err != nil {
			return err
		}
		setAttributes(f, d.attrs)
		err = f.Chmod(d.mode)
		if err == nil {
			err = setTime(int(f.Fd()), "", d.mtime)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
	}
	return nil
}
