package wire

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"
)

func preamble(nonce byte, generation uint64) *Preamble {
	p := &Preamble{Version: Version, Generation: generation}
	for i := range p.Nonce {
		p.Nonce[i] = nonce
	}
	return p
}

func chunks(t testing.TB, writes ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := NewChunkWriter(&b)
	for _, p := range writes {
		if _, err := w.Write([]byte(p)); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func cat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// await opens the next session and checks which.
func await(t *testing.T, c *Receiver, want *Preamble) {
	t.Helper()
	p, err := c.Await()
	if err != nil || p != *want {
		t.Fatalf("got %v, %v; want %v", p, err, *want)
	}
}

// readers deliver the same bytes in different pieces.
func readers(b []byte) map[string]io.Reader {
	return map[string]io.Reader{
		"whole":   bytes.NewReader(b),
		"by byte": iotest.OneByteReader(bytes.NewReader(b)),
		"halves":  iotest.HalfReader(bytes.NewReader(b)),
	}
}

func TestMagic(t *testing.T) {
	if len(magic) != 16 || bytes.IndexByte([]byte(magic), 0) >= 0 {
		t.Fatal("magic must be 16 bytes without a zero: a chunk header's zero is what it cannot span")
	}
	if bytes.IndexByte([]byte(magic[1:]), magic[0]) >= 0 {
		t.Fatal("the first byte of magic must occur once: the matcher relies on it")
	}
}

// No byte of a preamble may reach the session it ends, wherever in a chunk the parent was cut off: it might become
// the rest of something half read, say of a process's input.
func TestPreambleInTheMiddleOfAnything(t *testing.T) {
	first, second := preamble(1, 7), preamble(2, 8)
	session := chunks(t, "hello, world", "x"+magic, magic[:9], "tail")
	for cut := range len(session) + 1 {
		in := cat(first.Append(nil), session[:cut], second.Append(nil), chunks(t, "fresh"))
		for name, r := range readers(in) {
			c := NewReceiver(r)
			await(t, c, first)
			old, err := io.ReadAll(c)
			if !errors.Is(err, ErrTakeover) {
				t.Fatalf("cut %d, %s: %v", cut, name, err)
			}
			if !bytes.HasPrefix([]byte("hello, worldx"+magic+magic[:9]+"tail"), old) {
				t.Fatalf("cut %d, %s: the old session got %q", cut, name, old)
			}
			await(t, c, second)
			if got, err := io.ReadAll(c); err != nil || string(got) != "fresh" {
				t.Fatalf("cut %d, %s: got %q, %v", cut, name, got, err)
			}
		}
	}
}

func TestGarbageAndRepeats(t *testing.T) {
	p := preamble(3, 1)
	whole := p.Append(nil)
	corrupt := bytes.Clone(whole)
	corrupt[20] ^= 1
	garbage := make([]byte, 50_000)
	for i := range garbage {
		garbage[i] = byte(rand.IntN(256))
	}
	for name, before := range map[string][]byte{
		"nothing":            nil,
		"garbage":            garbage,
		"corrupt":            corrupt,
		"cut before the sum": whole[:len(whole)-3],
		"cut in magic":       whole[:5],
		"only magic, twice":  []byte(magic + magic),
		"parent's session":   cat(preamble(9, 9).Append(nil), chunks(t, "parent"))[:57],
		"large header":       {0xff, 0xff, 0xff, 0xff},
	} {
		in := cat(before, whole, whole, whole, chunks(t, "one"), whole, chunks(t, "two"))
		for piece, r := range readers(in) {
			c := NewReceiver(r)
			if name == "parent's session" {
				await(t, c, preamble(9, 9))
			}
			await(t, c, p)
			if got, err := io.ReadAll(c); err != nil || string(got) != "onetwo" {
				t.Fatalf("%s, %s: got %q, %v", name, piece, got, err)
			}
		}
	}
}

func TestMagicUploadedAtEverySplit(t *testing.T) {
	p := preamble(1, 1)
	data := "before " + string(p.Append(nil)) + magic + magic[:15] + "\xf9\xf9" + string(preamble(2, 2).Append(nil)) + "\xf9"
	for i := range len(data) {
		in := cat(p.Append(nil), chunks(t, data[:i], data[i:]))
		if bytes.Contains(in[1:], []byte(magic)) {
			t.Fatalf("split %d: magic in the session's bytes", i)
		}
		for name, r := range readers(in) {
			c := NewReceiver(r)
			await(t, c, p)
			if got, err := io.ReadAll(c); err != nil || string(got) != data {
				t.Fatalf("split %d, %s: got %q, %v", i, name, got, err)
			}
		}
	}
}

// The end of a write that looks like the beginning of a preamble must not be held back until more is written.
func TestNothingIsHeldBack(t *testing.T) {
	for n := 1; n < len(magic); n++ {
		r, w := io.Pipe()
		p := preamble(1, 1)
		go func() {
			_, _ = w.Write(p.Append(nil))
			_, _ = NewChunkWriter(w).Write([]byte("a" + magic[:n]))
		}()
		c := NewReceiver(r)
		await(t, c, p)
		got := make([]byte, 1+n)
		if _, err := io.ReadFull(c, got); err != nil || string(got) != "a"+magic[:n] {
			t.Fatalf("got %q, %v", got, err)
		}
	}
}

func TestLargeChunks(t *testing.T) {
	p := preamble(1, 1)
	data := bytes.Repeat([]byte("0123456789"+magic[:3]), 100_000)
	c := NewReceiver(bytes.NewReader(cat(p.Append(nil), chunks(t, string(data)))))
	await(t, c, p)
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d of %d bytes, %v", len(got), len(data), err)
	}
}

func TestAnswer(t *testing.T) {
	p := preamble(0xf9, 1) // a nonce of magic's first byte: the worst case for the matcher
	other := preamble(4, 1)
	answer := AppendAnswer(nil, p.Nonce, []byte(`{"version":1}`))
	for name, stale := range map[string]string{
		"nothing":       "",
		"other answer":  string(AppendAnswer(nil, other.Nonce, []byte("{}"))),
		"magic":         magic + magic[:7],
		"cut answer":    string(AppendAnswer(nil, other.Nonce, []byte("{}"))[:20]),
		"first byte":    "\xf9\xf9\xf9",
		"session bytes": string(make([]byte, 10_000)),
	} {
		for piece, r := range readers([]byte(stale + string(answer) + "rest")) {
			br := bufio.NewReader(r)
			hello, err := ReadAnswer(br, p.Nonce)
			if err != nil || string(hello) != `{"version":1}` {
				t.Fatalf("%s, %s: got %q, %v", name, piece, hello, err)
			}
			if rest, err := io.ReadAll(br); err != nil || string(rest) != "rest" {
				t.Fatalf("%s, %s: left %q, %v", name, piece, rest, err)
			}
		}
	}
	if _, err := ReadAnswer(bufio.NewReader(bytes.NewReader(answer[:40])), p.Nonce); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal(err)
	}
	huge := append(AppendAnswer(nil, p.Nonce, nil)[:32], 0xff, 0, 0, 0)
	if _, err := ReadAnswer(bufio.NewReader(bytes.NewReader(huge)), p.Nonce); err == nil {
		t.Fatal("accepted an endless hello")
	}
}

