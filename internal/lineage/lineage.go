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
	Running State = "running"
	Failed  State = "failed" // its machine died or could not be trusted; kept until killed, so that its reason can be read
)

// ErrState is wrapped by refusals of a transition or of an operation in a state.
var ErrState = errors.New("wrong state")

// To says whether next may follow s.
func (s State) To(next State) error {
	if s == Running && next == Failed {
		return nil
	}
	return fmt.Errorf("%w: a sandbox that is %s cannot become %s", ErrState, s, next)
}

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
