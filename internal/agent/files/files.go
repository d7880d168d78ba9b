// Package files serves the guest's files with the messages and semantics of E2B's envd: describe, list, make, move,
// remove, read, write. Every call acts with the rights of the user it names. It reads and writes regular files only
// (a device or pipe could hold it for ever), and never holds more than one frame of a file in memory. It does not watch
// and does not archive. Only the agent imports it; its tests run on any Linux.
package files

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
)

// maxEntries bounds one listing, which is a single message.
const maxEntries = 20000

// Service serves files.
type Service struct {
	accounts *account.Table
}

// New makes a service.
func New(accounts *account.Table) *Service { return &Service{accounts: accounts} }

// Handlers are the calls this package serves.
func (s *Service) Handlers() map[string]wire.Handler {
	return map[string]wire.Handler{
		wire.MethodFileStat:    wire.Handle(s.stat),
		wire.MethodFileMakeDir: wire.Handle(s.makeDir),
		wire.MethodFileMove:    wire.Handle(s.move),
		wire.MethodFileList:    wire.Handle(s.list),
		wire.MethodFileRemove:  wire.Handle(s.remove),
		wire.MethodFileRead:    wire.Handle(s.read),
		wire.MethodFileWrite:   wire.Handle(s.write),
	}
}

// locate finds the user and the absolute path of a request.
func (s *Service) locate(user, path string) (*account.User, string, error) {
	if path == "" {
		return nil, "", wire.Errorf(wire.CodeInvalid, "no path given")
	}
	if strings.ContainsRune(path, 0) {
		return nil, "", wire.Errorf(wire.CodeInvalid, "path %q contains NUL", path)
	}
	u, err := s.accounts.User(user)
	if err != nil {
		return nil, "", err
	}
	return u, account.Path(u, path), nil
}

func (s *Service) stat(_ context.Context, st *wire.Stream, req *wire.PathRequest) error {
	u, path, err := s.locate(req.User, req.Path)
	if err != nil {
		return err
	}
	var entry wire.EntryInfo
	if err := account.As(u, func() (err error) { entry, err = s.entry(path); return err }); err != nil {
		return failure("stat", path, err)
	}
	return st.SendMessage(wire.EntryReply{Entry: entry})
}

func (s *Service) makeDir(_ context.Context, st *wire.Stream, req *wire.PathRequest) error {
	u, path, err := s.locate(req.User, req.Path)
	if err != nil {
		return err
	}
	var entry wire.EntryInfo
	err = account.As(u, func() error {
		if info, err := os.Stat(path); err == nil {
			if !info.IsDir() {
				return unix.ENOTDIR
			}
			return wire.Errorf(wire.CodeExists, "make directory %s: it exists already", path)
		}
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		entry, err = s.entry(path)
		return err
	})
	if err != nil {
		return failure("make directory", path, err)
	}
	return st.SendMessage(wire.EntryReply{Entry: entry})
}

func (s *Service) move(_ context.Context, st *wire.Stream, req *wire.MoveRequest) error {
	u, source, err := s.locate(req.User, req.Source)
	if err != nil {
		return err
	}
	if req.Destination == "" || strings.ContainsRune(req.Destination, 0) {
		return wire.Errorf(wire.CodeInvalid, "move %s: no usable destination given", source)
	}
	destination := account.Path(u, req.Destination)
	var entry wire.EntryInfo
	err = account.As(u, func() error {
		if _, err := os.Lstat(source); err != nil {
			return err // before directories are made for it
		}
		if err := os.MkdirAll(filepath.Dir(destination), 0o755); err != nil {
			return err
		}
		if err := unix.Rename(source, destination); err != nil {
			return err
		}
		entry, err = s.entry(destination)
		return err
	})
	if errors.Is(err, unix.EXDEV) {
		return wire.Errorf(wire.CodePrecondition, "move %s to %s: they are on different file systems; copy it, then remove it", source, destination)
	}
	if err != nil {
		return failure("move", source+" to "+destination, err)
	}
	return st.SendMessage(wire.EntryReply{Entry: entry})
}

func (s *Service) remove(_ context.Context, st *wire.Stream, req *wire.PathRequest) error {
	u, path, err := s.locate(req.User, req.Path)
	if err != nil {
		return err
	}
	if path == "/" {
		return wire.Errorf(wire.CodeInvalid, "remove /: refused")
	}
	err = account.As(u, func() error {
		if _, err := os.Lstat(path); err != nil {
			return err
		}
		return os.RemoveAll(path)
	})
	if err != nil {
		return failure("remove", path, err)
	}
	return st.SendMessage(struct{}{})
}

