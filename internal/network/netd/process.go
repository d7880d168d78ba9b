package netd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Descriptors of the process, as Client starts it.
const (
	fdListener = 3
	fdStage    = 4 // with --outer: the file, and its log
	fdStageLog = 5
)

// processName is what the process is called.
const processName = "forkd-netd"

// Main is the process: `forkd netd`, as Client starts it. staged: the outside is that of tests.
func Main(ctx context.Context, staged bool) error {
	// It was started through a link. For ps and the like; it does not matter whether it is let.
	_ = os.WriteFile("/proc/self/comm", []byte(processName), 0)
	l, err := listenerOf(fdListener)
	if err != nil {
		return fmt.Errorf("this command is started by the daemon alone: %w", err)
	}
	// A packet goes from hand to hand between goroutines, none of which has much to do. The more threads there are for them,
	// the more of it is waking threads, on CPUs that emulated machines want.
	runtime.GOMAXPROCS(max(1, runtime.NumCPU()/2))
	if !staged {
		return NewServer(newWorld()).Serve(ctx, l)
	}
	text, err := io.ReadAll(os.NewFile(fdStage, "stage"))
	if err != nil {
		return errors.Join(err, l.Close())
	}
	s, err := ParseStage(text)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	return NewServer(&stage{Stage: *s, log: os.NewFile(fdStageLog, "log")}).Serve(ctx, l)
}

func listenerOf(fd int) (*net.UnixListener, error) {
	if on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || on != 1 {
		return nil, errors.New("descriptor " + strconv.Itoa(fd) + " is no listening socket")
	}
	f := os.NewFile(uintptr(fd), "listener")
	defer func() { _ = f.Close() }()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(errors.New("descriptor "+strconv.Itoa(fd)+" is no unix socket"), l.Close())
	}
	ul.SetUnlinkOnClose(false)
	return ul, nil
}
