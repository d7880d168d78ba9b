package qemu

import (
	"encoding/json"
	"slices"
	"sync"

	"forkd.dev/forkd/internal/engine/qemu/qmp"
)

// announcements hands what QEMU reports to those who wait for it. The zero value is ready.
type announcements struct {
	mu      sync.Mutex
	waiting []*announcement
}

// announcement is one awaited event.
type announcement struct {
	name  string
	match func(json.RawMessage) bool // nil: any
	seen  chan json.RawMessage       // has room for the first match
}

// expect is told of the next event called name for which match holds. It must be called before the command that causes
// the event is sent; drop ends the waiting.
func (a *announcements) expect(name string, match func(json.RawMessage) bool) *announcement {
	w := &announcement{name: name, match: match, seen: make(chan json.RawMessage, 1)}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = append(a.waiting, w)
	return w
}

func (a *announcements) drop(w *announcement) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = slices.DeleteFunc(a.waiting, func(o *announcement) bool { return o == w })
}

// tell passes an event on. It never blocks.
func (a *announcements) tell(ev qmp.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = slices.DeleteFunc(a.waiting, func(w *announcement) bool {
		if w.name != ev.Name || w.match != nil && !w.match(ev.Data) {
			return false
		}
		w.seen <- ev.Data
		return true
	})
}
