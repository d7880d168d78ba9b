package memory

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
)

// child maps an image privately, as QEMU does, in this very process: the calls are the same.
func child(tb testing.TB, img *Image) []byte {
	tb.Helper()
	m, err := unix.Mmap(int(img.File().Fd()), 0, int(img.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Munmap(m) })
	return m
}

func openSelf(tb testing.TB, size int64) *Process {
	tb.Helper()
	p, err := OpenProcess(os.Getpid(), size)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func ownPages(tb testing.TB, p *Process) []layer.Extent {
	tb.Helper()
	own, err := p.OwnPages(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return own
}

// copyOwn captures what is the child's own.
func copyOwn(tb testing.TB, p *Process, reserve int64) *Pages {
	tb.Helper()
	b, err := NewBuffer(reserve)
	if err != nil {
		tb.Fatal(err)
	}
	pages, err := p.Copy(tb.Context(), ownPages(tb, p), b)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = pages.Close() })
	return pages
}

func readView(tb testing.TB, v View) []byte {
	tb.Helper()
	b := make([]byte, v.Size())
	if n, err := v.ReadAt(b, 0); err != nil || n != len(b) {
		tb.Fatalf("read %d bytes: %v", n, err)
	}
	return b
}

func TestCopyAndWrite(t *testing.T) {
	const size = 24 << 20
	img := imageOf(t, content(1, size))
	m := child(t, img)
	p := openSelf(t, size)
	if !p.Private() || p.Size() != size {
		t.Errorf("got %+v", p)
	}
	if own := ownPages(t, p); own != nil {
		t.Errorf("a child that wrote nothing owns %v", own)
	}
	var want []layer.Extent
	r := rand.New(rand.NewPCG(1, 1))
	for off := int64(0); off < size; off += PageSize {
		if r.IntN(3) == 0 {
			_ = m[off] // reading makes no page its own
			continue
		}
		m[off+r.Int64N(PageSize)] ^= byte(r.Uint32())
		want = appendExtent(want, layer.Extent{Offset: off, Length: PageSize})
	}
	clear(m[1<<20 : 2<<20])
	clear(m[20<<20 : 21<<20])
	for _, e := range []layer.Extent{{Offset: 1 << 20, Length: 1 << 20}, {Offset: 20 << 20, Length: 1 << 20}} {
		want = union(want, e)
	}
	if d := cmp.Diff(want, ownPages(t, p)); d != "" {
		t.Error(d)
	}
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	slow, err := p.pagemapRead(t.Context(), f, pageOwn)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, slow); d != "" {
		t.Error(d)
	}

	// One buffer is too small and grows, one has slack.
	for _, reserve := range []int64{0, PageSize, 40 << 20} {
		pages := copyOwn(t, p, reserve)
		if got := readView(t, View{img, pages}); !bytes.Equal(got, m) {
			t.Fatalf("with %d bytes reserved, the copy differs", reserve)
		}
		if n := int64(len(pages.region)); n != pages.Bytes() {
			t.Errorf("pages of %d bytes are in memory of %d", pages.Bytes(), n)
		}
		if err := overwrite(pages.region); !errors.Is(err, unix.EFAULT) {
			t.Errorf("pages that were read can be written: %v", err)
		}
		second := copyOwn(t, p, reserve)
		if err := errors.Join(second.Seal(), second.Seal()); err != nil {
			t.Error(err)
		}
	}
	pages := copyOwn(t, p, 32<<20)
	pages.index = append(pages.index[:1:1], pages.index[1:]...)
	was := bytes.Clone(m)
	if err := unix.Munmap(m); err != nil {
		t.Fatal(err)
	}

	// A grandchild over the same image.
	m = child(t, img)
	p = openSelf(t, size)
	if err := p.Write(t.Context(), pages); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(m, was) {
		t.Error("the grandchild's memory differs from the child's")
	}
	if d := cmp.Diff(want, ownPages(t, p)); d != "" {
		t.Errorf("what was written is not the grandchild's own: %s", d)
	}
	// Zero pages are zeros.
	copy(m[4<<20:], bytes.Repeat([]byte{1}, 3*PageSize))
	zero := &Pages{size: size, index: []pageRun{{offset: 4 << 20, length: 3 * PageSize, zero: true}}}
	if err := p.Write(t.Context(), zero); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(m[4<<20:4<<20+3*PageSize], make([]byte, 3*PageSize)) {
		t.Error("zero pages are not zero")
	}
	if err := p.Write(t.Context(), &Pages{size: size + PageSize}); err == nil {
		t.Error("pages of another size were written")
	}
}

