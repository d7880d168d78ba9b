package netd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/network"
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
	pool := newPool()
	if !staged {
		return NewServer(newWorld(), pool).Serve(ctx, l)
	}
	text, err := io.ReadAll(os.NewFile(fdStage, "stage"))
	if err != nil {
		return errors.Join(err, l.Close())
	}
	s, err := ParseStage(text)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	return NewServer(&stage{Stage: *s, log: os.NewFile(fdStageLog, "log")}, pool).Serve(ctx, l)
}

const (
	// leastShare and mostShare bound what the networks of a host may hold: a quarter of its memory.
	leastShare = 256 << 20
	mostShare  = 8 << 30
)

// newPool is what this host has for the networks of its sandboxes.
func newPool() *network.Pool {
	memory := int64(leastShare)
	var host unix.Sysinfo_t
	if unix.Sysinfo(&host) == nil {
		memory = min(mostShare, max(leastShare, int64(host.Totalram*uint64(host.Unit)/4))) //nolint:gosec // far below 2^63.
	}
	debug.SetMemoryLimit(memory) // What is garbage counts as well.
	files := 1024
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		files = int(min(limit.Cur, 1<<24)) //nolint:gosec // bounded.
	}
	return network.NewPool(memory, files/2) // Links have the other half, see maxLinks.
}

// inUse is how much memory this process has of the system.
func inUse() int64 {
	sample := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(sample)
	return int64(sample[0].Value.Uint64() - sample[1].Value.Uint64()) //nolint:gosec // far below 2^63.
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
