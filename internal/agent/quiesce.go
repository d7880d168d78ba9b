package agent

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/metrics"
	"slices"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

// freezeLimit is how long a freeze may take before it is given up: the source of a branch must not stand still for
// longer because one process is stuck in the kernel.
const freezeLimit = 100 * time.Millisecond

// quiesce stops user processes, so that the machine can be captured and its clones be given an identity before any of
// them runs. Asked again it answers at once. The agent goes on reading the channel. Everything that takes time is done
// while they still run: the source of a branch waits for what comes after the order to freeze, and for nothing else.
func (a *Agent) quiesce(ctx context.Context, _ *wire.Stream, request []byte) error {
	var req wire.QuiesceRequest
	if err := decode(request, &req); err != nil {
		return err
	}
	if a.Phase() != PhaseReady {
		return wire.Errorf(wire.CodePrecondition, "the machine is being built and cannot be captured yet; call %s first", wire.MethodPivot)
	}
	by := freeze{session: sessionNumber(ctx), number: req.Freeze}
	if a.calledOff(by) {
		return wire.Errorf(wire.CodePrecondition, "this freeze was called off by %s before it began", wire.MethodThaw)
	}
	if p := a.prepared; p != nil {
		if p.by.session != by.session {
			return wire.Errorf(wire.CodePrecondition,
				"the machine has been frozen since an earlier connection; end that by %s, or by %s if it is a fresh copy", wire.MethodThaw, wire.MethodAwaken)
		}
		p.by = by
		return nil
	}
	if err := a.cfg.Contexts.Quiesce(ctx, req.Settle); err != nil {
		return fmt.Errorf("prepare contexts: %w", err)
	}
	// Nothing from here on waits for anything, so on a machine of one processor a call that comes meanwhile would be answered
	// after the pause: between the steps it is let in.
	runtime.Gosched()
	if req.Settle {
		if err := a.settle(ctx); err != nil {
			return fmt.Errorf("settle: %w", err)
		}
	}
	// The children of this machine start with a tidy heap and collect no garbage on their way to the first answer.
	if req.Settle {
		touchHeap()
	}
	if req.Settle || heapBytes() > tidyHeap {
		runtime.GC()
	}
	if !req.Settle {
		a.rehearse(ctx)
	}
	runtime.Gosched()
	if err := a.stop(ctx, req.Settle); err != nil {
		return err
	}
	if ctx.Err() != nil { // nobody is told, so nobody would ask for the thaw
		return errors.Join(context.Cause(ctx), a.thaw())
	}
	a.prepared.by = by
	if req.Settle {
		for pid := range a.cfg.Contexts.PIDs() {
			populate(pid)
		}
		warmHeap()
	}
	return nil
}

// tidyHeap leaves a child room until its first collection, which comes at 14 MiB. A collection is the slowest part of a
// first quiesce.
const tidyHeap = 6 << 20

func heapBytes() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	if s[0].Value.Kind() != metrics.KindUint64 {
		return tidyHeap + 1 // not in this version of Go
	}
	return s[0].Value.Uint64()
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

// freeze says which call froze the machine.
type freeze struct {
	session uint64 // of the agent's sessions
	number  uint64 // of the host's freezes in it
}

// prepared is what a stopped machine has ready for its awakening: in a fork all code runs for the first time and costs
// accordingly, so whatever can be found out beforehand is.
type prepared struct {
	by        freeze
	since     time.Time // when the order was given
	frozen    *Frozen
	resume    func() // lets the reaper start processes again
	files     *identityFiles
	processes []wire.NotRenewed
	hostKeys  []string
	hooks     []string
	pids      []int // of which processes was made
}

// stop prepares the awakening and freezes all user processes. For a machine that does not run on, last, all of it is
// prepared in the freeze, which nobody waits for the end of, and goes further.
func (a *Agent) stop(ctx context.Context, last bool) (err error) {
	a.spent.close()
	a.spent = nil
	p := &prepared{}
	var before []mark
	for range 2 { // the first time makes what is missing, which changes it
		before = a.marks()
		if err := a.prepare(p, false); err != nil {
			p.close()
			return err
		}
		runtime.Gosched()
		if last || slices.Equal(before, a.marks()) {
			break
		}
	}
	a.holdCalls()
	if err := a.freeze(ctx, p); err != nil {
		a.admitCalls()
		p.close()
		if errors.Is(err, context.DeadlineExceeded) {
			return wire.Errorf(wire.CodeDeadline, "user processes did not stop within %v, they run on: %v; try again", freezeLimit, err)
		}
		return err
	}
	a.prepared = p
	if last {
		err = a.prepare(p, true)
	} else {
		err = a.confirm(p, before)
	}
	if err != nil {
		return errors.Join(err, a.thaw())
	}
	return nil
}

// prepare fills in what does not need processes to be frozen, also again. Mapped files are awakened with less code, but
// mapping changes them: not for the source of a branch, where each change has to be looked at.
func (a *Agent) prepare(p *prepared, mapped bool) error {
	files, err := openIdentity(&a.cfg.System, mapped)
	if err != nil {
		return err
	}
	p.closeFiles()
	p.files = files
	p.hostKeys = listHostKeys(a.cfg.System.Root)
	p.hooks = listHooks(a.cfg.System.Root)
	if p.pids, err = a.cfg.Cgroups.PIDs(); err != nil {
		return err
	}
	p.processes = a.describe(p.pids, p.processes)
	return nil
}

func (p *prepared) closeFiles() {
	if p.files != nil {
		p.files.close()
		p.files = nil
	}
}

// close gives up what was prepared. Nil is nothing.
func (p *prepared) close() {
	if p == nil {
		return
	}
	p.closeFiles()
	if p.frozen != nil {
		p.frozen.Close()
	}
}

// freeze stops everything, or nothing.
func (a *Agent) freeze(ctx context.Context, p *prepared) (err error) {
	if p.resume, err = a.cfg.Reaper.Pause(ctx); err != nil {
		return err
	}
	if p.frozen, err = a.cfg.Cgroups.Open(); err == nil {
		p.since = time.Now()
		limited, cancel := context.WithTimeout(ctx, freezeLimit)
		defer cancel()
		if err = p.frozen.Freeze(limited); err == nil {
			return nil
		}
	}
	p.resume()
	return err
}

// confirm prepares again what user processes changed between the preparation and their freezing.
func (a *Agent) confirm(p *prepared, before []mark) error {
	if now := a.marks(); !slices.Equal(now, before) || recent(now, p.since) {
		return a.prepare(p, false)
	}
	pids, err := a.cfg.Cgroups.PIDs()
	if err != nil {
		return err
	}
	if !slices.Equal(pids, p.pids) {
		p.pids, p.processes = pids, a.describe(pids, p.processes)
	}
	return nil
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
	if err := p.frozen.Thaw(); err != nil {
		return err
	}
	// Its descriptors are closed the next time: not now, on the way to a fork's first answer.
	a.prepared, a.spent = nil, p
	p.startAgain()
	a.admitCalls()
	return nil
}
