package host

import (
	"time"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/lineage"
)

// keptEvents is how many events a listener may be late: at a thousand forks at once, those of some minutes.
const keptEvents = 8192

// newBus begins with the time in microseconds: an earlier daemon cannot have told so many events that its sequences got there.
func newBus() *events.Bus {
	return events.New(keptEvents, uint64(max(time.Now().UnixMicro(), 1)))
}

// Events is where the host tells what becomes of its objects.
func (h *Host) Events() *events.Bus { return h.events }

// tell tells what has become of a sandbox, unless it is a build's machine, which is nobody's sandbox.
func (h *Host) tell(what events.Type, s *sandbox, reason string) {
	if s.builder {
		return
	}
	h.events.Emit(events.Event{Type: what, Sandbox: s.id, Snapshot: s.tag, Labels: s.labels, Reason: reason})
}

// tellSnapshot tells what has become of a snapshot, unless it is a step of a build. from is the sandbox it was captured of,
// or "".
func (h *Host) tellSnapshot(what events.Type, tag, from, reason string) {
	if lineage.IsStep(tag) {
		return
	}
	h.events.Emit(events.Event{Type: what, Snapshot: tag, Sandbox: from, Reason: reason})
}

// tellBuried tells of a sandbox of an earlier daemon that has ended with it.
func (h *Host) tellBuried(m *left) {
	if m.record == nil || h.known(m.record.ID) { // nobody's, or suspended
		return
	}
	reason := "its machine died while no daemon ran"
	if len(m.pids) > 0 && m.reason != nil {
		reason = m.reason.Error()
	}
	h.events.Emit(events.Event{
		Type: events.SandboxEnded, Sandbox: m.record.ID, Snapshot: m.record.Tag, Labels: m.record.Labels, Reason: reason,
	})
}
