package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/store"
)

// finish makes a captured branch a snapshot, with the source running. free is called when the source can be captured
// again, done before anybody is told of the end.
func (b *branch) finish(ctx context.Context, free, done func()) {
	m, release, err := b.complete(ctx, free)
	if err != nil {
		err = b.h.explainFull(err)
	}
	if !b.began.IsZero() {
		b.h.took(TimedBranch, string(b.mode), err, b.began)
	}
	changed := b.h.settle(b, m, err)
	if release != nil {
		release()
	}
	free()
	done()
	close(b.w.settled)
	for _, s := range changed {
		b.h.record(s)
	}
	if err != nil {
		b.h.collect(ctx) // what it had written of its layers
		return
	}
	b.h.cfg.Changed(b.h.Tags())
	if !lineage.IsStep(m.Tag) {
		b.h.tidy(ctx, m.Tag)
	}
}

// complete waits for the memory of the instant, makes it hot, so that children can be forked, and then writes the layers
// and the record. Until the record is known to the host the layers that only it names would be taken for garbage:
// release, if it is not nil, ends that.
func (b *branch) complete(ctx context.Context, free func()) (m store.Snapshot, release func(), err error) {
	captured, err := b.capture.Finish(ctx)
	free()
	b.copied()
	if err != nil {
		return m, nil, fmt.Errorf("copy memory: %w", err)
	}
	copied := time.Now()
	if err := b.heat(ctx, captured); err != nil {
		closeCaptured(captured)
		return m, nil, err
	}
	if release, err = b.h.layers.Hold(ctx); err != nil {
		return m, nil, err
	}
	if m, err = b.write(ctx, captured, copied); err != nil {
		return m, release, err
	}
	if err := b.h.hot.shrink(ctx, b.w.hot, m); err != nil {
		b.h.log.Warn("share the memory of a branch", "snapshot", m.Tag, "error", err) // it has its own
	}
	return m, release, nil
}

// heat makes the captured machine's memory and disk a hot image. It owns the memory afterwards.
func (b *branch) heat(ctx context.Context, c *engine.Captured) error {
	below := b.w.hot.below[0]
	checkpoint := &engine.Checkpoint{Format: c.Format, State: c.State, Memory: c.Image, Pages: c.Pages}
	if c.Image == nil {
		image, err := b.h.hot.shareMemory(below)
		if err != nil {
			return err
		}
		checkpoint.Memory = image
	}
	// The source's own files are never given to others: its VM process could write what they back on.
	path := b.h.cfg.Home.HotDisk(b.w.hot.key)
	tops, over := b.disks, below.disks
	if len(over) > maxHotDepth { // all of the chain but the image's own disk becomes one file
		tops, over = append(reversed(over[:len(over)-1]), tops...), over[len(over)-1:]
	}
	if err := disk.Merge(ctx, path, tops, over[0], diskFormat(over)); err != nil {
		return errors.Join(fmt.Errorf("copy its disk: %w", err), checkpoint.Memory.Close())
	}
	b.h.hot.fill(b.w.hot, checkpoint, append([]string{path}, over...), path)
	return nil
}

// maxHotDepth bounds the chain of files below a child's disk: opening a chain takes longer with each.
const maxHotDepth = 8

func reversed(list []string) []string {
	out := make([]string, 0, len(list))
	for _, e := range slices.Backward(list) {
		out = append(out, e)
	}
	return out
}

// write stores the layers and the record.
func (b *branch) write(ctx context.Context, c *engine.Captured, copied time.Time) (store.Snapshot, error) {
	m, err := b.layers(ctx, c, b.h.hot.view(b.w.hot))
	if err != nil {
		return store.Snapshot{}, err
	}
	m.Tag, m.CreatedAt, m.Egress, m.Talked = b.w.m.Tag, b.w.m.CreatedAt, b.w.m.Egress, b.w.m.Talked
	m.Tool = b.h.cfg.Version
	m.Branch = &store.Branch{
		From: b.s.id, Passing: b.passing, Mode: string(b.mode), ModeReason: b.reason, PauseMS: millis(b.capture.Pause), FrozenMS: millis(b.frozen),
		SetupMS: millis(b.capture.Setup), CopyMS: millis(c.Copied), WriteMS: millis(time.Since(copied)), Ran: b.ran,
	}
	if b.describe != nil {
		b.describe(&m)
	}
	if err := b.h.store.AddSnapshot(ctx, m, c.State); err != nil {
		return store.Snapshot{}, err
	}
	return m, nil
}

