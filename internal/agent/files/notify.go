package files

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// maxDirs bounds the directories of one watch: the kernel keeps an inode in memory for each.
	maxDirs = 8192
	// maxBatch bounds what one look at a new directory can give.
	maxBatch = 20000
	// watchMask is what a directory is watched for. A file that has lost its name is no longer in it.
	watchMask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_DELETE |
		unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
)

// errLost ends a watch that has missed something. Silence would be taken for "nothing happened".
var errLost = wire.Errorf(wire.CodeExhausted, "events were lost, there were too many; watch again, then look what is there")

// notifier turns the kernel's events of directories into events of a tree. The kernel reports a directory's entries only,
// so each directory of the tree is watched, and a new one also read: what was made in it before it was watched has no
// event of its own. It is used by one goroutine.
type notifier struct {
	s         *Service
	u         *account.User
	root      string
	recursive bool
	entries   bool

	file *os.File // inotify; in a fork of the machine it goes on as it was
	raw  syscall.RawConn

	paths map[int32]string // watches and where they are, relative to root, which is "."
	wds   map[string]int32
	// found are the names that reading a directory gave; their own events may still be on the way, and are dropped.
	found map[string]struct{}
	// moving is a directory that has left its place and not yet come to another.
	moving       string
	movingCookie uint32
	// held is what happened in it since: told when it has come, for the kernel does not queue the two as one.
	held []happening

	batch []wire.FileEvent
	gone  bool // root is
	names namer
}

// happening is an event as the kernel reports it.
type happening struct {
	wd           int32
	mask, cookie uint32
	name         string
}

// newNotifier begins to watch: whatever happens after it has returned is reported.
func (s *Service) newNotifier(u *account.User, req *wire.WatchRequest, root string) (*notifier, error) {
	n := &notifier{
		s: s, u: u, root: root, recursive: req.Recursive, entries: req.IncludeEntry,
		paths: map[int32]string{}, wds: map[string]int32{}, found: map[string]struct{}{},
	}
	err := account.As(u, func() error {
		info, err := os.Stat(root)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return unix.ENOTDIR
		}
		if !req.AllowNetworkMounts && remote(root) {
			return wire.Errorf(wire.CodeInvalid, "watch %s: it is on a network file system, which does not report what others do; allow network mounts to watch it all the same", root)
		}
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if errors.Is(err, unix.EMFILE) {
			return wire.Errorf(wire.CodeExhausted, "watch %s: fs.inotify.max_user_instances is reached", root)
		}
		if err != nil {
			return err
		}
		n.file = os.NewFile(uintptr(fd), "inotify")
		if n.raw, err = n.file.SyscallConn(); err != nil {
			return err
		}
		return n.add(".", false)
	})
	if err != nil {
		n.close()
		return nil, failure("watch", root, err)
	}
	return n, nil
}

func (n *notifier) close() {
	if n.file != nil {
		_ = n.file.Close()
	}
}

