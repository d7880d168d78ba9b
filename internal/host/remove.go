package host

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

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
		return []string{tag}, h.store.EndSnapshot(tag)
	}
	m, err := h.snapshot(tag)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	down := descendants(tag, h.family())
	h.mu.Unlock()
	release, err := h.holdAll(append([]string{tag}, down...), "remove")
	if err != nil {
		return nil, err
	}
	defer release()
	if len(down) > 0 && !opts.Cascade && !opts.Force {
		return nil, hint(fmt.Errorf("remove snapshot %s: %w: snapshots %s stand on it", tag, ErrBusy, strings.Join(down, ", ")),
			"remove those, too: forkd rmi --cascade %s; or only this one, keeping what they need of it: forkd rmi --force %s", tag, tag)
	}
	if opts.Force && len(down) > 0 {
		return h.removeMiddle(ctx, m, down)
	}
	var removed []string
	slices.Reverse(down) // the leaves first, so that an interrupted removal leaves nothing without its parent
	for _, t := range append(down, tag) {
		if err := h.removeLeaf(t); err != nil {
			return removed, err
		}
		removed = append(removed, t)
	}
	h.cfg.Changed(h.Tags())
	h.collect(ctx)
	return removed, nil
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

// removeLeaf removes a snapshot that no other stands on.
func (h *Host) removeLeaf(tag string) error {
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
	h.mu.Unlock()
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
	release, err := h.layers.Hold(ctx)
	if err != nil {
		return nil, err
	}
	moved := map[string][2]store.Snapshot{}
	for _, tag := range down {
		if err := h.relink(ctx, tag, m, moved); err != nil {
			release()
			return nil, fmt.Errorf("remove snapshot %s: merge it into %s: %w", m.Tag, tag, h.explainFull(err))
		}
	}
	release()
	if err := h.store.RemoveSnapshot(m.Tag); err != nil {
		return nil, err
	}
	h.mu.Lock()
	delete(h.snapshots, m.Tag)
	h.mu.Unlock()
	h.cfg.Changed(h.Tags())
	h.collect(ctx)
	return []string{m.Tag}, nil
}

// relink gives one snapshot above the removed one its new layers and parent.
func (h *Host) relink(ctx context.Context, tag string, gone store.Snapshot, moved map[string][2]store.Snapshot) error {
	old, err := h.snapshot(tag)
	if err != nil {
		return err
	}
	state, err := h.store.State(old)
	if err != nil {
		return err
	}
	var mem, dsk layer.Info
	next := old
	if parents, ok := moved[old.Parent]; ok {
		next.ParentID = parents[1].ID()
		mem, err = h.linkTo(ctx, old.Memory, parents[0].Memory, parents[1].Memory)
		if err == nil {
			dsk, err = h.linkTo(ctx, old.Disk, parents[0].Disk, parents[1].Disk)
		}
	} else {
		next.Parent, next.ParentID = gone.Parent, gone.ParentID
		mem, err = h.mergeInto(ctx, old.Memory, gone.Memory)
		if err == nil {
			dsk, err = h.mergeInto(ctx, old.Disk, gone.Disk)
		}
	}
	if err != nil {
		return err
	}
	next = withLayers(next, mem, dsk)
	if err := h.store.ReplaceSnapshot(ctx, next, state); err != nil {
		return err
	}
	moved[tag] = [2]store.Snapshot{old, next}
	h.replaced(old, next)
	return nil
}

// mergeInto makes a layer that holds what d and all down to gone hold, over gone's parent.
func (h *Host) mergeInto(ctx context.Context, d, gone layer.Digest) (layer.Info, error) {
	info, err := h.layers.Stat(ctx, gone)
	if err != nil {
		return layer.Info{}, err
	}
	return h.layers.Merge(ctx, d, info.Parent)
}

// linkTo makes a layer like d over a parent of the same content. One that stands on old only through others stays.
func (h *Host) linkTo(ctx context.Context, d, old, parent layer.Digest) (layer.Info, error) {
	info, err := h.layers.Stat(ctx, d)
	if err != nil || info.Parent != old {
		return info, err
	}
	return h.layers.Relink(ctx, d, parent)
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
