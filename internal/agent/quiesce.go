package agent

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

// freezeLimit is how long a freeze may take before it is given up: the source of a branch must not stand still for
// longer because one process is stuck in the kernel.
const freezeLimit = 100 * time.Millisecond

// quiesce stops user processes, so that the machine can be captured and its clones be given an identity before any of
// them runs. Asked again it answers at once. The agent goes on reading the channel.
func (a *Agent) quiesce(ctx context.Context, _ *wire.Stream, _ []byte) error {
	if a.Phase() != PhaseReady {
		return wire.Errorf(wire.CodePrecondition, "the machine is being built and cannot be captured yet; call %s first", wire.MethodPivot)
	}
	if a.frozen() {
		return nil
	}
	if err := a.cfg.Contexts.Quiesce(ctx); err != nil {
		return fmt.Errorf("prepare contexts: %w", err)
	}
	// The children of this machine start with a tidy heap and collect no garbage on their way to the first answer.
	runtime.GC()
	return a.freeze(ctx)
}

func (a *Agent) frozen() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.quiesced != nil
}

func (a *Agent) freeze(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, freezeLimit)
	defer cancel()
	resume := a.cfg.Reaper.Pause()
	if err := a.cfg.Cgroups.Freeze(limited); err != nil {
		resume()
		if errors.Is(err, context.DeadlineExceeded) {
			return wire.Errorf(wire.CodeDeadline, "user processes did not stop within %v, they run on: %v; try again", freezeLimit, err)
		}
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.quiesced = resume
	return nil
}

// startAgain lets the reaper start processes: needed for fork hooks while users' are still frozen.
func (a *Agent) startAgain() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.quiesced != nil {
		a.quiesced()
		a.quiesced = func() {}
	}
}

// thaw lets everything run.
func (a *Agent) thaw() error {
	a.startAgain()
	if err := a.cfg.Cgroups.Thaw(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.quiesced = nil
	return nil
}
