package proc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// What may be done on mounts of a jail. Programs may be run from the directories that every jail has, and from files
// that were named, one by one.
const (
	plain = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	inert = plain | unix.MOUNT_ATTR_NOEXEC
)

// makeMounts makes the mount namespace that those of children are copied from: a root directory with the base alone and
// a /proc that shows each process itself. It runs on a thread that ends with it. To copy a few mounts is quicker
// than to copy and clear away all of the host's for each child.
func (j *Jailer) makeMounts() (*os.File, error) {
	trees := map[string]int{}
	defer func() {
		for _, fd := range trees {
			_ = unix.Close(fd)
		}
	}()
	for _, dir := range j.base {
		if isLink(dir) {
			continue
		}
		fd, err := tree(dir, plain|unix.MOUNT_ATTR_RDONLY)
		if err != nil {
			return nil, err
		}
		trees[dir] = fd
	}
	processes, err := newMount("proc", inert, "hidepid", "ptraceable", "subset", "pid")
	if err != nil {
		return nil, err
	}
	trees["/proc"] = processes
	root, err := newMount("tmpfs", plain, "mode", "0755", "size", "1m", "nr_inodes", "1k")
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(root) }()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("make a mount namespace: %w", err)
	}
	unix.Umask(0o022)
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("keep mounts to itself: %w", err)
	}
	space, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, err
	}
	if err := j.fillRoot(space, root, trees); err != nil {
		_ = space.Close()
		return nil, err
	}
	return space, nil
}

func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&os.ModeSymlink != 0
}

// fillRoot makes a new file system the root of the thread's mount namespace, with the trees in it.
func (j *Jailer) fillRoot(space *os.File, root int, trees map[string]int) error {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return err
	}
	j.device = st.Dev
	// To the root of the namespace, which is not ours if this program was started in another: who enters a namespace comes
	// to its root, and what is to be taken off is that one.
	if err := unix.Setns(int(space.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("go to the root of the mounts: %w", err)
	}
	const stage = "/proc" // Any directory that is there for sure.
	if err := unix.MoveMount(root, "", unix.AT_FDCWD, stage, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	if err := unix.Chdir(stage); err != nil {
		return err
	}
	for _, dir := range j.base {
		if target, err := os.Readlink(dir); err == nil {
			if err := os.Symlink(target, "."+dir); err != nil {
				return err
			}
		}
	}
	for dir, fd := range trees {
		if err := os.MkdirAll("."+dir, 0o755); err != nil {
			return err
		}
		if err := unix.MoveMount(fd, "", unix.AT_FDCWD, "."+dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	// Both the same: the old root ends below the new one, and is taken off there.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the host's root: %w", err)
	}
	return unix.Chdir("/")
}

// tree is a copy of the mounts at and below path, in nobody's namespace yet. The caller closes it.
func tree(path string, attributes uint64) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return -1, fmt.Errorf("take %s: %w", path, err)
	}
	attr := unix.MountAttr{Attr_set: attributes, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("restrict %s: %w", path, err)
	}
	return fd, nil
}

