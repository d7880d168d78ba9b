package qemu

import (
	"context"
	"maps"
	"os"
	"slices"
	"sync"
	"time"
	"weak"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/memory"
)

// A protected page that the guest writes costs it the wait for QEMU's copying thread: 100 µs, or milliseconds where that
// has to wait for a core. What a guest writes right after it runs again is much the same each time: the data and stacks
// of its kernel, of its agent and of the processes that are let run. So the pages that QEMU copied first in one capture
// are copied by us in the pause of the next, and unprotected as soon as the guest runs. What the stream holds of them is
// of no interest then.

const (
	// earlyMost bounds those pages: copying 8 MiB takes some 2 ms.
	earlyMost = 2048
	// earlyTime is how long after the first page of a stream a page counts as early.
	earlyTime = 150 * time.Millisecond
)

// early are pages of the instant that are taken in the pause.
type early struct {
	pages   []int64 // ascending
	content []byte  // of them, end to end
}

// newEarly reserves room for pages, the most important first.
func newEarly(pages []int64) early {
	e := early{pages: slices.Sorted(slices.Values(pages)), content: make([]byte, len(pages)*memory.PageSize)}
	for i := 0; i < len(e.content); i += memory.PageSize {
		e.content[i] = 1 // has the memory there, which a fault each would cost the pause
	}
	return e
}

// read takes the pages, of a machine that stands still. That they cannot be had is no reason to fail: QEMU has them, too.
func (e *early) read(ctx context.Context, ram *memory.Process) {
	if len(e.pages) == 0 || ram.Read(ctx, e.pages, e.content) != nil {
		*e = early{}
	}
}

// write takes them to their places.
func (e *early) write(sink pageSink) error {
	for start := 0; start < len(e.pages); {
		end := start
		var run [][]byte
		for end < len(e.pages) && len(run) < maxRun && e.pages[end] == e.pages[start]+int64(end-start)*memory.PageSize {
			run = append(run, e.content[end*memory.PageSize:(end+1)*memory.PageSize])
			end++
		}
		if err := sink.writePages(run, e.pages[start]); err != nil {
			return err
		}
		start = end
	}
	return nil
}

// unprotect lets the guest write the pages without a fault. It is a matter of speed alone.
func (e *early) unprotect(pid int, ram *memory.Process) error {
	if len(e.pages) == 0 {
		return nil
	}
	var ranges []addresses
	for _, off := range e.pages {
		at := ram.Address(off)
		if n := len(ranges); n > 0 && ranges[n-1].start+ranges[n-1].length == at {
			ranges[n-1].length += memory.PageSize
		} else {
			ranges = append(ranges, addresses{at, memory.PageSize})
		}
	}
	fds, err := userfaultfds(pid)
	if err != nil {
		return err
	}
	return withUserfaultfds(pid, fds, func(uffd int) error { return unprotect(uffd, ranges) })
}

// habits are the early pages of machines of one image, the most important first. All learn from each other, so that the
// first capture of a machine is like its others.
type habits struct {
	mu    sync.Mutex
	pages []int64
}

func (h *habits) known() []int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.pages)
}

// learn puts what a capture copied first before what was known.
func (h *habits) learn(copied []int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	seen := make(map[int64]bool, earlyMost)
	next := make([]int64, 0, earlyMost)
	for _, off := range slices.Concat(copied, h.pages) {
		if len(next) < earlyMost && !seen[off] {
			seen[off] = true
			next = append(next, off)
		}
	}
	h.pages = next
}

// habitsOf finds those of an image's machines, or begins them. They are kept as long as one of the machines uses them.
func (e *Engine) habitsOf(image *os.File) *habits {
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil {
		return &habits{}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if h := e.habits[st.Ino].Value(); h != nil {
		return h
	}
	maps.DeleteFunc(e.habits, func(_ uint64, p weak.Pointer[habits]) bool { return p.Value() == nil })
	h := &habits{}
	e.habits[st.Ino] = weak.Make(h)
	return h
}
