package proc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// StartTime is when a process started, in clock ticks after boot: with the PID it names a process for good.
func StartTime(pid int) (uint64, error) { return startTime(pid) }

// Terminate asks a process that is no child of ours to end, by a signal (SIGTERM, unless it understands another), and
// waits until it has. Gone already is no error.
func Terminate(ctx context.Context, pid int, signal unix.Signal) error {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find process %d: %w", pid, err)
	}
	w, err := newExitWaiter(pidfd)
	if err != nil {
		return err
	}
	if err := unix.PidfdSendSignal(pidfd, signal, nil, 0); err != nil {
		_ = w.file.Close()
		if errors.Is(err, unix.ESRCH) {
			return nil
		}
		return fmt.Errorf("signal process %d: %w", pid, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = w.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if !w.wait() {
		return context.Cause(ctx)
	}
	return nil
}
