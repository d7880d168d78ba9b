package api

import "time"

// Event is something that has happened, one of GET /v1/events. Type is "sandbox.forked", ".adopted" (by a new daemon),
// ".paused", ".resumed", ".suspended", ".woken", ".failed" (its machine died; it stays listed until it is ended), ".ended";
// "snapshot.created" (its instant is over, it is being written), ".ready", ".failed", ".removed"; "build.started",
// ".finished" (with a reason: it failed); "daemon.started", ".stopping"; and "events.lost" in the place of what is missing
// because it is no longer kept.
type Event struct {
	Sequence    uint64            `json:"sequence"` // ask for what comes after it with since=SEQUENCE
	Time        time.Time         `json:"time"`
	Type        string            `json:"type"`
	SandboxID   string            `json:"sandbox_id,omitempty"`
	SnapshotTag string            `json:"snapshot_tag,omitempty"` // what a sandbox was forked from, what a branch or build makes
	Labels      map[string]string `json:"labels,omitempty"`       // of the sandbox
	Port        int               `json:"port,omitempty"`         // of a service that listens now, or does not any more
	Reason      string            `json:"reason,omitempty"`
	Lost        uint64            `json:"lost,omitempty"` // of "events.lost": how many, if that is known
}
