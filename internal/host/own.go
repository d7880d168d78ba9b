package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// ownLine gives a snapshot and those it stands on chunks of their own before they leave the home: chunks that are shared page by
// page hold pages of others, too, which nobody has looked at for secrets. Records are replaced one by one, as by a removal.
func (h *Host) ownLine(ctx context.Context, tag string) error {
	h.owning.Lock() // who comes second finds it done
	defer h.owning.Unlock()
	tags := h.leaving(tag)
	shared, err := h.shared(ctx, tags)
	if err != nil || !shared {
		return err
	}
	release, err := h.holdAll(tags, removeWhat) // keeps forks and captures away
	if err != nil {
		return err
	}
	defer release()
	if err := h.awaitUnforked(ctx, tags); err != nil {
		return err
	}
	hold, err := h.layers.Hold(ctx)
	if err != nil {
		return err
	}
	err = h.replaceShared(ctx, tags)
	hold()
	h.collect(context.WithoutCancel(ctx))
	return err
}

// leaving are a snapshot and those that leave the home with it. Steps do not: they stay as they are.
func (h *Host) leaving(tag string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	tags := append(lineage.Ancestors(tag, h.family()), tag)
	return slices.DeleteFunc(tags, func(t string) bool { return lineage.IsStep(t) && t != tag })
}

// shared reports whether any of the snapshots uses parts of chunks.
func (h *Host) shared(ctx context.Context, tags []string) (bool, error) {
	for _, tag := range tags {
		m, err := h.snapshot(tag)
		if err != nil {
			return false, err
		}
		for _, d := range []layer.Digest{m.Memory, m.Disk} {
			if shares, err := h.layers.Shares(ctx, d); err != nil || shares {
				return shares, err
			}
		}
	}
	return false, nil
}

// forksLimit is how long those forks are awaited that had begun before the snapshot was held: no more can begin.
const forksLimit = 30 * time.Second

func (h *Host) awaitUnforked(ctx context.Context, tags []string) error {
	ctx, cancel := context.WithTimeout(ctx, forksLimit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := h.unforked(tags)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return err
		}
	}
}

// unforked refuses while children or captures of these are being made, which know the old layers.
func (h *Host) unforked(tags []string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range tags {
		if h.forks[t] > 0 {
			return hint(fmt.Errorf("%w: a fork of %s is in progress", ErrBusy, t), "try again when that is over")
		}
	}
	for b, parent := range h.parents {
		if slices.Contains(tags, parent) {
			return hint(fmt.Errorf("%w: a capture of sandbox %s that will stand on %s is in progress", ErrBusy, b.s.id, parent), "try again when that is over")
		}
	}
	return nil
}

func (h *Host) replaceShared(ctx context.Context, tags []string) error {
	parents := map[string]store.Snapshot{} // by the id of the record that each replaced
	for _, tag := range tags {
		old, err := h.snapshot(tag)
		if err != nil {
			return err
		}
		mem, memErr := h.layers.Own(ctx, old.Memory)
		dsk, dskErr := h.layers.Own(ctx, old.Disk)
		if err := errors.Join(memErr, dskErr); err != nil {
			return err
		}
		if len(mem)+len(dsk)+len(parents) == 0 {
			continue
		}
		next, err := h.replace(ctx, old, old, mem, dsk, parents)
		if err != nil {
			return err
		}
		parents[old.ID()] = next
	}
	return nil
}
