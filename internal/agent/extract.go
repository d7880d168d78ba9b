package agent

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
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
)

// xattrPrefix is how tar archives carry extended attributes (PAX).
const xattrPrefix = "SCHILY.xattr."

// maxEntries bounds what an archive makes the agent remember (its directories' times).
const maxEntries = 2_000_000

// as runs f as u, or as the agent itself for nil.
func as(u *account.User, f func() error) error {
	if u == nil {
		return f()
	}
	return account.As(u, f)
}

// extract unpacks the tar stream that follows the request.
func (a *Agent) extract(ctx context.Context, s *wire.Stream, request []byte) error {
	req := &wire.ExtractRequest{}
	if err := decode(request, req); err != nil {
		return err
	}
	var user *account.User
	if req.User != "" || req.DefaultUser {
		u, err := a.cfg.Accounts.User(req.User)
		if err != nil {
			return err
		}
		user = u
	}
	var err error
	if req.Path, err = wire.DecodeName(req.Path); err != nil {
		return err
	}
	if !path.IsAbs(req.Path) {
		return wire.Errorf(wire.CodeInvalid, "extract into %q: an absolute path is needed", req.Path)
	}
	data := s.DataReader()
	err = as(user, func() error { return unpackInto(ctx, req.Path, user, req.KeepDirs, data) })
	if err == nil {
		_, err = io.Copy(io.Discard, data) // padding after the archive's end
	}
	return tarError("extract into "+req.Path, err)
}

// tarError sorts errors by whose fault they are.
func tarError(doing string, err error) error {
	var refusal *wire.Error
	code := wire.CodeInternal
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refusal):
		return refusal
	case errors.Is(err, unix.ENOSPC):
		return wire.Errorf(wire.CodeExhausted, "%s: %v; the machine's disk is full, make it larger in the recipe", doing, err)
	case errors.Is(err, fs.ErrPermission):
		code = wire.CodeDenied
	case errors.Is(err, fs.ErrNotExist):
		code = wire.CodeNotFound
	case errors.Is(err, tar.ErrHeader), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		code = wire.CodeInvalid
	}
	return wire.Errorf(code, "%s: %v", doing, err)
}

// unpacker extracts an archive below one directory. Every name is resolved by the kernel as if that directory were /,
// so neither ".." nor a link, in the archive or there before, leads out of it.
type unpacker struct {
	root  int
	owner *account.User // nil: the archive's

	keepDirs bool // mode and owner of directories that were there already stay

	dir     int    // the directory of the entry before, for the usual case that the next is in it, too
	dirName string // "" when there is none

	times []dirTime
	buf   []byte
	short bool // the file being written ends in a hole
}

type dirTime struct {
	name  string
	mtime time.Time
}

func unpack(ctx context.Context, dir string, owner *account.User, r io.Reader) error {
	return unpackInto(ctx, dir, owner, false, r)
}

func unpackInto(ctx context.Context, dir string, owner *account.User, keepDirs bool, r io.Reader) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	u := &unpacker{root: root, owner: owner, keepDirs: keepDirs, dir: -1, buf: make([]byte, 64<<10)}
	defer u.close()
	entries := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := entries.Next()
		if errors.Is(err, io.EOF) {
			return u.finish()
		}
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if n >= maxEntries {
			return wire.Errorf(wire.CodeExhausted, "archive of more than %d entries", maxEntries)
		}
		if err := u.entry(h, entries); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
}

func (u *unpacker) close() {
	u.leave()
	_ = unix.Close(u.root)
}

func (u *unpacker) leave() {
	if u.dir >= 0 && u.dir != u.root {
		_ = unix.Close(u.dir)
	}
	u.dir, u.dirName = -1, ""
}

// open opens a name below root as if root were /.
func (u *unpacker) open(name string, flags uint64) (int, error) {
	return unix.Openat2(u.root, name, &unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
}

// enter makes dir the directory of name, with parents that are missing.
func (u *unpacker) enter(name string) error {
	if u.dir >= 0 && u.dirName == name {
		return nil
	}
	u.leave()
	if name == "." {
		u.dir, u.dirName = u.root, name
		return nil
	}
	fd, err := u.open(name, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		if fd, err = u.makeParents(name); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	u.dir, u.dirName = fd, name
	return nil
}

func (u *unpacker) makeParents(name string) (int, error) {
	at, err := u.open(".", unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return -1, err
	}
	done := ""
	for part := range strings.SplitSeq(name, "/") {
		done = path.Join(done, part)
		next, err := u.open(done, unix.O_PATH|unix.O_DIRECTORY)
		if errors.Is(err, unix.ENOENT) {
			if err = unix.Mkdirat(at, part, 0o755); err == nil || errors.Is(err, unix.EEXIST) {
				next, err = u.open(done, unix.O_PATH|unix.O_DIRECTORY)
			}
		}
		_ = unix.Close(at)
		if err != nil {
			return -1, err
		}
		at = next
	}
	return at, nil
}

func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	name := clean(h.Name)
	if name == "." {
		return u.rootEntry(h)
	}
	if err := u.enter(path.Dir(name)); err != nil {
		return err
	}
	base := path.Base(name)
	switch h.Typeflag {
	case tar.TypeDir:
		return u.directory(h, name, base)
	case tar.TypeReg, tar.TypeGNUSparse:
		return u.file(h, base, content)
	case tar.TypeSymlink:
		return u.create(h, base, func() error { return unix.Symlinkat(h.Linkname, u.dir, base) })
	case tar.TypeLink:
		return u.link(h, base)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return u.create(h, base, func() error {
			return unix.Mknodat(u.dir, base, nodeMode(h), int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))))
		})
	case tar.TypeXGlobalHeader:
		return nil
	default:
		return wire.Errorf(wire.CodeInvalid, "unknown kind %q of archive entry", h.Typeflag)
	}
}

