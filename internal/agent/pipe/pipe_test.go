package pipe

import (
	"bytes"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

// TestDrain: what was written before Drain was called has been delivered, in order, when it returns.
func TestDrain(t *testing.T) {
	r, w, err := New()
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer // the outlet's turn guards it
	o, err := NewOutlet(r, "test", 100, func(b []byte) { got.Write(b) })
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(o.Run)
	var want strings.Builder
	for i := range 2000 {
		line := strings.Repeat("x", i%300) + "\n"
		want.WriteString(line)
		if _, err := unix.Write(w, []byte(line)); err != nil {
			t.Fatal(err)
		}
		if o.Drain() {
			t.Fatal("end of file")
		}
		o.turn.Lock()
		n := got.Len()
		o.turn.Unlock()
		if n != want.Len() {
			t.Fatalf("round %d: %d of %d", i, n, want.Len())
		}
	}
	_ = unix.Close(w)
	running.Wait()
	if !o.Drain() {
		t.Error("no end of file")
	}
	if got.String() != want.String() {
		t.Error("different text")
	}
	o.Close()
	o.Close()
}

// TestDrainOfAnEndlessWriter ends.
func TestDrainOfAnEndlessWriter(t *testing.T) {
	r, w, err := New()
	if err != nil {
		t.Fatal(err)
	}
	o, err := NewOutlet(r, "test", 4096, func([]byte) {})
	if err != nil {
		t.Fatal(err)
	}
	var writer sync.WaitGroup
	writer.Go(func() {
		block := make([]byte, 4096)
		for {
			if _, err := unix.Write(w, block); err != nil {
				_ = unix.Close(w)
				return // EPIPE, once the read end is closed
			}
		}
	})
	for range 100 {
		o.Drain()
	}
	o.Close()
	writer.Wait()
}

func TestRing(t *testing.T) {
	r := Ring[byte]{Max: 100}
	for range 50 {
		r.Add('a', []byte("0123456789"))
		r.Add('b', []byte("x"))
	}
	if r.Len() != 100 {
		t.Errorf("kept %d", r.Len())
	}
	var got strings.Builder
	if err := r.Flush(func(_ byte, b []byte) error { got.Write(b); return nil }); err != nil {
		t.Fatal(err)
	}
	if all := strings.Repeat("0123456789x", 50); got.String() != all[len(all)-100:] || r.Len() != 0 {
		t.Errorf("%q", got.String())
	}
	r.Add('a', bytes.Repeat([]byte("y"), 1000))
	if r.Len() != 100 {
		t.Errorf("kept %d of one large piece", r.Len())
	}
	r.Clear()
	if r.Len() != 0 {
		t.Error("not cleared")
	}
}
