package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// Suspend writes a sandbox to disk and frees its memory; it keeps its id. On error it is as it was.
func (h *Host) Suspend(ctx context.Context, id string) (View, error) {
	s, err := h.find(id)
	if err != nil {
		return View{}, err
	}
	return h.suspendIf(ctx, s, "", func() bool { return true })
}

// suspendIf suspends a sandbox for a reason that still holds when nobody else can begin with it: still is called with its mu
// held.
func (h *Host) suspendIf(ctx context.Context, s *sandbox, reason string, still func() bool) (View, error) {
	done, err := s.beginIf(ctx, lineage.Suspending, still)
	if err != nil {
		return View{}, err
	}
	defer done("")
	if s.is(lineage.Suspended) {
		return s.view(), nil
	}
	began := time.Now()
	err = h.suspend(ctx, s)
	h.took(TimedSuspend, "", err, began)
	if err != nil {
		h.arm(s)
		return View{}, fmt.Errorf("suspend %s: %w", s.id, s.orEnded(h.explainFull(err)))
	}
	s.announce(func() { h.tell(events.SandboxSuspended, s, reason) })
	return s.view(), nil
}

func (h *Host) suspend(ctx context.Context, s *sandbox) error {
	s.timeOver() // What is written down of it is of a sandbox that is suspended.
	b := &branch{h: h, s: s, mode: BranchDiff, reason: "suspended", w: &writing{}}
	forget, err := b.findParent()
	if err != nil {
		return err
	}
	defer forget()
	_, admitted, err := b.admit()
	if err != nil {
		return err
	}
	defer admitted()
	paused := s.is(lineage.Paused)
	// Its processes stay frozen from the capture on: what they did after it would be lost.
	if err := b.snap(ctx, !paused); err != nil {
		return s.orEnded(errors.Join(err, b.abandon()))
	}
	// Until the sandbox names its layers a sweep would take them for garbage.
	release, err := h.layers.Hold(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	defer release()
	rec, state, err := b.suspended(ctx)
	if err == nil {
		err = h.store.AddSuspended(ctx, rec, state)
	}
	if err != nil {
		if paused {
			return err
		}
		return errors.Join(err, s.unfreeze(ctx))
	}
	return h.put(s, &rec)
}

// unfreeze lets the processes of a sandbox run that stays, also when nobody waits for it any more.
func (s *sandbox) unfreeze(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), thawTimeout)
	defer cancel()
	conn, err := s.guest(ctx)
	if err != nil {
		return err
	}
	return s.goAgain(ctx, conn)
}

// suspended stores the layers of a captured machine and says what it was.
func (b *branch) suspended(ctx context.Context) (store.Suspended, []byte, error) {
	s := b.s
	captured, err := b.capture.Finish(ctx)
	if err != nil {
		return store.Suspended{}, nil, fmt.Errorf("copy memory: %w", err)
	}
	defer closeCaptured(captured)
	b.h.hasTalked(ctx, s)
	b.h.networkTotals(ctx, s)
	s.mu.Lock()
	hot := s.hot
	b.disks = append([]string(nil), s.disks[:len(s.disks)-1]...)
	kept := s.kept()
	kept.Spent, kept.NetSpent = s.takenLocked(), addTotals(s.netSpent, s.net)
	s.mu.Unlock()
	v := memory.View{Image: captured.Image}
	if captured.Image == nil {
		image, err := b.h.hot.shareMemory(hot)
		if err != nil {
			return store.Suspended{}, nil, err
		}
		defer func() { _ = image.Close() }()
		v = memory.View{Image: image, Pages: captured.Pages}
	}
	m, err := b.layers(ctx, captured, v)
	if err != nil {
		return store.Suspended{}, nil, err
	}
	m.Tag, m.Branch = "", nil
	text, err := json.Marshal(kept)
	if err != nil {
		return store.Suspended{}, nil, err
	}
	rec := store.Suspended{FormatVersion: store.FormatVersion, ID: s.id, Sandbox: text, Machine: m}
	return rec, captured.State, nil
}

// put ends the machine of a sandbox that is on disk now.
func (h *Host) put(s *sandbox, rec *store.Suspended) error {
	s.mu.Lock()
	machine, conn, hot, dir, group := s.machine, s.conn, s.hot, s.dir, s.cgroup
	if s.state == lineage.Failed || s.ended {
		s.mu.Unlock()
		return errors.Join(fmt.Errorf("%w: it ended meanwhile", lineage.ErrState), h.store.RemoveSuspended(s.id))
	}
	s.console = machine.Console()
	s.spent, s.seen = s.takenLocked(), proc.Consumption{}
	s.netSpent, s.net = addTotals(s.netSpent, s.net), network.Totals{}
	s.machine, s.conn, s.hot, s.dir, s.disks, s.latest, s.cut, s.cgroup = nil, nil, nil, "", nil, nil, 0, nil
	s.state, s.suspended = lineage.Suspended, rec
	s.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
	}
	err := errors.Join(machine.Close(), group.Remove())
	h.cfg.Networks.Detach(s.id)
	h.hot.release(hot)
	return errors.Join(err, s.removeDir(dir))
}

