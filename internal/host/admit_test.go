package host

import (
	"errors"
	"testing"
)

// TestMemoryIsPromisedOnce: what one was promised and has not taken yet is not there for another.
func TestMemoryIsPromisedOnce(t *testing.T) {
	const available = 1 << 30
	h := fakeHost(t, newFakeEngine(), func(c *Config) { c.Available = func() (int64, error) { return available, nil } })
	const most = available - memoryReserve
	first, err := h.admitCopy(most - 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.admitCopy(2); !errors.Is(err, ErrExhausted) {
		t.Errorf("a second copy: %v", err)
	}
	m, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.admit(t.Context(), m, nil, 1); !errors.Is(err, ErrExhausted) {
		t.Errorf("a child: %v", err)
	}
	if err := h.admitBuild(2); !errors.Is(err, ErrExhausted) {
		t.Errorf("a build: %v", err)
	}
	first()
	first() // as one in a list of things to undo, and before
	second, err := h.admitCopy(most)
	if err != nil {
		t.Fatal(err)
	}
	second()
	if h.promised != 0 {
		t.Errorf("%d bytes stay promised", h.promised)
	}
}

// TestColdImagesMakeRoom: memory that only nobody's images take is no reason to refuse.
func TestColdImagesMakeRoom(t *testing.T) {
	var h *Host
	h = fakeHost(t, newFakeEngine(), func(c *Config) {
		c.Available = func() (int64, error) { return 1<<30 - h.hotBytes(), nil }
	})
	id := forkOneOf(t, h, fakeTag)
	mustBranch(t, h, id, "a", BranchFull)
	if err := h.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if h.hotBytes() == 0 {
		t.Fatal("nothing is hot")
	}
	done, err := h.admitCopy(1<<30 - memoryReserve)
	if err != nil {
		t.Fatal(err)
	}
	done()
	if n := h.hotBytes(); n != 0 {
		t.Errorf("%d bytes are still hot", n)
	}
}
