package proc

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Rights on files, by what they are given for. Anything a ruleset handles and no rule grants is refused.
const (
	readRights  = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR | unix.LANDLOCK_ACCESS_FS_EXECUTE
	writeRights = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR |
		unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	// fileRights are those the kernel accepts in a rule for something that is no directory.
	fileRights = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// handled is what a ruleset of this kernel's Landlock version can restrict.
func handled(abi int) unix.LandlockRulesetAttr {
	var a unix.LandlockRulesetAttr
	a.Handled_access_fs = unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1 // Version 1: everything up to it.
	if abi >= 2 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_REFER
	}
	if abi >= 3 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if abi >= 4 {
		a.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi >= 5 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if abi >= 6 {
		a.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	return a
}

// landlockABI is the kernel's Landlock version, or an error where it has none.
func landlockABI() (int, error) {
	// SAFETY: no pointer is passed; with this flag the call only returns a number.
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0, errno
	}
	return int(abi), nil
}

// ruleset makes a Landlock ruleset; the caller owns the file.
func ruleset(c *Confine, abi int, dials bool) (*os.File, error) {
	attr := handled(abi)
	if dials {
		attr.Handled_access_net = 0
	}
	// SAFETY: attr outlives the call; an older kernel accepts the larger size because the fields it does not know
	// are zero.
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return nil, fmt.Errorf("create ruleset: %w", errno)
	}
	rules := os.NewFile(fd, "landlock")
	for _, path := range c.ReadOnly {
		if err := addRule(rules, path, readRights&attr.Handled_access_fs); err != nil {
			_ = rules.Close()
			return nil, err
		}
	}
	for _, path := range c.ReadWrite {
		if err := addRule(rules, path, writeRights&attr.Handled_access_fs); err != nil {
			_ = rules.Close()
			return nil, err
		}
	}
	return rules, nil
}

func addRule(rules *os.File, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= fileRights
	}
	attr := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	// SAFETY: attr outlives the call and has the layout of the kernel's packed struct: the fields come first, the
	// kernel reads no padding.
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, rules.Fd(), unix.LANDLOCK_RULE_PATH_BENEATH,
		uintptr(unsafe.Pointer(&attr)), 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("allow %s: %w", path, errno)
	}
	return nil
}

// restrictThread puts the calling thread, and what it starts, under the ruleset for ever.
func restrictThread(rules *os.File) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	// SAFETY: no pointer is passed.
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, rules.Fd(), 0, 0); errno != 0 {
		return fmt.Errorf("restrict thread: %w", errno)
	}
	return nil
}
