package memory

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
)

// Process is the guest's RAM as it stands in a VM process. It needs the rights of a debugger: the same uid (and, under
// Yama, the process's consent), or root. It holds no descriptor; the caller makes sure that the process of this id
// stays the same one.
type Process struct {
	pid     int
	size    int64
	base    uintptr // address of the guest's first byte
	private bool    // a child's mapping: what the machine writes is its own, and not the image's
}

// OpenProcess finds the guest's RAM in a VM process: its mapping, from beginning to end, of a Scratch or Image of size
// bytes. The error wraps fs.ErrNotExist when the process is gone.
func OpenProcess(pid int, size int64) (*Process, error) {
	p, err := openProcess(pid, size)
	if err != nil {
		return nil, fmt.Errorf("find the guest's memory in process %d: %w", pid, gone(err))
	}
	return p, nil
}

func openProcess(pid int, size int64) (*Process, error) {
	if pid <= 0 || size <= 0 || size%PageSize != 0 {
		return nil, fmt.Errorf("size %d is not a positive multiple of %d", size, PageSize)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	p, err := findMapping(b, size)
	if err != nil {
		return nil, err
	}
	p.pid = pid
	return p, nil
}

// gone makes every way in which the kernel says so fs.ErrNotExist.
func gone(err error) error {
	if errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the process is gone: %w", fs.ErrNotExist)
	}
	return err
}

// Size is the size of the guest's RAM in bytes.
func (p *Process) Size() int64 { return p.size }

// Private reports whether the machine's writes are its own; a booting machine's go to its Scratch.
func (p *Process) Private() bool { return p.private }

// area is one line of /proc/PID/maps.
type area struct {
	start, end, offset uint64
	shared             bool
	inode              string // with the device
	name               string
}

// findMapping finds the RAM in the text of /proc/PID/maps. The kernel splits a mapping wherever madvise or userfaultfd
// touched a part of it, so neighbours of one file that go on where the last ended count as one.
func findMapping(maps []byte, size int64) (*Process, error) {
	var first, last area
	for line := range bytes.Lines(maps) {
		a, err := parseArea(string(line))
		if err != nil {
			return nil, err
		}
		if a.name != "/memfd:"+imageName && a.name != "/memfd:"+scratchName {
			continue
		}
		if a.start != last.end || a.offset != last.offset+(last.end-last.start) || a.inode != last.inode || a.shared != last.shared {
			first = a
		}
		last = a
		if first.offset == 0 && last.end-first.start == uint64(size) {
			return &Process{size: size, base: uintptr(first.start), private: !first.shared}, nil
		}
	}
	return nil, fmt.Errorf("it maps no memory file of ours of %d bytes", size)
}

func parseArea(line string) (area, error) {
	fields := strings.Fields(line)
	if len(fields) < 5 || len(fields[1]) != 4 {
		return area{}, fmt.Errorf("maps: unexpected line %.200q", line)
	}
	from, to, ok := strings.Cut(fields[0], "-")
	start, err1 := strconv.ParseUint(from, 16, 64)
	end, err2 := strconv.ParseUint(to, 16, 64)
	offset, err3 := strconv.ParseUint(fields[2], 16, 64)
	if err := errors.Join(err1, err2, err3); err != nil || !ok || start >= end {
		return area{}, fmt.Errorf("maps: unexpected line %.200q", line)
	}
	a := area{start: start, end: end, offset: offset, shared: fields[1][3] == 's', inode: fields[3] + " " + fields[4]}
	if len(fields) > 5 {
		a.name = fields[5]
	}
	return a, nil
}

// OwnPages lists the pages that are the machine's own: those it has written since it was restored, swapped ones too. In
// a machine that runs, it is what was so at some time during the call. While a live capture is in progress, or was left
// behind, it may list more. A machine that maps a Scratch has none.
func (p *Process) OwnPages(ctx context.Context) ([]layer.Extent, error) {
	list, err := p.scan(ctx, pageOwn)
	if err != nil {
		return nil, fmt.Errorf("find own pages of process %d: %w", p.pid, gone(err))
	}
	return list, nil
}

