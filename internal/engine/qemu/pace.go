package qemu

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A drain that reads each page as it comes is woken for each, and QEMU's thread runs all the time beside it: on two
// processors nothing is left for the guest. So the stream is read by the clock, all that has come at a time; between, QEMU
// has to wait when there is no more room.

// paceTick is how often. While little room is given it is also how long a guest may wait for a page that QEMU has been
// told of and cannot send.
const paceTick = time.Millisecond

// errCut is why a stream is not read to its end: nobody wants it any more.
var errCut = errors.New("the stream was cut")

// streamPipe makes the pipe of a stream. Reads of our end give EAGAIN when it is empty. It is kept from the runtime's
// poller: a pipe that somebody polls wakes him at every write.
func streamPipe() (ours, theirs *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("make a pipe: %w", err)
	}
	ours, theirs = os.NewFile(uintptr(fds[0]), "stream"), os.NewFile(uintptr(fds[1]), "stream")
	if err := unix.SetNonblock(fds[0], true); err != nil { // After NewFile, which takes such a file for one to be polled.
		return nil, nil, errors.Join(fmt.Errorf("make a pipe: %w", err), ours.Close(), theirs.Close())
	}
	return ours, theirs, nil
}

// pace reads a stream so.
type pace struct {
	r       io.Reader
	cut     <-chan struct{} // closed to end reads
	hurried <-chan struct{}
	hurry   func() // called once when hurried is closed

	tick *time.Ticker
	slow bool // waits before it reads
	full bool // the last read took as much as it could
}

func (p *pace) Read(b []byte) (int, error) {
	if p.hurry != nil && isClosed(p.hurried) {
		p.hurry()
		p.hurry = nil
	}
	for wait := p.slow && !p.full; ; wait = true {
		if wait {
			select {
			case <-p.tick.C:
			case <-p.cut:
				return 0, errCut
			}
		}
		n, err := p.r.Read(b)
		if errors.Is(err, unix.EAGAIN) {
			continue
		}
		p.full = n == len(b)
		return n, err
	}
}
