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

func (c *Context) setSink(sink func(wire.Kind, []byte) error, show func(*wire.EvalEvent) error) {
	c.sinkMu.Lock()
	defer c.sinkMu.Unlock()
	c.sink, c.show = sink, show
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
func (c *Context) request(appendTo func(b []byte, sequence int) []byte) (int, error) {
	c.sequence++
	b := appendTo(c.out[:0], c.sequence)
	err := c.write(b)
	clear(b) // there are seeds among it
	if c.out = b[:0]; cap(b) > maxKept {
		c.out = nil
	}
	if err != nil {
		return 0, errGone
	}
	return c.sequence, nil
}

func (c *Context) write(b []byte) error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	_, err := c.ctl.Write(b)
	return err
}

// maxReply is more than the driver ever sends.
const maxReply = 32 << 20

// receive waits for the reply of a number, passing over late ones and handing over what the driver shows meanwhile. The
// error is errGone, errMarshal or that of a read deadline. It needs the turn.
func (c *Context) receive(sequence int) (any, error) {
	for {
		b, err := c.frame()
		if err != nil {
			return nil, err
		}
		m, err := c.in.dialect.parse(b)
		if err != nil {
			return nil, err
		}
		if m.sequence == sequence {
			return m.reply, nil
		}
		if m.sequence < 0 {
			c.shown(m)
		}
	}
}

// shown hands a result over, after what was printed before it, and tells the driver so.
func (c *Context) shown(m message) {
	for _, o := range c.outs {
		o.Drain()
	}
	if m.result != nil {
		c.sinkMu.Lock()
		if c.show != nil && c.show(bounded(m.result)) != nil {
			c.sink, c.show = discard, nil // the caller is gone
		}
		c.sinkMu.Unlock()
	}
	if m.wait {
		_ = c.write(c.in.dialect.ack(nil))
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
