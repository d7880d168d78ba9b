// Package files serves the guest's files with the messages and semantics of E2B's envd: describe, list, make, move,
// remove, read, write, compose, watch; and sends trees of them. Every call acts with the rights of the user it names. It
// reads and writes regular files only (a device or pipe could hold it for ever), and never holds more than one frame of
// a file in memory. It does not unpack trees: that is the agent's own. Only the agent imports it; its tests run on any
// Linux.
package files

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
)

// maxEntries and maxListing bound one listing, which is a single message, and is in memory as a whole.
const (
	maxEntries = 20000
	maxListing = 8 << 20
)

// Service serves files.
type Service struct {
	accounts *account.Table
	watchers watchers
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
		wire.MethodFileCompose: wire.Handle(s.compose),
		wire.MethodFileTree:    wire.Handle(s.tree),

		wire.MethodWatch:         wire.Handle(s.watchDir),
		wire.MethodWatcherNew:    wire.Handle(s.createWatcher),
		wire.MethodWatcherEvents: wire.Handle(s.watcherEvents),
		wire.MethodWatcherRemove: wire.Handle(s.removeWatcher),
	}
}

// locate finds the user and the absolute path of a request.
func (s *Service) locate(user, path string) (*account.User, string, error) {
	u, err := s.accounts.User(user)
	if err != nil {
		return nil, "", err
	}
	path, err = resolvePath(u, path)
	return u, path, err
}

// locateOrWorkdir is locate for calls that change nothing: without a path they mean the image's working directory, or
// else the user's home.
func (s *Service) locateOrWorkdir(user, path string) (*account.User, string, error) {
	if path != "" {
		return s.locate(user, path)
	}
	u, err := s.accounts.User(user)
	if err != nil {
		return nil, "", err
	}
	dir, err := s.accounts.Dir(u, "")
	return u, dir, err
}

// resolvePath makes the path of a request absolute.
func resolvePath(u *account.User, text string) (string, error) {
	path, err := wire.DecodeName(text)
	switch {
	case err != nil:
		return "", err
	case path == "":
		return "", wire.Errorf(wire.CodeInvalid, "no path given")
	case path[0] == '~' && path != "~" && path[1] != '/':
		return "", wire.Errorf(wire.CodeInvalid, "path %q: another user's home cannot be named so; for a file of that name write ./%s", text, text)
	}
	return account.Path(u, path), nil
}

func (s *Service) stat(_ context.Context, st *wire.Stream, req *wire.PathRequest) error {
	u, path, err := s.locateOrWorkdir(req.User, req.Path)
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
	if req.Destination == "" {
		return wire.Errorf(wire.CodeInvalid, "move %s: no destination given", source)
	}
	destination, err := resolvePath(u, req.Destination)
	if err != nil {
		return err
	}
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

func (s *Service) list(ctx context.Context, st *wire.Stream, req *wire.ListDirRequest) error {
	u, path, err := s.locateOrWorkdir(req.User, req.Path)
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
	bytes   int // about
}

// entryBytes is about what an entry takes in a message beside its names.
const entryBytes = 250

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
		path := filepath.Join(dir, d.Name())
		l.bytes += len(path) + len(d.Name()) + entryBytes
		if len(l.entries) >= maxEntries || l.bytes > maxListing {
			return wire.Errorf(wire.CodeExhausted, "list %s: more than %d entries, or %d bytes of them; list its directories one by one", dir, maxEntries, maxListing)
		}
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

// openRegular opens without waiting: a pipe without a writer would wait for one, a terminal would become ours. It looks
// first, because already the opening of a device can do something.
func openRegular(path string) (int, error) {
	if err := regular(path); err != nil {
		return -1, err
	}
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
			if err = readable(st.Mode); err == nil {
				return fd, nil
			}
		}
		_ = unix.Close(fd)
		return -1, err
	}
}

var errSpecial = errors.New("not a regular file")

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
	if at := (*fs.PathError)(nil); errors.As(err, &at) && at.Path != path && !strings.HasPrefix(filepath.Base(at.Path), tempPrefix) {
		why = at.Path + ": " + why
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
	case errors.Is(err, unix.ELOOP):
		code = wire.CodePrecondition
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR),
		errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ESPIPE):
		code = wire.CodeInvalid
	case errors.Is(err, unix.EAGAIN):
		code, why = wire.CodeInvalid, "it has nothing to read now and would wait"
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.ETXTBSY):
		code = wire.CodePrecondition
	case errors.Is(err, context.Canceled), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.ErrClosedPipe):
		code = wire.CodeUnavailable
	}
	return wire.Errorf(code, "%s", strings.ToValidUTF8(doing+" "+path+": "+why, "\uFFFD"))
}
