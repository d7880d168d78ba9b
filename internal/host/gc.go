package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// GCSpec says what may go beside what nothing needs any more. A snapshot goes if it is older and not among the last that are
// kept, as far as those were given; then the least recently used, but for the last that are kept, until the rest takes no
// more than MaxBytes. One that is pinned, in use, or that something stays on never does.
type GCSpec struct {
	OlderThan time.Duration // not used for so long; 0: however long
	KeepLast  int           // of each recipe so many, the newest; 0: none
	MaxBytes  int64         // the store may take; 0: what it does
	Images    bool          // those on which no snapshot stands, too
	DryRun    bool
}

// GCItem is something that goes, or would.
type GCItem struct {
	Kind, Name string // "snapshot", "step", "image"
	LastUsed   time.Time
	Why        string
	Removed    bool
	Err        error
}

// GCResult is what became of it.
type GCResult struct {
	Items []GCItem
	Kept  map[string]string // tags that would have gone → why they did not
	Freed int64             // bytes; or what would be freed
	Left  int64             // that the store takes then
}

// Pin keeps GC and removal away from a snapshot; without on it lets them.
func (h *Host) Pin(tag string, on bool) (SnapshotView, error) {
	m, err := h.snapshot(tag)
	if err != nil {
		return SnapshotView{}, err
	}
	if lineage.IsStep(tag) {
		return SnapshotView{}, invalid("%s is a step of a build; pin a snapshot that stands on it", tag)
	}
	set := h.store.Unpin
	if on {
		set = h.store.Pin
	}
	if err := set(tag); err != nil {
		return SnapshotView{}, err
	}
	return h.viewSnapshot(m), nil
}

// unpinned refuses to remove what is pinned.
func (h *Host) unpinned(tags ...string) error {
	pins, err := h.store.Pins()
	if err != nil {
		return err
	}
	for _, t := range tags {
		if pins[t] {
			return hint(fmt.Errorf("remove snapshot %s: %w: it is pinned", t, ErrBusy), "unpin it with: forkd unpin %s", t)
		}
	}
	return nil
}

// GC removes what the spec lets go, and then every layer that nothing needs. With DryRun it says what that would be.
func (h *Host) GC(ctx context.Context, spec GCSpec) (GCResult, error) {
	return h.gc(ctx, spec, "")
}

// gc does it for the daemon, too, but for the tag that it spares.
func (h *Host) gc(ctx context.Context, spec GCSpec, spare string) (GCResult, error) {
	if spec.OlderThan < 0 || spec.KeepLast < 0 || spec.MaxBytes < 0 {
		return GCResult{}, invalid("ages, numbers and sizes are not negative")
	}
	pins, err := h.store.Pins()
	if err != nil {
		return GCResult{}, err
	}
	needed := func(tag string, gone map[string]bool) string {
		if tag == spare {
			return "it was just made"
		}
		return h.neededLocked(tag, pins, gone)
	}
	res := GCResult{Kept: map[string]string{}}
	before, err := h.layers.Usage(ctx, h.roots(nil, nil))
	if err != nil {
		return res, fmt.Errorf("nothing was removed: %w", err)
	}
	gone := map[string]bool{}
	h.choose(spec, needed, gone, &res)
	left, err := h.layers.Usage(ctx, h.roots(gone, nil))
	if err != nil {
		return res, fmt.Errorf("nothing was removed: %w", err)
	}
	for spec.MaxBytes > 0 && left.Kept > spec.MaxBytes {
		if !h.chooseOldest(spec, needed, gone, &res) {
			break
		}
		if left, err = h.layers.Usage(ctx, h.roots(gone, nil)); err != nil {
			return res, fmt.Errorf("nothing was removed: %w", err)
		}
	}
	images := h.looseImages(spec, needed, gone, &res)
	if spec.DryRun {
		after, err := h.layers.Usage(ctx, h.roots(gone, images))
		res.Freed, res.Left = before.Total-after.Kept, after.Kept
		return res, err
	}
	h.removeChosen(ctx, &res)
	h.trimPulls()
	h.collect(ctx)
	h.cfg.Changed(h.Tags())
	after, err := h.layers.Usage(ctx, nil)
	res.Freed, res.Left = before.Total-after.Total, after.Total
	return res, err
}

