package qemu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/memory"
)

// The RAM of TestAhead's machine: each word of a page says which page it is of and in which version. Some are zero, some
// are the image's, most its own.
const (
	aheadPagesAll = 8 << 10
	aheadRAM      = aheadPagesAll * memory.PageSize
)

func aheadWord(page int, version uint64) uint64 {
	if version <= 1 && page%7 == 0 {
		return 0
	}
	return uint64(page)<<32 | version
}

func fillPage(page []byte, word uint64) {
	for i := 0; i < len(page); i += 8 {
		binary.NativeEndian.PutUint64(page[i:], word)
	}
}

// TestAhead: every page of a process that goes on writing, and from which somebody else takes protection meanwhile, is
// either taken as it was at the instant, or was copied by that somebody before.
func TestAhead(t *testing.T) {
	for range 2 {
		testAhead(t)
		if t.Failed() {
			return
		}
	}
}

func testAhead(t *testing.T) {
	scratch, err := memory.NewScratch(aheadRAM)
	if err != nil {
		t.Fatal(err)
	}
	page := make([]byte, memory.PageSize)
	for i := range aheadPagesAll {
		fillPage(page, aheadWord(i, 1))
		if _, err := scratch.File().WriteAt(page, int64(i)*memory.PageSize); err != nil {
			t.Fatal(err)
		}
	}
	image, err := scratch.Seal()
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	stream, err := memory.NewScratch(aheadRAM + aheadPagesAll) // what the other sends, and which pages it has sent
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()

	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestAheadMachine$", "-test.v")
	cmd.Env = append(os.Environ(), "FORKD_TEST_MACHINE=1")
	cmd.ExtraFiles = []*os.File{image.File(), stream.File()}
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
	said, err := readUntil(stdout, "running\n", "without\n")
	if err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	if strings.Contains(said, "without") {
		_, _ = stdin.Close(), cmd.Wait()
		t.Skip("the kernel gives this user no userfaultfd")
	}
	ram, err := memory.OpenProcess(cmd.Process.Pid, aheadRAM)
	if err != nil {
		t.Fatal(err)
	}
	sink := make(sliceSink, aheadRAM)
	a := newAhead(aheadRAM)
	stop := make(chan struct{})
	limit := time.AfterFunc(5*time.Minute, func() { close(stop) })
	a.run(cmd.Process.Pid, ram, sink, stop)
	if !limit.Stop() {
		t.Fatal("it did not come to its end")
	}
	if a.err != nil {
		t.Fatal(a.err)
	}
	if err := stdin.Close(); err != nil {
		t.Fatal(err)
	}
	rest, _ := io.ReadAll(stdout)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, rest)
	}
	checkAhead(t, &a, sink, stream.File())
}

// readUntil reads until one of the words comes.
func readUntil(r io.Reader, words ...string) (string, error) {
	var said []byte
	b := make([]byte, 1)
	for {
		n, err := r.Read(b)
		said = append(said, b[:n]...)
		for _, w := range words {
			if bytes.HasSuffix(said, []byte(w)) {
				return string(said), nil
			}
		}
		if err != nil {
			return string(said), err
		}
	}
}

func checkAhead(t *testing.T, a *ahead, sink sliceSink, stream *os.File) {
	t.Helper()
	sent := make([]byte, aheadRAM+aheadPagesAll)
	if _, err := stream.ReadAt(sent, 0); err != nil {
		t.Fatal(err)
	}
	taken, left, served := 0, 0, len(a.served)
	want := make([]byte, memory.PageSize)
	for i := range aheadPagesAll {
		fillPage(want, aheadWord(i, 1))
		from, whose := []byte(sink), "taken"
		if !a.taken.has(int64(i) * memory.PageSize) {
			from, whose = sent, "sent"
			left++
			if sent[aheadRAM+i] == 0 {
				t.Fatalf("page %d was neither taken nor sent", i)
			}
		} else {
			taken++
		}
		if got := from[i*memory.PageSize : (i+1)*memory.PageSize]; !bytes.Equal(got, want) {
			t.Fatalf("page %d, %s, is %x and not %x", i, whose, got[:16], want[:16])
		}
	}
	t.Logf("%d pages taken, %d sent before, %d waited for", taken, left, served)
	if taken == 0 || left == 0 || served == 0 {
		t.Error("nothing was contended")
	}
}

