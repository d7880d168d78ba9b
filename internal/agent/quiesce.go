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
func (a *Agent) quiesce(ctx context.Context, _ *wire.Stream, request []byte) error {
	var req wire.QuiesceRequest
	if err := decode(request, &req); err != nil {
		return err
	}
	if a.Phase() != PhaseReady {
		return wire.Errorf(wire.CodePrecondition, "the machine is being built and cannot be captured yet; call %s first", wire.MethodPivot)
	}
	if a.prepared != nil {
		return nil
	}
	if err := a.cfg.Contexts.Quiesce(ctx); err != nil {
		return fmt.Errorf("prepare contexts: %w", err)
	}
	if req.Settle {
		if err := a.settle(ctx); err != nil {
			return fmt.Errorf("settle: %w", err)
		}
	}
	// The children of this machine start with a tidy heap and collect no garbage on their way to the first answer.
	touchHeap()
	runtime.GC()
	if err := a.stop(ctx); err != nil {
		return err
	}
	if req.Settle {
		for pid := range a.cfg.Contexts.PIDs() {
			populate(pid)
		}
	}
	warmHeap()
	return nil
}

// touchHeap has the kernel give the runtime memory, which the collection that follows makes free: what a fork allocates
// is there already.
func touchHeap() {
	const room, page = 1 << 20, 4 << 10
	b := make([]byte, room)
	for i := 0; i < room; i += page {
		b[i] = 1
	}
	runtime.KeepAlive(b)
}

// warmHeap has the runtime find memory for small objects of every size, which after a collection it would do at the
// first object of each: in a fork, with code that runs for the first time in it and in the kernel.
func warmHeap() {
	const most = 4 << 10
	for size := 8; size <= most; size += max(8, size/8) {
		for range 2 {
			runtime.KeepAlive(make([]byte, size))
			runtime.KeepAlive(make([]*byte, size/8))
		}
	}
}

// prepared is what a stopped machine has ready for its awakening: in a fork all code runs for the first time and costs
// accordingly, so whatever can be found out beforehand is.
type prepared struct {
	frozen    *Frozen
	resume    func() // lets the reaper start processes again
	files     *identityFiles
	processes []wire.NotRenewed
	hostKeys  []string
	hooks     []string
}

// stop freezes all user processes and prepares the awakening.
func (a *Agent) stop(ctx context.Context) (err error) {
	a.spent.close()
	a.spent = nil
	p := &prepared{}
	if p.files, err = openIdentity(&a.cfg.System); err != nil {
		return err
	}
	p.hostKeys = listHostKeys(a.cfg.System.Root)
	p.hooks = listHooks(a.cfg.System.Root)
	limited, cancel := context.WithTimeout(ctx, freezeLimit)
	defer cancel()
	p.resume = a.cfg.Reaper.Pause()
	if p.frozen, err = a.cfg.Cgroups.Freeze(limited); err != nil {
		p.resume()
		p.files.close()
		if errors.Is(err, context.DeadlineExceeded) {
			return wire.Errorf(wire.CodeDeadline, "user processes did not stop within %v, they run on: %v; try again", freezeLimit, err)
		}
		return err
	}
	a.prepared = p
	if p.processes, err = a.userProcesses(); err != nil {
		return errors.Join(err, a.thaw())
	}
	return nil
}

// close gives up what was prepared. Nil is nothing.
func (p *prepared) close() {
	if p != nil {
		p.files.close()
		_ = p.frozen.Close()
	}
}

// startAgain lets the reaper start processes: needed for fork hooks while users' are still frozen.
func (p *prepared) startAgain() {
	if p.resume != nil {
		p.resume()
		p.resume = nil
	}
}

// thaw lets everything run.
func (a *Agent) thaw() error {
	p := a.prepared
	if p == nil {
		return nil
	}
	p.startAgain()
	if err := p.frozen.Thaw(); err != nil {
		return err
	}
	// Its descriptors are closed the next time: not now, on the way to a fork's first answer.
	a.prepared, a.spent = nil, p
	return nil
}
