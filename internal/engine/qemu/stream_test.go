package qemu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"

	"forkd.dev/forkd/internal/memory"
)

// streamWriter writes what QEMU would.
type streamWriter struct{ bytes.Buffer }

func (w *streamWriter) u32(v uint32) { w.Write(binary.BigEndian.AppendUint32(nil, v)) }
func (w *streamWriter) u64(v uint64) { w.Write(binary.BigEndian.AppendUint64(nil, v)) }
func (w *streamWriter) name(s string) {
	w.WriteByte(byte(len(s)))
	w.WriteString(s)
}

func (w *streamWriter) start(section string) {
	w.u32(streamMagic)
	w.u32(streamVersion)
	w.WriteByte(sectionStart)
	w.u32(2)
	w.name(section)
	w.u32(0)
	w.u32(4)
}

func (w *streamWriter) list(blocks ...any) {
	var total uint64
	for i := 1; i < len(blocks); i += 2 {
		total += uint64(blocks[i].(int))
	}
	w.u64(total | ramBlocks)
	for i := 0; i < len(blocks); i += 2 {
		w.name(blocks[i].(string))
		w.u64(uint64(blocks[i+1].(int)))
	}
}

func (w *streamWriter) end() {
	w.u64(ramEnd)
	w.WriteByte(sectionFooter)
	w.u32(2)
}

func (w *streamWriter) part(kind byte) {
	w.WriteByte(kind)
	w.u32(2)
}

// page writes a record; block "" is the one before.
func (w *streamWriter) page(block string, off int, content []byte) {
	flags := uint64(ramPage)
	if len(content) == 1 {
		flags = ramZero
	}
	if block == "" {
		flags |= ramContinue
	}
	w.u64(uint64(off) | flags)
	if block != "" {
		w.name(block)
	}
	w.Write(content)
}

const testRAM = 8 * memory.PageSize

func testPage(i int) []byte { return bytes.Repeat([]byte{byte(i), 0xa5}, memory.PageSize/2) }

// goodStream is a small stream with everything in it: pages out of order, zeros, other blocks, several parts.
func goodStream() []byte {
	w := &streamWriter{}
	w.start("ram")
	w.list("ram", testRAM, "pc.bios", 4*memory.PageSize)
	w.end()
	w.part(sectionPart)
	w.page("ram", 5*memory.PageSize, testPage(5))
	w.page("", 0, testPage(0))
	w.page("", memory.PageSize, testPage(1))
	w.page("", 2*memory.PageSize, []byte{0})
	w.page("pc.bios", 0, testPage(9))
	w.page("", memory.PageSize, []byte{0xff})
	w.page("", 0, testPage(9))
	w.page("ram", 3*memory.PageSize, testPage(3))
	w.end()
	w.part(sectionPart)
	w.page("ram", 4*memory.PageSize, []byte{0})
	w.page("", 6*memory.PageSize, testPage(6))
	w.page("", 7*memory.PageSize, testPage(7))
	w.end()
	w.part(sectionEnd)
	w.end()
	w.Write(deviceState)
	return w.Bytes()
}

var deviceState = []byte("\x04device state\x00")

// TestEndlessStream is given up, whatever it says.
func TestEndlessStream(t *testing.T) {
	w := &streamWriter{}
	w.start("ram")
	w.list("ram", testRAM, "pc.bios", memory.PageSize)
	w.end()
	part := &streamWriter{}
	for range 100 {
		part.part(sectionPart)
		part.page("pc.bios", 0, testPage(1))
		part.end()
	}
	r := io.MultiReader(bytes.NewReader(w.Bytes()), &again{b: part.Bytes()})
	if _, err := drain(r, make(sliceSink, testRAM), testRAM, nil, streamNews{}); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("drain: %v", err)
	}
}

// again reads the same for ever.
type again struct {
	b  []byte
	at int
}

func (r *again) Read(p []byte) (int, error) {
	n := copy(p, r.b[r.at:])
	r.at = (r.at + n) % len(r.b)
	return n, nil
}

