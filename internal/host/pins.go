package host

import (
	"context"
	"strconv"
	"sync"
	"time"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/store"
)

// maxPinned are the sandboxes and snapshots whose names are remembered at a time.
const maxPinned = 1024

// pinBook remembers which names the guests of machines knew addresses for when they were captured, so that children, branches
// and woken sandboxes can go on to use them: their policies allow names, and what has looked one up need not do so again. None
// is good for longer than an hour, so that none is written down, or goes to another host with a snapshot.
type pinBook struct {
	mu sync.Mutex
	of map[string]pinned
}

type pinned struct {
	pins  []network.Pin
	until time.Time // the last of them is forgotten
}

func (b *pinBook) put(key string, pins []network.Pin) {
	var until time.Time
	for _, p := range pins {
		if p.Until.After(until) {
			until = p.Until
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.of == nil {
		b.of = map[string]pinned{}
	}
	delete(b.of, key)
	if len(pins) == 0 {
		return
	}
	if len(b.of) >= maxPinned {
		b.makeRoom(time.Now())
	}
	b.of[key] = pinned{pins, until}
}

// makeRoom forgets what is over, or else what will be first.
func (b *pinBook) makeRoom(now time.Time) {
	first := ""
	for key, p := range b.of {
		if !p.until.After(now) {
			delete(b.of, key)
		} else if first == "" || p.until.Before(b.of[first].until) {
			first = key
		}
	}
	if len(b.of) >= maxPinned {
		delete(b.of, first)
	}
}

func (b *pinBook) get(key string) []network.Pin {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of[key].pins
}

// hand has what is known by one key known by another, too.
func (b *pinBook) hand(from, to string) { b.put(to, b.get(from)) }

// snapshotKey is a snapshot's, whose tag may be another's later.
func snapshotKey(m *store.Snapshot) string {
	return m.Tag + " " + strconv.FormatInt(m.CreatedAt.UnixMilli(), 10)
}

// notePins remembers what the guest of a machine that is being captured knows, by its sandbox.
func (h *Host) notePins(ctx context.Context, s *sandbox) {
	pins, err := h.cfg.Networks.Pins(ctx, s.id)
	if err != nil {
		h.log.Warn("ask which names a guest knows", "sandbox", s.id, "error", err)
		return
	}
	h.pins.put(s.id, pins)
}

// givePins has a machine that is about to start know what it knew, or what it is made of.
func (h *Host) givePins(s *sandbox) {
	pins := h.pins.get(s.id)
	if pins == nil && s.from != nil {
		pins = h.pins.get(snapshotKey(&s.from.snapshot))
	}
	if len(pins) > 0 {
		h.cfg.Networks.Pin(s.id, pins)
	}
}