// layers stores what the captured machine, whose memory is v, adds to the branch's parent, and describes it.
func (b *branch) layers(ctx context.Context, c *engine.Captured, v memory.View) (store.Snapshot, error) {
	parent, err := b.parent.settled(ctx, b.h)
	if err != nil {
		return store.Snapshot{}, err
	}
	mem, err := b.writeMemory(ctx, c, v, parent)
	if err != nil {
		return store.Snapshot{}, fmt.Errorf("store memory: %w", err)
	}
	dsk, err := b.writeDisk(ctx, parent)
	if err != nil {
		return store.Snapshot{}, fmt.Errorf("store disk: %w", err)
	}
	m := withLayers(parent, mem, dsk)
	m.Source = "branch of " + b.s.id
	switch {
	case b.mode == BranchFull:
		m.Parent, m.ParentID = "", ""
	case parent.Tag != "": // else it is what a suspended sandbox was, and stands on that one's parent
		m.Parent, m.ParentID = parent.Tag, parent.ID()
	}
	return m.WithState(c.State), nil
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// writeMemory stores the pages that differ from the parent's.
func (b *branch) writeMemory(ctx context.Context, c *engine.Captured, v memory.View, parent store.Snapshot) (layer.Info, error) {
	if b.mode == BranchFull {
		return memory.SaveLike(ctx, b.h.layers, v, nil, layer.Digest{}, nil, []layer.Digest{parent.Memory})
	}
	hot, err := b.h.hot.acquireBelow(ctx, parent)
	if err != nil {
		return layer.Info{}, err
	}
	defer b.h.hot.release(hot)
	var named []layer.Extent
	if c.Pages != nil {
		// A page that is not the machine's own is as in the image it was restored from, and was when the parent was taken.
		named = c.Pages.Extents()
	}
	below := b.h.hot.view(hot)
	var like []layer.Digest
	if b.build != nil && b.build.recipe != nil {
		like = b.h.alike(b.build.spec.Tag, b.build.recipe.Name, parent.Image, parent.Engine, store.Snapshot{})
	}
	return memory.SaveLike(ctx, b.h.layers, v, named, parent.Memory, &below, like)
}

// writeDisk stores the blocks written since the parent. For a branch that stands on nothing the whole chain down to the
// image's disk becomes one layer.
func (b *branch) writeDisk(ctx context.Context, parent store.Snapshot) (layer.Info, error) {
	if b.mode != BranchFull {
		return disk.SaveOverlays(ctx, b.h.layers, b.disks[b.cut:], parent.Disk)
	}
	from, err := b.from.settled(ctx, b.h) // not what the source has now: it may have been suspended and woken since
	if err != nil {
		return layer.Info{}, err
	}
	over, err := disk.SaveOverlays(ctx, b.h.layers, b.disks, from.Disk)
	if err != nil {
		return layer.Info{}, err
	}
	return b.h.layers.Merge(ctx, over.Digest, parent.ImageDisk)
}

// enterWriting makes a captured branch known. The caller starts the goroutine that finishes it.
func (h *Host) enterWriting(b *branch) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return ErrClosed
	}
	b.w.m.Branch = &store.Branch{
		From: b.s.id, Passing: b.passing, Mode: string(b.mode), ModeReason: b.reason, PauseMS: millis(b.capture.Pause), FrozenMS: millis(b.frozen),
		SetupMS: millis(b.capture.Setup), Ran: b.ran,
	}
	if err := h.store.BeginSnapshot(b.w.m); err != nil {
		return err
	}
	h.writing[b.w.m.Tag] = b.w
	h.tellSnapshot(events.SnapshotCreated, b.w.m.Tag, b.s.id, "")
	h.wait.Add(1)
	return nil
}

