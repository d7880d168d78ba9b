package host

import (
	"context"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

const compactWhat = "compact"

// Compact makes a snapshot with the content of tag that stands on no other.
func (h *Host) Compact(ctx context.Context, tag, to string) (SnapshotView, error) {
	if _, err := h.snapshot(tag); err != nil {
		return SnapshotView{}, err
	}
	if err := lineage.CheckTag(to); err != nil {
		return SnapshotView{}, err
	}
	if tag == to {
		return SnapshotView{}, h.tagFree(to)
	}
	release, err := h.holdAll([]string{tag, to}, compactWhat)
	if err != nil {
		return SnapshotView{}, err
	}
	defer release()
	if err := h.tagFree(to); err != nil {
		return SnapshotView{}, err
	}
	if err := h.quota(ctx, to); err != nil {
		return SnapshotView{}, fmt.Errorf("compact %s: %w", tag, err)
	}
	m, err := h.snapshot(tag) // only now: it may have been removed just before we held it
	if err != nil {
		return SnapshotView{}, err
	}
	c, err := h.compact(ctx, m, to)
	if err != nil {
		return SnapshotView{}, fmt.Errorf("compact %s: %w", tag, h.explainFull(err))
	}
	h.tidy(context.WithoutCancel(ctx), to)
	return h.viewSnapshot(c), nil
}

func (h *Host) compact(ctx context.Context, m store.Snapshot, to string) (store.Snapshot, error) {
	state, err := h.store.State(m)
	if err != nil {
		return m, err
	}
	release, err := h.layers.Hold(ctx)
	if err != nil {
		return m, err
	}
	defer release()
	mem, err := h.layers.MergeShared(ctx, m.Memory, layer.Digest{})
	if err != nil {
		return m, fmt.Errorf("merge memory: %w", err)
	}
	dsk, err := h.layers.MergeShared(ctx, m.Disk, m.ImageDisk)
	if err != nil {
		return m, fmt.Errorf("merge disk: %w", err)
	}
	c := withLayers(m, mem, dsk)
	c.Tag, c.CreatedAt, c.Source, c.Parent, c.ParentID = to, time.Now().UTC().Round(time.Millisecond), "compact of "+m.ID(), "", ""
	if c.Branch != nil && c.Branch.Passing {
		kept := *c.Branch
		kept.Passing = false // it has a name that a user gave
		c.Branch = &kept
	}
	return c, h.enterSnapshot(ctx, c, state, false)
}

// withLayers is the record of a snapshot with other layers.
func withLayers(m store.Snapshot, mem, dsk layer.Info) store.Snapshot {
	m.Memory, m.Disk = mem.Digest, dsk.Digest
	m.MemoryOwn, m.DiskOwn, m.Stored = mem.OwnBytes, dsk.OwnBytes, mem.StoredBytes+dsk.StoredBytes
	return m
}