// run delivers events until deliver fails, ctx ends or the directory is gone, which is no error.
func (n *notifier) run(ctx context.Context, deliver func([]wire.FileEvent) error) error {
	defer n.close()
	stop := context.AfterFunc(ctx, func() { _ = n.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, 8<<10)
	for !n.gone {
		got, err := n.read(buf)
		if err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return failure("watch", n.root, err)
		}
		n.batch = n.batch[:0]
		work := func() error { return n.take(buf[:got]) }
		// Only what looks at files needs the user's rights, and with them a thread of its own.
		if n.entries || n.recursive {
			err = account.As(n.u, work)
		} else {
			err = work()
		}
		if len(n.batch) > 0 {
			if err := deliver(n.batch); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// read waits for events.
func (n *notifier) read(buf []byte) (int, error) {
	var got int
	var err error
	werr := n.raw.Read(func(fd uintptr) bool {
		for {
			got, err = unix.Read(int(fd), buf)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if errors.Is(err, unix.EAGAIN) {
				n.idle(int(fd))
				return false
			}
			return true
		}
	})
	return got, errors.Join(werr, err)
}

// idle is called when every event there was has been seen.
func (n *notifier) idle(fd int) {
	clear(n.found)
	n.left(fd)
}

// left forgets a directory that has not come to another place: it is outside, and so is what happened in it since.
func (n *notifier) left(fd int) {
	if n.moving != "" {
		n.drop(fd, n.moving)
		n.moving, n.held = "", nil
	}
}

// arrived gives a directory its new place, and then tells what happened in it on the way.
func (n *notifier) arrived(path string) error {
	n.move(n.moving, path)
	held := n.held
	n.moving, n.held = "", nil
	if err := n.emit(wire.EventCreate, path); err != nil {
		return err
	}
	for _, h := range held {
		if err := n.event(h); err != nil {
			return err
		}
	}
	return nil
}

// take handles what one read gave.
func (n *notifier) take(b []byte) error {
	if n.entries {
		n.names = n.s.namer()
	}
	const header = unix.SizeofInotifyEvent
	for len(b) >= header {
		size := int(binary.NativeEndian.Uint32(b[12:]))
		if len(b) < header+size {
			break
		}
		name, _, _ := bytes.Cut(b[header:header+size], []byte{0})
		h := happening{
			int32(binary.NativeEndian.Uint32(b)), binary.NativeEndian.Uint32(b[4:]), binary.NativeEndian.Uint32(b[8:]), string(name),
		}
		if err := n.event(h); err != nil {
			return err
		}
		b = b[header+size:]
	}
	return nil
}

func (n *notifier) event(h happening) error {
	mask, name := h.mask, h.name
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return errLost
	}
	dir, known := n.paths[h.wd]
	switch {
	case known && n.moving != "" && within(dir, n.moving):
		if len(n.held) >= maxBatch {
			return errLost
		}
		n.held = append(n.held, h)
		return nil
	case mask&unix.IN_IGNORED != 0:
		delete(n.paths, h.wd)
		if n.wds[dir] == h.wd {
			delete(n.wds, dir)
		}
		if known && dir == "." && !n.gone { // unmounted, for one
			n.gone = true
			return n.emit(wire.EventRemove, ".")
		}
		return nil
	case !known || n.gone:
		return nil
	case name == "":
		return n.self(dir, mask)
	}
	path := join(dir, name)
	isDir := mask&unix.IN_ISDIR != 0
	switch {
	case mask&unix.IN_CREATE != 0:
		if path == n.moving {
			n.left(n.fd()) // its name was free: the kernel has told both halves of a move by then
		}
		if _, seen := n.found[path]; seen {
			delete(n.found, path)
			return nil
		}
		return n.appeared(path, isDir)
	case mask&unix.IN_MOVED_TO != 0:
		delete(n.found, path)
		if isDir && n.moving != "" && h.cookie == n.movingCookie {
			return n.arrived(path)
		}
		if isDir {
			// It may be the same one, back from outside: the kernel would give it the watches that are to be dropped.
			n.left(n.fd())
		}
		return n.appeared(path, isDir)
	case mask&unix.IN_MOVED_FROM != 0:
		delete(n.found, path)
		if isDir && n.recursive {
			n.left(n.fd())
			n.moving, n.movingCookie = path, h.cookie
		}
		return n.emit(wire.EventRename, path)
	case mask&unix.IN_DELETE != 0:
		delete(n.found, path)
		return n.emit(wire.EventRemove, path)
	case mask&unix.IN_MODIFY != 0:
		return n.emit(wire.EventWrite, path)
	case mask&unix.IN_ATTRIB != 0:
		return n.emit(wire.EventChmod, path)
	}
	return nil
}

// self handles what happens to a watched directory itself. Of those below the root their parents tell.
func (n *notifier) self(dir string, mask uint32) error {
	switch {
	case dir != ".":
		return nil
	case mask&(unix.IN_DELETE_SELF|unix.IN_UNMOUNT) != 0:
		n.gone = true
		return n.emit(wire.EventRemove, ".")
	case mask&unix.IN_MOVE_SELF != 0:
		return n.emit(wire.EventRename, ".")
	case mask&unix.IN_ATTRIB != 0:
		return n.emit(wire.EventChmod, ".")
	}
	return nil
}

// appeared reports a new name, and what is below it.
func (n *notifier) appeared(path string, isDir bool) error {
	if err := n.emit(wire.EventCreate, path); err != nil || !isDir || !n.recursive {
		return err
	}
	return n.add(path, true)
}

// add watches a directory and, recursively, those in it. With report their entries are reported as created.
func (n *notifier) add(path string, report bool) error {
	full := n.full(path)
	mask := uint32(watchMask)
	if path != "." {
		mask |= unix.IN_DONT_FOLLOW
	}
	if len(n.paths) >= maxDirs {
		return wire.Errorf(wire.CodeExhausted, "watch %s: more than %d directories; watch parts of it", n.root, maxDirs)
	}
	wd, err := unix.InotifyAddWatch(n.fd(), full, mask)
	if errors.Is(err, unix.ENOSPC) {
		return wire.Errorf(wire.CodeExhausted, "watch %s: fs.inotify.max_user_watches is reached", n.root)
	}
	if err != nil {
		if path == "." {
			return err
		}
		return nil // gone again, or not for this user to see
	}
	n.paths[int32(wd)] = path
	n.wds[path] = int32(wd)
	if !n.recursive {
		return nil
	}
	entries, err := os.ReadDir(full)
	if err != nil && path == "." {
		return err
	}
	for _, e := range entries { // as far as it could be read
		below := join(path, e.Name())
		if report {
			n.found[below] = struct{}{}
			if err := n.emit(wire.EventCreate, below); err != nil {
				return err
			}
		}
		if e.IsDir() {
			if err := n.add(below, report); err != nil {
				return err
			}
		}
	}
	return nil
}

// fd does not make the descriptor blocking, as os.File's does.
func (n *notifier) fd() int {
	fd := -1
	_ = n.raw.Control(func(f uintptr) { fd = int(f) })
	return fd
}

// move renames the watches of a directory that is elsewhere in the tree now.
func (n *notifier) move(from, to string) {
	for path, wd := range n.below(from) {
		delete(n.wds, path)
		path = to + strings.TrimPrefix(path, from)
		n.wds[path], n.paths[wd] = wd, path
	}
}

// drop forgets a directory that is no longer in the tree.
func (n *notifier) drop(fd int, dir string) {
	for path, wd := range n.below(dir) {
		delete(n.wds, path)
		delete(n.paths, wd)
		_, _ = unix.InotifyRmWatch(fd, uint32(wd))
	}
}

func (n *notifier) below(dir string) map[string]int32 {
	found := map[string]int32{}
	for path, wd := range n.wds {
		if within(path, dir) {
			found[path] = wd
		}
	}
	return found
}

func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

func (n *notifier) emit(kind, path string) error {
	if len(n.batch) >= maxBatch {
		return errLost
	}
	e := wire.FileEvent{Name: wire.EncodeName(path), Type: kind}
	if last := len(n.batch) - 1; last >= 0 && kind == wire.EventWrite && n.batch[last].Name == e.Name && n.batch[last].Type == kind {
		return nil // a file is written in pieces
	}
	if n.entries && kind != wire.EventRemove && kind != wire.EventRename {
		full := n.full(path)
		if info, err := os.Lstat(full); err == nil {
			entry := n.names.describe(full, info)
			e.Entry = &entry
		}
	}
	n.batch = append(n.batch, e)
	return nil
}

func (n *notifier) full(path string) string {
	if path == "." {
		return n.root
	}
	return filepath.Join(n.root, path)
}

func join(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

// remote reports whether a path is on a file system that others change as well.
func remote(path string) bool {
	const smb, cifs, smb2 = 0x517b, 0xff534d42, 0xfe534d42
	var st unix.Statfs_t
	if unix.Statfs(path, &st) != nil {
		return false
	}
	switch uint32(st.Type) {
	case unix.NFS_SUPER_MAGIC, unix.FUSE_SUPER_MAGIC, smb, cifs, smb2, unix.V9FS_MAGIC, unix.CEPH_SUPER_MAGIC:
		return true
	}
	return false
}
