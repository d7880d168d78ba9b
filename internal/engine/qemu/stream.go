package qemu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/memory"
)

// The stream of a background snapshot, as QEMU 7.2 to 10 write it; docs/engines.md describes it.
const (
	streamMagic   = 0x5145564d // "QEVM"
	streamVersion = 3
	streamHeader  = 8

	sectionStart  = 0x01
	sectionPart   = 0x02
	sectionEnd    = 0x03
	sectionFooter = 0x7e

	ramZero     = 0x02 // a page of one repeated byte
	ramBlocks   = 0x04 // the list of blocks
	ramPage     = 0x08
	ramEnd      = 0x10 // of this section
	ramContinue = 0x20 // with ramZero or ramPage: in the block of the page before
	ramFlags    = memory.PageSize - 1
)

// maxBlocks bounds the list of RAM blocks: a machine of ours has some ten (RAM, firmware, tables).
const maxBlocks = 256

// window is how much of the stream is held at a time, and with it how many pages go to their place in one call.
const window = 1 << 20

// roomToRead is what must be free of the window, so that reads stay long.
const roomToRead = 64 << 10

// streamSlack is how much longer a stream may be than twice the RAM: the other blocks, which a process names as large as it
// likes, and the device state. Without a bound one that never ends would be read for ever, and its sandbox be busy.
const streamSlack = 512 << 20

// maxRun is how many pages one pwritev may take (IOV_MAX).
const maxRun = 1024

// pageSink takes pages to their place in the guest's RAM.
type pageSink interface {
	// writePages writes consecutive pages, the first at off.
	writePages(pages [][]byte, off int64) error
}

// fileSink writes into the memory file of an image to be.
type fileSink struct{ file *os.File }

// writePages is one call for a run of pages. Written this way a page of a memory file is allocated without being
// cleared first and without a fault; and a host out of memory gives an error instead of SIGBUS.
func (s fileSink) writePages(pages [][]byte, off int64) error {
	want := len(pages) * memory.PageSize
	n, err := unix.Pwritev(int(s.file.Fd()), pages, off)
	if err == nil && n == want {
		return nil
	}
	if err != nil && !errors.Is(err, unix.EINTR) {
		return sinkError(err)
	}
	// Cut short by a signal: the rest page by page.
	for _, p := range pages {
		if _, err := s.file.WriteAt(p, off); err != nil {
			return sinkError(err)
		}
		off += int64(len(p))
	}
	return nil
}

// errSink is why a stream is not read to its end by no fault of QEMU's.
var errSink = errors.New("write memory image")

func sinkError(err error) error { return fmt.Errorf("%w: %w", errSink, memory.NoRoom(err)) }

// streamNews are functions that a drain calls on its way; each may be nil.
type streamNews struct {
	// begun is called once, when the first page has come: from then on the machine may run.
	begun func()
	// jumped is told of every page that does not follow the one before: most of them the guest was about to write.
	jumped func(off int64)
	// passed is told of each stride of RAM that QEMU is done with: all of its pages have come, and one more.
	passed func(off int64)
	// copied is told, now and then, how many bytes of RAM have come.
	copied func(done int64)
}

// drainer reads the stream of a background snapshot.
type drainer struct {
	r    io.Reader
	sink pageSink
	size int64
	tell streamNews

	buf        []byte
	start, end int   // what is unread of buf
	read       int64 // bytes taken from r
	most       int64 // of them that there can be

	except *pageSet // pages that are not taken to sink
	next   int64    // the page that follows the last
	run    [][]byte // pages that lie in buf and are not written yet
	runOff int64    // place of the first
	seen   []uint64 // a bit for each page of RAM
	left   int64    // pages not seen
	within []int32  // of them in each stride
	ended  int64    // place of the stride whose last page came last; -1: none
	told   int64

	blocks map[string]int64
	block  string // of the page before
	ramID  uint32
}

// ramBlock is the name of the RAM's block: the id of the memory backend.
const ramBlock = "ram"

// drain reads a whole stream from r, takes the pages of the guest's RAM to sink, and returns the device state, ready to
// be loaded. A page that is zero is not written, so sink must be zero. The stream is foreign bytes: anything wrong in
// it is an error, and without error every page has come exactly once. QEMU's thread waits for it, and the guest for that thread
// until nothing is protected any more, so it does nothing else.
//
// Pages in except must come as well, but are not taken to sink: what they were at the instant is known already, and they
// may have been written since. Others may add to it meanwhile.
func drain(r io.Reader, sink pageSink, size int64, except *pageSet, tell streamNews) ([]byte, error) {
	pages := size / memory.PageSize
	d := &drainer{
		r: r, sink: sink, size: size, tell: tell, buf: make([]byte, min(window, size+2*roomToRead)), run: make([][]byte, 0, maxRun),
		seen: make([]uint64, (pages+63)/64), within: strides(size), ended: -1, except: except, left: pages, blocks: map[string]int64{}, most: 2*size + streamSlack,
	}
	state, err := d.drain()
	if err != nil {
		return nil, fmt.Errorf("read QEMU's snapshot stream, before byte %d: %w", d.read-int64(d.end-d.start), err)
	}
	return state, nil
}

