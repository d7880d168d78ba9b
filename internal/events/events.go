// Package events tells whoever listens what becomes of sandboxes, snapshots and builds: a bus that keeps the newest of them in
// a ring of fixed size. Who tells never waits; who listens too slowly loses what the ring has passed over, and is told how
// much. It knows no sandboxes, does no I/O and starts nothing; package host tells, package httpapi listens.
package events

import (
	"context"
	"sync"
	"time"
)

// Type is what has happened, the kind of object first.
type Type string

// Types.
const (
	DaemonStarted  Type = "daemon.started"
	DaemonStopping Type = "daemon.stopping"

	SandboxForked    Type = "sandbox.forked"
	SandboxAdopted   Type = "sandbox.adopted" // a new daemon has it
	SandboxPaused    Type = "sandbox.paused"
	SandboxResumed   Type = "sandbox.resumed"
	SandboxSuspended Type = "sandbox.suspended"
	SandboxWoken     Type = "sandbox.woken"
	SandboxEgress    Type = "sandbox.egress"      // it may reach something else now: the reason says in a word what
	PortOpened       Type = "sandbox.port_opened" // a service listens; the reason is its command
	PortClosed       Type = "sandbox.port_closed"
	SandboxFailed    Type = "sandbox.failed" // its machine died; it stays listed until it is ended
	SandboxEnded     Type = "sandbox.ended"

	SnapshotCreated Type = "snapshot.created" // its instant is over, it is being written
	SnapshotReady   Type = "snapshot.ready"
	SnapshotFailed  Type = "snapshot.failed"
	SnapshotRemoved Type = "snapshot.removed"

	BuildStarted  Type = "build.started"
	BuildFinished Type = "build.finished" // with a reason: it failed

	NetworkRestarted Type = "network.restarted" // the process that moves the sandboxes' frames had died: their flows were cut

	// Lost stands in a subscription for what it did not get.
	Lost Type = "events.lost"
)

// Types are all of them.
func Types() []Type {
	return []Type{
		DaemonStarted, DaemonStopping, SandboxForked, SandboxAdopted, SandboxPaused, SandboxResumed, SandboxSuspended,
		SandboxWoken, SandboxEgress, PortOpened, PortClosed, SandboxFailed, SandboxEnded, SnapshotCreated, SnapshotReady, SnapshotFailed, SnapshotRemoved, BuildStarted,
		BuildFinished, NetworkRestarted, Lost,
	}
}

// Event is one of them.
type Event struct {
	Sequence uint64 // one more than that of the event before
	Time     time.Time
	Type     Type
	Sandbox  string            // id
	Snapshot string            // tag: what a sandbox was forked from, what a branch or a build makes
	Labels   map[string]string // of the sandbox; not to be changed
	Port     int
	Reason   string
	Lost     uint64 // of Lost: how many; 0 where that is not known, because an earlier daemon told them
}

// Bus is safe for concurrent use.
type Bus struct {
	mu    sync.Mutex
	ring  []Event
	first uint64        // that the bus ever had
	next  uint64        // sequence of the next one
	more  chan struct{} // closed at the next one; nil: nobody waits
}

// New makes a bus that keeps so many events. Sequences begin at first: later buses must get greater ones, so that who was
// listening to an earlier one can tell that it has missed something.
func New(keep int, first uint64) *Bus {
	first = max(first, 1)
	return &Bus{ring: make([]Event, keep), first: first, next: first}
}

// Emit tells everybody, and never waits for anybody. It sets sequence and time.
func (b *Bus) Emit(e Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e.Sequence, e.Time = b.next, time.Now()
	b.ring[b.next%uint64(len(b.ring))] = e
	b.next++
	if b.more != nil {
		close(b.more)
		b.more = nil
	}
}

// Told is how many events there have been.
func (b *Bus) Told() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.next - b.first
}

// oldest is the sequence of the oldest event that is kept. The caller holds mu.
func (b *Bus) oldest() uint64 {
	if kept := uint64(len(b.ring)); b.next-b.first > kept {
		return b.next - kept
	}
	return b.first
}

// Subscription is one listener's place in the bus. It holds nothing that must be given back, and is for one goroutine.
type Subscription struct {
	b       *Bus
	at      uint64 // sequence of the next event it gets
	foreign bool   // it asked to go on after an event that this bus never had
}

// After goes on after the event of a sequence: one the listener has seen.
func (b *Bus) After(sequence uint64) *Subscription {
	b.mu.Lock()
	defer b.mu.Unlock()
	if sequence+1 < b.first || sequence >= b.next {
		return &Subscription{b: b, at: b.oldest(), foreign: true}
	}
	return &Subscription{b: b, at: sequence + 1}
}

// Kept begins with what is kept, but for no more than the newest most.
func (b *Bus) Kept(most int) *Subscription {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.oldest()
	if kept := b.next - at; kept > uint64(max(most, 0)) {
		at = b.next - uint64(max(most, 0))
	}
	return &Subscription{b: b, at: at}
}

// Now returns the next event without waiting; false: there is none yet.
func (s *Subscription) Now() (Event, bool) {
	e, _, ok := s.take()
	return e, ok
}

// Next waits for the next event, or for ctx.
func (s *Subscription) Next(ctx context.Context) (Event, error) {
	for {
		e, more, ok := s.take()
		if ok {
			return e, nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return Event{}, context.Cause(ctx)
		}
	}
}

// take returns what is next, or what is closed when there is something.
func (s *Subscription) take() (Event, <-chan struct{}, bool) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	oldest := b.oldest()
	switch {
	case s.foreign:
		s.foreign, s.at = false, oldest
		return Event{
			Sequence: oldest - 1, Time: time.Now(), Type: Lost,
			Reason: "the daemon has started since; what an earlier one told after that is not known",
		}, nil, true
	case s.at < oldest:
		lost := Event{
			Sequence: oldest - 1, Time: time.Now(), Type: Lost, Lost: oldest - s.at, Reason: "they are no longer kept: read faster",
		}
		s.at = oldest
		return lost, nil, true
	case s.at < b.next:
		e := b.ring[s.at%uint64(len(b.ring))]
		s.at++
		return e, nil, true
	}
	if b.more == nil {
		b.more = make(chan struct{})
	}
	return Event{}, b.more, false
}
