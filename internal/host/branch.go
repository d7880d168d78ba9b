package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
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
	// Passing marks it as made for its children alone, whoever makes it removes it with the last of them. No user can give
	// that to a snapshot of theirs.
	Passing bool
}

const branchWhat = "branch"

// thawTimeout bounds letting the source's processes run again. It is not the caller's to cut short.
const thawTimeout = 30 * time.Second

// branch is one branch in progress, from its request until its snapshot is ready.
type branch struct {
	h      *Host
	s      *sandbox
	w      *writing
	mode   BranchMode
	reason string // of the mode

	passing bool // as the spec has it
	ran     *store.Ran

	from    *origin        // what the lowest of the source's own disk files stands on
	parent  *origin        // what the snapshot will stand on
	cut     int            // how many of the source's own disk files the parent holds already
	machine engine.Machine // that was captured; the source may have another by the end
	began   time.Time      // when it was asked for; zero for what nobody asked for
	capture *engine.Capture
	frozen  time.Duration // the source's processes stood still
	disks   []string      // those, the lowest first

	build    *build                // whose step it is, which may have been built before, a little different; else nil
	describe func(*store.Snapshot) // of a step of a build, whose record is not a branch's; else nil
	copied   func()                // gives back the promise of memory for the copy
	undo     undo.Stack            // what holds as long as the branch is in progress
	told     bool                  // it is known to be ready or to have failed: nothing is held for it any more
}

// Branch captures a sandbox, which runs on. It returns when the snapshot is ready, or with NoWait when the source runs
// again. On error the source is as it was, and there is no snapshot.
func (h *Host) Branch(ctx context.Context, id string, spec BranchSpec) (SnapshotView, error) {
	s, err := h.find(id)
	if err != nil {
		return SnapshotView{}, err
	}
	b := &branch{h: h, s: s, began: time.Now(), passing: spec.Passing}
	if b.mode, b.reason, err = h.branchMode(ctx, s, spec.Mode); err != nil {
		h.took(TimedBranch, ModeNone, err, b.began)
		return SnapshotView{}, fmt.Errorf("branch %s: %w", s.id, err)
	}
	if spec.Tag == "" {
		spec.Tag = autoTag(s.id)
	}
	if err := lineage.CheckTag(spec.Tag); err != nil {
		return SnapshotView{}, err
	}
	err = h.quota(ctx, spec.Tag)
	if err == nil {
		err = b.take(ctx, spec)
	}
	if err != nil {
		h.took(TimedBranch, string(b.mode), err, b.began)
		return SnapshotView{}, fmt.Errorf("branch %s: %w", s.id, s.orEnded(err))
	}
	if !spec.NoWait {
		if err := b.w.wait(ctx); err != nil {
			return SnapshotView{}, fmt.Errorf("branch %s: snapshot %s: %w", s.id, spec.Tag, err)
		}
	}
	return h.Snapshot(spec.Tag)
}

func autoTag(id string) string { return fmt.Sprintf("branch-%s-%d", id, time.Now().UnixMilli()) }

// branchMode chooses a mode and says why. A mode asked for by name is never replaced by another (invariant 9).
func (h *Host) branchMode(ctx context.Context, s *sandbox, asked BranchMode) (mode BranchMode, reason string, err error) {
	f, err := h.Features(ctx)
	if err != nil {
		return "", "", err
	}
	if !f.Capture {
		return "", "", fmt.Errorf("%w: engine %s cannot capture running machines", ErrUnsupported, f.Format.Engine)
	}
	unavailable, err := s.liveReason(ctx, f)
	if err != nil {
		return "", "", err
	}
	switch asked {
	case BranchAuto, "":
		if unavailable == "" {
			return BranchLive, "auto: this host can capture live", nil
		}
		return BranchDiff, "auto: no live capture here: " + unavailable, nil
	case BranchLive:
		if unavailable != "" {
			return "", "", hint(fmt.Errorf("%w: %s", engine.ErrLiveUnavailable, unavailable),
				"use --mode diff, which needs no privilege, or --mode auto")
		}
	case BranchDiff, BranchFull:
	default:
		return "", "", invalid("mode %.40q: there are auto, live, diff and full", string(asked))
	}
	return asked, "asked for", nil
}

// liveReason says why a sandbox cannot be captured live, or "". One that an earlier daemon started may be confined as
// none would be now.
func (s *sandbox) liveReason(ctx context.Context, f *engine.Features) (string, error) {
	s.mu.Lock()
	confined, ok := s.machine.(engine.Confined)
	s.mu.Unlock()
	if ok {
		return confined.LiveReason(ctx)
	}
	if f.Live {
		return "", nil
	}
	return f.LiveReason, nil
}

