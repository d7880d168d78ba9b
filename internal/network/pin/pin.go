// Package pin remembers which addresses were given for which names, so that a rule for a name can be held against the
// address that a guest then goes to. It is bounded whatever a guest looks up, and reads no clock of its own.
package pin

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// MaxNames is how many names one address is remembered for: the latest.
	MaxNames = 64
	// MaxAddresses is how many addresses a Table remembers unless it is told otherwise.
	MaxAddresses = 4096
	// namesEach is how many names an address has on average, at most: 4 MiB of them, of the longest, in a Table.
	namesEach = 4
)

// A Table is safe for use by many at once.
type Table struct {
	limit int

	mu   sync.Mutex
	pins map[netip.Addr][]entry
	// names are all entries together.
	names int
	// sweep is when the next look at everything is due.
	sweep time.Time
}

type entry struct {
	name  string
	until time.Time
}

// New makes a Table of at most limit addresses; 0: MaxAddresses.
func New(limit int) *Table {
	if limit <= 0 {
		limit = MaxAddresses
	}
	return &Table{limit: limit, pins: map[netip.Addr][]entry{}}
}

// Add remembers that addrs were given for name, until then. At the limit, what would be forgotten first goes.
func (t *Table) Add(name string, addrs []netip.Addr, now, until time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, a := range addrs {
		a = a.Unmap()
		if _, known := t.pins[a]; !known && len(t.pins) >= t.limit || t.names >= t.limit*namesEach {
			t.makeRoom(now)
		}
		old, until := t.pins[a], until
		entries := make([]entry, 0, min(len(old)+1, MaxNames))
		for _, e := range old {
			if e.name == name {
				until = maxTime(until, e.until)
			} else if e.until.After(now) {
				entries = append(entries, e)
			}
		}
		if len(entries) >= MaxNames {
			entries = slices.Delete(entries, 0, len(entries)-MaxNames+1)
		}
		t.pins[a] = append(entries, entry{name, until})
		t.names += len(entries) + 1 - len(old)
	}
}

func (t *Table) forget(a netip.Addr) {
	t.names -= len(t.pins[a])
	delete(t.pins, a)
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// makeRoom forgets what has expired, once a second at most, or else the address that would be forgotten first among some.
func (t *Table) makeRoom(now time.Time) {
	if !now.Before(t.sweep) {
		t.sweep = now.Add(time.Second)
		for a, entries := range t.pins {
			if !last(entries).After(now) {
				t.forget(a)
			}
		}
		if len(t.pins) < t.limit && t.names < t.limit*namesEach {
			return
		}
	}
	var victim netip.Addr
	var soonest time.Time
	looked := 0
	for a, entries := range t.pins { // in no order: a sample
		if until := last(entries); !victim.IsValid() || until.Before(soonest) {
			victim, soonest = a, until
		}
		if looked++; looked == 16 {
			break
		}
	}
	t.forget(victim)
}

func last(entries []entry) (until time.Time) {
	for _, e := range entries {
		until = maxTime(until, e.until)
	}
	return until
}

// Names are those that the address was given for and that are remembered still, the latest last.
func (t *Table) Names(addr netip.Addr, now time.Time) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var names []string
	for _, e := range t.pins[addr] {
		if e.until.After(now) {
			names = append(names, e.name)
		}
	}
	return names
}

// Len is how many addresses are held.
func (t *Table) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.pins)
}

// A Pin is one name that an address was given for.
type Pin struct {
	Addr  netip.Addr `json:"addr"`
	Name  string     `json:"name"`
	Until time.Time  `json:"until"`
}

// List is what is remembered, if that is more than most those that will be forgotten last.
func (t *Table) List(now time.Time, most int) []Pin {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []Pin
	for a, entries := range t.pins {
		for _, e := range entries {
			if e.until.After(now) {
				list = append(list, Pin{a, e.name, e.until})
			}
		}
	}
	slices.SortFunc(list, func(a, b Pin) int {
		return cmp.Or(b.Until.Compare(a.Until), a.Addr.Compare(b.Addr), strings.Compare(a.Name, b.Name))
	})
	return slices.Clip(list[:min(len(list), most)])
}
