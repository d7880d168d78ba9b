package contexts

import (
	"errors"
	"os"
	"slices"

	"forkd.dev/forkd/internal/guest/wire"
)

// deliver hands output over; it blocks while the caller of the evaluation does not read, and so does the interpreter.
func (c *Context) deliver(kind wire.Kind, data []byte) {
	c.sinkMu.Lock()
	defer c.sinkMu.Unlock()
	if c.sink == nil {
		c.kept.Add(kind, data)
		return
	}
	if c.sink(kind, data) != nil {
		c.sink = discard // the caller is gone
	}
}

func discard(wire.Kind, []byte) error { return nil }

func (c *Context) setSink(sink func(wire.Kind, []byte) error) {
	c.sinkMu.Lock()
	defer c.sinkMu.Unlock()
	c.sink = sink
	if sink != nil && c.kept.Flush(sink) != nil {
		c.sink = discard
	}
}

// errGone is the end of the process seen on the control channel.
var errGone = errors.New("the interpreter is gone")

// maxKept is how large a buffer for requests is kept. It has been used before in a fork, so it is there; fresh memory
// would have to be found by the runtime and the kernel.
const maxKept = 64 << 10

// request sends a message and returns its number. It needs the turn.
func (c *Context) request(op string, args tuple) (int, error) {
	c.sequence++
	b := appendMessage(c.out[:0], op, c.sequence, args)
	_, err := c.ctl.Write(b)
	clear(b) // there are seeds among it
	if c.out = b[:0]; cap(b) > maxKept {
		c.out = nil
	}
	if err != nil {
		return 0, errGone
	}
	return c.sequence, nil
}

// maxReply is more than the driver ever sends.
const maxReply = 32 << 20

// receive waits for the reply of a number, passing over late ones. The error is errGone, errMarshal or that of a read
// deadline. It needs the turn.
func (c *Context) receive(sequence int) (any, error) {
	for {
		b, err := c.frame()
		if err != nil {
			return nil, err
		}
		n, reply, err := parseReply(b)
		if err != nil {
			return nil, err
		}
		if n == sequence {
			return reply, nil
		}
	}
}

// frame reads one frame; it is valid until the next call.
func (c *Context) frame() ([]byte, error) {
	const room = 8 << 10
	if n := copy(c.buf, c.buf[c.parsed:]); cap(c.buf) > maxKept {
		c.buf = append([]byte(nil), c.buf[:n]...)
	} else {
		c.buf = c.buf[:n]
	}
	c.parsed = 0
	for {
		if len(c.buf) >= 4 {
			n := int(c.buf[0])<<24 | int(c.buf[1])<<16 | int(c.buf[2])<<8 | int(c.buf[3])
			if n > maxReply {
				return nil, errMarshal
			}
			if len(c.buf) >= 4+n {
				c.parsed = 4 + n
				return c.buf[4 : 4+n], nil
			}
		}
		if cap(c.buf)-len(c.buf) < room {
			c.buf = slices.Grow(c.buf, max(room, len(c.buf)))
		}
		n, err := c.ctl.Read(c.buf[len(c.buf):cap(c.buf)])
		c.buf = c.buf[:len(c.buf)+n]
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) && c.alive():
			return nil, err
		default:
			return nil, errGone
		}
	}
}
