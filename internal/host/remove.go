package host

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

const removeWhat = "remove"

// RemoveOptions say what to do with a snapshot that others stand on; at most one is set.
type RemoveOptions struct {
	Cascade bool // remove those, too
	Force   bool // remove it alone; those keep what they need of it
}

// RemoveSnapshot deletes a snapshot and returns the tags that are gone. One that others stand on is refused unless the
// options say what is to become of them, one with sandboxes always.
func (h *Host) RemoveSnapshot(ctx context.Context, tag string, opts RemoveOptions) ([]string, error) {
	if opts.Cascade && opts.Force {
		return nil, invalid("cascade and force are two different things; give one of them")
	}
	if h.removeFailed(tag) {
		h.tellSnapshot(events.SnapshotRemoved, tag, "", "")
		return []string{tag}, h.store.EndSnapshot(tag)
	}
	m, err := h.snapshot(tag)
	if err != nil {
		return nil, err
	}
	if !opts.Cascade && !opts.Force {
		if err := h.removeStepsOn(tag); err != nil {
			return nil, err
		}
	}
	h.mu.Lock()
	down := descendants(tag, h.family())
	h.mu.Unlock()
	release, err := h.holdAll(append([]string{tag}, down...), removeWhat)
	if err != nil {
		return nil, err
	}
	defer release()
	going := []string{tag}
	if opts.Cascade {
		going = append(going, down...)
	}
	if err := h.unpinned(going...); err != nil {
		return nil, err
	}
	if err := h.unclaimed(tag, down); err != nil {
		return nil, fmt.Errorf("remove snapshot %s: %w", tag, err)
	}
	if len(down) > 0 && !opts.Cascade && !opts.Force {
		return nil, hint(fmt.Errorf("remove snapshot %s: %w: snapshots %s stand on it", tag, ErrBusy,
			strings.Join(slices.DeleteFunc(slices.Clone(down), lineage.IsStep), ", ")),
			"remove those, too: forkd rmi --cascade %s; or only this one, keeping what they need of it: forkd rmi --force %s", tag, tag)
	}
	if opts.Force && len(down) > 0 {
		return h.removeMiddle(ctx, m, down)
	}
	var removed []string
	slices.Reverse(down) // the leaves first, so that an interrupted removal leaves nothing without its parent
	for _, t := range append(down, tag) {
		if err := h.removeLeaf(t, ""); err != nil {
			return removed, err
		}
		removed = append(removed, t)
	}
	h.cfg.Changed(h.Tags())
	h.collect(ctx)
	return removed, nil
}

// unclaimed refuses to remove tag, which is held with all that stands on it, when there is more of that by now, or will be.
func (h *Host) unclaimed(tag string, down []string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.unclaimedLocked(tag, down)
}

// claimForRemoval turns the hold on a tag on which nothing stands into one that keeps forks and captures away, until
// restore is called.
func (h *Host) claimForRemoval(tag string) (restore func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.unclaimedLocked(tag, nil); err != nil {
		return nil, fmt.Errorf("replace snapshot %s: %w", tag, err)
	}
	before := h.busy[tag]
	h.busy[tag] = removeWhat
	return func() {
		h.mu.Lock()
		h.busy[tag] = before
		h.mu.Unlock()
	}, nil
}

func (h *Host) unclaimedLocked(tag string, down []string) error {
	if now := descendants(tag, h.family()); !slices.Equal(now, down) {
		return hint(fmt.Errorf("%w: what stands on it has changed: %s", ErrBusy, strings.Join(now, ", ")), "try again")
	}
	for _, t := range append([]string{tag}, down...) {
		if h.forks[t] > 0 {
			return hint(fmt.Errorf("%w: a fork of %s is in progress", ErrBusy, t), "try again when that is over")
		}
	}
	for b, parent := range h.parents {
		if parent == tag || slices.Contains(down, parent) {
			return hint(fmt.Errorf("%w: a capture of sandbox %s that will stand on %s is in progress", ErrBusy, b.s.id, parent),
				"try again when that is over")
		}
	}
	return nil
}

// removeFailed forgets a branch that failed.
func (h *Host) removeFailed(tag string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	w, ok := h.writing[tag]
	if !ok || w.status != lineage.FailedSnap {
		return false
	}
	delete(h.writing, tag)
	return true
}

// descendants are all tags that stand on tag, parents before children.
func descendants(tag string, family map[string]lineage.Snapshot) []string {
	all := lineage.Dependents(tag, family)
	for i := 0; i < len(all); i++ {
		for _, d := range lineage.Dependents(all[i], family) {
			if !slices.Contains(all, d) && d != tag {
				all = append(all, d)
			}
		}
	}
	return all
}

func (h *Host) holdAll(tags []string, what string) (release func(), err error) {
	var releases []func()
	release = func() {
		for _, r := range releases {
			r()
		}
	}
	for _, t := range tags {
		r, err := h.hold(t, what)
		if err != nil {
			release()
			return nil, err
		}
		releases = append(releases, r)
	}
	return release, nil
}