func (s *Service) list(ctx context.Context, st *wire.Stream, req *wire.ListRequest) error {
	u, path, err := s.locate(req.User, req.Path)
	if err != nil {
		return err
	}
	l := lister{ctx: ctx, namer: s.namer(), entries: []wire.EntryInfo{}}
	err = account.As(u, func() error {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return unix.ENOTDIR
		}
		return l.walk(path, max(req.Depth, 1))
	})
	if err != nil {
		return failure("list", path, err)
	}
	return st.SendMessage(wire.EntriesReply{Entries: l.entries})
}

type lister struct {
	ctx     context.Context //nolint:containedctx // one call's
	namer   namer
	entries []wire.EntryInfo
}

// walk lists a directory, each directory in it followed by its own entries. What vanishes meanwhile is left out, what
// cannot be entered below the first level too. Links are not followed.
func (l *lister) walk(dir string, depth uint32) error {
	names, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, d := range names {
		if err := l.ctx.Err(); err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			continue
		}
		if len(l.entries) >= maxEntries {
			return wire.Errorf(wire.CodeExhausted, "list %s: more than %d entries; list its directories one by one", dir, maxEntries)
		}
		path := filepath.Join(dir, d.Name())
		l.entries = append(l.entries, l.namer.describe(path, info))
		if d.IsDir() && depth > 1 {
			if err := l.walk(path, depth-1); err != nil && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

func (s *Service) read(ctx context.Context, st *wire.Stream, req *wire.ReadRequest) error {
	u, path, err := s.locate(req.User, req.Path)
	if err != nil {
		return err
	}
	if req.Offset < 0 || req.Length < 0 {
		return wire.Errorf(wire.CodeInvalid, "read %s: offset %d and length %d cannot be negative", path, req.Offset, req.Length)
	}
	fd := -1
	var entry wire.EntryInfo
	err = account.As(u, func() error {
		var err error
		if fd, err = openRegular(path); err != nil {
			return err
		}
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		entry = s.namer().describe(path, info)
		return nil
	})
	if fd >= 0 {
		defer unix.Close(fd)
	}
	if err != nil {
		return failure("read", path, err)
	}
	if err := st.SendMessage(wire.EntryReply{Entry: entry}); err != nil {
		return err
	}
	left := req.Length
	if left == 0 {
		left = 1<<63 - 1
	}
	buf := make([]byte, wire.MaxPayload)
	for at := req.Offset; left > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		// Not through os.File, which would wait for files of /proc that answer "again".
		n, err := unix.Pread(fd, buf[:min(left, int64(len(buf)))], at)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return failure("read", path, err)
		}
		if n == 0 {
			return nil
		}
		if err := st.Send(wire.KindData, buf[:n]); err != nil {
			return err
		}
		at += int64(n)
		left -= int64(n)
	}
	return nil
}

// openRegular opens without waiting: a pipe without a writer would wait for one, a terminal would become ours.
func openRegular(path string) (int, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.ENXIO) {
			return -1, errSpecial
		}
		if err != nil {
			return -1, err
		}
		var st unix.Stat_t
		if err = unix.Fstat(fd, &st); err == nil {
			switch st.Mode & unix.S_IFMT {
			case unix.S_IFREG:
				return fd, nil
			case unix.S_IFDIR:
				err = unix.EISDIR
			default:
				err = errSpecial
			}
		}
		_ = unix.Close(fd)
		return -1, err
	}
}

var errSpecial = errors.New("not a regular file")

func (s *Service) write(ctx context.Context, st *wire.Stream, req *wire.WriteRequest) error {
	u, path, err := s.locate(req.User, req.Path)
	if err != nil {
		return err
	}
	if req.Mode != nil && *req.Mode > 0o7777 {
		return wire.Errorf(wire.CodeInvalid, "write %s: mode %#o", path, *req.Mode)
	}
	if strings.HasSuffix(req.Path, "/") {
		return wire.Errorf(wire.CodeInvalid, "write %s: the path names a directory", req.Path)
	}
	var w *writer
	if err := account.As(u, func() (err error) { w, err = create(path, req.Mode); return err }); err != nil {
		return failure("write", path, err)
	}
	// The rights to write are in the open file; only names need the user's again.
	if err := w.receive(st); err != nil {
		_ = account.As(u, func() error { w.abort(); return nil })
		return failure("write", path, err)
	}
	var entry wire.EntryInfo
	err = account.As(u, func() error {
		if err := w.commit(); err != nil {
			return err
		}
		entry, err = s.entry(path)
		return err
	})
	if err != nil {
		return failure("write", path, err)
	}
	return st.SendMessage(wire.EntryReply{Entry: entry})
}

// writer is a file that appears under its name when it is complete.
type writer struct {
	file   *os.File
	target string
	temp   string
}

