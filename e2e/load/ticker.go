package load

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ticker wakes a thousand times a second and knows its longest gap as somebody outside would have seen it: the monotonic
// clock stands still while the machine does, the wall clock is put right before user processes run again.
type ticker struct {
	mu      sync.Mutex
	longest time.Duration
	ticks   int
}

func startTicker() *ticker {
	t := &ticker{}
	go func() {
		last := time.Now()
		nap := unix.Timespec{Nsec: int64(time.Millisecond)}
		for {
			_ = unix.Nanosleep(&nap, nil)
			now := time.Now()
			t.mu.Lock()
			t.longest = max(t.longest, now.Sub(last), now.Round(0).Sub(last.Round(0)))
			t.ticks++
			t.mu.Unlock()
			last = now
		}
	}()
	return t
}

// take is the longest gap, and how many ticks there were, since the last call.
func (t *ticker) take() (longest time.Duration, ticks int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	longest, ticks = t.longest, t.ticks
	t.longest, t.ticks = 0, 0
	return longest, ticks
}