// take does everything up to the moment when the source runs again, and leaves the rest to a goroutine.
func (b *branch) take(ctx context.Context, spec BranchSpec) error {
	if err := b.h.catchUp(ctx, b.s); err != nil {
		return err
	}
	defer b.undo.Run() // nothing, once the goroutine has taken over
	release, err := b.h.hold(spec.Tag, branchWhat)
	if err != nil {
		return err
	}
	b.undo.Add(func() {
		if !b.told {
			release()
		}
	})
	if err := b.h.tagFree(spec.Tag); err != nil {
		return err
	}
	done, err := b.s.begin(ctx, lineage.Branching)
	if err != nil {
		return err
	}
	b.undo.Add(func() { done("") })
	forget, err := b.findParent()
	if err != nil {
		return err
	}
	b.undo.Add(forget)
	if spec.Parent != "" && spec.Parent != b.parent.tag {
		return invalid("parent_tag is %q, but the parent of this branch is %s", spec.Parent, b.parent.tag)
	}
	if err := b.reserve(spec.Tag); err != nil {
		return err
	}
	b.s.writers(1)
	b.undo.Add(func() { b.s.writers(-1) })
	if err := b.snap(ctx, false); err != nil {
		return errors.Join(err, b.abandon())
	}
	b.ran = b.s.commandsRun()
	b.w.m.Talked = b.h.hasTalked(ctx, b.s) // Asked after the instant: what it says holds for that, too.
	b.h.pins.hand(b.s.id, snapshotKey(&b.w.m))
	if err := b.keepDisks(); err != nil {
		return errors.Join(err, b.abandon())
	}
	if err := b.h.enterWriting(b); err != nil {
		return errors.Join(err, b.abandon())
	}
	b.s.goOn(lineage.Copying)
	settle := b.undo
	b.undo.Keep()
	go func() {
		defer b.h.wait.Done()
		b.finish(b.h.life, func() { done("") }, settle.Run)
		b.h.shorten(b.s)
	}()
	return nil
}

// admit promises room for the copy, and says how much it takes. The caller calls done once it has been made, or will not be.
func (b *branch) admit() (bytes int64, done func(), err error) {
	b.s.mu.Lock()
	bytes = b.s.format.MemoryBytes
	pid := b.s.machine.Ref().PID
	b.s.mu.Unlock()
	if b.mode != BranchLive {
		// What is the machine's own is copied; the rest of its process's own memory makes this a little too much.
		usage, err := memory.Glance(pid)
		if err != nil {
			return 0, nil, err
		}
		bytes = min(bytes, usage.OwnBytes)
	}
	done, err = b.h.admitCopy(bytes)
	return bytes, done, err
}

// reserve admits the memory of the branch and makes its place among the hot images.
func (b *branch) reserve(tag string) error {
	bytes, admitted, err := b.admit()
	if err != nil {
		return err
	}
	b.undo.Add(admitted)
	b.copied = admitted
	b.s.mu.Lock()
	hot, format := b.s.hot, b.s.format
	b.s.mu.Unlock()
	image, err := b.h.hot.begin(tag, "branch-"+newID(), bytes, hot)
	if err != nil {
		return err
	}
	b.w = &writing{hot: image, parent: b.parent, status: lineage.Writing, settled: make(chan struct{})}
	b.w.m = store.Snapshot{
		FormatVersion: store.FormatVersion, Tag: tag, CreatedAt: time.Now().UTC().Round(time.Millisecond), Parent: b.parent.tag,
		Engine: format, Image: hot.image, Warm: []string{}, Protocol: b.parent.snapshot.Protocol, Config: b.parent.snapshot.Config,
		Limits: b.parent.snapshot.Limits, Egress: b.s.policy(),
	}
	b.undo.Add(func() {
		if b.told {
			return
		}
		if !isClosed(image.ready) {
			b.h.hot.fail(image, errors.New("its capture failed"))
		}
		b.h.hot.release(image)
	})
	return nil
}

