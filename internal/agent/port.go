package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Port is the guest's end of the control channel: a virtio-serial port, used with blocking system calls, which take
// less of a cold machine than the runtime's poller. It stays open for the life of the agent, across forks.
type Port struct{ fd, changes int }

// openPort finds the port by its name.
func openPort(ctx context.Context) (*Port, error) {
	var path string
	err := waitFor(ctx, "virtio-serial port "+portName, func() bool {
		path = findPort("/sys/class/virtio-ports")
		return path != ""
	})
	if err != nil {
		return nil, err
	}
	if err := waitFor(ctx, path, func() bool { _, err := os.Stat(path); return err == nil }); err != nil {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	changes, err := watchPort(fd)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", path, err), unix.Close(fd))
	}
	return &Port{fd: fd, changes: changes}, nil
}

// watchPort makes a descriptor that can be waited on for the port's changes.
func watchPort(fd int) (int, error) {
	changes, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return -1, err
	}
	err = unix.EpollCtl(changes, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(fd)})
	if err != nil {
		return -1, errors.Join(err, unix.Close(changes))
	}
	return changes, nil
}

func findPort(class string) string {
	names, err := filepath.Glob(class + "/*/name")
	if err != nil {
		return ""
	}
	for _, name := range names {
		if b, err := os.ReadFile(name); err == nil && strings.TrimSpace(string(b)) == portName {
			return "/dev/" + filepath.Base(filepath.Dir(name))
		}
	}
	return ""
}

// Read waits for the host. While none is connected the driver's read returns nothing at once and its poll always says
// that the host has hung up. An edge-triggered poll tells of the change only: a machine whose daemon is gone must not
// keep a core busy by asking.
func (p *Port) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(p.fd, b)
		if n > 0 {
			return n, nil
		}
		if again(err) {
			_, err = unix.EpollWait(p.changes, make([]unix.EpollEvent, 1), int(askAgain.Milliseconds()))
		}
		if !again(err) {
			return 0, fmt.Errorf("read control channel: %w", err)
		}
	}
}

// askAgain is how often the port is read without having been told of a change, should one be missed.
const askAgain = 500 * time.Millisecond

func again(err error) bool {
	return err == nil || errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN)
}

// Write waits while no host is connected: what an ended session still had to say is dropped by the next host, which
// looks for the answer to its own preamble.
func (p *Port) Write(b []byte) (int, error) {
	total := 0
	for total < len(b) {
		n, err := unix.Write(p.fd, b[total:])
		if !again(err) {
			return total, fmt.Errorf("write control channel: %w", err)
		}
		total += max(n, 0)
	}
	return total, nil
}
