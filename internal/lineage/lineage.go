// Package lineage is the pure model of the family: names, the states of a sandbox and which may follow which, and
// the tree of images, snapshots and sandboxes. It does no I/O and imports nothing of ours.
package lineage

import (
	"errors"
	"fmt"
	"slices"
)

// State of a sandbox.
type State string

// States. A sandbox that was ended is gone, it has no state.
const (
	Running   State = "running"
	Paused    State = "paused"    // its CPUs stand still, its memory stays
	Suspended State = "suspended" // its machine is gone, all of it is on disk
	Failed    State = "failed"    // its machine died or could not be trusted; kept until killed, so that its reason can be read
)

// Work is what is being done with a sandbox that nothing else may be done with at the same time.
type Work string

// Works.
const (
	Branching  Work = "branch"
	Pausing    Work = "pause"
	Resuming   Work = "resume"
	Suspending Work = "suspend"
	Waking     Work = "wake"

	// What the host does by itself while the sandbox runs, soon over: others wait for it.
	Copying    Work = "copying of its memory"
	Shortening Work = "shortening of its disk"
	Thawing    Work = "letting its processes run"
)

// ErrState is wrapped by refusals of a transition or of an operation in a state.
var ErrState = errors.New("wrong state")

// To says whether next may follow s.
func (s State) To(next State) error {
	var after []State
	switch s {
	case Running:
		after = []State{Paused, Suspended, Failed}
	case Paused:
		after = []State{Running, Suspended, Failed}
	case Suspended:
		after = []State{Running, Failed}
	case Failed:
	}
	if slices.Contains(after, next) {
		return nil
	}
	return fmt.Errorf("%w: a sandbox that is %s cannot become %s", ErrState, s, next)
}

// Begin says whether work may begin with a sandbox in state s while doing ("": nothing) is in progress. Work that finds
// what it wants already there is allowed: pausing what is paused changes nothing.
func Begin(s State, doing, work Work) error {
	if doing != "" {
		return fmt.Errorf("%w: %s cannot begin while %s is in progress", ErrState, work, doing)
	}
	var from []State
	switch work {
	case Branching, Suspending, Shortening:
		from = []State{Running, Paused}
	case Thawing:
		from = []State{Running}
	case Pausing, Resuming:
		from = []State{Running, Paused}
	case Waking:
		from = []State{Suspended, Running}
	case Copying: // never begins by itself
	}
	if work == Suspending && s == Suspended || slices.Contains(from, s) {
		return nil
	}
	if len(from) == 0 {
		return fmt.Errorf("%w: %s is only what is left of another work", ErrState, work)
	}
	return fmt.Errorf("%w: %s needs a sandbox that is %s, this one is %s", ErrState, work, from[0], s)
}

// Status of a snapshot.
type Status string

// Statuses. Only a ready one is on disk and survives its daemon; the others are known as long as it lives, or until
// they are removed.
const (
	Writing    Status = "writing" // its instant is over, it is being made durable
	Ready      Status = "ready"
	FailedSnap Status = "failed" // it could not be, or its daemon ended meanwhile; kept so that the reason can be read
)

// Snapshot is a node of the family tree.
type Snapshot struct {
	Tag    string
	Image  string // id
	Parent string // tag of the snapshot its layers add to, or ""
}

// Sandbox is a leaf.
type Sandbox struct {
	ID       string
	Snapshot string
	State    State
}

// Ancestors are the tags a snapshot stands on, root first, without its own. A parent that is missing or a cycle ends
// the walk: a tree read from a damaged disk must not hang its reader.
func Ancestors(tag string, all map[string]Snapshot) []string {
	var up []string
	seen := map[string]bool{tag: true}
	for at := all[tag].Parent; at != "" && !seen[at]; at = all[at].Parent {
		if _, ok := all[at]; !ok {
			break
		}
		seen[at] = true
		up = append(up, at)
	}
	slices.Reverse(up)
	return up
}

// Dependents are the tags whose parent is tag, sorted.
func Dependents(tag string, all map[string]Snapshot) []string {
	var down []string
	for name, s := range all {
		if s.Parent == tag && name != tag {
			down = append(down, name)
		}
	}
	slices.Sort(down)
	return down
}