// snap captures the machine. Whatever happens, it runs as before when this returns, and so do its processes, unless stay
// leaves them frozen when all went well.
func (b *branch) snap(ctx context.Context, stay bool) error {
	s := b.s
	defer b.h.hurry(s)()
	s.mu.Lock()
	machine, paused := s.machine, s.state == lineage.Paused
	top := diskPath(s.dir, s.nextDisk)
	below := s.disks[len(s.disks)-1]
	s.nextDisk++
	s.mu.Unlock()
	b.machine = machine
	capturer, ok := machine.(engine.Capturer)
	if !ok {
		return fmt.Errorf("%w: its machine cannot be captured while it runs", ErrUnsupported)
	}
	if err := disk.CreateOverlay(top, below, "qcow2"); err != nil {
		return deathOr(machine, err) // whose directory goes with it
	}
	mode := engine.CaptureDiff
	if b.mode == BranchLive {
		mode = engine.CaptureLive
	}
	capture := func(quiesce func(context.Context) error) error {
		var err error
		b.capture, err = capturer.Capture(ctx, &engine.CaptureSpec{
			Mode: mode, DiskTop: top, Progress: b.w.copied, Quiesce: quiesce,
		})
		return err
	}
	thawed, err := b.h.around(ctx, s, paused, stay, capture)
	if b.capture != nil && thawed != nil {
		// As the guest counts it, whose clocks stand still in the pause: without the way of the calls to it and back.
		b.frozen = b.capture.Pause + time.Duration(thawed.FrozenMS*float64(time.Millisecond))
		b.h.cfg.Took(TimedBranchFrozen, string(b.mode), Done, b.frozen)
	}
	if b.capture != nil {
		b.h.cfg.Took(TimedBranchPause, string(b.mode), Done, b.capture.Pause)
	}
	if err != nil {
		err = deathOr(machine, err)
	}
	// Moved also when the capture went well and only what came after it did not.
	if b.capture != nil || engine.DiskMoved(err) {
		s.mu.Lock()
		s.disks = append(s.disks, top)
		s.mu.Unlock()
		b.h.record(s)
		return err
	}
	return errors.Join(err, ignoreMissing(os.Remove(top)))
}

// around lets capture run with a machine whose processes it can freeze, and afterwards makes them run again; those of a
// paused machine are frozen all the time, and only its CPUs run meanwhile.
func (h *Host) around(ctx context.Context, s *sandbox, paused, stay bool,
	capture func(quiesce func(context.Context) error) error,
) (*wire.ThawReport, error) {
	if paused {
		if err := s.setPaused(ctx, false); err != nil {
			return nil, err
		}
		err := capture(func(context.Context) error { return nil })
		return nil, errors.Join(err, s.setPaused(context.WithoutCancel(ctx), true))
	}
	conn, err := s.guest(ctx)
	if err != nil {
		return nil, err
	}
	asked := false
	err = capture(func(ctx context.Context) error {
		asked = true
		if err := conn.Quiesce(ctx, wire.QuiesceRequest{}); err != nil {
			return fmt.Errorf("freeze its processes: %w", err)
		}
		return nil
	})
	if !asked || stay && err == nil {
		return nil, err
	}
	thawed, thawErr := s.thaw(ctx, conn)
	if thawErr != nil {
		h.log.Warn("let a source's processes run again", "sandbox", s.id, "error", thawErr)
		h.thawLater(s) //nolint:contextcheck // What it starts lives as long as the machine.
		err = errors.Join(err, fmt.Errorf("let its processes run again: %w", thawErr))
	}
	return thawed, err
}

// thaw lets a guest's processes run again, whatever the caller's patience.
func (s *sandbox) thaw(ctx context.Context, conn *guest.Conn) (*wire.ThawReport, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), thawTimeout)
	defer cancel()
	report, err := conn.Thaw(ctx, s.id)
	if err == nil || ctx.Err() != nil || !isClosed(conn.Closed()) {
		return report, err
	}
	again, err := s.guest(ctx) // The connection broke, and somebody has to let them run.
	if err != nil {
		return nil, err
	}
	return again.Thaw(ctx, s.id)
}

// thawLater goes on trying to let a sandbox's processes run, until they do or the machine is another's or nobody's.
func (h *Host) thawLater(s *sandbox) {
	s.mu.Lock()
	machine := s.machine
	s.mu.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || machine == nil {
		return
	}
	h.wait.Go(func() {
		ctx, stop := untilDead(h.life, machine)
		defer stop()
		tick := time.NewTicker(reachAgain)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			done, err := s.begin(ctx, lineage.Thawing)
			if s.is(lineage.Paused) { // who lets it run lets its processes run
				return
			}
			if err != nil {
				continue // busy, maybe with what does the same
			}
			err = s.unfreeze(ctx)
			done("")
			if err == nil {
				return
			}
		}
	})
}

func (s *sandbox) writers(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writing += n
}

// orEnded explains a failure by the sandbox's end, if it was ended meanwhile.
func (s *sandbox) orEnded(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil || !s.ended {
		return err
	}
	return fmt.Errorf("%w: the sandbox was ended meanwhile: %w", lineage.ErrState, err)
}

// keepDisks links the source's frozen disk files to a place of the branch, where they stay if the source ends.
func (b *branch) keepDisks() error {
	b.s.mu.Lock()
	frozen := b.s.disks[:len(b.s.disks)-1]
	b.s.mu.Unlock()
	dir, err := b.h.TempDir("branch-")
	if err != nil {
		return err
	}
	b.undo.Add(func() { _ = os.RemoveAll(dir) })
	for i, f := range frozen {
		link := filepath.Join(dir, strconv.Itoa(i)+".qcow2")
		if err := os.Link(f, link); err != nil {
			return fmt.Errorf("keep its disk: %w", err)
		}
		b.disks = append(b.disks, link)
	}
	return nil
}