// Scattered lists the places of at most so many of the machine's own pages, those of the shortest runs first. What a guest
// writes all the time lies about: stacks, heaps, the data of its kernel; large arrays lie together.
func (p *Process) Scattered(ctx context.Context, most int) ([]int64, error) {
	own, err := p.OwnPages(ctx)
	if err != nil {
		return nil, err
	}
	return scattered(own, most), nil
}

func scattered(own []layer.Extent, most int) []int64 {
	runs := slices.Clone(own)
	slices.SortStableFunc(runs, func(a, b layer.Extent) int { return cmp.Compare(a.Length, b.Length) })
	var pages []int64
	for _, r := range runs {
		for off := r.Offset; off < r.Offset+r.Length && len(pages) < most; off += PageSize {
			pages = append(pages, off)
		}
	}
	return pages
}

// scan lists pages of a kind, in one call of the kernel's (Linux 6.7), or by reading an entry for every page.
func (p *Process) scan(ctx context.Context, kind pageKind) ([]layer.Extent, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", p.pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, err := p.pagemapScan(ctx, f, kind)
	if errors.Is(err, unix.ENOTTY) {
		return p.pagemapRead(ctx, f, kind)
	}
	return list, err
}

// pageKind is what scan looks for.
type pageKind int

const (
	pageOwn    pageKind = iota // anonymous, in memory or swapped out
	pageAbsent                 // not in the page table
)

// Bits of a pagemap entry.
const (
	pagemapFile    = 1 << 61
	pagemapSwapped = 1 << 62
	pagemapPresent = 1 << 63
)

func (k pageKind) is(entry uint64) bool {
	if k == pageAbsent {
		return entry&pagemapPresent == 0
	}
	return entry&(pagemapPresent|pagemapSwapped) != 0 && entry&pagemapFile == 0
}

func (p *Process) pagemapRead(ctx context.Context, f io.ReaderAt, kind pageKind) ([]layer.Extent, error) {
	var list []layer.Extent
	b := make([]byte, 256<<10)
	for off := int64(0); off < p.size; {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		n := min(int64(len(b)), (p.size-off)/PageSize*8)
		if _, err := io.ReadFull(io.NewSectionReader(f, (int64(p.base)+off)/PageSize*8, n), b[:n]); err != nil {
			return nil, err
		}
		for i := int64(0); i < n; i, off = i+8, off+PageSize {
			if kind.is(binary.NativeEndian.Uint64(b[i:])) {
				list = appendExtent(list, layer.Extent{Offset: off, Length: PageSize})
			}
		}
	}
	return list, nil
}

// appendExtent adds an extent that comes after all others.
func appendExtent(list []layer.Extent, e layer.Extent) []layer.Extent {
	if n := len(list); n > 0 {
		last := &list[n-1]
		if last.Zero == e.Zero && last.Offset+last.Length == e.Offset {
			last.Length += e.Length
			return list
		}
	}
	return append(list, e)
}

// checkExtents refuses what is not whole pages of a memory, in ascending order.
func checkExtents(list []layer.Extent, size int64) error {
	end := int64(0)
	for _, e := range list {
		if e.Offset < end || e.Length <= 0 || e.Offset%PageSize != 0 || e.Length%PageSize != 0 || e.Length > size-e.Offset {
			return fmt.Errorf("extent of %d bytes at %d is not whole pages of a memory of %d, in ascending order",
				e.Length, e.Offset, size)
		}
		end = e.Offset + e.Length
	}
	return nil
}

func extentBytes(list []layer.Extent) int64 {
	var n int64
	for _, e := range list {
		n += e.Length
	}
	return n
}

// Populate has the kernel enter every page into the machine's page table, by reading a byte of each that is not there
// yet. A live capture write-protects page by page, and where an entry is lacking it must make one: that is done here,
// before the pause. It fills the holes of the image, so the image then occupies its full size.
func (p *Process) Populate(ctx context.Context) error {
	if err := p.populate(ctx); err != nil {
		return fmt.Errorf("populate the memory of process %d: %w", p.pid, gone(err))
	}
	return nil
}

