package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc64"
	"io"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	pageSize    = 4096
	headSize    = 16  // of a page: its number and generation
	perRecord   = 256 // pages rewritten between two records
	perSync     = 16  // records between two writes to the disk
	recordSize  = 40
	slots       = 64
	recordsFile = "forkd-load.records" // in the working directory
	slotsFile   = "forkd-load.slots"
	// most is how many of its newest records a check reads again: minutes of them. All of an hour would take it seconds.
	most = 1 << 13
)

// churn rewrites memory page by page, in rounds that it calls generations: when it has rewritten page k in generation g,
// the pages up to it are of g and the others of g-1. Each page is checked as a whole before it is rewritten. Now and then
// it writes a record twice: to the end of a file, through the page cache and later to the disk; and past the cache into
// one of a few slots of another, over an older one. Memory counts the records, so memory that is of two instants is found,
// and a disk of another instant than the memory, too, older or newer.
type churn struct {
	mu         sync.Mutex
	pages      []byte
	generation uint64
	cursor     int
	err        error // the first thing found wrong

	records uint64
	chain   uint64 // of the last record
	last    record
	file    *os.File
	slots   *os.File
	slot    []byte // for direct I/O: the runtime begins large objects at a page
	table   *crc64.Table
}

// record as it is in the file: numbers in little-endian order. Time makes those of two copies differ, chain is a checksum
// of the record and of all before it.
type record struct {
	number, generation, cursor, time, chain uint64
}

func newChurn(size int) (*churn, error) {
	file, err := os.OpenFile(recordsFile, os.O_RDWR|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	direct, err := os.OpenFile(slotsFile, os.O_RDWR|os.O_CREATE|unix.O_DIRECT, 0o600)
	if err != nil {
		return nil, err
	}
	c := &churn{
		pages: make([]byte, size), generation: 1, file: file, slots: direct, slot: make([]byte, 64<<10)[:pageSize],
		table: crc64.MakeTable(crc64.ECMA),
	}
	if err := direct.Truncate(slots * pageSize); err != nil {
		return nil, err
	}
	for i := range c.count() {
		fill(c.page(i), uint64(i), 0)
	}
	return c, nil
}

func (c *churn) count() int { return len(c.pages) / pageSize }

func (c *churn) page(i int) []byte { return c.pages[i*pageSize : (i+1)*pageSize] }

// pattern is the first word of a page after its head, and what the others grow by.
func pattern(page, generation uint64) (first, step uint64) {
	x := page*0x9e3779b97f4a7c15 ^ generation*0xbf58476d1ce4e5b9
	x ^= x >> 29
	return x, x*0x94d049bb133111eb | 1
}

func fill(p []byte, page, generation uint64) {
	binary.LittleEndian.PutUint64(p, page)
	binary.LittleEndian.PutUint64(p[8:], generation)
	word, step := pattern(page, generation)
	for i := headSize; i+8 <= len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], word)
		word += step
	}
}

func verify(p []byte, page, generation uint64) error {
	n, g := binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
	if n != page || g != generation {
		return fmt.Errorf("page %d of generation %d says it is page %d of generation %d", page, generation, n, g)
	}
	word, step := pattern(page, generation)
	for i := headSize; i+8 <= len(p); i += 8 {
		if got := binary.LittleEndian.Uint64(p[i:]); got != word {
			return fmt.Errorf("page %d of generation %d is torn: byte %d has %#x, want %#x", page, generation, i, got, word)
		}
		word += step
	}
	return nil
}

// run rewrites so many MiB a second, 0 for as fast as it goes, until something is wrong.
func (c *churn) run(rate int) {
	for start, done := time.Now(), 0; c.some(); {
		if rate == 0 {
			continue
		}
		done += batch
		early := time.Duration(float64(done*pageSize)/float64(rate<<20)*float64(time.Second)) - time.Since(start)
		switch {
		case early > 5*time.Millisecond:
			nap := unix.NsecToTimespec(int64(early))
			_ = unix.Nanosleep(&nap, nil)
		case early < -time.Second: // what could not be done in time is not caught up on
			start, done = time.Now(), 0
		}
	}
}

const batch = 16

// some rewrites a few pages; in between others may look.
func (c *churn) some() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range batch {
		if c.err != nil {
			return false
		}
		c.fail(c.step())
	}
	return true
}

func (c *churn) fail(err error) {
	if c.err == nil && err != nil {
		c.err = fmt.Errorf("at page %d of generation %d: %w", c.cursor, c.generation, err)
	}
}

func (c *churn) step() error {
	p, n := c.page(c.cursor), uint64(c.cursor)
	if err := verify(p, n, c.generation-1); err != nil {
		return err
	}
	fill(p, n, c.generation)
	if c.cursor++; c.cursor == c.count() {
		c.cursor = 0
		c.generation++
	}
	if c.cursor%perRecord == 0 {
		return c.record()
	}
	return nil
}

