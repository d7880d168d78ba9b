package qemu

import (
	"io"
	"sync"
)

// consoleMax is how much of what the guest printed is kept.
const consoleMax = 64 << 10

// console keeps the newest part of what a guest prints. A guest can print for ever, so it is a ring; most print
// little, so it grows only as needed.
type console struct {
	mu    sync.Mutex
	ring  []byte
	next  int           // where the next byte goes, once the ring is full
	total int64         // bytes printed
	more  chan struct{} // closed by the next; nil while nobody waits
}

func (c *console) Write(p []byte) (int, error) {
	n := len(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total += int64(n)
	if c.more != nil {
		close(c.more)
		c.more = nil
	}
	if free := consoleMax - len(c.ring); free > 0 {
		k := min(free, len(p))
		c.ring = append(c.ring, p[:k]...)
		p = p[k:]
	}
	for len(p) > 0 {
		k := copy(c.ring[c.next:], p)
		c.next = (c.next + k) % consoleMax
		p = p[k:]
	}
	return n, nil
}

// Bytes is a copy of the newest text.
func (c *console) Bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes()
}

func (c *console) bytes() []byte {
	b := make([]byte, 0, len(c.ring))
	b = append(b, c.ring[c.next:]...)
	return append(b, c.ring[:c.next]...)
}

// From is what was printed since a position, as far as it is kept, the next position, and what is closed when there is
// more.
func (c *console) From(at int64) (text []byte, next int64, more <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	text = c.bytes()
	if fresh := c.total - at; fresh < int64(len(text)) {
		text = text[int64(len(text))-max(0, fresh):]
	}
	if c.more == nil {
		c.more = make(chan struct{})
	}
	return text, c.total, c.more
}

// follow copies what the guest prints until the VM process closes its end or r is closed.
func (c *console) follow(r io.Reader) {
	_, _ = io.CopyBuffer(onlyWriter{c}, r, make([]byte, 4<<10))
}

// onlyWriter hides every optional method, so that CopyBuffer uses the small buffer it was given.
type onlyWriter struct{ io.Writer }