// sliceSink is RAM in a slice; it refuses what does not fit.
type sliceSink []byte

func (s sliceSink) writePages(pages [][]byte, off int64) error {
	for _, p := range pages {
		if off < 0 || off+int64(len(p)) > int64(len(s)) || len(p) != memory.PageSize {
			panic(fmt.Sprintf("%d bytes at %d of %d", len(p), off, len(s)))
		}
		off += int64(copy(s[off:], p))
	}
	return nil
}

func TestStream(t *testing.T) {
	want := make([]byte, testRAM)
	for _, i := range []int{0, 1, 3, 5, 6, 7} {
		copy(want[i*memory.PageSize:], testPage(i))
	}
	stream := goodStream()
	for name, r := range map[string]io.Reader{
		"at once":    bytes.NewReader(stream),
		"by bytes":   iotest.OneByteReader(bytes.NewReader(stream)),
		"by halves":  iotest.HalfReader(bytes.NewReader(stream)),
		"eof beside": iotest.DataErrReader(bytes.NewReader(stream)),
	} {
		ram := make(sliceSink, testRAM)
		state, err := drain(r, ram, testRAM, nil, streamNews{})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !bytes.Equal(ram, want) {
			t.Errorf("%s: the RAM is not what was sent", name)
		}
		if header := "QEVM\x00\x00\x00\x03"; string(state) != header+string(deviceState) {
			t.Errorf("%s: device state %q", name, state)
		}
	}
}

