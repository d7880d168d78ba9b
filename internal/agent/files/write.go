package files

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
)

func (s *Service) write(ctx context.Context, st *wire.Stream, req *wire.WriteRequest) error {
	u, path, err := s.locate(req.User, req.Path)
	if err != nil {
		return err
	}
	if req.Mode != nil && *req.Mode > 0o7777 {
		return wire.Errorf(wire.CodeInvalid, "write %s: mode %#o", path, *req.Mode)
	}
	if err := checkMetadata(req.Metadata); err != nil {
		return err
	}
	if strings.HasSuffix(req.Path, "/") {
		return wire.Errorf(wire.CodeInvalid, "write %s: the path names a directory", req.Path)
	}
	var w *writer
	if err := account.As(u, func() (err error) { w, err = create(path, req.Mode, u.UID == 0); return err }); err != nil {
		return failure("write", path, err)
	}
	// The rights to write are in the open file; only names need the user's again.
	err = w.receive(st)
	if err == nil && !w.inPlace() {
		err = setMetadata(int(w.file.Fd()), req.Metadata)
	}
	if err != nil {
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

// tempPrefix begins the names of files that are not complete yet.
const tempPrefix = ".forkd-"

// writer is a file that appears under its name when it is complete.
type writer struct {
	file   *os.File
	target string
	temp   string // empty: target itself
}

// create opens a temporary file beside the target. A link is followed: its target is replaced, not the link. Settings of
// the kernel's are written as they are, by root: what may be written to them depends on who writes, not on who opened.
func create(path string, mode *uint32, root bool) (*writer, error) {
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
		if root && virtual(target) {
			file, err := os.OpenFile(target, os.O_WRONLY|os.O_TRUNC, 0)
			return &writer{file: file, target: target}, err
		}
	}
	if mode != nil {
		perm = *mode
	}
	random := make([]byte, 8)
	_, _ = rand.Read(random)
	temp := filepath.Join(filepath.Dir(target), tempPrefix+hex.EncodeToString(random))
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
	if w.inPlace() {
		return err
	}
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
	if !w.inPlace() {
		_ = os.Remove(w.temp)
	}
}

func (w *writer) inPlace() bool { return w.temp == "" }

// virtual reports whether a file is a setting of the kernel's, beside which no other file can be made.
func virtual(path string) bool {
	var st unix.Statfs_t
	if unix.Statfs(path, &st) != nil {
		return false
	}
	switch st.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC,
		unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC:
		return true
	}
	return false
}