func (p *Process) populate(ctx context.Context) error {
	absent, err := p.scan(ctx, pageAbsent)
	if err != nil {
		return err
	}
	// Pieces that many faults share evenly among cores; the kernel enters the 16 pages around a fault at once.
	const piece = 4 << 20
	var pieces []layer.Extent
	for _, e := range absent {
		for ; e.Length > 0; e.Offset, e.Length = e.Offset+piece, e.Length-piece {
			pieces = append(pieces, layer.Extent{Offset: e.Offset, Length: min(e.Length, piece)})
		}
	}
	return each(ctx, len(pieces), func(i int) error {
		e := pieces[i]
		remote := make([]unix.RemoteIovec, e.Length/PageSize)
		for j := range remote {
			remote[j] = unix.RemoteIovec{Base: p.base + uintptr(e.Offset) + uintptr(j)*PageSize, Len: 1}
		}
		return p.transfer(false, make([]byte, len(remote)), remote)
	})
}

// maxIovecs is the kernel's UIO_MAXIOV.
const maxIovecs = 1024

// transfer copies between local memory and as many bytes of the process.
func (p *Process) transfer(write bool, local []byte, remote []unix.RemoteIovec) error {
	for len(remote) > 0 {
		batch := remote[:min(len(remote), maxIovecs)]
		want := 0
		for _, r := range batch {
			want += r.Len
		}
		iov := []unix.Iovec{{Base: &local[0]}}
		iov[0].SetLen(want)
		call := unix.ProcessVMReadv
		if write {
			call = unix.ProcessVMWritev
		}
		n, err := call(p.pid, iov, batch, 0)
		if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
			// Some containers filter the system call and not the file.
			return p.transferFile(write, local, remote)
		}
		if err != nil {
			return fmt.Errorf("at %d: %w", int64(batch[0].Base-p.base), err)
		}
		if n <= 0 {
			return fmt.Errorf("at %d: %w", int64(batch[0].Base-p.base), io.ErrUnexpectedEOF)
		}
		// A short count ends somewhere within the batch: go on from there, and learn the reason.
		local = local[n:]
		for n > 0 && n >= remote[0].Len {
			n -= remote[0].Len
			remote = remote[1:]
		}
		if n > 0 {
			remote[0] = unix.RemoteIovec{Base: remote[0].Base + uintptr(n), Len: remote[0].Len - n}
		}
	}
	return nil
}

// transferFile does the same by the process's memory file.
func (p *Process) transferFile(write bool, local []byte, remote []unix.RemoteIovec) error {
	flag := os.O_RDONLY
	if write {
		flag = os.O_RDWR
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", p.pid), flag, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, r := range remote {
		if write {
			_, err = f.WriteAt(local[:r.Len], int64(r.Base))
		} else {
			_, err = f.ReadAt(local[:r.Len], int64(r.Base))
		}
		if err != nil {
			return err
		}
		local = local[r.Len:]
	}
	return nil
}

// job is a part of a transfer: what one call of the kernel's moves.
type job struct {
	at     int64 // place in the local memory
	length int64
	remote []unix.RemoteIovec
}

// jobs cuts a transfer of these pages, end to end in local memory, into parts that cores can share.
func (p *Process) jobs(list []layer.Extent) []job {
	const most = 2 << 20
	jobs := make([]job, 0, extentBytes(list)/most+int64(len(list)/maxIovecs)+1)
	j := job{}
	flush := func() {
		if j.length > 0 {
			jobs = append(jobs, j)
		}
		j = job{at: j.at + j.length}
	}
	for _, e := range list {
		for e.Length > 0 {
			n := min(e.Length, most-j.length)
			j.remote = append(j.remote, unix.RemoteIovec{Base: p.base + uintptr(e.Offset), Len: int(n)})
			j.length += n
			e.Offset, e.Length = e.Offset+n, e.Length-n
			if j.length == most || len(j.remote) == maxIovecs {
				flush()
			}
		}
	}
	flush()
	return jobs
}