// whyNeeded says why a snapshot cannot go, or "". It is called with mu held.
type whyNeeded func(tag string, gone map[string]bool) string

// choose marks what goes for its age or because there are newer ones.
func (h *Host) choose(spec GCSpec, needed whyNeeded, gone map[string]bool, res *GCResult) {
	if spec.OlderThan == 0 && spec.KeepLast == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	newest := h.newest(spec.KeepLast)
	// The leaves first: what stands on nothing any more can go itself.
	for changed := true; changed; {
		changed = false
		for _, tag := range h.byUse() {
			used := h.lastUse(tag)
			if gone[tag] || newest[tag] || spec.OlderThan > 0 && time.Since(used) < spec.OlderThan || lineage.IsStep(tag) && spec.OlderThan == 0 {
				continue
			}
			if why := needed(tag, gone); why != "" {
				if !lineage.IsStep(tag) {
					res.Kept[tag] = why
				}
				continue
			}
			why := "newer ones of its recipe are kept"
			if spec.OlderThan > 0 {
				why = "not used since " + used.UTC().Format(time.DateTime)
			}
			h.mark(tag, why, gone, res)
			changed = true
		}
	}
}

// mark notes that a tag goes.
func (h *Host) mark(tag, why string, gone map[string]bool, res *GCResult) {
	kind := "snapshot"
	if lineage.IsStep(tag) {
		kind = "step"
	}
	gone[tag] = true
	delete(res.Kept, tag)
	res.Items = append(res.Items, GCItem{Kind: kind, Name: tag, LastUsed: h.lastUse(tag), Why: why})
}

// chooseOldest marks the least recently used that nothing needs.
func (h *Host) chooseOldest(spec GCSpec, needed whyNeeded, gone map[string]bool, res *GCResult) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	newest := h.newest(spec.KeepLast)
	for _, tag := range h.byUse() {
		if gone[tag] {
			continue
		}
		if newest[tag] {
			res.Kept[tag] = fmt.Sprintf("it is among the newest %d of its recipe", spec.KeepLast)
			continue
		}
		if why := needed(tag, gone); why != "" {
			if !lineage.IsStep(tag) {
				res.Kept[tag] = why
			}
			continue
		}
		h.mark(tag, "least recently used, and the store is to take less", gone, res)
		return true
	}
	return false
}

// byUse are all tags, the least recently used first. The caller holds mu.
func (h *Host) byUse() []string {
	tags := slices.Collect(maps.Keys(h.snapshots))
	slices.SortFunc(tags, func(a, b string) int { return cmp.Or(h.lastUse(a).Compare(h.lastUse(b)), cmp.Compare(a, b)) })
	return tags
}

// lastUse of a snapshot. The caller holds mu.
func (h *Host) lastUse(tag string) time.Time {
	if at, ok := h.stepUse[tag]; ok {
		return at
	}
	return h.snapshots[tag].CreatedAt
}

// newest are the newest n of each recipe. The caller holds mu.
func (h *Host) newest(n int) map[string]bool {
	byRecipe := map[string][]store.Snapshot{}
	for tag, m := range h.snapshots {
		if !lineage.IsStep(tag) {
			byRecipe[m.Recipe] = append(byRecipe[m.Recipe], m)
		}
	}
	keep := map[string]bool{}
	for _, all := range byRecipe {
		slices.SortFunc(all, func(a, b store.Snapshot) int {
			return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.Tag, b.Tag))
		})
		for _, m := range all[:min(n, len(all))] {
			keep[m.Tag] = true
		}
	}
	return keep
}

