package process

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
)

// openPTY makes a pty whose slave belongs to u.
func openPTY(u *account.User, size wire.PTYSize) (master, slave int, err error) {
	master, err = unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("open /dev/ptmx: %w", err)
	}
	slave, err = openSlave(master)
	if err == nil {
		if os.Geteuid() == 0 {
			err = unix.Fchown(slave, int(u.UID), int(u.GID))
		}
		if err == nil {
			err = resizePTY(master, size)
		}
		if err == nil {
			err = utf8PTY(slave)
		}
		if err != nil {
			_ = unix.Close(slave)
		}
	}
	if err != nil {
		_ = unix.Close(master)
		return -1, -1, err
	}
	return master, slave, nil
}

func openSlave(master int) (int, error) {
	// SAFETY: both ioctls take an int by pointer, which these wrappers keep alive.
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, fmt.Errorf("unlock pty: %w", err)
	}
	n, err := unix.IoctlGetInt(master, unix.TIOCGPTN)
	if err != nil {
		return -1, fmt.Errorf("number of pty: %w", err)
	}
	path := "/dev/pts/" + strconv.Itoa(n)
	slave, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	return slave, nil
}

// utf8PTY has the kernel erase whole characters, not bytes, in lines that are edited.
func utf8PTY(slave int) error {
	// SAFETY: both wrappers pass a pointer to a live termios of the kernel's layout.
	t, err := unix.IoctlGetTermios(slave, unix.TCGETS)
	if err == nil {
		t.Iflag |= unix.IUTF8
		err = unix.IoctlSetTermios(slave, unix.TCSETS, t)
	}
	if err != nil {
		return fmt.Errorf("set up pty: %w", err)
	}
	return nil
}

// resizePTY sets the size in characters; 0 means 80 by 24.
func resizePTY(fd int, size wire.PTYSize) error {
	if size.Cols > 1<<16-1 || size.Rows > 1<<16-1 {
		return wire.Errorf(wire.CodeInvalid, "terminal of %d by %d characters; at most 65535 each", size.Cols, size.Rows)
	}
	if size.Cols == 0 {
		size.Cols = 80
	}
	if size.Rows == 0 {
		size.Rows = 24
	}
	// SAFETY: the wrapper passes a pointer to a live winsize of the kernel's layout.
	err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(size.Cols), Row: uint16(size.Rows)})
	if err != nil {
		return fmt.Errorf("resize pty: %w", err)
	}
	return nil
}