// clean makes a name relative to the root, without "..": the kernel would keep it inside anyway.
func clean(name string) string { return path.Clean("/" + name)[1:] + emptyDot(name) }

func emptyDot(name string) string {
	if path.Clean("/"+name) == "/" {
		return "."
	}
	return ""
}

func (u *unpacker) rootEntry(h *tar.Header) error {
	if h.Typeflag != tar.TypeDir {
		return wire.Errorf(wire.CodeInvalid, "an archive entry for the target directory itself that is not a directory")
	}
	if u.keepDirs {
		return nil
	}
	fd, err := u.open(".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	u.times = append(u.times, dirTime{".", h.ModTime})
	return errors.Join(u.metadata(fd, h), unix.Close(fd))
}

// directory makes a directory, or takes the one that is there, also behind a link: layers of an image rely on /lib and
// the like staying links.
func (u *unpacker) directory(h *tar.Header, name, base string) error {
	err := unix.Mkdirat(u.dir, base, 0o700)
	there := errors.Is(err, unix.EEXIST)
	if err != nil && !there {
		return err
	}
	fd, err := u.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err == nil && there && u.keepDirs {
		return unix.Close(fd)
	}
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		if err = unix.Unlinkat(u.dir, base, 0); err == nil {
			if err = unix.Mkdirat(u.dir, base, 0o700); err == nil {
				fd, err = u.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
			}
		}
	}
	if err != nil {
		return err
	}
	u.times = append(u.times, dirTime{name, h.ModTime})
	return errors.Join(u.metadata(fd, h), unix.Close(fd))
}

