// Package pipe reads what a child writes, with a way to be sure that nothing is left in the pipe at a given moment. It
// does not know where the data goes. Only the agent's services import it.
package pipe

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/quick"
)

// Outlet is the read end of a pipe or the master of a pty.
type Outlet struct {
	file    *os.File
	conn    syscall.RawConn
	deliver func([]byte)

	// turn is held from before a read until its data has been delivered: who holds it knows that all that was ever
	// read has arrived, in order.
	turn *sync.Mutex
	buf  []byte
	eof  bool
}

// NewOutlet makes an outlet of a descriptor, which it owns from then on, also when it fails. Deliver gets at most size
// bytes at a time, valid during the call; it may block, and the writer is then held back.
func NewOutlet(fd int, name string, size int, deliver func([]byte)) (*Outlet, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("prepare %s: %w", name, err)
	}
	file := os.NewFile(uintptr(fd), name)
	conn, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare %s: %w", name, err), file.Close())
	}
	return &Outlet{file: file, conn: conn, deliver: deliver, turn: &sync.Mutex{}, buf: make([]byte, size)}, nil
}

// Share makes outlets take turns: what is read from one has been delivered before anything is read from another. So a
// writer that waits until one pipe is empty before it writes to the next finds both in the order of writing. Call it
// before Run.
func Share(outlets ...*Outlet) {
	for _, o := range outlets[1:] {
		o.turn = outlets[0].turn
	}
}

// File is the descriptor, for writing to a pty or resizing it.
func (o *Outlet) File() *os.File { return o.file }

// Run reads and delivers until the last writer is gone or Close.
func (o *Outlet) Run() {
	for o.next() {
	}
}

func (o *Outlet) next() bool {
	var n int
	err := o.conn.Read(func(fd uintptr) bool {
		o.turn.Lock()
		var again bool
		if n, again = o.read(int(fd)); again {
			o.turn.Unlock()
			return false
		}
		return true
	})
	if err != nil {
		return false // closed: the turn is free, the last read said again or never happened
	}
	defer o.turn.Unlock()
	if n > 0 {
		o.deliver(o.buf[:n])
	}
	return !o.eof
}

// read needs turn.
func (o *Outlet) read(fd int) (n int, again bool) {
	if o.eof {
		return 0, false
	}
	for {
		n, err := quick.Read(fd, o.buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return 0, true
		case err != nil || n <= 0:
			// EIO is how a pty says that its last user is gone.
			o.eof = true
			return 0, false
		}
		return n, false
	}
}

// Drain delivers what is in the pipe now, beside Run: whatever was written before the call has been delivered when it
// returns. A writer that goes on writing cannot hold it: no more is read than fits into the pipe.
func (o *Outlet) Drain() (eof bool) {
	o.turn.Lock()
	defer o.turn.Unlock()
	err := o.conn.Control(func(fd uintptr) {
		limit := 0
		for first := true; first || limit > 0; first = false {
			n, again := o.read(int(fd))
			if again || o.eof {
				return
			}
			if first { // usually there is nothing
				limit = capacity(int(fd))
			}
			o.deliver(o.buf[:n])
			limit -= n
		}
	})
	return err != nil || o.eof
}

func capacity(fd int) int {
	const pty = 128 << 10 // more than the kernel holds for one
	n, err := unix.FcntlInt(uintptr(fd), unix.F_GETPIPE_SZ, 0)
	if err != nil || n <= 0 {
		return pty
	}
	return n
}

// Close ends Run. It may be called more than once.
func (o *Outlet) Close() { _ = o.file.Close() }

// New makes a pipe whose ends are closed on exec. The read end belongs into an Outlet; the write end stays blocking, as
// programs expect of their output.
func New() (read, write int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return -1, -1, fmt.Errorf("make a pipe: %w", err)
	}
	return p[0], p[1], nil
}