// removeLeaf removes a snapshot that no other stands on, and tells why, if there is a reason.
func (h *Host) removeLeaf(tag, why string) error {
	m, err := h.snapshot(tag)
	if err != nil {
		return err
	}
	if err := h.unused(m); err != nil {
		return err
	}
	if err := h.store.RemoveSnapshot(tag); err != nil {
		return err
	}
	h.mu.Lock()
	delete(h.snapshots, tag)
	delete(h.stepUse, tag)
	h.mu.Unlock()
	h.tellSnapshot(events.SnapshotRemoved, tag, "", why)
	return nil
}

// unused drops a snapshot's hot image, and refuses if sandboxes of it live or are being made.
func (h *Host) unused(m store.Snapshot) error {
	h.mu.Lock()
	n := h.sandboxesOf(m.Tag)
	h.mu.Unlock()
	if n > 0 || !h.hot.forget(m) {
		return hint(fmt.Errorf("remove snapshot %s: %w: sandboxes of it are running", m.Tag, ErrBusy),
			"list them with: forkd ls, and end them with: forkd kill ID")
	}
	return nil
}

// removeMiddle removes one link of a chain: the snapshots directly above it take over its pages and blocks, those above
// them are linked to their new layers. Each record is replaced in one step; a crash in between leaves the chain as long
// as it was, with nothing lost.
func (h *Host) removeMiddle(ctx context.Context, m store.Snapshot, down []string) ([]string, error) {
	if err := h.unused(m); err != nil {
		return nil, err
	}
	if err := h.unlink(ctx, m, down); err != nil {
		return nil, fmt.Errorf("remove snapshot %s: merge it into those above: %w", m.Tag, h.explainFull(err))
	}
	if err := h.store.RemoveSnapshot(m.Tag); err != nil {
		return nil, err
	}
	h.mu.Lock()
	delete(h.snapshots, m.Tag)
	h.mu.Unlock()
	h.tellSnapshot(events.SnapshotRemoved, m.Tag, "", "those that stood on it keep what they need of it")
	h.cfg.Changed(h.Tags())
	h.collect(ctx)
	return []string{m.Tag}, nil
}

// unlink gives the snapshots above gone, parents before children, their new layers and parents.
func (h *Host) unlink(ctx context.Context, gone store.Snapshot, down []string) error {
	release, err := h.layers.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	var olds []store.Snapshot
	var memories, disks []layer.Digest
	for _, tag := range down {
		old, err := h.snapshot(tag)
		if err != nil {
			return err
		}
		olds, memories, disks = append(olds, old), append(memories, old.Memory), append(disks, old.Disk)
	}
	mem, err := h.layers.Unlink(ctx, gone.Memory, memories)
	if err != nil {
		return err
	}
	dsk, err := h.layers.Unlink(ctx, gone.Disk, disks)
	if err != nil {
		return err
	}
	parents := map[string]store.Snapshot{} // by the id of the record that each replaced
	for _, old := range olds {
		next, err := h.replace(ctx, old, gone, mem, dsk, parents)
		if err != nil {
			return err
		}
		parents[old.ID()] = next
	}
	return nil
}

// replace writes the record of one snapshot above the removed one anew.
func (h *Host) replace(ctx context.Context, old, gone store.Snapshot, mem, dsk map[layer.Digest]layer.Info,
	parents map[string]store.Snapshot,
) (store.Snapshot, error) {
	state, err := h.store.State(old)
	if err != nil {
		return old, err
	}
	next := old
	// A crash before those above it have their new records must not make them roots.
	next.Formerly = append(slices.Clone(old.Formerly), old.ID())
	if info, ok := mem[old.Memory]; ok {
		next.Memory, next.MemoryOwn = info.Digest, info.OwnBytes
	}
	if info, ok := dsk[old.Disk]; ok {
		next.Disk, next.DiskOwn = info.Digest, info.OwnBytes
	}
	next.Stored = 0
	for _, d := range []layer.Digest{next.Memory, next.Disk} {
		info, err := h.layers.Stat(ctx, d)
		if err != nil {
			return old, err
		}
		next.Stored += info.StoredBytes
	}
	next.Parent, next.ParentID = gone.Parent, gone.ParentID
	if p, ok := parents[old.ParentID]; ok {
		next.Parent, next.ParentID = p.Tag, p.ID()
	}
	if err := h.store.ReplaceSnapshot(ctx, next, state); err != nil {
		return old, err
	}
	h.replaced(old, next)
	return next, nil
}

// replaced makes everything that knows a record know the one of the same content that replaced it.
func (h *Host) replaced(old, next store.Snapshot) {
	h.hot.rekey(old, next)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.snapshots[next.Tag] = next
	id := old.ID()
	for _, s := range h.sandboxes {
		s.mu.Lock()
		if s.from.writing == nil && s.from.snapshot.ID() == id {
			s.from = &origin{tag: next.Tag, snapshot: next}
		}
		if s.latest != nil && s.latest.ID() == id {
			s.latest = &next
		}
		s.mu.Unlock()
	}
}
