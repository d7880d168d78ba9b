package quick

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is a socket or a device that is read and written through the runtime's poller: a wait takes no thread, and the
// goroutine that goes on after it needs none woken up.
type Conn struct {
	file *os.File
	raw  syscall.RawConn
	// patient: a read of nothing does not mean the end. A virtio port reads so while no host is connected; it tells the
	// poller when that changes.
	patient bool
}

// NewConn takes a descriptor, which it owns from then on, also when it fails.
func NewConn(fd int, name string, patient bool) (*Conn, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare %s: %w", name, err), unix.Close(fd))
	}
	file := os.NewFile(uintptr(fd), name)
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare %s: %w", name, err), file.Close())
	}
	return &Conn{file: file, raw: raw, patient: patient}, nil
}

// Read implements io.Reader.
func (c *Conn) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	werr := c.raw.Read(func(fd uintptr) bool {
		n, err = Read(int(fd), p)
		return !errors.Is(err, unix.EAGAIN) && (n > 0 || err != nil || !c.patient)
	})
	switch {
	case werr != nil:
		return 0, werr
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// Write implements io.Writer.
func (c *Conn) Write(p []byte) (int, error) {
	total := 0
	for total < len(p) {
		var n int
		var err error
		werr := c.raw.Write(func(fd uintptr) bool {
			n, err = Write(int(fd), p[total:])
			return !errors.Is(err, unix.EAGAIN)
		})
		if werr != nil {
			return total, werr
		}
		if err != nil {
			return total, err
		}
		total += n
	}
	return total, nil
}

// SetReadDeadline is that of os.File.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.file.SetReadDeadline(t) }

// SetDeadline is that of os.File.
func (c *Conn) SetDeadline(t time.Time) error { return c.file.SetDeadline(t) }

// Close closes the descriptor; who waits for it stops waiting.
func (c *Conn) Close() error { return c.file.Close() }

// Writable waits until a write would not wait.
func (c *Conn) Writable() error {
	var err error
	werr := c.raw.Write(func(fd uintptr) bool {
		// Asked each time: the poller may have told before anybody waited.
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		var n int
		n, err = unix.Poll(p, 0)
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	return errors.Join(werr, err)
}
