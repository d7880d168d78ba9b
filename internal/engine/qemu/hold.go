package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine/qemu/qmp"
)

// A background snapshot begins with what needs no pause: a new thread reads a byte of every page of the RAM (30 ms for
// 1.5 GiB), and writes the stream's header; only then does it stop the CPUs. So it is begun with the machine running, on
// a stream that is full: the write of the header waits until the machine has been stopped and its disk switched.

// heldBefore is the first major version of which some write the header with QEMU's big lock held, under which it takes no
// commands as long as the write waits: 8.2 and later do.
const heldBefore = 8

// holdTick is how often it is looked where the thread is, and holdLimit for how long. Nothing depends on its having come
// to the write: the less of its way is left the shorter is the pause.
const (
	holdTick  = 500 * time.Microsecond
	holdLimit = 2 * time.Second
)

// canHold reports whether this QEMU can be held so.
func canHold(version string) bool {
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	return err == nil && n < heldBefore
}

// dam makes a pipe full, by its end for writing, and says which pipe it is. The write that finds it so goes on when the
// flood is opened.
func dam(theirs *os.File) (inode uint64, err error) {
	fd := int(theirs.Fd())
	n, err := unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, os.Getpagesize())
	if err != nil {
		return 0, fmt.Errorf("make a pipe small: %w", err)
	}
	if _, err := theirs.Write(make([]byte, n)); err != nil {
		return 0, fmt.Errorf("fill a pipe: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("look at a pipe: %w", err)
	}
	return st.Ino, nil
}

// undam takes what dam put into the pipe.
func undam(ours *os.File) error {
	_, err := io.ReadFull(ours, make([]byte, os.Getpagesize()))
	return err
}

// narrow gives a pipe the customary room.
func narrow(pipe *os.File) { resize(pipe, pipeBytesFirst) }

// widen gives a pipe the room that QEMU may be ahead of the drain.
func widen(pipe *os.File) {
	if !resize(pipe, pipeBytes) {
		resize(pipe, pipeBytesFewer) // Refused to a user of many pipes; then QEMU waits for the drain more often.
	}
}

func resize(pipe *os.File, bytes int) (ok bool) {
	// Not by Fd, which would make reads of our end block for good: nothing could end a drain then but QEMU.
	raw, err := pipe.SyscallConn()
	if err != nil {
		return true // it was closed
	}
	_ = raw.Control(func(fd uintptr) {
		_, err := unix.FcntlInt(fd, unix.F_SETPIPE_SZ, bytes)
		ok = err == nil
	})
	return ok
}

// begin has QEMU begin its snapshot, and waits until the header is all that is left before its instant.
func (l *liveCapture) begin(ctx context.Context) error {
	ctx, cancel := answerContext(ctx)
	defer cancel()
	l.m.copying.Store(true)
	err := l.m.monitor.Do(ctx, qmp.Command{Name: "migrate", Args: map[string]string{"uri": "fd:" + captureFD}}, nil)
	if err != nil {
		return err
	}
	ctx, enough := context.WithTimeout(ctx, holdLimit)
	defer enough()
	tick := time.NewTicker(holdTick)
	defer tick.Stop()
	for !waitsToWrite(l.m.process.PID(), l.pipe) {
		select {
		case <-tick.C:
		case <-l.m.done:
			return l.m.dead()
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// waitsToWrite reports whether a thread of a process stands in a call that writes to a pipe, whatever its name: QEMU gives
// its threads none. Where that cannot be seen it says yes: there is nothing to wait for.
func waitsToWrite(pid int, pipe uint64) bool {
	of := fmt.Sprintf("/proc/%d/", pid)
	threads, err := os.ReadDir(of + "task")
	if err != nil {
		return true
	}
	for _, t := range threads {
		text, err := os.ReadFile(of + "task/" + t.Name() + "/syscall")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) { // ended meanwhile
			continue
		}
		if err != nil {
			return true
		}
		call := strings.Fields(string(text)) // or "running"
		if len(call) < 2 || call[0] != strconv.Itoa(unix.SYS_WRITE) && call[0] != strconv.Itoa(unix.SYS_WRITEV) {
			continue
		}
		fd, err := strconv.ParseUint(strings.TrimPrefix(call[1], "0x"), 16, 31)
		if err != nil {
			continue
		}
		if name, err := os.Readlink(of + "fd/" + strconv.FormatUint(fd, 10)); err == nil && name == fmt.Sprintf("pipe:[%d]", pipe) {
			return true
		}
	}
	return false
}