// create opens a temporary file beside the target. A link is followed: its target is replaced, not the link.
func create(path string, mode *uint32) (*writer, error) {
	target, err := resolve(path)
	if err != nil {
		return nil, err
	}
	perm := uint32(0o644)
	var st unix.Stat_t
	switch err := unix.Stat(target, &st); {
	case errors.Is(err, unix.ENOENT):
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return nil, unix.EISDIR
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, errSpecial
	default:
		// Replacing a file needs the right to its directory only; whoever could not have opened it must not.
		if err := unix.Faccessat(unix.AT_FDCWD, target, unix.W_OK, unix.AT_EACCESS); err != nil {
			return nil, err
		}
		perm = st.Mode & 0o777
	}
	if mode != nil {
		perm = *mode
	}
	random := make([]byte, 8)
	_, _ = rand.Read(random)
	temp := filepath.Join(filepath.Dir(target), ".forkd-"+hex.EncodeToString(random))
	file, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	w := &writer{file: file, target: target, temp: temp}
	if err := unix.Fchmod(int(file.Fd()), perm); err != nil {
		w.abort()
		return nil, err
	}
	return w, nil
}

// resolve follows links in the last part of a path, also where the last one points at nothing yet.
func resolve(path string) (string, error) {
	for range 40 { // the kernel's own limit
		link, err := os.Readlink(path)
		if err != nil {
			return path, nil //nolint:nilerr // not a link
		}
		if !filepath.IsAbs(link) {
			link = filepath.Join(filepath.Dir(path), link)
		}
		path = link
	}
	return "", unix.ELOOP
}

// receive copies data frames to the file until the half-close.
func (w *writer) receive(st *wire.Stream) error {
	for {
		kind, data, err := st.Recv()
		if err != nil {
			return err
		}
		switch kind {
		case wire.KindData:
			if _, err := w.file.Write(data); err != nil {
				return err
			}
		case wire.KindHalfClose:
			return nil
		default:
			return wire.Errorf(wire.CodeInvalid, "unexpected frame %q in the data of a file", byte(kind))
		}
	}
}

func (w *writer) commit() error {
	err := w.file.Close()
	if err == nil {
		err = unix.Rename(w.temp, w.target)
	}
	if err != nil {
		_ = os.Remove(w.temp)
	}
	return err
}

func (w *writer) abort() {
	_ = w.file.Close()
	_ = os.Remove(w.temp)
}

// failure gives an error its code.
func failure(doing, path string, err error) error {
	if coded := (*wire.Error)(nil); errors.As(err, &coded) {
		return coded
	}
	code := wire.CodeInternal
	why := err.Error()
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		why = errno.Error()
	}
	switch {
	case errors.Is(err, errSpecial):
		code, why = wire.CodeInvalid, "it is a device, pipe or socket; only regular files can be read and written here"
	case errors.Is(err, fs.ErrNotExist):
		code = wire.CodeNotFound
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, fs.ErrExist):
		code = wire.CodeExists
	case errors.Is(err, unix.EROFS), errors.Is(err, fs.ErrPermission):
		code = wire.CodeDenied
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EMFILE), errors.Is(err, unix.EFBIG):
		code = wire.CodeExhausted
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP),
		errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ESPIPE):
		code = wire.CodeInvalid
	case errors.Is(err, unix.EAGAIN):
		code, why = wire.CodeInvalid, "it has nothing to read now and would wait"
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.ETXTBSY):
		code = wire.CodePrecondition
	case errors.Is(err, context.Canceled), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.ErrClosedPipe):
		code = wire.CodeUnavailable
	}
	return wire.Errorf(code, "%s %s: %s", doing, path, why)
}

// entry describes a path; a link itself, with the type of what it points at.
func (s *Service) entry(path string) (wire.EntryInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return wire.EntryInfo{}, err
	}
	return s.namer().describe(path, info), nil
}

func (s *Service) namer() namer {
	users, groups := s.accounts.Names()
	return namer{users: users, groups: groups}
}

type namer struct {
	users, groups map[uint32]string
}

// describe makes an entry as envd does: of a link, type and mode are those of its target, whose path is resolved; a link
// to nothing keeps its type and names what it points at.
func (n namer) describe(path string, info fs.FileInfo) wire.EntryInfo {
	entry := wire.EntryInfo{
		Name:         filepath.Base(path),
		Path:         path,
		Type:         entryType(info.Mode()),
		Size:         info.Size(),
		Permissions:  permissions(info.Mode()),
		ModifiedTime: info.ModTime().UTC().Round(time.Nanosecond),
	}
	if st, ok := info.Sys().(*sysStat); ok {
		entry.Mode = st.Mode & 0o7777
		entry.Owner = name(n.users, st.Uid)
		entry.Group = name(n.groups, st.Gid)
	}
	if info.Mode()&fs.ModeSymlink == 0 {
		return entry
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		entry.SymlinkTarget = &target
		if info, err := os.Stat(path); err == nil {
			entry.Type = entryType(info.Mode())
			if st, ok := info.Sys().(*sysStat); ok {
				entry.Mode = st.Mode & 0o7777
			}
		}
	} else if link, err := os.Readlink(path); err == nil {
		entry.SymlinkTarget = &link
	}
	return entry
}
