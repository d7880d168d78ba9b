package host

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// SnapshotView is what the edges see of a snapshot.
type SnapshotView struct {
	store.Snapshot
	Status                lineage.Status
	Hot                   bool
	Sandboxes             int
	Ancestors, Dependents []string
	MemoryShared          int64 // bytes its children have from what it stands on
	DiskShared            int64

	Progress float64 // of a writing one: 0 to 1
	Reason   string  // of a failed one
}

// snapshot resolves a tag.
func (h *Host) snapshot(tag string) (store.Snapshot, error) {
	if err := lineage.CheckTag(tag); err != nil {
		return store.Snapshot{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	m, ok := h.snapshots[tag]
	if !ok {
		return store.Snapshot{}, hint(fmt.Errorf("snapshot %s: %w", tag, ErrNotFound),
			"list them with: forkd snapshots, or build one with: forkd build RECIPE -t %s", tag)
	}
	return m, nil
}

// Tags lists all tags, sorted.
func (h *Host) Tags() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.snapshots))
}

// Snapshots lists all, newest first.
func (h *Host) Snapshots() []SnapshotView {
	h.mu.Lock()
	all := slices.Collect(maps.Values(h.snapshots))
	h.mu.Unlock()
	slices.SortFunc(all, func(a, b store.Snapshot) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.Tag, b.Tag)
	})
	views := make([]SnapshotView, len(all))
	for i, m := range all {
		views[i] = h.viewSnapshot(m)
	}
	return views
}

// Snapshot describes one.
func (h *Host) Snapshot(tag string) (SnapshotView, error) {
	m, err := h.snapshot(tag)
	if err != nil {
		return SnapshotView{}, err
	}
	return h.viewSnapshot(m), nil
}

func (h *Host) viewSnapshot(m store.Snapshot) SnapshotView {
	v := SnapshotView{Snapshot: m, Status: lineage.Ready, Hot: h.hot.has(m)}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.sandboxes {
		if s.tag == m.Tag {
			v.Sandboxes++
		}
	}
	family := h.family()
	v.Ancestors, v.Dependents = lineage.Ancestors(m.Tag, family), lineage.Dependents(m.Tag, family)
	return v
}

// family is the pure view of the table. The caller holds mu.
func (h *Host) family() map[string]lineage.Snapshot {
	all := make(map[string]lineage.Snapshot, len(h.snapshots))
	for tag, m := range h.snapshots {
		all[tag] = lineage.Snapshot{Tag: tag, Image: m.Image, Parent: m.Parent}
	}
	return all
}

// hold marks a name (a tag, or an image id) as being worked on; one at a time.
func (h *Host) hold(name, what string) (release func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	if doing, ok := h.busy[name]; ok {
		return nil, hint(fmt.Errorf("%s %s: %w: %s is in progress", what, name, ErrBusy, doing), "wait for it, or use another name")
	}
	h.busy[name] = what
	return func() {
		h.mu.Lock()
		delete(h.busy, name)
		h.mu.Unlock()
	}, nil
}

// RemoveOptions say what to do with a snapshot that others stand on; at most one is set.
type RemoveOptions struct {
	Cascade bool // remove those, too
	Force   bool // remove it alone; those keep what they need of it
}

// RemoveSnapshot deletes a snapshot nothing stands on: no dependent snapshot, no running sandbox. It returns the tags
// that are gone.
func (h *Host) RemoveSnapshot(ctx context.Context, tag string, _ RemoveOptions) ([]string, error) {
	if err := h.removeSnapshot(ctx, tag); err != nil {
		return nil, err
	}
	return []string{tag}, nil
}

func (h *Host) removeSnapshot(ctx context.Context, tag string) error {
	m, err := h.snapshot(tag)
	if err != nil {
		return err
	}
	release, err := h.hold(tag, "remove")
	if err != nil {
		return err
	}
	defer release()
	v := h.viewSnapshot(m)
	if len(v.Dependents) > 0 {
		return hint(fmt.Errorf("remove snapshot %s: %w: snapshots %s stand on it", tag, ErrBusy, strings.Join(v.Dependents, ", ")),
			"remove those first")
	}
	if v.Sandboxes > 0 || !h.hot.forget(m) {
		return hint(fmt.Errorf("remove snapshot %s: %w: sandboxes of it are running", tag, ErrBusy),
			"list them with: forkd ls, and end them with: forkd kill ID")
	}
	if err := h.store.RemoveSnapshot(tag); err != nil {
		return err
	}
	h.mu.Lock()
	delete(h.snapshots, tag)
	h.mu.Unlock()
	h.cfg.Changed(h.Tags())
	h.collect(ctx)
	return nil
}

