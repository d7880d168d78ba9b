package qemu

import (
	"bytes"
	"errors"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/memory"
)

// QEMU's thread takes the protection from one page at a time, and each time the kernel interrupts the other processors on
// which the machine runs: half of the thread's time and a third of an emulated guest's went there, 20 µs a page, for
// seconds. A guest that writes meanwhile waits for that thread, too. So the daemon copies the RAM itself while it is
// protected, aheadStep at a time, and takes the protection from all of that at once: in a fraction of the time nothing is
// protected any more. Until then QEMU's thread is kept short of room in the stream (pace.go), and the daemon serves the
// guest's faults as well. QEMU goes on to send every page, but what it sends of these is of no interest.
//
// It is decided page by page whose copy counts. One that is still protected when the daemon has read it was not written
// since the instant: the daemon's counts. From any other the protection was taken by QEMU, after it had sent it: QEMU's
// counts. The decision is taken before the daemon takes the protection, so what QEMU sent until then is right in any case.

// ahead copies the RAM of a machine that runs, as it was at the instant, before QEMU does.
type ahead struct {
	taken  pageSet // pages of which not the stream's copy counts
	served []int64 // first of those that the guest waited for; run's until over
	err    error   // why not all that is taken is at its place; set when over
	over   chan struct{}
}

func newAhead(size int64) ahead { return ahead{taken: newPageSet(size), over: make(chan struct{})} }

const (
	// aheadStep is how much is copied at a time. What the guest is about to write meanwhile waits as long.
	aheadStep = 128 << 10
	// aheadAround is what is copied of the neighbourhood of a page that the guest waits for: it often writes there next.
	aheadAround = 32 << 10
	// aheadAfter is how long only that is copied first: the guest, its client and the daemon have much to do then.
	aheadAfter = 30 * time.Millisecond
	// aheadSteps is how many copied steps may wait for being written, and aheadSpare how many more what the guest waits for.
	aheadSteps = 64
	aheadSpare = 16
)

// run ends when all of the RAM is copied, when something fails, or when stop is closed. But for err it is a matter of speed
// alone: what it leaves comes from QEMU.
func (a *ahead) run(pid int, ram *memory.Process, sink pageSink, stop <-chan struct{}) {
	defer close(a.over)
	look, err := ram.Protection()
	if err != nil {
		return
	}
	defer func() { _ = look.Close() }()
	fds, err := userfaultfds(pid)
	if err != nil {
		return
	}
	_ = withUserfaultfds(pid, fds, func(uffd int) error {
		c := newAheadCopy(a, uffd, ram, look)
		written := make(chan struct{})
		go func() {
			defer close(written)
			c.write(sink)
		}()
		err := c.run(stop)
		close(c.copied)
		<-written
		return err
	})
}

// aheadCopy copies under one userfaultfd. Who copies does not write: the memory that is written to is new, and getting it
// may take milliseconds where the host is a virtual machine itself.
type aheadCopy struct {
	a     *ahead
	uffd  int
	ram   *memory.Process
	look  *memory.Protection
	began time.Time

	free   chan *aheadPages
	copied chan *aheadPages
}

// aheadPages is a piece of RAM that was copied.
type aheadPages struct {
	off       int64
	content   []byte
	protected []bool // pages of it that are taken
}

func newAheadCopy(a *ahead, uffd int, ram *memory.Process, look *memory.Protection) *aheadCopy {
	const all = aheadSteps + aheadSpare
	c := &aheadCopy{
		a: a, uffd: uffd, ram: ram, look: look, began: time.Now(),
		free: make(chan *aheadPages, all), copied: make(chan *aheadPages, all),
	}
	for range all {
		c.free <- &aheadPages{}
	}
	return c
}

func (c *aheadCopy) run(stop <-chan struct{}) error {
	for wait := aheadAfter; wait > 0 && !isClosed(stop); wait = aheadAfter - time.Since(c.began) {
		if err := c.serve(wait); err != nil {
			return err
		}
	}
	for off := int64(0); off < c.ram.Size() && !isClosed(stop); {
		wait := time.Duration(0)
		if len(c.free) <= aheadSpare {
			wait = paceTick // until something has been written
		}
		if err := c.serve(wait); err != nil {
			return err
		}
		if wait > 0 {
			continue
		}
		if err := c.copy(off, min(aheadStep, c.ram.Size()-off)); err != nil {
			return err
		}
		off += aheadStep
	}
	return c.serve(0)
}