// settle makes a branch ready or failed, and returns the sandboxes for which something has changed.
func (h *Host) settle(b *branch, m store.Snapshot, err error) (changed []*sandbox) {
	tag := b.w.m.Tag
	if err == nil {
		b.h.hot.rename(b.w.hot, m)
	} else {
		h.log.Warn("branch failed", "snapshot", tag, "sandbox", b.s.id, "error", err)
		h.hot.fail(b.w.hot, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	b.w.err = err
	// Who sees that it is ready, or has failed, may do with it what he likes at once.
	b.told = true
	delete(h.busy, tag)
	delete(h.parents, b)
	defer h.hot.release(b.w.hot)
	if err != nil {
		b.w.status = lineage.FailedSnap
		h.tellSnapshot(events.SnapshotFailed, tag, b.s.id, err.Error())
		if err := h.store.FailSnapshot(b.w.m, err); err != nil {
			h.log.Warn("note why a branch failed", "snapshot", tag, "error", err)
		}
		return nil
	}
	b.w.m, b.w.status = m, lineage.Ready
	h.snapshots[tag] = m
	h.tellSnapshot(events.SnapshotReady, tag, b.s.id, "")
	delete(h.writing, tag)
	if err := h.store.EndSnapshot(tag); err != nil {
		h.log.Warn("forget that a snapshot was being written", "snapshot", tag, "error", err)
	}
	b.s.branched(m, b.machine, len(b.disks))
	changed = []*sandbox{b.s}
	for _, s := range h.sandboxes {
		if s.bornOf(b.w, m) {
			changed = append(changed, s)
		}
	}
	return changed
}

// bornOf makes a child of a branch that was being written one of the snapshot it became.
func (s *sandbox) bornOf(w *writing, m store.Snapshot) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.from == nil || s.from.writing != w {
		return false
	}
	s.from = &origin{tag: m.Tag, snapshot: m}
	return true
}

// branched notes a branch that became ready. One of a machine that was suspended since says nothing of the disk of the
// machine that was woken.
func (s *sandbox) branched(m store.Snapshot, of engine.Machine, cut int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.branches++
	if s.machine != of {
		return
	}
	if s.latest == nil || s.latest.CreatedAt.Before(m.CreatedAt) {
		s.latest, s.cut = &m, cut
	}
}

// maxOwnDisks is how many disk files of its own a running machine may have before those that its latest ready branch
// holds are made one: a machine's chain never gets longer than 16 together with what is below.
const maxOwnDisks = 6

// maxBehind is how many disk files of its own a machine may have before its next branch waits until those being written are
// done with them, so that they can be made fewer: branches that follow each other closely would leave no moment for it.
const maxBehind = 10

// catchUp has a sandbox's disk shortened before a branch makes it longer, if it has got too long.
func (h *Host) catchUp(ctx context.Context, s *sandbox) error {
	s.mu.Lock()
	behind := len(s.disks) > maxBehind
	s.mu.Unlock()
	if !behind {
		return nil
	}
	var all []*writing
	h.mu.Lock()
	for _, w := range h.writing {
		if w.status == lineage.Writing && w.m.Branch != nil && w.m.Branch.From == s.id {
			all = append(all, w)
		}
	}
	h.mu.Unlock()
	for _, w := range all {
		if err := w.wait(ctx); ctx.Err() != nil { // else it has failed, and says so to whom it concerns
			return err
		}
	}
	h.shorten(s)
	return nil
}

// shorten makes a sandbox's own disk files fewer, with the machine running on, when they have become many. A failure is
// only logged: the next branch tries again.
func (h *Host) shorten(s *sandbox) {
	done, err := s.begin(h.life, lineage.Shortening)
	if err != nil {
		return // busy or gone; the next branch
	}
	defer done("")
	for {
		removed, err := h.commitSpare(s)
		for _, f := range removed {
			err = errors.Join(err, os.Remove(f))
		}
		if err != nil {
			h.log.Warn("shorten the disk of a sandbox", "sandbox", s.id, "error", err)
		}
		if err != nil || len(removed) == 0 {
			return
		}
	}
}

// spare is the first run of a machine's own disk files, from one to below another, that can be made one file: those that
// its latest ready branch holds, which are the first cut of them, or those above, which branches that failed left behind.
// The last file is the one it writes.
func spare(files, cut int) (from, to int, found bool) {
	switch {
	case files <= maxOwnDisks:
		return 0, 0, false
	case cut >= 2:
		return 0, cut, true
	case files-1-cut >= 2:
		return cut, files - 1, true
	}
	return 0, 0, false
}

// commitSpare makes one such run one file, and returns the files that are of no use any more. Nobody else uses them as
// long as no branch is being written.
func (h *Host) commitSpare(s *sandbox) ([]string, error) {
	s.mu.Lock()
	committer, ok := s.machine.(engine.Committer)
	files := append([]string(nil), s.disks...)
	from, to, found := spare(len(files), s.cut)
	idle := s.writing == 0
	s.mu.Unlock()
	if !ok || !idle || !found {
		return nil, nil
	}
	if err := committer.CommitDisk(h.life, files[to-1], files[from]); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.disks = append(files[:from+1:from+1], files[to:]...)
	if from < s.cut {
		s.cut = 1
	}
	s.mu.Unlock()
	h.record(s)
	return files[from+1 : to], nil
}
