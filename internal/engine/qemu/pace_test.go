package qemu

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"
)

// TestPace: all that is written is read, in its order, however much there is room for; and the end is the end.
func TestPace(t *testing.T) {
	ours, theirs, err := streamPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	narrow(ours)
	want := bytes.Repeat([]byte("0123456789abcdef"), 40<<10)
	go func() {
		defer theirs.Close()
		for b := want; len(b) > 0; b = b[min(len(b), 1000):] {
			if _, err := theirs.Write(b[:min(len(b), 1000)]); err != nil {
				t.Error(err)
			}
		}
	}()
	hurried, hurries := make(chan struct{}), 0
	p := pace{
		r: ours, hurried: hurried, slow: true, tick: time.NewTicker(paceTick),
		hurry: func() { hurries++; widen(ours) },
	}
	defer p.tick.Stop()
	got := make([]byte, 64<<10)
	if _, err := io.ReadFull(&p, got); err != nil {
		t.Fatal(err)
	}
	close(hurried)
	rest, err := io.ReadAll(&p)
	if err != nil || !bytes.Equal(got, want[:len(got)]) || !bytes.Equal(rest, want[len(got):]) {
		t.Errorf("read %d bytes of %d, %v", len(got)+len(rest), len(want), err)
	}
	if hurries != 1 {
		t.Errorf("hurried %d times", hurries)
	}
}

// TestPaceIsCut: one who waits for a stream that brings nothing is let go.
func TestPaceIsCut(t *testing.T) {
	for name, slow := range map[string]bool{"at first": false, "later": true} {
		ours, theirs, err := streamPipe()
		if err != nil {
			t.Fatal(err)
		}
		cut := make(chan struct{})
		p := pace{r: ours, cut: cut, slow: slow, tick: time.NewTicker(paceTick)}
		read := make(chan error, 1)
		go func() {
			_, err := p.Read(make([]byte, 10))
			read <- err
		}()
		close(cut)
		if err := <-read; !errors.Is(err, errCut) {
			t.Errorf("%s: %v", name, err)
		}
		p.tick.Stop()
		_, _ = ours.Close(), theirs.Close()
	}
}
