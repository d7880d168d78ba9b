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
type Port struct{ fd int }

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
	return &Port{fd: fd}, nil
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

// Read waits for the host. While no host is connected the driver's read returns nothing at once, and its poll a
// hang-up: there is no event to wait for, so the port is asked again, soon at first, for a restored machine is being
// waited for.
func (p *Port) Read(b []byte) (int, error) {
	var tick *time.Ticker
	for idle := 0; ; idle++ {
		n, err := unix.Read(p.fd, b)
		switch {
		case n > 0:
			if tick != nil {
				tick.Stop()
			}
			return n, nil
		case err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN):
			return 0, fmt.Errorf("read control channel: %w", err)
		}
		switch idle {
		case 0:
			tick = time.NewTicker(time.Millisecond)
		case 500:
			tick.Reset(20 * time.Millisecond)
		}
		<-tick.C
	}
}

// Write waits while no host is connected: what an ended session still had to say is dropped by the next host, which
// looks for the answer to its own preamble.
func (p *Port) Write(b []byte) (int, error) {
	total := 0
	for total < len(b) {
		n, err := unix.Write(p.fd, b[total:])
		if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return total, fmt.Errorf("write control channel: %w", err)
		}
		total += max(n, 0)
	}
	return total, nil
}