// neededLocked says why a snapshot cannot go, or "". The caller holds mu.
func (h *Host) neededLocked(tag string, pins, gone map[string]bool) string {
	if pins[tag] {
		return "it is pinned"
	}
	if n := h.sandboxesOf(tag); n > 0 {
		return fmt.Sprintf("%d sandboxes of it", n)
	}
	if h.busy[tag] != "" || h.forks[tag] > 0 {
		return "it is in use just now"
	}
	for _, d := range lineage.Dependents(tag, h.family()) {
		if !gone[d] {
			return d + " stands on it"
		}
	}
	for _, parent := range h.parents {
		if parent == tag {
			return "a capture that will stand on it is in progress"
		}
	}
	return ""
}

// looseImages marks images that no snapshot that stays stands on. Steps that nobody uses are no reason for one to stay: they
// go with it.
func (h *Host) looseImages(spec GCSpec, needed whyNeeded, gone map[string]bool, res *GCResult) map[string]bool {
	loose := map[string]bool{}
	if !spec.Images {
		return loose
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	used := map[string]bool{}
	for tag, m := range h.snapshots {
		used[m.Image] = used[m.Image] || !gone[tag] && !lineage.IsStep(tag)
	}
	for _, w := range h.writing {
		used[w.m.Image] = true
	}
	for _, id := range slices.Sorted(maps.Keys(h.images)) {
		if used[id] || h.busy[id] != "" {
			continue
		}
		if steps, ok := h.stepsThatGo(id, needed, gone); ok {
			for _, tag := range steps {
				h.mark(tag, "its image goes", gone, res)
			}
			loose[id] = true
			res.Items = append(res.Items, GCItem{Kind: "image", Name: id, LastUsed: h.images[id].CreatedAt, Why: "no snapshot stands on it"})
		}
	}
	return loose
}

// stepsThatGo are the steps on an image, the leaves first, if nothing needs any of them. The caller holds mu.
func (h *Host) stepsThatGo(image string, needed whyNeeded, gone map[string]bool) (list []string, ok bool) {
	also := maps.Clone(gone)
	for changed := true; changed; {
		changed, ok = false, true
		for _, tag := range slices.Sorted(maps.Keys(h.snapshots)) {
			if h.snapshots[tag].Image != image || also[tag] {
				continue
			}
			if needed(tag, also) != "" {
				ok = false
				continue
			}
			also[tag], changed = true, true
			list = append(list, tag)
		}
	}
	return list, ok
}

// removeChosen removes what was marked, in that order: what stands on something before that.
func (h *Host) removeChosen(ctx context.Context, res *GCResult) {
	for i := range res.Items {
		item := &res.Items[i]
		if ctx.Err() != nil {
			item.Err = context.Cause(ctx)
			continue
		}
		if item.Kind == "image" {
			item.Err = h.RemoveImage(ctx, item.Name)
		} else {
			item.Err = h.removeStep(item.Name, item.Why) // refuses what has come to be in use meanwhile
		}
		if errors.Is(item.Err, ErrNotFound) {
			item.Err = nil
		}
		if item.Removed = item.Err == nil; item.Removed {
			h.log.Info("removed", "kind", item.Kind, "name", item.Name, "why", item.Why)
		}
	}
}

// roots are all layers that something needs, but for what is gone.
func (h *Host) roots(gone, images map[string]bool) []layer.Digest {
	h.mu.Lock()
	defer h.mu.Unlock()
	var roots []layer.Digest
	for tag, m := range h.snapshots {
		if !gone[tag] {
			roots = append(roots, m.Memory, m.Disk, m.ImageDisk)
		}
	}
	for id, m := range h.images {
		if !images[id] {
			roots = append(roots, m.Disk)
		}
	}
	for _, w := range h.writing {
		if w.parent != nil {
			roots = append(roots, w.parent.layers()...)
		}
	}
	for _, s := range h.sandboxes {
		s.mu.Lock()
		if s.suspended != nil {
			roots = append(roots, s.suspended.Machine.Memory, s.suspended.Machine.Disk)
		}
		// What it writes adds to these, whether a tag still names them or not.
		roots = append(roots, s.from.layers()...)
		s.mu.Unlock()
	}
	return roots
}
