package memory

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

func openStore(tb testing.TB) *layer.Store {
	tb.Helper()
	s, err := layer.Open(filepath.Join(tb.TempDir(), "layers"))
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// imageOf is a sealed image with this content, holes where it is zero.
func imageOf(tb testing.TB, content []byte) *Image {
	tb.Helper()
	s, err := NewScratch(int64(len(content)))
	if err != nil {
		tb.Fatal(err)
	}
	for off := 0; off < len(content); off += PageSize {
		if p := content[off : off+PageSize]; !bytes.Equal(p, make([]byte, PageSize)) {
			if _, err := s.File().WriteAt(p, int64(off)); err != nil {
				tb.Fatal(err)
			}
		}
	}
	img, err := s.Seal()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = img.Close() })
	return img
}

func read(tb testing.TB, img *Image) []byte {
	tb.Helper()
	b := make([]byte, img.Size())
	if _, err := img.ReadAt(b, 0); err != nil {
		tb.Fatal(err)
	}
	return b
}

func mustLoad(tb testing.TB, s *layer.Store, d layer.Digest) *Image {
	tb.Helper()
	img, err := Load(tb.Context(), s, d)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = img.Close() })
	return img
}

// Invariant 2: whoever holds a descriptor, however it was opened, cannot write, map for writing, shrink or grow.
func wantImmutable(t *testing.T, img *Image) {
	t.Helper()
	before := read(t, img)
	reopened, err := os.OpenFile(procPath(img.File()), os.O_RDWR, 0)
	if err != nil {
		t.Fatalf("open for writing, as QEMU does: %v", err)
	}
	defer reopened.Close()
	for name, f := range map[string]*os.File{"own": img.File(), "reopened": reopened} {
		if _, err := f.WriteAt([]byte{1}, 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s descriptor: write: %v, want EPERM", name, err)
		}
		if err := f.Truncate(PageSize); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s descriptor: shrink: %v, want EPERM", name, err)
		}
		if err := f.Truncate(img.Size() + PageSize); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s descriptor: grow: %v, want EPERM", name, err)
		}
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, PageSize)
		if !errors.Is(err, unix.EPERM) {
			t.Errorf("%s descriptor: punch: %v, want EPERM", name, err)
		}
		if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s descriptor: seal again: %v, want EPERM", name, err)
		}
		_, err = unix.Mmap(int(f.Fd()), 0, PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if !errors.Is(err, unix.EPERM) {
			t.Errorf("%s descriptor: map shared and writable: %v, want EPERM", name, err)
		}
		// What children do: a private mapping, whose writes are their own.
		m, err := unix.Mmap(int(f.Fd()), 0, PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			t.Fatalf("%s descriptor: map privately: %v", name, err)
		}
		m[0]++
		if err := unix.Munmap(m); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(before, read(t, img)) {
		t.Error("the image changed")
	}
}

func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// content has pages of every kind.
func content(seed uint64, size int) []byte {
	r := rand.New(rand.NewPCG(seed, 2))
	b := make([]byte, size)
	for off := 0; off < size; off += PageSize {
		switch r.IntN(3) {
		case 0:
			for i := range 512 {
				b[off+i*8] = byte(r.Uint32())
			}
		case 1:
			b[off+PageSize-1] = 1
		}
	}
	return b
}

func TestSealedImageIsImmutable(t *testing.T) { wantImmutable(t, imageOf(t, content(1, 1<<20))) }

