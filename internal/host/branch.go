package host

import (
	"context"
	"fmt"
)

// BranchMode is how a branch takes the memory of its source.
type BranchMode string

// Modes.
const (
	BranchAuto BranchMode = "auto" // live where this host can, else diff
	BranchLive BranchMode = "live" // the pause does not grow with what was written
	BranchDiff BranchMode = "diff" // copies the source's own pages in the pause; needs no privilege
	BranchFull BranchMode = "full" // taken like diff, stored whole: the snapshot stands on no other
)

// BranchSpec asks for a snapshot of a running sandbox.
type BranchSpec struct {
	Tag  string // empty: one is made
	Mode BranchMode
	// Parent, if given, must be the tag the branch will stand on; clients of the existing forkd say it.
	Parent string
	// NoWait returns when the source runs again; the snapshot is writing then.
	NoWait bool
}

// Branch captures a sandbox, which runs on.
func (h *Host) Branch(_ context.Context, id string, _ BranchSpec) (SnapshotView, error) {
	return SnapshotView{}, fmt.Errorf("branch %s: %w", id, ErrUnsupported)
}

// Pause halts a sandbox's CPUs; its memory stays.
func (h *Host) Pause(_ context.Context, id string) (View, error) {
	return View{}, fmt.Errorf("pause %s: %w", id, ErrUnsupported)
}

// Resume lets a paused sandbox run on.
func (h *Host) Resume(_ context.Context, id string) (View, error) {
	return View{}, fmt.Errorf("resume %s: %w", id, ErrUnsupported)
}

// Suspend writes a sandbox to disk and frees its memory; it keeps its id.
func (h *Host) Suspend(_ context.Context, id string) (View, error) {
	return View{}, fmt.Errorf("suspend %s: %w", id, ErrUnsupported)
}

// Wake lets a suspended sandbox run on.
func (h *Host) Wake(_ context.Context, id string) (View, error) {
	return View{}, fmt.Errorf("wake %s: %w", id, ErrUnsupported)
}

// Compact makes a snapshot with the content of tag that stands on no other.
func (h *Host) Compact(_ context.Context, tag, _ string) (SnapshotView, error) {
	return SnapshotView{}, fmt.Errorf("compact %s: %w", tag, ErrUnsupported)
}