// abandon waits for a capture that nobody wants any more: to cancel it would be the greater risk for the source.
func (b *branch) abandon() error {
	if b.capture == nil {
		return nil
	}
	captured, err := b.capture.Finish(b.h.life)
	if err != nil {
		return err
	}
	closeCaptured(captured)
	return nil
}

func closeCaptured(c *engine.Captured) {
	if c.Image != nil {
		_ = c.Image.Close()
	}
	if c.Pages != nil {
		_ = c.Pages.Close()
	}
}

// findParent chooses what the branch will stand on, which cannot be removed, nor get another record, until forget is
// called.
func (b *branch) findParent() (forget func(), err error) {
	h := b.h
	h.mu.Lock()
	defer h.mu.Unlock()
	b.parent, b.cut = h.parentOf(b.s)
	b.s.mu.Lock()
	b.from = b.s.from
	b.s.mu.Unlock()
	if h.busy[b.parent.tag] == removeWhat { // it, or what it stands on
		return nil, hint(fmt.Errorf("snapshot %s, which it would stand on: %w: %s is in progress", b.parent.tag, ErrBusy, removeWhat),
			"try again when that is over")
	}
	if w := b.parent.writing; w != nil && w.status == lineage.FailedSnap { // said before its processes are frozen for nothing
		return nil, hint(fmt.Errorf("snapshot %s, which it stands on: %w: it has %s: %w", b.parent.tag, lineage.ErrState,
			lineage.FailedSnap, w.err), "copy what you need of the sandbox with: forkd cp")
	}
	h.parents[b] = b.parent.tag
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.parents, b)
	}, nil
}

// parentOf is what the next branch of s stands on, and how many of its own disk files that holds. The caller holds mu.
func (h *Host) parentOf(s *sandbox) (*origin, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest != nil {
		if m, ok := h.snapshots[s.latest.Tag]; ok && m.ID() == s.latest.ID() {
			return &origin{tag: m.Tag, snapshot: m}, s.cut
		}
		s.latest, s.cut = nil, 0 // it was removed
	}
	return s.from, 0
}

// writing is a snapshot that is not ready yet, or failed.
type writing struct {
	hot     *hotImage
	parent  *origin
	settled chan struct{} // closed when it is ready or failed
	done    atomic.Int64  // bytes of memory copied
	total   atomic.Int64

	// Guarded by the host's lock.
	m      store.Snapshot // as far as it is known
	status lineage.Status
	err    error
}

func (w *writing) copied(done, total int64) {
	w.done.Store(done)
	w.total.Store(total)
}

// progress is from 0 to 1: copying is half of it.
func (w *writing) progress() float64 {
	total := w.total.Load()
	if total == 0 {
		return 0
	}
	return 0.5 * float64(min(w.done.Load(), total)) / float64(total)
}

// wait returns when the snapshot is ready.
func (w *writing) wait(ctx context.Context) error {
	select {
	case <-w.settled:
		return w.err // set before settled was closed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// origin is the snapshot a sandbox was forked from, which may still be being written.
type origin struct {
	tag      string
	snapshot store.Snapshot
	writing  *writing // nil: it was ready
}

// originNow is what a child that is about to enter the table was forked from, as it is known now: while the child was
// made, a branch may have become ready, and its record another's of the same content. The layers that an older record names
// may be gone. The caller holds mu.
func (h *Host) originNow(from *origin) (*origin, error) {
	old := from.snapshot
	if w := from.writing; w != nil {
		if w.status != lineage.Ready {
			return from, nil
		}
		old = w.m
	}
	m, ok := h.snapshots[from.tag]
	if !ok || m.State != old.State || !m.CreatedAt.Equal(old.CreatedAt) {
		return nil, fmt.Errorf("snapshot %s: %w: it was removed meanwhile", from.tag, ErrNotFound)
	}
	if from.writing == nil && m.Memory == old.Memory && m.Disk == old.Disk && m.ParentID == old.ParentID {
		return from, nil
	}
	return &origin{tag: m.Tag, snapshot: m}, nil
}

// settled waits until the snapshot is durable and returns it.
func (o *origin) settled(ctx context.Context, h *Host) (store.Snapshot, error) {
	if o.writing == nil {
		return o.snapshot, nil
	}
	if err := o.writing.wait(ctx); err != nil {
		return store.Snapshot{}, fmt.Errorf("snapshot %s, which it stands on: %w", o.tag, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return o.writing.m, nil
}

// layers are what must not be collected while a sandbox of it lives; one being written holds its own.
func (o *origin) layers() []layer.Digest {
	if o.writing != nil {
		return nil
	}
	return []layer.Digest{o.snapshot.Memory, o.snapshot.Disk}
}