// serve copies what the guest waits to write; it waits for that as long as it is told. QEMU's thread does the same, whoever
// learns of it first; it has to wait for room in the stream now and then.
func (c *aheadCopy) serve(wait time.Duration) error {
	for {
		at, err := awaited(c.uffd, wait)
		if err != nil || len(at) == 0 {
			return err
		}
		wait = 0
		for i, address := range at {
			off, ok := c.ram.Offset(address)
			if !ok { // QEMU protects firmware and tables, too, which no capture keeps
				if err := unprotect(c.uffd, []addresses{{address &^ (memory.PageSize - 1), memory.PageSize}}); err != nil && !errors.Is(err, unix.ENOENT) {
					return errors.Join(err, wake(c.uffd, at[i:]))
				}
				continue
			}
			if len(c.a.served) < earlyMost && time.Since(c.began) < earlyTime {
				c.a.served = append(c.a.served, off&^(memory.PageSize-1))
			}
			off &^= aheadAround - 1
			if err := c.copy(off, min(aheadAround, c.ram.Size()-off)); err != nil {
				// Nobody else is told of these any more. Woken they fault again, and QEMU is told.
				return errors.Join(err, wake(c.uffd, at[i:]))
			}
		}
	}
}

// copy takes n bytes at off, so far as they are protected, and then the protection from them.
func (c *aheadCopy) copy(off, n int64) error {
	p := <-c.free
	pages := int(n / memory.PageSize)
	if cap(p.protected) < pages {
		p.content, p.protected = make([]byte, n), make([]bool, pages)
	}
	p.off, p.content, p.protected = off, p.content[:n], p.protected[:pages]
	if err := c.look.ReadProtected(off, p.content, p.protected); err != nil {
		c.free <- p
		return err
	}
	for i, yes := range p.protected {
		if yes {
			c.a.taken.add(off + int64(i)*memory.PageSize)
		}
	}
	c.copied <- p
	err := unprotect(c.uffd, []addresses{{c.ram.Address(off), uint64(n)}})
	if errors.Is(err, unix.ENOENT) { // What QEMU was done with before is not registered any more.
		return nil
	}
	return err
}

// write takes what has been copied to its place, until nothing more comes.
func (c *aheadCopy) write(sink pageSink) {
	for p := range c.copied {
		if c.a.err == nil {
			c.a.err = p.write(sink)
		}
		c.free <- p
	}
}

// write writes the pages that are taken, but no zeros.
func (p *aheadPages) write(sink pageSink) error {
	run := make([][]byte, 0, len(p.protected))
	for i, yes := range append(p.protected, false) {
		if yes {
			page := p.content[i*memory.PageSize : (i+1)*memory.PageSize]
			if !isZero(page) {
				run = append(run, page)
				continue
			}
		}
		if len(run) == 0 {
			continue
		}
		if err := sink.writePages(run, p.off+int64(i-len(run))*memory.PageSize); err != nil {
			return err
		}
		run = run[:0]
	}
	return nil
}

var zeroPage [memory.PageSize]byte

func isZero(page []byte) bool { return bytes.Equal(page, zeroPage[:]) }

// pageSet is a set of pages of a RAM. It is safe for concurrent use. Nil has none.
type pageSet struct{ bits []atomic.Uint64 }

func newPageSet(size int64) pageSet {
	return pageSet{bits: make([]atomic.Uint64, (size/memory.PageSize+63)/64)}
}

func (s *pageSet) add(off int64) {
	i := off / memory.PageSize
	s.bits[i/64].Or(1 << (i % 64))
}

func (s *pageSet) has(off int64) bool {
	if s == nil {
		return false
	}
	i := off / memory.PageSize
	return s.bits[i/64].Load()&(1<<(i%64)) != 0
}
