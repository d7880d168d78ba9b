package conformance

import (
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// openPTY makes a terminal of this machine's: the test has the master, the program the slave.
func openPTY() (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	master = os.NewFile(uintptr(fd), "master")
	// SAFETY: both ioctls take an int by pointer, which these wrappers keep alive.
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, err
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, nil, err
	}
	slave, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	return master, slave, err
}

func setSize(f *os.File, cols, rows uint16) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = conn.Control(func(fd uintptr) {
		// SAFETY: the wrapper passes a pointer to a live winsize of the kernel's layout.
		failed = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: cols, Row: rows})
	})
	if err != nil {
		return err
	}
	return failed
}

func settings(f *os.File) (unix.Termios, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return unix.Termios{}, err
	}
	var t *unix.Termios
	var failed error
	err = conn.Control(func(fd uintptr) {
		// SAFETY: the wrapper passes a pointer to a termios of the kernel's layout.
		t, failed = unix.IoctlGetTermios(int(fd), unix.TCGETS)
	})
	if err := errors.Join(err, failed); err != nil {
		return unix.Termios{}, err
	}
	return *t, nil
}
