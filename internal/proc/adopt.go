package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrGone says that there is no process to adopt: it has ended, or its number belongs to another now.
	ErrGone = errors.New("the process is gone")
	// ErrUnknownExit is Err of an adopted process that ended by itself: only the parent is told how a process ended.
	ErrUnknownExit = errors.New("it ended, how is not known because an earlier daemon had started it")
)

// Adopt takes hold of a process that an earlier daemon started: PID and start time must name it, and its program's file
// must have one of the names. What it wrote can still be read where it was started by Start. It is not ended by a failure here.
func Adopt(ctx context.Context, pid int, startedAt uint64, names ...string) (*Process, error) {
	p, err := adopt(ctx, pid, startedAt, names)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrProcessDone) {
		err = ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("adopt process %d: %w", pid, err)
	}
	return p, nil
}

func adopt(ctx context.Context, pid int, startedAt uint64, names []string) (*Process, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if pid <= 1 {
		return nil, fmt.Errorf("%d is no process of ours", pid)
	}
	child, err := os.FindProcess(pid) // holds a pidfd of its own
	if err != nil {
		return nil, err
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, errors.Join(err, child.Release())
	}
	exit, err := newExitWaiter(pidfd)
	if err != nil {
		return nil, errors.Join(err, child.Release())
	}
	// Looked at after both descriptors were opened: from here on they cannot mean another process than the one seen.
	name, out, err := inspect(pid, startedAt, names)
	if err != nil {
		return nil, errors.Join(err, exit.file.Close(), child.Release())
	}
	p := &Process{
		name: name, pid: pid, startTime: startedAt, output: out, child: child, adopted: true, exit: exit, done: make(chan struct{}),
	}
	go p.wait()
	return p, nil
}

// inspect says whether a process is the one meant, and opens its output.
func inspect(pid int, startedAt uint64, names []string) (string, *output, error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	now, err := startTime(pid)
	if err != nil {
		return "", nil, err
	}
	if now != startedAt {
		return "", nil, ErrGone
	}
	exe, err := os.Readlink(filepath.Join(dir, "exe")) // fails for one that only waits to be reaped
	if err != nil {
		return "", nil, err
	}
	// The program's file may have been replaced since, by an upgrade.
	name := filepath.Base(strings.TrimSuffix(exe, " (deleted)"))
	if !slices.Contains(names, name) {
		return "", nil, fmt.Errorf("it runs %s and not %s", name, strings.Join(names, " or "))
	}
	out := &output{reopened: true}
	// Only what newOutput makes: opening something else might block, or act on a device.
	if link, err := os.Readlink(filepath.Join(dir, "fd", "2")); err == nil && strings.HasPrefix(link, "/memfd:"+outputName) {
		if out.file, err = os.Open(filepath.Join(dir, "fd", "2")); err != nil {
			return "", nil, fmt.Errorf("open its output: %w", err)
		}
	}
	return name, out, nil
}

// written is how far an output that was opened again has come. The child's offset cannot be read once it has ended; the
// file was made of zeros and has a fixed size.
func written(f *os.File, limit int64) []byte {
	info, err := f.Stat()
	if err != nil {
		return nil
	}
	b := make([]byte, min(info.Size(), maxReopened))
	n, _ := f.ReadAt(b, 0)
	b = bytes.TrimRight(b[:n], "\x00")
	return b[max(0, int64(len(b))-limit):]
}

// maxReopened bounds what is read of an output whose size an earlier daemon has chosen.
const maxReopened = 1 << 20

// Detach gives up a process, which runs on: Done is closed, Err is nil, and Kill does nothing any more. For a process
// that has ended it does nothing.
func (p *Process) Detach() {
	_ = p.exit.file.SetReadDeadline(time.Unix(1, 0))
	<-p.done
}