// union adds an extent to a sorted list.
func union(list []layer.Extent, e layer.Extent) []layer.Extent {
	var out []layer.Extent
	for off := int64(0); off < 24<<20; off += PageSize {
		in := off >= e.Offset && off < e.Offset+e.Length
		for _, l := range list {
			in = in || off >= l.Offset && off < l.Offset+l.Length
		}
		if in {
			out = appendExtent(out, layer.Extent{Offset: off, Length: PageSize})
		}
	}
	return out
}

// A process of its own, which is no descendant that asked to be traced: what a VM process is to the daemon.
func TestOtherProcess(t *testing.T) {
	const size = 8 << 20
	img := imageOf(t, content(3, size))
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHelperChild$")
	cmd.Env = append(os.Environ(), "FORKD_TEST_CHILD=1")
	cmd.ExtraFiles = []*os.File{img.File()}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = stdin.Close(), cmd.Wait() }()
	if _, err := io.ReadFull(stdout, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	p, err := OpenProcess(cmd.Process.Pid, size)
	if err != nil {
		t.Fatal(err)
	}
	want := []layer.Extent{{Offset: PageSize, Length: 2 * PageSize}, {Offset: size - PageSize, Length: PageSize}}
	if d := cmp.Diff(want, ownPages(t, p)); d != "" {
		t.Error(d)
	}
	pages := copyOwn(t, p, 1<<20)
	b := readView(t, View{img, pages})
	if b[PageSize] != 7 || b[2*PageSize] != 8 || b[size-1] != 9 {
		t.Error("the copy is not what the child wrote")
	}
	if err := p.Populate(t.Context()); err != nil {
		t.Fatal(err)
	}
	absent, err := p.scan(t.Context(), pageAbsent)
	if err != nil || absent != nil {
		t.Errorf("absent after Populate: %v, %v", absent, err)
	}
	if n := img.AllocatedBytes(); n != size {
		t.Errorf("the image occupies %d of %d bytes after Populate", n, size)
	}
	if d := cmp.Diff(want, ownPages(t, p)); d != "" {
		t.Errorf("Populate made pages the child's own: %s", d)
	}
	if err := p.Write(t.Context(), pages); err != nil {
		t.Error(err)
	}
	local := make([]byte, 3)
	if err := p.transferFile(false, local, []unix.RemoteIovec{{Base: p.base + PageSize, Len: 1}, {Base: p.base + size - 2, Len: 2}}); err != nil {
		t.Fatal(err)
	}
	if local[0] != 7 || local[2] != 9 {
		t.Errorf("by the memory file: %v", local)
	}
	if err := p.transferFile(true, []byte{5}, []unix.RemoteIovec{{Base: p.base + 5*PageSize, Len: 1}}); err != nil {
		t.Error(err)
	}
	if err := errors.Join(stdin.Close(), cmd.Wait()); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"own pages": func() error { _, err := p.OwnPages(t.Context()); return err }(),
		"populate":  p.Populate(t.Context()),
		"write":     p.Write(t.Context(), pages),
		"open":      func() error { _, err := OpenProcess(cmd.Process.Pid, size); return err }(),
		"copy": func() error {
			b, err := NewBuffer(PageSize)
			if err != nil {
				t.Fatal(err)
			}
			_, err = p.Copy(t.Context(), want, b)
			return err
		}(),
	} {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s of a process that is gone: %v", name, err)
		}
	}
}