// TestAheadMachine is the process of TestAhead.
func TestAheadMachine(t *testing.T) {
	if os.Getenv("FORKD_TEST_MACHINE") == "" {
		t.Skip("not a test")
	}
	// A thread that waits for a page cannot be stopped for a collection.
	debug.SetGCPercent(-1)
	runtime.GOMAXPROCS(4)
	// SAFETY: no pointer is passed; 1 is UFFD_USER_MODE_ONLY, which everybody may have.
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|1, 0, 0)
	if errno != 0 {
		_, _ = os.Stdout.WriteString("without\n")
		return
	}
	m, err := unix.Mmap(3, 0, aheadRAM, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	sent, err := unix.Mmap(4, 0, aheadRAM+aheadPagesAll, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	at := func(i int) []byte { return m[i*memory.PageSize : (i+1)*memory.PageSize] }
	for i := range aheadPagesAll {
		if i%3 != 0 {
			fillPage(at(i), aheadWord(i, 1)) // its own now
		}
		_ = at(i)[0] // all are in the page table, as QEMU does it
	}
	if why := protectOnce(int(fd), m); why != "" {
		t.Fatal(why)
	}
	// Something else is protected as well, which the machine writes first.
	table, err := unix.Mmap(-1, 0, memory.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	table[0] = 1
	where := addresses{uint64(uintptr(unsafe.Pointer(&table[0]))), memory.PageSize}
	register, protect := uffdRegisterArg{at: where, mode: uffdRegisterWP}, uffdProtectArg{at: where, mode: uffdProtectWP}
	if err := errors.Join(
		uffdIoctl(int(fd), uffdioRegister, unsafe.Pointer(&register)), uffdIoctl(int(fd), uffdioProtect, unsafe.Pointer(&protect)),
	); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var ended [2]chan struct{}
	for i := range ended {
		ended[i] = make(chan struct{})
	}
	go func() { // the guest
		defer close(ended[0])
		table[0] = 2
		for version := uint64(2); !isClosed(stop); version++ {
			i := rand.IntN(aheadPagesAll)
			fillPage(at(i), aheadWord(i, version))
		}
	}()
	go func() { // who sends page by page
		defer close(ended[1])
		for _, i := range rand.Perm(aheadPagesAll)[:aheadPagesAll/2] { // or a test that gets no processor finds nothing left
			if isClosed(stop) {
				return
			}
			copy(sent[i*memory.PageSize:], at(i))
			sent[aheadRAM+i] = 1
			address := uint64(uintptr(unsafe.Pointer(&at(i)[0])))
			if err := unprotect(int(fd), []addresses{{address, memory.PageSize}}); err != nil {
				t.Error(err)
				return
			}
			fillPage(at(i), aheadWord(i, 1<<20)) // at once: that there is no time between is not what it stands on
		}
	}()
	_, _ = os.Stdout.WriteString("running\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
	close(stop)
	for _, e := range ended {
		<-e
	}
}

// TestAheadFails: what could not be written is told, and what comes after it is not waited for in vain.
func TestAheadFails(t *testing.T) {
	full := errors.New("full")
	c := newAheadCopy(&ahead{}, -1, nil, nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.write(fullSink{full})
	}()
	for range 3 * (aheadSteps + aheadSpare) {
		p := <-c.free
		p.content, p.protected = testPage(1), []bool{true}
		c.copied <- p
	}
	close(c.copied)
	<-done
	if !errors.Is(c.a.err, full) {
		t.Errorf("error %v, want that of the sink", c.a.err)
	}
}

// TestAheadPages: runs of pages are written to their places, zeros are not written at all.
func TestAheadPages(t *testing.T) {
	const n = 8
	p := &aheadPages{off: 2 * memory.PageSize, content: make([]byte, n*memory.PageSize), protected: make([]bool, n)}
	want := make(sliceSink, (n+2)*memory.PageSize)
	for i := range n {
		copy(p.content[i*memory.PageSize:], testPage(i+1))
		p.protected[i] = i != 2 && i != 5
		if i == 3 {
			clear(p.content[i*memory.PageSize : (i+1)*memory.PageSize])
		}
		if p.protected[i] && i != 3 {
			copy(want[(i+2)*memory.PageSize:], testPage(i+1))
		}
	}
	sink := make(sliceSink, len(want))
	copy(sink[5*memory.PageSize:], []byte{0}) // stays as it is
	if err := p.write(sink); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(sink, want) {
		t.Error("the pages are not at their places")
	}
}
