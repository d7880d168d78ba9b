package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/quick"
)

// Port is the guest's end of the control channel: a virtio-serial port. It stays open for the life of the agent, across
// forks. While no host is connected reads and writes wait: the driver tells the poller when one comes. What an ended
// session still had to say is dropped by the next host, which looks for the answer to its own preamble.
type Port = quick.Conn

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
	return quick.NewConn(fd, path, true)
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