// record writes the next one.
func (c *churn) record() error {
	r := record{c.records, c.generation, uint64(c.cursor), uint64(time.Now().UnixNano()), 0}
	r.chain = c.link(c.chain, r)
	// Memory counts it first: at any instant it knows as many as the file has, or one more.
	c.records, c.chain, c.last = c.records+1, r.chain, r
	if _, err := c.file.Write(r.encode()); err != nil {
		return err
	}
	if c.records%perSync == 0 {
		if err := unix.Fdatasync(int(c.file.Fd())); err != nil {
			return fmt.Errorf("sync records: %w", err)
		}
	}
	fill(c.slot, r.number, r.chain)
	_, err := c.slots.WriteAt(c.slot, int64(r.number%slots)*pageSize)
	return err
}

func (c *churn) link(before uint64, r record) uint64 {
	sum := crc64.New(c.table)
	_, _ = sum.Write(record{before, r.number, r.generation, r.cursor, r.time}.encode())
	return sum.Sum64()
}

func (r record) encode() []byte {
	b := make([]byte, 0, recordSize)
	for _, v := range []uint64{r.number, r.generation, r.cursor, r.time, r.chain} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func decode(b []byte) record {
	v := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return record{v(0), v(1), v(2), v(3), v(4)}
}

// report says how far it is, and the chains of the records from one on. With check it looks at everything first.
func (c *churn) report(check bool, from uint64) Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	chains, err := c.chains(from)
	c.fail(err)
	if check {
		c.fail(c.check())
	}
	r := Report{Generation: c.generation, Cursor: c.cursor, Pages: c.count(), Records: c.records, Chains: chains}
	if c.err != nil {
		r.Error = c.err.Error()
	}
	return r
}

func (c *churn) chains(from uint64) ([]string, error) {
	var list []string
	if from >= c.records {
		return nil, nil
	}
	b := make([]byte, (c.records-from)*recordSize)
	if _, err := c.file.ReadAt(b, int64(from*recordSize)); err != nil {
		return nil, fmt.Errorf("read records from %d of %d: %w", from, c.records, err)
	}
	for ; len(b) > 0; b = b[recordSize:] {
		list = append(list, strconv.FormatUint(decode(b).chain, 16))
	}
	return list, nil
}

func (c *churn) check() error {
	var errs []error
	for i := range c.count() {
		g := c.generation
		if i >= c.cursor {
			g--
		}
		if err := verify(c.page(i), uint64(i), g); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("%d pages are wrong, the first: %w", len(errs), errs[0])
	}
	return errors.Join(c.checkFile(), c.checkSlots())
}

// checkFile reads from the disk what is there, and of the page cache only what is not.
func (c *churn) checkFile() error {
	if err := unix.Fadvise(int(c.file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("drop the page cache: %w", err)
	}
	info, err := c.file.Stat()
	if err != nil {
		return err
	}
	// Memory counts a record before it is written, and both happened before anybody could look.
	if info.Size() != int64(c.records*recordSize) {
		return fmt.Errorf("memory counts %d records, the file has %d bytes", c.records, info.Size())
	}
	first := c.records - min(c.records, most)
	b, err := io.ReadAll(io.NewSectionReader(c.file, int64(first*recordSize), most*recordSize))
	if err != nil {
		return err
	}
	var before record
	for n := first; len(b) >= recordSize; n, b = n+1, b[recordSize:] {
		r := decode(b)
		if r.number != n || r.chain != c.link(before.chain, r) && n != first || n == 0 && r.chain != c.link(0, r) {
			return fmt.Errorf("record %d is damaged: %+v after %+v", n, r, before)
		}
		before = r
	}
	if c.records == 0 {
		return nil
	}
	done := (c.generation-before.generation)*uint64(c.count()) + uint64(c.cursor) - before.cursor
	if before != c.last || done >= perRecord {
		return fmt.Errorf("the file's last record is %+v, memory's %+v, and %d pages were written since", before, c.last, done)
	}
	return nil
}

func (c *churn) checkSlots() error {
	p := c.slot
	newest := min(c.records, slots)
	chains, err := c.chains(c.records - newest)
	if err != nil {
		return err
	}
	for i, chain := range chains {
		n := c.records - newest + uint64(i)
		if _, err := c.slots.ReadAt(p, int64(n%slots)*pageSize); err != nil {
			return fmt.Errorf("read slot of record %d: %w", n, err)
		}
		want, err := strconv.ParseUint(chain, 16, 64)
		if err != nil {
			return err
		}
		if err := verify(p, n, want); err != nil {
			return fmt.Errorf("the disk has not record %d of %d: %w", n, c.records, err)
		}
	}
	return nil
}