func (d *drainer) drain() ([]byte, error) {
	header, err := d.take(streamHeader)
	if err != nil {
		return nil, err
	}
	if m, v := binary.BigEndian.Uint32(header), binary.BigEndian.Uint32(header[4:]); m != streamMagic || v != streamVersion {
		return nil, fmt.Errorf("it begins with %x, version %d; %x, version %d is expected", m, v, streamMagic, streamVersion)
	}
	state := append(make([]byte, 0, 64<<10), header...)
	for {
		kind, err := d.peek()
		if err != nil {
			return nil, err
		}
		if kind != sectionStart && kind != sectionPart && kind != sectionEnd {
			break
		}
		if err := d.section(kind); err != nil {
			return nil, err
		}
	}
	if err := d.flush(); err != nil {
		return nil, err
	}
	if d.left > 0 {
		return nil, fmt.Errorf("it ends without %d of the %d pages of RAM", d.left, d.size/memory.PageSize)
	}
	return d.rest(state)
}

// rest is the device state. Its sections are read by QEMU alone.
func (d *drainer) rest(state []byte) ([]byte, error) {
	state = append(state, d.buf[d.start:d.end]...)
	d.start = d.end
	for len(state) <= maxState {
		n, err := d.r.Read(d.buf)
		d.read += int64(n)
		state = append(state, d.buf[:n]...)
		if errors.Is(err, io.EOF) {
			if last := state[len(state)-1]; last != 0 || len(state) <= streamHeader+1 {
				return nil, fmt.Errorf("the device state of %d bytes has no end: %w", len(state), io.ErrUnexpectedEOF)
			}
			return state, nil
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("a device state of more than %d bytes", maxState)
}

// section reads one part of the RAM's section. No other device of ours has parts.
func (d *drainer) section(kind byte) error {
	head, err := d.take(5)
	if err != nil {
		return err
	}
	id := binary.BigEndian.Uint32(head[1:])
	if kind == sectionStart {
		name, err := d.name()
		if err != nil {
			return err
		}
		if name != "ram" || len(d.blocks) > 0 {
			return fmt.Errorf("a section %q; one, of RAM, is expected", name)
		}
		if _, err := d.take(8); err != nil { // Instance and version; what follows shows whether it is understood.
			return err
		}
		d.ramID = id
	} else if len(d.blocks) == 0 || id != d.ramID {
		return fmt.Errorf("a part of the unknown section %d", id)
	}
	for {
		end, err := d.record()
		if err != nil {
			return err
		}
		if end {
			break
		}
	}
	foot, err := d.take(5)
	if err != nil {
		return err
	}
	if foot[0] != sectionFooter || binary.BigEndian.Uint32(foot[1:]) != id {
		return fmt.Errorf("section %d ends with %x", id, foot)
	}
	return nil
}

// record reads one record of the RAM's section and reports whether it was the last of its part.
func (d *drainer) record() (end bool, err error) {
	word, err := d.take(8)
	if err != nil {
		return false, err
	}
	v := binary.BigEndian.Uint64(word)
	addr, flags := v&^ramFlags, v&ramFlags
	switch flags {
	case ramEnd:
		return true, nil
	case ramBlocks:
		return false, d.blockList(addr)
	case ramPage, ramPage | ramContinue, ramZero, ramZero | ramContinue:
	default:
		return false, fmt.Errorf("a record with unknown flags %#x", flags)
	}
	if flags&ramContinue == 0 {
		if d.block, err = d.name(); err != nil {
			return false, err
		}
	}
	size, ok := d.blocks[d.block]
	if !ok || addr >= uint64(size) {
		return false, fmt.Errorf("a page at %#x of block %q, which has %d bytes", addr, d.block, size)
	}
	return false, d.page(int64(addr), flags&ramZero != 0)
}

// page reads a page's content and takes it to its place.
func (d *drainer) page(off int64, filled bool) error {
	if begun := d.tell.begun; begun != nil {
		d.tell.begun = nil
		begun()
	}
	n := memory.PageSize
	if filled {
		n = 1
	}
	content, err := d.take(n)
	if err != nil || d.block != ramBlock {
		return err
	}
	// QEMU's thread ends a page's protection before it sends the next.
	if d.ended >= 0 && d.tell.passed != nil {
		d.tell.passed(d.ended)
	}
	if err := d.mark(off); err != nil {
		return err
	}
	if off != d.next && d.tell.jumped != nil {
		d.tell.jumped(off)
	}
	d.next = off + memory.PageSize
	if d.except.has(off) {
		return nil
	}
	if filled {
		if content[0] != 0 {
			return fmt.Errorf("the page at %#x is filled with %#x; only zero is expected", off, content[0])
		}
		return nil
	}
	if len(d.run) == maxRun || len(d.run) > 0 && d.runOff+int64(len(d.run))*memory.PageSize != off {
		if err := d.flush(); err != nil {
			return err
		}
	}
	if len(d.run) == 0 {
		d.runOff = off
	}
	d.run = append(d.run, content)
	return nil
}

// mark notes that a page has come. Twice would mean that two instants are mixed.
func (d *drainer) mark(off int64) error {
	i := off / memory.PageSize
	bit := uint64(1) << (i % 64)
	if d.seen[i/64]&bit != 0 {
		return fmt.Errorf("the page at %#x comes twice", off)
	}
	d.seen[i/64] |= bit
	d.left--
	d.ended = -1
	at := off / stride
	if d.within[at]--; d.within[at] == 0 {
		d.ended = at * stride
	}
	return nil
}

// stride is what passed tells of at a time.
const stride = 2 << 20

// strides are the numbers of pages in each stride of a RAM.
func strides(size int64) []int32 {
	all := make([]int32, (size+stride-1)/stride)
	for i := range all {
		all[i] = int32(min(stride, size-int64(i)*stride) / memory.PageSize)
	}
	return all
}

// flush writes the pages that lie in the window.
func (d *drainer) flush() error {
	if len(d.run) == 0 {
		return nil
	}
	err := d.sink.writePages(d.run, d.runOff)
	d.run = d.run[:0]
	if done := d.size - d.left*memory.PageSize; d.tell.copied != nil && done-d.told >= 16<<20 {
		d.told = done
		d.tell.copied(done)
	}
	return err
}

// blockList reads the names and sizes of the blocks.
func (d *drainer) blockList(total uint64) error {
	if len(d.blocks) > 0 {
		return errors.New("a second list of blocks")
	}
	for total > 0 {
		name, err := d.name()
		if err != nil {
			return err
		}
		b, err := d.take(8)
		if err != nil {
			return err
		}
		size := binary.BigEndian.Uint64(b)
		_, twice := d.blocks[name]
		if size == 0 || size > total || twice || len(d.blocks) == maxBlocks {
			return fmt.Errorf("an impossible list of blocks: %q of %d bytes, %d left", name, size, total)
		}
		d.blocks[name] = int64(size)
		total -= size
	}
	if d.blocks[ramBlock] != d.size {
		return fmt.Errorf("block %q has %d bytes, the machine %d", ramBlock, d.blocks[ramBlock], d.size)
	}
	return nil
}

// name reads a string of up to 255 bytes.
func (d *drainer) name() (string, error) {
	n, err := d.take(1)
	if err != nil {
		return "", err
	}
	b, err := d.take(int(n[0]))
	if err != nil {
		return "", err
	}
	return string(b), nil
}

func (d *drainer) peek() (byte, error) {
	if err := d.need(1); err != nil {
		return 0, err
	}
	return d.buf[d.start], nil
}

// take returns the next n bytes, n being at most a page. They stay valid until flush.
func (d *drainer) take(n int) ([]byte, error) {
	if err := d.need(n); err != nil {
		return nil, err
	}
	b := d.buf[d.start : d.start+n]
	d.start += n
	return b, nil
}

// need reads until n bytes are in the window.
func (d *drainer) need(n int) error {
	for d.end-d.start < n {
		if d.read > d.most {
			return fmt.Errorf("a stream of more than %d bytes for %d bytes of RAM", d.most, d.size)
		}
		if len(d.buf)-d.end < roomToRead {
			// Pages that wait lie in the window. Not before it is full: a call for many pages costs little more than one.
			if err := d.flush(); err != nil {
				return err
			}
			d.end = copy(d.buf, d.buf[d.start:d.end])
			d.start = 0
		}
		k, err := d.r.Read(d.buf[d.end:])
		d.end += k
		d.read += int64(k)
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil && d.end-d.start < n {
			return err
		}
	}
	return nil
}