// Wake lets a suspended sandbox run on, as the same one. On error it stays suspended.
func (h *Host) Wake(ctx context.Context, id string) (View, error) {
	s, err := h.find(id)
	if err != nil {
		return View{}, err
	}
	done, err := s.begin(ctx, lineage.Waking)
	if err != nil {
		return View{}, err
	}
	defer done("")
	if s.is(lineage.Running) {
		return s.view().withUsage(), nil
	}
	began := time.Now()
	err = h.wake(ctx, s)
	h.took(TimedWake, "", err, began)
	if err != nil {
		return View{}, fmt.Errorf("wake %s: %w", s.id, s.orEnded(err))
	}
	h.arm(s)
	s.announce(func() { h.tell(events.SandboxWoken, s, "") })
	return s.view().withUsage(), nil
}

func (h *Host) wake(ctx context.Context, s *sandbox) error {
	rec := *s.suspended
	done, err := h.admit(ctx, rec.Machine, nil, 1)
	if err != nil {
		return err
	}
	defer done()
	hot, err := h.hot.acquireWith(ctx, rec.Machine, func() ([]byte, error) { return h.store.SuspendedState(rec) })
	if err != nil {
		return err
	}
	var u undo.Stack
	defer u.Run()
	u.Add(func() { h.hot.release(hot) })
	dir, err := h.machineDir()
	if err != nil {
		return err
	}
	u.Add(func() { _ = os.RemoveAll(dir) })
	woken := &sandbox{
		id: s.id, dir: dir, hot: hot, generation: s.generation + 1, limits: s.limits, egress: s.policy(), netSpent: h.spentNetwork(s),
	}
	if s.mayTalk() {
		woken.lost = 1
	}
	u.Add(func() { _ = woken.cgroup.Remove() })
	if err := h.restore(ctx, woken); err != nil {
		return woken.orLimit(err)
	}
	u.Add(func() {
		_ = woken.machine.Close()
		h.cfg.Networks.Detach(s.id)
	})
	conn, err := woken.rouse(ctx, h.cfg.Patience)
	if err != nil {
		return withConsole(woken.orLimit(err), woken.machine.Console())
	}
	u.Add(func() { _ = conn.Close() })
	if err := h.connect(ctx, woken); err != nil {
		return err
	}
	if err := woken.bound(ctx); err != nil {
		return err
	}
	if err := h.runAgain(s, woken, conn, &rec, &u); err != nil { //nolint:contextcheck // what is watched outlives the wake
		return err
	}
	// A daemon that dies between these two leaves both, and the next one takes what is on disk.
	h.record(s)
	if err := h.store.RemoveSuspended(s.id); err != nil {
		h.log.Warn("remove the record of a woken sandbox", "sandbox", s.id, "error", err)
	}
	return nil
}

// runAgain gives a sandbox its new machine.
func (h *Host) runAgain(s, woken *sandbox, conn *guest.Conn, rec *store.Suspended, u *undo.Stack) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || h.closed {
		return fmt.Errorf("%w: it was ended meanwhile", lineage.ErrState)
	}
	u.Keep()
	s.machine, s.conn, s.hot, s.dir, s.generation = woken.machine, conn, woken.hot, woken.dir, woken.generation
	s.disks, s.nextDisk, s.format, s.mapped, s.cgroup = woken.disks, 1, woken.format, woken.mapped, woken.cgroup
	s.state, s.suspended, s.console, s.lost = lineage.Running, nil, nil, 0
	// What it writes from now on is over what it was when it was suspended, which no tag names.
	s.from = &origin{tag: rec.Machine.Parent, snapshot: rec.Machine}
	machine := s.machine
	h.wait.Go(func() { h.watch(s, machine) })
	return nil
}

// rouse steps the clock of a machine that was suspended and lets its processes run. It is the same machine as before: it
// keeps its names.
func (s *sandbox) rouse(ctx context.Context, within time.Duration) (*guest.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("the guest did not answer within %s", within))
	defer cancel()
	ctx, stop := untilDead(ctx, s.machine)
	defer stop()
	conn, err := guest.Dial(ctx, s.machine.DialGuest, s.generation)
	if err != nil {
		return nil, fmt.Errorf("reach the agent: %w", s.because(ctx, err))
	}
	if err := s.goAgain(ctx, conn); err != nil {
		return nil, errors.Join(fmt.Errorf("let its processes run: %w", s.because(ctx, err)), conn.Close())
	}
	return conn, nil
}

// loadSuspended brings back the sandboxes that an earlier daemon suspended.
func (h *Host) loadSuspended() error {
	list, bad, err := h.store.SuspendedSandboxes()
	if err != nil {
		return err
	}
	for _, err := range bad {
		h.log.Warn("record left alone", "error", err)
	}
	h.mu.Lock() // The time of one that is over ends it at once, beside this.
	defer h.mu.Unlock()
	for _, rec := range list {
		var k keptSandbox
		if err := json.Unmarshal(rec.Sandbox, &k); err != nil {
			h.log.Warn("record left alone", "error", fmt.Errorf("read suspended sandbox %s: %w", rec.ID, err))
			continue
		}
		s := k.sandbox(rec.ID)
		s.format, s.state, s.suspended = rec.Machine.Engine, lineage.Suspended, &rec
		s.from = &origin{tag: rec.Machine.Parent, snapshot: rec.Machine}
		h.armEnd(s)
		h.sandboxes[s.id] = s
	}
	return nil
}