// Whatever comes before it, a preamble is found, and its session is read to the byte.
func FuzzReceiver(f *testing.F) {
	p := preamble(1, 1)
	f.Add(p.Append(nil), []byte("data"), byte(3))
	f.Add([]byte(magic+magic[:4]), []byte(magic), byte(1))
	f.Add(cat(preamble(2, 2).Append(nil), []byte{0, 0, 0, 40, 1, 2, 3}), []byte("\xf9"), byte(200))
	f.Fuzz(func(t *testing.T, before, data []byte, piece byte) {
		if len(data) == 0 {
			return
		}
		last := preamble(0xee, 99)
		in := cat(before, last.Append(nil), chunks(t, string(data)))
		c := NewReceiver(&pieces{b: in, n: int(piece) + 1})
		var got Preamble
		for got.Nonce != last.Nonce {
			var err error
			if got, err = c.Await(); err != nil {
				t.Fatal(err)
			}
			if got.Nonce == last.Nonce {
				break
			}
			if _, err = io.Copy(io.Discard, c); !errors.Is(err, ErrTakeover) && !errors.Is(err, ErrLost) {
				t.Fatal(err)
			}
		}
		if b, err := io.ReadAll(c); err != nil || !bytes.Equal(b, data) {
			t.Fatalf("got %q, %v; want %q", b, err, data)
		}
	})
}

type pieces struct {
	b []byte
	n int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.b) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), p.n)], p.b)
	p.b = p.b[n:]
	return n, nil
}