// Images lists all, newest first.
func (h *Host) Images() []ImageView {
	h.mu.Lock()
	defer h.mu.Unlock()
	views := []ImageView{}
	for _, m := range h.images {
		views = append(views, ImageView{Image: m, Snapshots: h.snapshotsOf(m.ID)})
	}
	slices.SortFunc(views, func(a, b ImageView) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return views
}

// ImageView is an image with the tags that need it.
type ImageView struct {
	store.Image
	Snapshots []string
}

// snapshotsOf lists the tags that stand on an image. The caller holds mu.
func (h *Host) snapshotsOf(image string) []string {
	tags := []string{}
	for tag, m := range h.snapshots {
		if m.Image == image {
			tags = append(tags, tag)
		}
	}
	slices.Sort(tags)
	return tags
}

// RemoveImage deletes an image no snapshot needs. id may be the beginning of one, or the name of its recipe.
func (h *Host) RemoveImage(ctx context.Context, id string) error {
	m, err := h.findImage(id)
	if err != nil {
		return err
	}
	release, err := h.hold(m.ID, "remove image")
	if err != nil {
		return err
	}
	defer release()
	h.mu.Lock()
	tags := h.snapshotsOf(m.ID)
	h.mu.Unlock()
	if len(tags) > 0 {
		return hint(fmt.Errorf("remove image %s: %w: snapshots %s need it", short(m.ID), ErrBusy, strings.Join(tags, ", ")),
			"remove those first with: forkd rmi %s", strings.Join(tags, " "))
	}
	if err := h.store.RemoveImage(m.ID); err != nil {
		return err
	}
	h.mu.Lock()
	delete(h.images, m.ID)
	h.mu.Unlock()
	h.hot.forgetBase(m.ID)
	h.collect(ctx)
	return nil
}

func (h *Host) findImage(id string) (store.Image, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var found []store.Image
	for have, m := range h.images {
		if have == id || m.Name == id || len(id) >= minPrefix && strings.HasPrefix(have, id) {
			found = append(found, m)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return store.Image{}, hint(fmt.Errorf("image %.80q: %w", id, ErrNotFound), "list them with: forkd images")
	}
	return store.Image{}, hint(invalid("image %q names %d images", id, len(found)), "name one by its id from: forkd images")
}

// collect removes layers that nothing names any more. A build holds the layer store from its first layer until its
// record names it, so collecting waits for builds that are writing.
//
// A failure is logged and not returned: what the caller asked for is done, and the next removal or start tries again.
// A damaged layer of one snapshot would otherwise keep the user from removing any.
func (h *Host) collect(ctx context.Context) {
	freed, err := h.layers.Sweep(ctx, func(context.Context) ([]layer.Digest, error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		var roots []layer.Digest
		for _, m := range h.snapshots {
			roots = append(roots, m.Memory, m.Disk, m.ImageDisk)
		}
		for _, m := range h.images {
			roots = append(roots, m.Disk)
		}
		return roots, nil
	})
	if err != nil {
		h.log.Warn("unused layers not collected", "error", err)
	}
	if freed > 0 {
		h.log.Info("collected unused layers", "bytes", freed)
	}
}

// Node is a node of the family tree.
type Node struct {
	Kind, Name, State       string
	OwnBytes                int64
	MemoryOwn, MemoryShared int64
	DiskOwn, DiskShared     int64
	Children                []Node
}

// Tree is the family: images, the snapshots on them, their snapshots and sandboxes.
func (h *Host) Tree() []Node {
	sandboxes := h.Sandboxes(nil)
	h.mu.Lock()
	defer h.mu.Unlock()
	var roots []Node
	for _, id := range slices.Sorted(maps.Keys(h.images)) {
		m := h.images[id]
		n := Node{Kind: "image", Name: m.Name + "@" + short(id), OwnBytes: m.StoredBytes}
		for _, tag := range h.snapshotsOf(id) {
			if h.snapshots[tag].Parent == "" {
				n.Children = append(n.Children, h.subtree(tag, sandboxes, 0))
			}
		}
		roots = append(roots, n)
	}
	return roots
}

const maxDepth = 1000 // a cycle read from a damaged disk must not recurse for ever

func (h *Host) subtree(tag string, sandboxes []View, depth int) Node {
	n := Node{Kind: "snapshot", Name: tag, State: "ready", OwnBytes: h.snapshots[tag].Stored}
	if depth > maxDepth {
		return n
	}
	for _, child := range lineage.Dependents(tag, h.family()) {
		n.Children = append(n.Children, h.subtree(child, sandboxes, depth+1))
	}
	for _, s := range sandboxes {
		if s.SnapshotTag == tag {
			n.Children = append(n.Children, Node{Kind: "sandbox", Name: s.ID, State: string(s.State), OwnBytes: s.Usage.OwnBytes})
		}
	}
	return n
}