// Copy copies these pages of the machine, which must stand still, into a buffer that was made beforehand, and does
// nothing else. The buffer becomes the pages', whatever happens; what it lacks of the room is added. Pages that are
// zero are data like others.
func (p *Process) Copy(ctx context.Context, own []layer.Extent, into *Buffer) (*Pages, error) {
	pages, err := p.copy(ctx, own, into)
	if err != nil {
		return nil, fmt.Errorf("copy own pages of process %d: %w", p.pid, errors.Join(gone(err), into.Close()))
	}
	return pages, nil
}

func (p *Process) copy(ctx context.Context, own []layer.Extent, into *Buffer) (*Pages, error) {
	if err := checkExtents(own, p.size); err != nil {
		return nil, err
	}
	total := extentBytes(own)
	if err := into.grow(total); err != nil {
		return nil, err
	}
	jobs := p.jobs(own)
	err := each(ctx, len(jobs), func(i int) error {
		j := jobs[i]
		return p.transfer(false, into.mapped[j.at:j.at+j.length], j.remote)
	})
	if err != nil {
		return nil, err
	}
	pages := &Pages{size: p.size, data: total}
	for _, e := range own {
		at := int64(0)
		if n := len(pages.index); n > 0 {
			at = pages.index[n-1].at + pages.index[n-1].length
		}
		pages.index = append(pages.index, pageRun{offset: e.Offset, length: e.Length, at: at})
	}
	pages.region = into.take()
	return pages, nil
}

// Address is where a byte of the guest's RAM lies in the process's address space.
func (p *Process) Address(off int64) uint64 { return uint64(p.base) + uint64(off) }

// Offset is which byte of the guest's RAM lies at an address, if one does.
func (p *Process) Offset(address uint64) (off int64, ok bool) {
	if address < uint64(p.base) || address-uint64(p.base) >= uint64(p.size) {
		return 0, false
	}
	return int64(address - uint64(p.base)), true
}

// Read copies the pages at these places, in ascending order, of a machine that stands still, end to end into a buffer of
// their size.
func (p *Process) Read(ctx context.Context, pages []int64, into []byte) error {
	var list []layer.Extent
	for _, off := range pages {
		list = appendExtent(list, layer.Extent{Offset: off, Length: PageSize})
	}
	err := checkExtents(list, p.size)
	if n := extentBytes(list); err == nil && n != int64(len(into)) {
		err = fmt.Errorf("a buffer of %d bytes for %d", len(into), n)
	}
	if err == nil {
		jobs := p.jobs(list)
		err = each(ctx, len(jobs), func(i int) error {
			j := jobs[i]
			return p.transfer(false, into[j.at:j.at+j.length], j.remote)
		})
	}
	if err != nil {
		return fmt.Errorf("read pages of process %d: %w", p.pid, gone(err))
	}
	return nil
}

// Write makes these pages the machine's own, which must map the image they stand over and whose CPUs must not have run.
func (p *Process) Write(ctx context.Context, pages *Pages) error {
	if err := p.write(ctx, pages); err != nil {
		return fmt.Errorf("write pages into process %d: %w", p.pid, gone(err))
	}
	return nil
}

func (p *Process) write(ctx context.Context, pages *Pages) error {
	if !p.private {
		return errors.New("it maps its memory shared, so its siblings would see them")
	}
	if pages.size != p.size {
		return fmt.Errorf("they are of a memory of %d bytes, not %d", pages.size, p.size)
	}
	data, release, err := pages.hold()
	if err != nil {
		return err
	}
	defer release()
	var full, zero []layer.Extent
	for _, r := range pages.index {
		e := layer.Extent{Offset: r.offset, Length: r.length}
		if r.zero {
			zero = append(zero, e)
		} else {
			full = append(full, e)
		}
	}
	jobs := p.jobs(full)
	if err := each(ctx, len(jobs), func(i int) error {
		j := jobs[i]
		return p.transfer(true, data[j.at:j.at+j.length], j.remote)
	}); err != nil {
		return err
	}
	jobs = p.jobs(zero)
	if len(jobs) == 0 {
		return nil
	}
	longest := int64(0)
	for _, j := range jobs {
		longest = max(longest, j.length)
	}
	zeros := make([]byte, longest)
	return each(ctx, len(jobs), func(i int) error { return p.transfer(true, zeros[:jobs[i].length], jobs[i].remote) })
}
