package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	pageSize   = 4096
	recordSize = 4096
	recordSlot = 64 // on the disk
	perRecord  = 256
)

// churn rewrites memory without end, page by page, in rounds: while it writes page k in round r, the pages before it are
// of round r and the others of round r-1. Now and then it writes a record to the disk. So memory that is of two
// instants, or a disk of another than the memory, is found.
type churn struct {
	mu      sync.Mutex
	pages   []byte
	round   uint64
	next    int
	records uint64
	disk    *os.File
	buf     []byte // for direct I/O: the runtime begins large objects at a page
	err     error
}

// startChurn begins with mib of memory, rewritten at so many MiB a second, 0 for as fast as it goes, less for never.
func startChurn(mib, rate string) (*churn, error) {
	n, err1 := strconv.Atoi(mib)
	perSecond, err2 := strconv.Atoi(rate)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	// Past the page cache, which is memory and would hide what the disk holds.
	disk, err := os.OpenFile("/dev/vda", os.O_RDWR|syscall.O_DIRECT|syscall.O_SYNC, 0)
	if err != nil {
		return nil, err
	}
	c := &churn{pages: make([]byte, n<<20), disk: disk, buf: make([]byte, 64<<10)[:recordSize]}
	for i := range c.count() {
		c.fill(i, 0)
	}
	c.round = 1
	if perSecond >= 0 {
		go c.run(perSecond)
	}
	return c, nil
}

func (c *churn) count() int { return len(c.pages) / pageSize }

func word(round uint64, page, i int) uint64 {
	return round*0x9e3779b97f4a7c15 ^ uint64(page)<<20 ^ uint64(i)
}

func (c *churn) fill(page int, round uint64) {
	p := c.pages[page*pageSize : (page+1)*pageSize]
	for i := 0; i < pageSize; i += 8 {
		binary.LittleEndian.PutUint64(p[i:], word(round, page, i))
	}
}

func (c *churn) run(perSecond int) {
	const batch = 64
	for {
		start := time.Now()
		for range batch {
			c.mu.Lock()
			c.step()
			failed := c.err != nil
			c.mu.Unlock()
			if failed {
				return
			}
		}
		if perSecond > 0 {
			want := time.Second * batch * pageSize / time.Duration(perSecond<<20)
			<-time.After(want - time.Since(start))
		}
	}
}

func (c *churn) step() {
	c.fill(c.next, c.round)
	c.next++
	if c.next == c.count() {
		c.next = 0
		c.round++
	}
	if c.next%perRecord == 0 {
		c.record()
	}
}

func (c *churn) record() {
	for i := 0; i < recordSize; i += 8 {
		binary.LittleEndian.PutUint64(c.buf[i:], word(c.records, -1, i))
	}
	binary.LittleEndian.PutUint64(c.buf, c.records)
	if _, err := c.disk.WriteAt(c.buf, int64(c.records%recordSlot)*recordSize); err != nil {
		c.err = err
		return
	}
	c.records++
}

// check says what is wrong with memory and disk, or how far they are.
func (c *churn) check() (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return "", c.err
	}
	for page := range c.count() {
		want := c.round
		if page >= c.next {
			want--
		}
		for i := 0; i < pageSize; i += 8 {
			if got := binary.LittleEndian.Uint64(c.pages[page*pageSize+i:]); got != word(want, page, i) {
				return "", fmt.Errorf("torn: round %d, at page %d: byte %d of page %d has %#x, want %#x", c.round, c.next, i, page,
					got, word(want, page, i))
			}
		}
	}
	for slot := range uint64(recordSlot) {
		if _, err := c.disk.ReadAt(c.buf, int64(slot)*recordSize); err != nil {
			return "", err
		}
		// The newest record of this slot.
		want := c.records - 1 - (c.records-1-slot)%recordSlot
		if slot >= c.records {
			continue
		}
		got := binary.LittleEndian.Uint64(c.buf)
		if got != want {
			return "", fmt.Errorf("disk: %d records in memory, slot %d has record %d, want %d", c.records, slot, got, want)
		}
		for i := 8; i < recordSize; i += 8 {
			if binary.LittleEndian.Uint64(c.buf[i:]) != word(want, -1, i) {
				return "", fmt.Errorf("disk: record %d is damaged", want)
			}
		}
	}
	return fmt.Sprintf("ok %d %d", c.round*uint64(c.count())+uint64(c.next), c.records), nil
}

// ticker measures by the guest's clock how long a thread that wakes each millisecond was kept from it.
type ticker struct {
	mu      sync.Mutex
	longest time.Duration
}

func startTicker() *ticker {
	t := &ticker{}
	go func() {
		last := time.Now()
		nap := unix.Timespec{Nsec: 1e6}
		for {
			_ = unix.Nanosleep(&nap, nil)
			now := time.Now()
			t.mu.Lock()
			t.longest = max(t.longest, now.Sub(last))
			t.mu.Unlock()
			last = now
		}
	}()
	return t
}

// take is the longest gap since the last call.
func (t *ticker) take() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.longest
	t.longest = 0
	return d
}