// TestHelperChild is the process of TestOtherProcess.
func TestHelperChild(t *testing.T) {
	if os.Getenv("FORKD_TEST_CHILD") == "" {
		t.Skip("not a test")
	}
	m, err := unix.Mmap(3, 0, 8<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	// The mapping is split as by QEMU's advice.
	if err := unix.Madvise(m[2<<20:3<<20], unix.MADV_DONTFORK); err != nil {
		t.Fatal(err)
	}
	m[PageSize], m[2*PageSize], m[len(m)-1] = 7, 8, 9
	_, _ = os.Stdout.WriteString("ready\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = unix.Munmap(m)
}

func TestFindMapping(t *testing.T) {
	const lib = "7f0000000000-7f0000001000 r--p 00000000 fe:01 77   /usr/lib/x y.so\n"
	const inode = " 00:01 1234   /memfd:forkd-image (deleted)\n"
	for name, tc := range map[string]struct {
		maps string
		base uintptr
	}{
		"whole":       {lib + "10000-20000 rw-p 00000000" + inode, 0x10000},
		"split":       {"10000-18000 rw-p 00000000" + inode + "18000-1c000 rw-p 00008000" + inode + "1c000-20000 r--p 0000c000" + inode, 0x10000},
		"after part":  {"10000-18000 rw-p 00000000" + inode + "30000-38000 rw-p 00000000" + inode + "38000-40000 rw-p 00008000" + inode, 0x30000},
		"shared":      {"10000-20000 rw-s 00000000 00:01 9 /memfd:forkd-scratch (deleted)\n", 0x10000},
		"none":        {lib, 0},
		"smaller":     {"10000-18000 rw-p 00000000" + inode, 0},
		"tail":        {"10000-20000 rw-p 00001000" + inode, 0},
		"gap":         {"10000-18000 rw-p 00000000" + inode + "19000-21000 rw-p 00008000" + inode, 0},
		"other inode": {"10000-18000 rw-p 00000000" + inode + "18000-20000 rw-p 00008000" + strings.Replace(inode, "1234", "5", 1), 0},
		"other name":  {"10000-20000 rw-p 00000000 00:01 9 /memfd:else (deleted)\n", 0},
		"nonsense":    {"hello\n", 0},
		"backwards":   {"20000-10000 rw-p 00000000" + inode, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := findMapping([]byte(tc.maps), 0x10000)
			if (tc.base == 0) != (err != nil) || err == nil && (p.base != tc.base || p.private != (name != "shared")) {
				t.Errorf("got %+v, %v", p, err)
			}
		})
	}
}

func FuzzFindMapping(f *testing.F) {
	f.Add([]byte("10000-20000 rw-p 00000000 00:01 1234   /memfd:forkd-image (deleted)\n"))
	f.Fuzz(func(_ *testing.T, maps []byte) { _, _ = findMapping(maps, 0x10000) })
}

func TestCopyRefuses(t *testing.T) {
	const size = 4 << 20
	img := imageOf(t, content(1, size))
	child(t, img)
	p := openSelf(t, size)
	for name, own := range map[string][]layer.Extent{
		"beyond":     {{Offset: size - PageSize, Length: 2 * PageSize}},
		"unaligned":  {{Offset: 1, Length: PageSize}},
		"descending": {{Offset: 2 * PageSize, Length: PageSize}, {Offset: PageSize, Length: PageSize}},
		"empty":      {{Offset: PageSize}},
	} {
		b, err := NewBuffer(PageSize)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Copy(t.Context(), own, b); err == nil {
			t.Errorf("%s was accepted", name)
		}
		if b.Size() != 0 {
			t.Errorf("%s: the buffer was not consumed", name)
		}
	}
	if _, err := OpenProcess(os.Getpid(), size*2); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a size nobody maps: %v", err)
	}
}

func TestScratchReserveAndMap(t *testing.T) {
	const size = 8 << 20
	s, err := NewScratch(size)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	extents := []layer.Extent{{Offset: 1 << 20, Length: 1 << 20}, {Offset: 4 << 20, Length: 2 << 20}}
	if err := s.Reserve(t.Context(), extents); err != nil {
		t.Fatal(err)
	}
	if n, err := allocatedBytes(s.File()); err != nil || n != 3<<20 {
		t.Errorf("%d bytes are allocated, %v", n, err)
	}
	m, err := s.Map()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Populate(t.Context(), extents); err != nil {
		t.Fatal(err)
	}
	m.Bytes()[1<<20] = 1
	m.Bytes()[5<<20] = 2
	if p := openSelf(t, size); p.Private() || ownPages(t, p) != nil || p.Write(t.Context(), &Pages{size: size}) == nil {
		t.Error("a shared mapping has own pages, or was written")
	}
	if _, err := s.Seal(); !errors.Is(err, unix.EBUSY) {
		t.Errorf("Seal while mapped: %v", err)
	}
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Fatal(err)
	}
	img, err := s.Seal()
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	list, err := img.Allocated(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(extents, list); d != "" {
		t.Error(d)
	}
	shared, err := img.Share()
	if err != nil {
		t.Fatal(err)
	}
	defer shared.Close()
	if err := img.Close(); err != nil {
		t.Fatal(err)
	}
	if b := read(t, shared); b[1<<20] != 1 || b[5<<20] != 2 {
		t.Error("the second handle does not hold what was written")
	}
	if err := s.Reserve(t.Context(), nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Reserve of a sealed scratch: %v", err)
	}
	if _, err := s.Map(); !errors.Is(err, ErrClosed) {
		t.Errorf("Map of a sealed scratch: %v", err)
	}
}