// create makes what has no content, in place of what has the name.
func (u *unpacker) create(h *tar.Header, base string, place func() error) error {
	err := place()
	if errors.Is(err, unix.EEXIST) {
		if err = u.remove(base); err == nil {
			err = place()
		}
	}
	if err != nil {
		return err
	}
	if u.owner == nil {
		if err := unix.Fchownat(u.dir, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if h.Typeflag != tar.TypeSymlink {
		if err := unix.Fchmodat(u.dir, base, uint32(h.Mode)&0o7777, 0); err != nil {
			return err
		}
	}
	err = u.attributes(h, func(name string, value []byte) error {
		return unix.Lsetxattr(fmt.Sprintf("/proc/self/fd/%d/%s", u.dir, base), name, value, 0)
	})
	if err != nil {
		return err
	}
	return u.setTime(u.dir, base, h.ModTime)
}

func (u *unpacker) remove(base string) error {
	err := unix.Unlinkat(u.dir, base, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Unlinkat(u.dir, base, unix.AT_REMOVEDIR)
	}
	return err
}

// link makes a hard link to an earlier entry.
func (u *unpacker) link(h *tar.Header, base string) error {
	target := clean(h.Linkname)
	dir, err := u.open(path.Dir(target), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("hard link to %s: %w", h.Linkname, err)
	}
	defer unix.Close(dir)
	err = unix.Linkat(dir, path.Base(target), u.dir, base, 0)
	if errors.Is(err, unix.EEXIST) {
		if same(dir, path.Base(target), u.dir, base) {
			return nil
		}
		if err = u.remove(base); err == nil {
			err = unix.Linkat(dir, path.Base(target), u.dir, base, 0)
		}
	}
	if err != nil {
		return fmt.Errorf("hard link to %s: %w", h.Linkname, err)
	}
	return nil
}

func same(dir1 int, name1 string, dir2 int, name2 string) bool {
	var a, b unix.Stat_t
	return unix.Fstatat(dir1, name1, &a, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		unix.Fstatat(dir2, name2, &b, unix.AT_SYMLINK_NOFOLLOW) == nil && a.Dev == b.Dev && a.Ino == b.Ino
}

func (u *unpacker) file(h *tar.Header, base string, content io.Reader) error {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(u.dir, base, flags, 0o600)
	if errors.Is(err, unix.EEXIST) {
		if err = u.remove(base); err == nil {
			fd, err = unix.Openat(u.dir, base, flags, 0o600)
		}
	}
	if err != nil {
		return err
	}
	err = u.content(fd, h, content)
	if err == nil {
		err = u.metadata(fd, h)
	}
	if err == nil {
		err = u.setTime(fd, "", h.ModTime)
	}
	return errors.Join(err, unix.Close(fd))
}

// content writes a file, leaving holes where the archive says so, and where blocks are zero.
func (u *unpacker) content(fd int, h *tar.Header, r io.Reader) error {
	size, holes, err := sparse(h)
	if err != nil {
		return err
	}
	var off int64
	u.short = false
	for _, hole := range holes {
		if err := u.piece(fd, off, hole.offset, r); err != nil {
			return err
		}
		off = hole.offset + hole.length
		u.short = true
	}
	if err := u.piece(fd, off, size, r); err != nil {
		return err
	}
	if u.short {
		return unix.Ftruncate(fd, size)
	}
	return nil
}

// piece writes what is from off to end of a file.
func (u *unpacker) piece(fd int, off, end int64, r io.Reader) error {
	for off < end {
		n, err := io.ReadFull(r, u.buf[:min(int64(len(u.buf)), end-off)])
		if err != nil {
			return unexpected(err)
		}
		block := u.buf[:n]
		hole := len(block) >= 4096 && allZero(block)
		u.short = hole
		for !hole && len(block) > 0 {
			m, err := unix.Pwrite(fd, block, off+int64(n-len(block)))
			if err != nil {
				return err
			}
			block = block[m:]
		}
		off += int64(n)
	}
	return nil
}

type hole struct{ offset, length int64 }

// sparse is a file's size, and the holes that the archive leaves out.
func sparse(h *tar.Header) (size int64, holes []hole, err error) {
	text, ok := h.PAXRecords[wire.SparseSize]
	if !ok {
		return h.Size, nil, nil
	}
	fail := wire.Errorf(wire.CodeInvalid, "malformed list of holes")
	if size, err = strconv.ParseInt(text, 10, 64); err != nil || size < 0 {
		return 0, nil, fail
	}
	var end, left int64 // left: bytes that the archive has
	for field := range strings.FieldsSeq(h.PAXRecords[wire.SparseHoles]) {
		offset, length, _ := strings.Cut(field, "+")
		var next hole
		next.offset, err = strconv.ParseInt(offset, 10, 64)
		if err == nil {
			next.length, err = strconv.ParseInt(length, 10, 64)
		}
		if err != nil || next.length <= 0 || next.offset < end || next.offset > size || next.length > size-next.offset {
			return 0, nil, fail
		}
		left += next.offset - end
		end = next.offset + next.length
		holes = append(holes, next)
	}
	if left+size-end != h.Size {
		return 0, nil, fail
	}
	return size, holes, nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func allZero(b []byte) bool { return b[0] == 0 && bytes.Equal(b[:len(b)-1], b[1:]) }

// metadata sets owner, mode and attributes, in this order: a change of owner clears setuid bits and capabilities.
func (u *unpacker) metadata(fd int, h *tar.Header) error {
	if u.owner == nil {
		if err := unix.Fchown(fd, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(fd, uint32(h.Mode)&0o7777); err != nil {
		return err
	}
	return u.attributes(h, func(name string, value []byte) error { return unix.Fsetxattr(fd, name, value, 0) })
}

// attributes sets the extended attributes that the file system can keep.
func (u *unpacker) attributes(h *tar.Header, set func(name string, value []byte) error) error {
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok || u.owner != nil && !strings.HasPrefix(name, "user.") {
			continue // a user may set its own namespace only
		}
		err := set(name, []byte(value))
		if errors.Is(err, unix.ENOSPC) {
			err = errors.New("there is no room for it: a file's attributes together fit into one block of the disk")
		}
		if err != nil && !errors.Is(err, unix.ENOTSUP) {
			return fmt.Errorf("attribute %s: %w", name, err)
		}
	}
	return nil
}

// setTime sets the time of a name in a directory, or of the file itself.
func (u *unpacker) setTime(fd int, name string, t time.Time) error {
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

// finish sets the times of directories, which making their entries changed; the innermost first.
func (u *unpacker) finish() error {
	for _, d := range slices.Backward(u.times) {
		fd, err := u.open(d.name, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			continue // replaced by a later entry
		}
		err = u.setTime(fd, "", d.mtime)
		if err = errors.Join(err, unix.Close(fd)); err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
	}
	return nil
}

func nodeMode(h *tar.Header) uint32 {
	switch h.Typeflag {
	case tar.TypeChar:
		return unix.S_IFCHR | 0o600
	case tar.TypeBlock:
		return unix.S_IFBLK | 0o600
	default:
		return unix.S_IFIFO | 0o600
	}
}