// TestLongStream is longer than the window and its runs longer than a call takes.
func TestLongStream(t *testing.T) {
	const pages = 5*maxRun + 7
	w := &streamWriter{}
	w.start("ram")
	w.list("ram", pages*memory.PageSize)
	w.end()
	w.part(sectionPart)
	block := "ram"
	for i := range pages {
		w.page(block, i*memory.PageSize, testPage(i))
		block = ""
	}
	w.end()
	w.Write(deviceState)
	ram := make(sliceSink, pages*memory.PageSize)
	var told []int64
	begun := 0
	_, err := drain(iotest.HalfReader(&w.Buffer), ram, int64(len(ram)), nil, streamNews{
		begun:  func() { begun++ },
		copied: func(done int64) { told = append(told, done) },
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range pages {
		if !bytes.Equal(ram[i*memory.PageSize:(i+1)*memory.PageSize], testPage(i)) {
			t.Fatalf("page %d is not what was sent", i)
		}
	}
	if begun != 1 {
		t.Errorf("told %d times that it has begun", begun)
	}
	if len(told) == 0 || told[len(told)-1] > int64(len(ram)) {
		t.Errorf("told of %d bytes of %d", told, len(ram))
	}
}

func TestBadStreams(t *testing.T) {
	ram := func(list ...any) *streamWriter {
		w := &streamWriter{}
		w.start("ram")
		w.list(list...)
		return w
	}
	good := func() *streamWriter { return ram("ram", testRAM) }
	for name, c := range map[string]struct {
		want  string
		build func() *streamWriter
	}{
		"empty":       {"EOF", func() *streamWriter { return &streamWriter{} }},
		"other magic": {"begins with", func() *streamWriter { w := &streamWriter{}; w.WriteString("GIF89a.."); return w }},
		"other section": {"of RAM, is expected", func() *streamWriter {
			w := &streamWriter{}
			w.start("block")
			return w
		}},
		"wrong size":  {"the machine", func() *streamWriter { return ram("ram", testRAM/2) }},
		"no ram":      {"the machine", func() *streamWriter { return ram("mem", testRAM) }},
		"block twice": {"impossible", func() *streamWriter { return ram("ram", testRAM, "ram", testRAM) }},
		"empty block": {"impossible", func() *streamWriter { return ram("a", 0, "ram", testRAM) }},
		"huge block": {"impossible", func() *streamWriter {
			w := &streamWriter{}
			w.start("ram")
			w.u64(4096 | ramBlocks)
			w.name("a")
			w.u64(1 << 63)
			return w
		}},
		"beyond":        {"which has", func() *streamWriter { w := good(); w.page("ram", testRAM, testPage(0)); return w }},
		"far beyond":    {"which has", func() *streamWriter { w := good(); w.u64(^uint64(ramFlags) | ramPage); w.name("ram"); return w }},
		"unknown block": {"which has", func() *streamWriter { w := good(); w.page("vga", 0, testPage(0)); return w }},
		"no block yet":  {"which has", func() *streamWriter { w := good(); w.page("", 0, testPage(0)); return w }},
		"twice": {"twice", func() *streamWriter {
			w := good()
			w.page("ram", 0, testPage(0))
			w.page("", 0, testPage(1))
			return w
		}},
		"filled":        {"only zero", func() *streamWriter { w := good(); w.page("ram", 0, []byte{7}); return w }},
		"unknown flags": {"unknown flags", func() *streamWriter { w := good(); w.u64(0x100); return w }},
		"two lists":     {"second list", func() *streamWriter { w := good(); w.list("ram", testRAM); return w }},
		"bad footer":    {"ends with", func() *streamWriter { w := good(); w.u64(ramEnd); w.WriteString("12345"); return w }},
		"other part":    {"unknown section", func() *streamWriter { w := good(); w.end(); w.WriteByte(sectionPart); w.u32(9); return w }},
		"pages missing": {"without", func() *streamWriter { w := good(); w.end(); w.Write(deviceState); return w }},
		"state at once": {"without", func() *streamWriter {
			w := &streamWriter{}
			w.u32(streamMagic)
			w.u32(streamVersion)
			w.Write(deviceState)
			return w
		}},
		"second section": {"of RAM, is expected", func() *streamWriter {
			w := good()
			w.end()
			w.WriteByte(sectionStart)
			w.u32(3)
			w.name("ram")
			return w
		}},
	} {
		_, err := drain(&c.build().Buffer, make(sliceSink, testRAM), testRAM, nil, streamNews{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
}

// TestCutStreams: wherever a stream ends early, that is an error; the device state alone cannot tell.
func TestCutStreams(t *testing.T) {
	stream := goodStream()
	for n := 0; n < len(stream); n += 1 + n%31 {
		_, err := drain(bytes.NewReader(stream[:n]), make(sliceSink, testRAM), testRAM, nil, streamNews{})
		if err == nil {
			t.Errorf("cut after %d of %d bytes: no error", n, len(stream))
		}
	}
	broken := errors.New("broken")
	if _, err := drain(io.MultiReader(bytes.NewReader(stream), iotest.ErrReader(broken)), make(sliceSink, testRAM), testRAM, nil, streamNews{}); !errors.Is(err, broken) {
		t.Errorf("a reader that breaks: %v", err)
	}
}

type fullSink struct{ err error }

func (s fullSink) writePages([][]byte, int64) error { return s.err }

func TestStreamIntoFullMemory(t *testing.T) {
	full := errors.New("full")
	if _, err := drain(bytes.NewReader(goodStream()), fullSink{full}, testRAM, nil, streamNews{}); !errors.Is(err, full) {
		t.Errorf("error %v, want that of the sink", err)
	}
}

// TestStreamIntoImage: the pages arrive in a real memory file, and zeros leave holes.
func TestStreamIntoImage(t *testing.T) {
	scratch, err := memory.NewScratch(testRAM)
	if err != nil {
		t.Fatal(err)
	}
	defer scratch.Close()
	if _, err := drain(bytes.NewReader(goodStream()), fileSink{scratch.File()}, testRAM, nil, streamNews{}); err != nil {
		t.Fatal(err)
	}
	image, err := scratch.Seal()
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	got := make([]byte, memory.PageSize)
	for i := range testRAM / memory.PageSize {
		if _, err := image.ReadAt(got, int64(i)*memory.PageSize); err != nil {
			t.Fatal(err)
		}
		want := testPage(i)
		if i == 2 || i == 4 {
			want = make([]byte, memory.PageSize)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("page %d is not what was sent", i)
		}
	}
	if n := image.AllocatedBytes(); n != 6*memory.PageSize {
		t.Errorf("%d bytes are allocated, want those of six pages", n)
	}
}

func FuzzStream(f *testing.F) {
	// Small, or the search spends its time on the content of pages.
	const size = 4 * memory.PageSize
	w := &streamWriter{}
	w.start("ram")
	w.list("bios", memory.PageSize, "ram", size)
	w.end()
	w.part(sectionPart)
	w.page("bios", 0, []byte{1})
	w.page("ram", 0, []byte{0})
	w.page("", 2*memory.PageSize, []byte{0})
	w.page("", memory.PageSize, testPage(1))
	w.end()
	w.part(sectionEnd)
	w.page("ram", 3*memory.PageSize, []byte{0})
	w.end()
	w.Write(deviceState)
	f.Add(w.Bytes())
	f.Add(w.Bytes()[:60])
	f.Fuzz(func(t *testing.T, stream []byte) {
		ram := make(sliceSink, size) // Panics on a write out of range.
		state, err := drain(bytes.NewReader(stream), ram, size, nil, streamNews{})
		if err == nil && (len(state) < streamHeader+2 || len(state) > len(stream)) {
			t.Errorf("a state of %d bytes from %d", len(state), len(stream))
		}
	})
}

func BenchmarkStream(b *testing.B) {
	const pages = 64 << 20 / memory.PageSize
	w := &streamWriter{}
	w.start("ram")
	w.list("ram", pages*memory.PageSize)
	w.end()
	w.part(sectionPart)
	block := "ram"
	for i := range pages {
		w.page(block, i*memory.PageSize, testPage(i))
		block = ""
	}
	w.end()
	w.Write(deviceState)
	b.SetBytes(pages * memory.PageSize)
	for b.Loop() {
		scratch, err := memory.NewScratch(pages * memory.PageSize)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := drain(bytes.NewReader(w.Bytes()), fileSink{scratch.File()}, pages*memory.PageSize, nil, streamNews{}); err != nil {
			b.Fatal(err)
		}
		_ = scratch.Close()
	}
}

// TestPassed: a stride is passed once, when all of its pages have come and one more, in whatever order they come.
func TestPassed(t *testing.T) {
	const size = 5 << 20 // two strides and a half
	const pages = size / memory.PageSize
	rng := rand.New(rand.NewPCG(1, 2))
	order := rng.Perm(pages)
	w := &streamWriter{}
	w.start("ram")
	w.list("ram", size)
	w.end()
	w.part(sectionPart)
	for i, p := range order {
		name := ""
		if i == 0 {
			name = "ram"
		}
		w.page(name, p*memory.PageSize, []byte{0})
	}
	w.end()
	w.part(sectionEnd)
	w.end()
	w.Write(deviceState)
	last := map[int64]int{} // by stride: when its last page comes
	for i, p := range order {
		last[int64(p)*memory.PageSize/stride*stride] = i
	}
	came, passed := 0, map[int64]bool{}
	news := streamNews{
		jumped: func(int64) { came++ }, // nearly every page; told before the next
		passed: func(off int64) {
			if passed[off] {
				t.Errorf("the stride at %#x was passed twice", off)
			}
			passed[off] = true
			if came < last[off]*9/10 || last[off] == pages-1 {
				t.Errorf("the stride at %#x was passed after some %d pages; its last comes as number %d of %d", off, came, last[off], pages)
			}
		},
	}
	if _, err := drain(bytes.NewReader(w.Bytes()), fullSink{nil}, size, nil, news); err != nil {
		t.Fatal(err)
	}
	for off, i := range last {
		if !passed[off] && i != pages-1 {
			t.Errorf("the stride at %#x was never passed", off)
		}
	}
}
