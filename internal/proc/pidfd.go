package proc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// exitWaiter waits for the end of a process without occupying a thread, which os.Process.Wait would: a hundred
// machines would be a hundred threads.
type exitWaiter struct {
	file *os.File
	raw  syscall.RawConn
}

// newExitWaiter takes over pidfd.
func newExitWaiter(pidfd int) (*exitWaiter, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil {
		_ = unix.Close(pidfd)
		return nil, fmt.Errorf("prepare pidfd: %w", err)
	}
	// A non-blocking descriptor makes os.File use the runtime's poller.
	f := os.NewFile(uintptr(pidfd), "pidfd")
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("prepare pidfd: %w", err)
	}
	return &exitWaiter{f, raw}, nil
}

// wait returns when the process has ended, as a zombie or reaped, or when the deadline set on the file has passed.
func (w *exitWaiter) wait() bool {
	defer func() { _ = w.file.Close() }()
	ended := false
	_ = w.raw.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		ended = n > 0 && err == nil
		return ended
	})
	return ended
}

// Bury ends a process of an earlier daemon, if that PID is still the process that started at startTime, and waits
// until it is gone. Gone already is no error.
func Bury(ctx context.Context, pid int, startedAt uint64) error {
	err := bury(ctx, pid, startedAt)
	if err == nil || errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("end process %d left by an earlier daemon: %w", pid, err)
}

func bury(ctx context.Context, pid int, startedAt uint64) error {
	if pid <= 1 {
		return fmt.Errorf("%d is no process of ours", pid)
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	w, err := newExitWaiter(pidfd)
	if err != nil {
		return err
	}
	// Compared after the pidfd was opened: from here on the process cannot be exchanged for another.
	now, err := startTime(pid)
	if err != nil || now != startedAt {
		_ = w.file.Close()
		return err
	}
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil {
		_ = w.file.Close()
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = w.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if !w.wait() {
		return context.Cause(ctx)
	}
	return nil
}

// startTime is field 22 of /proc/PID/stat.
func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	return parseStartTime(string(b))
}

func parseStartTime(stat string) (uint64, error) {
	// The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
	i := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[i+1:])
	if i < 0 || len(fields) < 20 {
		return 0, fmt.Errorf("unreadable process status %q", stat)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// CopyFile is a copy of a descriptor that another process has. The kernel gives it to who may trace that process.
func CopyFile(pid, fd int) (*os.File, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(pidfd) }()
	copied, err := unix.PidfdGetfd(pidfd, fd, 0)
	if err != nil {
		return nil, fmt.Errorf("copy descriptor %d of process %d: %w", fd, pid, err)
	}
	return os.NewFile(uintptr(copied), "copy"), nil
}