func TestLoadedImageIsImmutable(t *testing.T) {
	s := openStore(t)
	info, err := Save(t.Context(), s, imageOf(t, content(1, 1<<20)), layer.Digest{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	wantImmutable(t, mustLoad(t, s, info.Digest))
}

func TestSealNeedsWritableMappingsGone(t *testing.T) {
	s, err := NewScratch(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	m, err := unix.Mmap(int(s.File().Fd()), 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	m[5] = 5
	if _, err := s.Seal(); !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "maps it") {
		t.Errorf("Seal under a mapping: %v, want EBUSY and the reason", err)
	}
	m[6] = 6 // still writable: the refused seal changed nothing
	if err := unix.Munmap(m); err != nil {
		t.Fatal(err)
	}
	img, err := s.Seal()
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	if b := read(t, img); b[5] != 5 || b[6] != 6 {
		t.Error("what was written through the mapping is lost")
	}
	if s.File() != nil || s.Close() != nil {
		t.Error("a sealed scratch is not empty")
	}
	if _, err := s.Seal(); !errors.Is(err, ErrClosed) {
		t.Errorf("Seal twice: %v", err)
	}
}

func TestImageClose(t *testing.T) {
	s := openStore(t)
	img := imageOf(t, content(1, 1<<20))
	m, err := unix.Mmap(int(img.File().Fd()), 0, 1<<20, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(m) }()
	want := read(t, img)
	dup, err := img.Dup()
	if err != nil {
		t.Fatal(err)
	}
	defer dup.Close()
	for range 2 {
		if err := img.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if b, err := io.ReadAll(io.NewSectionReader(dup, 0, img.Size())); err != nil || !bytes.Equal(b, want) {
		t.Errorf("a second descriptor lost its memory when the image was closed: %v", err)
	}
	if !bytes.Equal(m, want) {
		t.Error("a mapping lost its memory when the image was closed")
	}
	if _, err := img.Dup(); !errors.Is(err, ErrClosed) {
		t.Errorf("Dup: %v", err)
	}
	if img.File() != nil || img.AllocatedBytes() != 0 {
		t.Error("a closed image still has a file")
	}
	if _, err := img.ReadAt(make([]byte, 1), 0); !errors.Is(err, ErrClosed) {
		t.Errorf("ReadAt: %v", err)
	}
	if _, err := Save(t.Context(), s, img, layer.Digest{}, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Save: %v", err)
	}
}

func TestSizes(t *testing.T) {
	for _, size := range []int64{0, -PageSize, 1, PageSize + 1} {
		if s, err := NewScratch(size); err == nil {
			_ = s.Close()
			t.Errorf("NewScratch(%d) was accepted", size)
		}
	}
}

func TestSaveLoad(t *testing.T) {
	s := openStore(t)
	root := content(1, 16<<20)
	rootImage := imageOf(t, root)
	allocated := rootImage.AllocatedBytes()
	a, err := Save(t.Context(), s, rootImage, layer.Digest{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	child := bytes.Clone(root)
	copy(child[3<<20:], content(2, 1<<20))
	clear(child[8<<20 : 9<<20])
	b, err := Save(t.Context(), s, imageOf(t, child), a.Digest, rootImage)
	if err != nil {
		t.Fatal(err)
	}
	if b.OwnBytes > 1<<20 {
		t.Errorf("a child with 1 MiB of changes owns %d bytes", b.OwnBytes)
	}
	if before, after := allocated, rootImage.AllocatedBytes(); after != before {
		t.Errorf("saving raised what an image occupies from %d to %d", before, after)
	}
	got := mustLoad(t, s, b.Digest)
	if !bytes.Equal(read(t, mustLoad(t, s, a.Digest)), root) || !bytes.Equal(read(t, got), child) {
		t.Error("an image came back different")
	}
	if got.Size() != int64(len(child)) || got.AllocatedBytes() > int64(len(child))*3/4 {
		t.Errorf("loaded image has %d bytes, %d allocated: zero pages should be holes", got.Size(), got.AllocatedBytes())
	}
}

// Invariant 3, at this level: a page that became zero over a parent that has data there is zero after Load.
func TestPageThatBecameZeroIsZeroAfterLoad(t *testing.T) {
	s := openStore(t)
	root := bytes.Repeat([]byte{0xcc}, 16*PageSize)
	rootImage := imageOf(t, root)
	a, err := Save(t.Context(), s, rootImage, layer.Digest{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	child := bytes.Clone(root)
	clear(child[4*PageSize : 7*PageSize]) // imageOf leaves holes there
	b, err := Save(t.Context(), s, imageOf(t, child), a.Digest, rootImage)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(read(t, mustLoad(t, s, b.Digest)), child) {
		t.Error("pages that became zero are not zero")
	}
}

func TestSaveRefusesMismatch(t *testing.T) {
	s := openStore(t)
	img := imageOf(t, content(1, 1<<20))
	a, err := Save(t.Context(), s, img, layer.Digest{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Save(t.Context(), s, img, a.Digest, nil); err == nil {
		t.Error("parent without image was accepted")
	}
	if _, err := Save(t.Context(), s, img, layer.Digest{}, img); err == nil {
		t.Error("parent image without layer was accepted")
	}
	if _, err := Save(t.Context(), s, imageOf(t, content(1, 2<<20)), a.Digest, img); err == nil {
		t.Error("a child of another size was accepted")
	}
	disk, err := s.Write(t.Context(), layer.WriteSpec{PageSize: 65536, Size: 65536})
	if err != nil {
		t.Fatal(err)
	}
	if img, err := Load(t.Context(), s, disk.Digest); err == nil {
		_ = img.Close()
		t.Error("a disk was loaded as memory")
	}
}

func TestLoadOfDamagedLayer(t *testing.T) {
	dir := t.TempDir()
	s, err := layer.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	info, err := Save(t.Context(), s, imageOf(t, content(1, 4<<20)), layer.Digest{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	chunks, err := filepath.Glob(filepath.Join(dir, "chunks", "*", "*"))
	if err != nil || len(chunks) == 0 {
		t.Fatal(chunks, err)
	}
	if err := os.Truncate(chunks[0], 100); err != nil {
		t.Fatal(err)
	}
	before := openMemfds(t)
	if _, err := Load(t.Context(), s, info.Digest); !errors.Is(err, layer.ErrCorrupt) {
		t.Errorf("got %v, want ErrCorrupt", err)
	}
	if after := openMemfds(t); after != before {
		t.Errorf("%d memfds open before, %d after a refused Load", before, after)
	}
}

func openMemfds(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && strings.HasPrefix(to, "/memfd:") {
			n++
		}
	}
	return n
}

func TestNoMemoryIsNamed(t *testing.T) {
	for errno, remedy := range map[error]string{unix.ENOSPC: "no memory left", unix.ENOMEM: "no memory left", unix.EFBIG: "ulimit -f"} {
		err := noMemory(&os.PathError{Op: "write", Path: "memfd", Err: errno}, 1<<30)
		if !errors.Is(err, errno) || !strings.Contains(err.Error(), remedy) || !strings.Contains(err.Error(), "an image of 1024 MiB") {
			t.Error(err)
		}
	}
	if err := noMemory(fs.ErrClosed, 1<<30); !errors.Is(err, fs.ErrClosed) || strings.Contains(err.Error(), "memory") {
		t.Error(err)
	}
}

func TestMeasure(t *testing.T) {
	const size = 32 << 20
	debug.FreeOSMemory() // not between the two measurements
	before, err := Measure(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if before.OwnBytes <= 0 || before.ProportionalBytes < before.OwnBytes {
		t.Errorf("impossible: %+v", before)
	}
	own, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(own) }()
	for i := 0; i < size; i += PageSize {
		own[i] = 1
	}
	after, err := Measure(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if grown := after.OwnBytes - before.OwnBytes; grown < size*3/4 {
		t.Errorf("touching %d bytes raised own memory by %d", size, grown)
	}
}

// TestMeasureTellsOwnFromShared: pages of the image that a lone child reads are not its own, those it writes are.
func TestMeasureTellsOwnFromShared(t *testing.T) {
	const size = 32 << 20
	s, err := NewScratch(size)
	if err != nil {
		t.Fatal(err)
	}
	for off := int64(0); off < size; off += PageSize {
		if _, err := s.File().WriteAt([]byte{1}, off); err != nil {
			t.Fatal(err)
		}
	}
	image, err := s.Seal()
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	m, err := unix.Mmap(int(image.File().Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(m) }()
	own := func() int64 {
		debug.FreeOSMemory()
		u, err := Measure(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		return u.OwnBytes
	}
	before, sum := own(), byte(0)
	for i := 0; i < size; i += PageSize {
		sum += m[i]
	}
	read := own()
	if grown := read - before; grown > size/4 || sum == 1 {
		t.Errorf("reading %d bytes of an image raised own memory by %d", size, grown)
	}
	for i := 0; i < size/2; i += PageSize {
		m[i] = 2
	}
	if grown := own() - read; grown < size/2*3/4 || grown > size/2*5/4 {
		t.Errorf("writing %d bytes raised own memory by %d", size/2, grown)
	}
}

func TestMeasureGoneProcess(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "true")
	if err := cmd.Start(); err != nil {
		t.Skip("no program to start: ", err)
	}
	pid := cmd.Process.Pid
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, err := Measure(pid); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "gone") {
		t.Errorf("got %v", err)
	}
}

func TestParseSmapsRollup(t *testing.T) {
	u, err := parseSmapsRollup([]byte("55d4-7ffe ---p 00000000 00:00 0   [rollup]\nRss:  900 kB\nPss:  500 kB\nPss_Dirty:  9 kB\n" +
		"Shared_Clean: 10 kB\nPrivate_Dirty:  800 kB\nAnonymous:  300 kB\nSwap: 1 kB\n"))
	if want := (Usage{OwnBytes: 301 << 10, SharedBytes: 600 << 10, ProportionalBytes: 500 << 10}); u != want || err != nil {
		t.Errorf("got %+v, %v", u, err)
	}
	if _, err := parseSmapsRollup(nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a zombie's empty file: %v", err)
	}
	if _, err := parseSmapsRollup([]byte("Pss: 99999999999999999999 kB\n")); err == nil {
		t.Error("a number beyond int64 was accepted")
	}
}

// A 512 MiB guest of which 150 MiB are in use, half of it incompressible.
func benchContent() []byte {
	b := make([]byte, 512<<20)
	r := rand.NewChaCha8([32]byte{1})
	for off := 0; off < 300<<20; off += 128 << 10 {
		_, _ = r.Read(b[off : off+32<<10])
		for i := off + 32<<10; i < off+64<<10; i += 64 {
			copy(b[i:], "a line of text such as a page of memory might hold, more or less")
			b[i] = byte(i >> 6)
		}
	}
	return b
}

func BenchmarkLoad(b *testing.B) {
	s := openStore(b)
	info, err := Save(b.Context(), s, imageOf(b, benchContent()), layer.Digest{}, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(info.OwnBytes)
	for b.Loop() {
		img, err := Load(b.Context(), s, info.Digest)
		if err != nil {
			b.Fatal(err)
		}
		if err := img.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSave(b *testing.B) {
	img := imageOf(b, benchContent())
	for b.Loop() {
		b.StopTimer()
		s := openStore(b)
		b.StartTimer()
		info, err := Save(b.Context(), s, img, layer.Digest{}, nil)
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(info.OwnBytes)
	}
}