// newMount is a new file system, in nobody's namespace yet; options are names and values in turn.
func newMount(kind string, attributes int, options ...string) (int, error) {
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("make a %s: %w", kind, err)
	}
	defer func() { _ = unix.Close(fs) }()
	for pair := range slices.Chunk(options, 2) {
		if err := unix.FsconfigSetString(fs, pair[0], pair[1]); err != nil {
			return -1, fmt.Errorf("make a %s with %s=%s: %w", kind, pair[0], pair[1], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("make a %s: %w", kind, err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return -1, fmt.Errorf("make a %s: %w", kind, err)
	}
	return fd, nil
}

// piece is a file, directory or device that one child gets in its root.
type piece struct {
	path   string
	fd     int // a mount, or -1
	write  bool
	copy   *os.File    // what is to be copied instead of mounted
	mode   os.FileMode // of what is there on the host
	device uint64
}

// enterMounts moves the thread into a root directory made for one child, and into new namespaces of the other kinds.
func (j *Jailer) enterMounts(cmd *Command) error {
	pieces, err := j.pieces(cmd.Confine, cmd.Jail.Copies)
	defer func() {
		for _, p := range pieces {
			if p.fd >= 0 {
				_ = unix.Close(p.fd)
			}
			if p.copy != nil {
				_ = p.copy.Close()
			}
		}
	}()
	if err != nil {
		return err
	}
	// Threads share root and working directory, and one that does may not change its mounts.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	unix.Umask(0o022) // The thread's own from here on; the daemon's may be one that lets only itself enter directories.
	if err := unix.Setns(int(j.mounts.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the jails' mount namespace: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat("/", &st); err != nil {
		return err
	}
	if st.Dev != j.device {
		return errors.New("the root of the jails' mount namespace is not theirs")
	}
	if err := unix.Unshare(unix.CLONE_NEWNS | spaces); err != nil {
		return fmt.Errorf("make namespaces: %w", err)
	}
	r := childRoot{base: j.base}
	for _, p := range pieces {
		if err := r.put(&p, int(cmd.Jail.ID)); err != nil {
			return fmt.Errorf("%s: %w", p.path, err)
		}
	}
	if cmd.Dir == "" {
		return nil
	}
	// In this file system and not the host's, unless it was named: but with the host's path, by which it is found.
	return r.makeDir(cmd.Dir)
}

// pieces are what a child gets besides the base, those above others first. On failure the caller closes what there is.
func (j *Jailer) pieces(c *Confine, copies []string) ([]piece, error) {
	if c == nil {
		return nil, nil
	}
	var all []piece
	for _, path := range copies {
		f, err := os.Open(path)
		if err != nil {
			return all, err
		}
		all = append(all, piece{path: filepath.Clean(path), fd: -1, copy: f})
	}
	add := func(path string, attributes uint64) error {
		path = filepath.Clean(path)
		write := attributes&unix.MOUNT_ATTR_RDONLY == 0
		there := func(p piece) bool {
			return p.path == path || write && p.write && p.mode == os.ModeDir && strings.HasPrefix(path, p.path+"/")
		}
		if slices.Contains(j.base, path) || slices.ContainsFunc(all, there) {
			return nil
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return &os.PathError{Op: "stat", Path: path, Err: err}
		}
		p := piece{path: path, fd: -1, write: write}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFCHR:
			p.mode, p.device = os.ModeDevice, st.Rdev
		case unix.S_IFDIR:
			p.mode = os.ModeDir
		}
		if p.mode != os.ModeDevice {
			var err error
			if p.fd, err = tree(path, attributes); err != nil {
				return err
			}
		}
		all = append(all, p)
		return nil
	}
	for _, path := range slices.Sorted(slices.Values(c.ReadWrite)) { // directories before what is in them
		if err := add(path, inert); err != nil {
			return all, err
		}
	}
	for _, path := range c.ReadOnly {
		attributes := uint64(inert | unix.MOUNT_ATTR_RDONLY)
		if info, err := os.Stat(path); err == nil && (info.IsDir() || info.Mode()&0o111 != 0) {
			attributes = plain | unix.MOUNT_ATTR_RDONLY
		}
		if err := add(path, attributes); err != nil {
			return all, err
		}
	}
	slices.SortStableFunc(all, func(a, b piece) int { return strings.Compare(a.path, b.path) })
	return all, nil
}

// childRoot is the root directory of one child while it is filled. The root itself is shared by all children, so it has
// only names of the first level; what is below them is in a file system of the child's own.
type childRoot struct {
	base  []string
	areas []string // first parts of paths that have a file system already
}

// put brings a piece to its path.
func (r *childRoot) put(p *piece, owner int) error {
	if p.mode == os.ModeDevice {
		return r.putDevice(p, owner)
	}
	if p.copy != nil {
		return r.putCopy(p)
	}
	if p.mode == os.ModeDir {
		if err := r.makeDir(p.path); err != nil {
			return err
		}
	} else if err := r.makeFile(p.path); err != nil {
		return err
	}
	return unix.MoveMount(p.fd, "", unix.AT_FDCWD, p.path, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// putDevice makes a node that is the child's own: who may open the host's does not matter to it.
func (r *childRoot) putDevice(p *piece, owner int) error {
	if err := r.makeDir(filepath.Dir(p.path)); err != nil {
		return err
	}
	if err := unix.Mknod(p.path, unix.S_IFCHR|0o600, int(p.device)); err != nil {
		return fmt.Errorf("make a device: %w", err)
	}
	return os.Lchown(p.path, owner, owner)
}

func (r *childRoot) putCopy(p *piece) error {
	if err := r.makeDir(filepath.Dir(p.path)); err != nil {
		return err
	}
	f, err := os.OpenFile(p.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o444)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, p.copy)
	return errors.Join(err, f.Close())
}

func (r *childRoot) makeFile(path string) error {
	if err := r.makeDir(filepath.Dir(path)); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return err
	}
	return f.Close()
}

func (r *childRoot) makeDir(dir string) error {
	dir = filepath.Clean(dir)
	if dir == "/" {
		return nil
	}
	area, _, _ := strings.Cut(dir[1:], "/")
	area = "/" + area
	if !slices.Contains(r.areas, area) && !slices.Contains(r.base, area) {
		if err := os.Mkdir(area, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		attributes := inert
		if area == "/dev" {
			attributes &^= unix.MOUNT_ATTR_NODEV
		}
		// Only root can write there, which is this thread until it has filled it.
		fd, err := newMount("tmpfs", attributes, "mode", "0755", "nr_inodes", "1k")
		if err != nil {
			return err
		}
		err = unix.MoveMount(fd, "", unix.AT_FDCWD, area, unix.MOVE_MOUNT_F_EMPTY_PATH)
		_ = unix.Close(fd)
		if err != nil {
			return err
		}
		r.areas = append(r.areas, area)
	}
	return os.MkdirAll(dir, 0o755)
}
