package host

import (
	"context"
	"errors"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// Timed is something the host does whose time is told, to Config.Took.
type Timed string

// What is timed, and the modes of those that have one.
const (
	TimedFork         Timed = "fork" // a request with all its children: ModeHot, ModeCold, ModeWriting
	TimedForkChild    Timed = "fork_child"
	TimedBranch       Timed = "branch"        // a BranchMode, or ModeNone where none was chosen yet
	TimedBranchPause  Timed = "branch_pause"  // the machine stood still
	TimedBranchFrozen Timed = "branch_frozen" // its processes did
	TimedBoot         Timed = "boot"
	TimedBuild        Timed = "build" // ModeRecipe, ModeDockerfile, ModeRootfs
	TimedPause        Timed = "pause"
	TimedResume       Timed = "resume"
	TimedSuspend      Timed = "suspend"
	TimedWake         Timed = "wake"
)

// Modes.
const (
	ModeHot        = "hot"     // the image was ready
	ModeCold       = "cold"    // it was unpacked first
	ModeWriting    = "writing" // the snapshot was still being written
	ModeRecipe     = "recipe"
	ModeDockerfile = "dockerfile"
	ModeRootfs     = "rootfs"
	ModeNone       = "none"
)

// Outcome is how something that was timed has ended.
type Outcome string

// Outcomes.
const (
	Done     Outcome = "ok"
	Refused  Outcome = "refused" // it could not be meant, or not now, or not here
	Canceled Outcome = "canceled"
	Broken   Outcome = "error"
)

// outcome sorts errors: whose fault they are.
func outcome(err error) Outcome {
	if err == nil {
		return Done
	}
	if errors.Is(err, context.Canceled) {
		return Canceled
	}
	for _, refusal := range []error{
		ErrInvalid, ErrNotFound, ErrBusy, ErrExhausted, ErrUnsupported, ErrClosed, ErrStep, lineage.ErrName, lineage.ErrState, store.ErrExists,
		engine.ErrIncompatible, engine.ErrLiveUnavailable,
	} {
		if errors.Is(err, refusal) {
			return Refused
		}
	}
	return Broken
}

// took tells how long something has taken.
func (h *Host) took(what Timed, mode string, err error, since time.Time) {
	h.cfg.Took(what, mode, outcome(err), time.Since(since))
}