// A child of 1.5 GiB with 64 MiB of its own, half of it scattered.
func BenchmarkCopy(b *testing.B) {
	const size = 1536 << 20
	s, err := NewScratch(size)
	if err != nil {
		b.Fatal(err)
	}
	img, err := s.Seal()
	if err != nil {
		b.Fatal(err)
	}
	defer img.Close()
	m := child(b, img)
	for off := 0; off < 32<<20; off += PageSize {
		m[off] = 1
		m[512<<20+off*16] = 1
	}
	p := openSelf(b, size)
	var scan, took time.Duration
	n := int64(0)
	for b.Loop() {
		start := time.Now()
		own := ownPages(b, p)
		scan += time.Since(start)
		n = extentBytes(own)
		buf, err := NewBuffer(n)
		if err != nil {
			b.Fatal(err)
		}
		start = time.Now()
		pages, err := p.Copy(b.Context(), own, buf)
		if err != nil {
			b.Fatal(err)
		}
		took += time.Since(start)
		if err := pages.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(n)*float64(b.N)/took.Seconds()/1e9, "GB/s-copied")
	b.ReportMetric(took.Seconds()*1e3/float64(b.N), "ms/copy")
	b.ReportMetric(scan.Seconds()*1e3/float64(b.N), "ms/scan")
}

// More own ranges than the kernel hands out in a call, and exactly as many.
func TestManyOwnRanges(t *testing.T) {
	for _, size := range []int64{128 << 20, 144 << 20} {
		s, err := NewScratch(size)
		if err != nil {
			t.Fatal(err)
		}
		img, err := s.Seal()
		if err != nil {
			t.Fatal(err)
		}
		m, err := unix.Mmap(int(img.File().Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		for off := int64(0); off < size; off += 2 * PageSize {
			m[off] = 1
		}
		own := ownPages(t, openSelf(t, size))
		if err := errors.Join(unix.Munmap(m), img.Close(), checkExtents(own, size)); err != nil {
			t.Error(err)
		}
		if int64(len(own)) != size/PageSize/2 {
			t.Errorf("%d ranges of %d", len(own), size/PageSize/2)
		}
	}
}

// The first capture of a child of 1.5 GiB that has run little.
func BenchmarkPopulate(b *testing.B) {
	const size = 1536 << 20
	img, _ := filled(b, size, 0)
	var first, again time.Duration
	for b.Loop() {
		m, err := unix.Mmap(int(img.File().Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			b.Fatal(err)
		}
		p := openSelf(b, size)
		start := time.Now()
		if err := p.Populate(b.Context()); err != nil {
			b.Fatal(err)
		}
		first += time.Since(start)
		start = time.Now()
		if err := p.Populate(b.Context()); err != nil {
			b.Fatal(err)
		}
		again += time.Since(start)
		if err := unix.Munmap(m); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(first.Seconds()*1e3/float64(b.N), "ms/first")
	b.ReportMetric(again.Seconds()*1e3/float64(b.N), "ms/again")
}

// overwrite tries to write memory of this process, and gets an error where a store would be a signal.
func overwrite(m []byte) error {
	one := []byte{1}
	local := []unix.Iovec{{Base: &one[0]}}
	local[0].SetLen(1)
	_, err := unix.ProcessVMWritev(os.Getpid(), local, []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&m[0])), Len: 1}}, 0)
	return err
}

// TestScattered: short runs come first, and there are not too many.
func TestScattered(t *testing.T) {
	const page, most = PageSize, 2048
	got := scattered([]layer.Extent{{Offset: 0, Length: 3 * page}, {Offset: 8 * page, Length: page}, {Offset: 10 * page, Length: 2 * page}}, most)
	if want := []int64{8 * page, 10 * page, 11 * page, 0, page, 2 * page}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	got = scattered([]layer.Extent{{Offset: 0, Length: 1 << 30}, {Offset: 2 << 30, Length: page}}, most)
	if len(got) != most || got[0] != 2<<30 {
		t.Errorf("got %d pages, the first %#x", len(got), got[0])
	}
}
