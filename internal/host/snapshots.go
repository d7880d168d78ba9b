package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

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
	Pinned                bool

	Progress float64 // of a writing one: 0 to 1
	Reason   string  // of a failed one
	Dir      string  // of its record
}

// snapshot resolves the tag of a snapshot that is ready.
func (h *Host) snapshot(tag string) (store.Snapshot, error) {
	m, w, err := h.forkable(tag)
	if w != nil {
		return m, hint(fmt.Errorf("snapshot %s: %w: it is being written", tag, ErrBusy), "wait until forkd snapshots shows it as ready")
	}
	return m, err
}

// forkable resolves the tag of a snapshot that is ready, or will be: then writing is not nil.
func (h *Host) forkable(tag string) (m store.Snapshot, w *writing, err error) {
	if err := lineage.CheckKnownTag(tag); err != nil {
		return m, nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.forkableLocked(tag)
}

func (h *Host) forkableLocked(tag string) (m store.Snapshot, w *writing, err error) {
	if m, ok := h.snapshots[tag]; ok {
		return m, nil, nil
	}
	w, ok := h.writing[tag]
	switch {
	case !ok:
		return m, nil, hint(fmt.Errorf("snapshot %s: %w", tag, ErrNotFound),
			"list them with: forkd snapshots, or build one with: forkd build RECIPE -t %s", tag)
	case w.status == lineage.FailedSnap:
		return m, nil, hint(fmt.Errorf("snapshot %s: %w: it has %s: %w", tag, lineage.ErrState, lineage.FailedSnap, w.err),
			"remove it with: forkd rmi %s, then branch again", tag)
	}
	return w.m, w, nil
}

// claim resolves a tag for a fork and keeps the snapshot until forget is called: a removal that has begun refuses the fork, one that
// has not is refused itself.
func (h *Host) claim(tag string) (m store.Snapshot, w *writing, forget func(), err error) {
	if err := lineage.CheckKnownTag(tag); err != nil {
		return m, nil, nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if m, w, err = h.forkableLocked(tag); err != nil {
		return m, nil, nil, err
	}
	if h.busy[tag] == removeWhat {
		return m, nil, nil, hint(fmt.Errorf("snapshot %s: %w: %s is in progress", tag, ErrBusy, removeWhat), "try again when that is over")
	}
	h.forks[tag]++
	return m, w, func() {
		h.mu.Lock()
		if h.forks[tag]--; h.forks[tag] == 0 {
			delete(h.forks, tag)
		}
		_, ready := h.snapshots[tag]
		h.mu.Unlock()
		if ready {
			h.used(tag)
		}
	}, nil
}

// withBroken adds to an error of a damaged map or chunk which snapshots that breaks.
func (h *Host) withBroken(ctx context.Context, err error) error {
	d, ok := errors.AsType[*layer.DamageError](err)
	if !ok {
		return err
	}
	return fmt.Errorf("%w (damaged by this: %s)", err, strings.Join(h.brokenBy(ctx, d.Digest), ", "))
}

// writingLimit is how long a fork waits for the memory of a snapshot that is being written.
const writingLimit = 2 * time.Minute

// acquire returns the hot image of a snapshot; that of one being written as soon as its memory is complete.
func (h *Host) acquire(ctx context.Context, m store.Snapshot, w *writing) (*hotImage, error) {
	if w == nil {
		hot, err := h.hot.acquire(ctx, m)
		return hot, h.withBroken(ctx, err)
	}
	h.mu.Lock()
	if w.status != lineage.Writing {
		m, err := w.m, w.err
		h.mu.Unlock()
		if err != nil {
			return nil, err
		}
		return h.hot.acquire(ctx, m)
	}
	h.hot.retain(w.hot)
	h.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, writingLimit,
		fmt.Errorf("%w: its memory was not copied within %s; it is still being written", ErrBusy, writingLimit))
	defer cancel()
	return h.hot.join(ctx, w.hot)
}

// tagFree says whether a new snapshot can have a tag. One that failed makes room.
func (h *Host) tagFree(tag string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ready := h.snapshots[tag]
	w, known := h.writing[tag]
	if ready || known && w.status != lineage.FailedSnap {
		return hint(fmt.Errorf("snapshot %s: %w", tag, store.ErrExists), "use another tag, or remove it with: forkd rmi %s", tag)
	}
	delete(h.writing, tag)
	return nil
}

// loadUnfinished lists as failed what an earlier daemon was writing when it ended.
func (h *Host) loadUnfinished() error {
	list, err := h.store.Unfinished()
	if err != nil {
		return err
	}
	for _, m := range list {
		if _, ready := h.snapshots[m.Tag]; ready { // it ended just before it removed the note
			if err := h.store.EndSnapshot(m.Tag); err != nil {
				return err
			}
			continue
		}
		if m.Unpacking != nil {
			if err := h.forgetUnpacking(m); err != nil {
				return err
			}
			continue
		}
		reason := m.Failure
		if reason == "" {
			reason = "the daemon ended while it was being written"
		}
		w := &writing{m: m.Snapshot, status: lineage.FailedSnap, err: errors.New(reason), settled: make(chan struct{})}
		close(w.settled)
		h.writing[m.Tag] = w
	}
	return nil
}

// Tags lists the tags that users have given, sorted.
func (h *Host) Tags() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Sorted(maps.Keys(h.snapshots)), lineage.IsStep)
}

// Snapshots lists all, newest first.
func (h *Host) Snapshots() []SnapshotView {
	h.mu.Lock()
	views := make([]SnapshotView, 0, len(h.snapshots)+len(h.writing))
	for _, m := range h.snapshots {
		views = append(views, h.viewLocked(m))
	}
	for _, w := range h.writing {
		views = append(views, h.viewWriting(w))
	}
	h.mu.Unlock()
	slices.SortFunc(views, func(a, b SnapshotView) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.Tag, b.Tag)
	})
	for i := range views {
		h.addShared(&views[i])
	}
	return views
}

// Snapshot describes one, also one that is being written or failed.
func (h *Host) Snapshot(tag string) (SnapshotView, error) {
	if err := lineage.CheckKnownTag(tag); err != nil {
		return SnapshotView{}, err
	}
	h.mu.Lock()
	w, writing := h.writing[tag]
	if writing {
		defer h.mu.Unlock()
		return h.viewWriting(w), nil
	}
	h.mu.Unlock()
	m, err := h.snapshot(tag)
	if err != nil {
		return SnapshotView{}, err
	}
	return h.viewSnapshot(m), nil
}

// AwaitSnapshot returns when a snapshot is not being written any more, or ctx ends.
func (h *Host) AwaitSnapshot(ctx context.Context, tag string) (SnapshotView, error) {
	h.mu.Lock()
	w := h.writing[tag]
	h.mu.Unlock()
	if w != nil {
		select {
		case <-w.settled:
		case <-ctx.Done():
		}
	}
	return h.Snapshot(tag)
}

func (h *Host) viewSnapshot(m store.Snapshot) SnapshotView {
	h.mu.Lock()
	v := h.viewLocked(m)
	h.mu.Unlock()
	h.addShared(&v)
	return v
}

// viewLocked describes a ready snapshot, but for what must be read from disk. The caller holds mu.
func (h *Host) viewLocked(m store.Snapshot) SnapshotView {
	v := SnapshotView{
		Snapshot: m, Status: lineage.Ready, Hot: h.hot.has(m), Sandboxes: h.sandboxesOf(m.Tag), Progress: 1,
		Dir: h.cfg.Home.Snapshot(m.Tag), Pinned: h.store.Pinned(m.Tag),
	}
	family := h.family()
	v.Ancestors, v.Dependents = lineage.Ancestors(m.Tag, family), lineage.Dependents(m.Tag, family)
	return v
}

// viewWriting describes one that is not ready. The caller holds mu.
func (h *Host) viewWriting(w *writing) SnapshotView {
	v := SnapshotView{
		Snapshot: w.m, Status: w.status, Sandboxes: h.sandboxesOf(w.m.Tag), Progress: w.progress(),
		Ancestors: lineage.Ancestors(w.m.Tag, h.family()), Dependents: []string{}, Dir: h.cfg.Home.Snapshot(w.m.Tag),
	}
	if w.err != nil {
		v.Reason = w.err.Error()
	}
	return v
}

func (h *Host) sandboxesOf(tag string) int {
	n := 0
	for _, s := range h.sandboxes {
		if s.tag == tag {
			n++
		}
	}
	return n
}

// addShared adds how much the children of a snapshot have from what it stands on: the layers below, each counted whole.
func (h *Host) addShared(v *SnapshotView) {
	if v.Status != lineage.Ready {
		return
	}
	v.MemoryShared = h.below(v.Memory)
	v.DiskShared = h.below(v.Disk)
}

func (h *Host) below(d layer.Digest) int64 {
	chain, err := h.layers.Chain(h.life, d)
	if err != nil { // damaged: said by whoever needs it
		return 0
	}
	var sum int64
	for _, l := range chain[:len(chain)-1] {
		sum += l.OwnBytes
	}
	return sum
}

// family is the pure view of the table. The caller holds mu.
func (h *Host) family() map[string]lineage.Snapshot {
	all := make(map[string]lineage.Snapshot, len(h.snapshots)+len(h.writing))
	for tag, m := range h.snapshots {
		all[tag] = lineage.Snapshot{Tag: tag, Image: m.Image, Parent: h.parentTag(m)}
	}
	for tag, w := range h.writing {
		if w.status == lineage.Writing {
			all[tag] = lineage.Snapshot{Tag: tag, Image: w.m.Image, Parent: w.m.Parent}
		}
	}
	return all
}

// parentTag is the tag of the parent, if it is still there and still the one. The caller holds mu.
func (h *Host) parentTag(m store.Snapshot) string {
	if p, ok := h.snapshots[m.Parent]; ok && (m.ParentID == "" || p.Is(m.ParentID)) {
		return m.Parent
	}
	return ""
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

// Images lists all, newest first.
func (h *Host) Images() []ImageView {
	h.mu.Lock()
	defer h.mu.Unlock()
	views := []ImageView{}
	for _, m := range h.images {
		views = append(views, ImageView{Image: m, Snapshots: slices.DeleteFunc(h.snapshotsOf(m.ID), lineage.IsStep)})
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
	tags, err := h.removeStepsOf(m.ID)
	if err != nil {
		return err
	}
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
		h.trimKernels() // nobody is writing a record now
		return h.roots(nil, nil), nil
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

// Tree is the family: images, the snapshots on them, their snapshots and sandboxes. Steps of builds are in it with all;
// otherwise what stands on them stands where they do.
func (h *Host) Tree(all bool) []Node {
	snapshots := map[string]SnapshotView{}
	for _, v := range h.Snapshots() {
		snapshots[v.Tag] = v
	}
	sandboxes := h.Sandboxes(nil)
	h.mu.Lock()
	defer h.mu.Unlock()
	family := h.family()
	var roots []Node
	for _, id := range slices.Sorted(maps.Keys(h.images)) {
		m := h.images[id]
		n := Node{Kind: "image", Name: m.Name + "@" + short(id), OwnBytes: m.StoredBytes, DiskOwn: m.OwnBytes}
		for _, tag := range slices.Sorted(maps.Keys(family)) {
			if family[tag].Image == id && family[tag].Parent == "" {
				n.Children = append(n.Children, subtree(tag, family, snapshots, sandboxes, 0))
			}
		}
		if !all {
			n.Children = withoutSteps(n.Children)
		}
		roots = append(roots, n)
	}
	return roots
}

// withoutSteps has what stands on a step in its place.
func withoutSteps(nodes []Node) []Node {
	var out []Node
	for _, n := range nodes {
		n.Children = withoutSteps(n.Children)
		if n.Kind == "snapshot" && lineage.IsStep(n.Name) && !slices.ContainsFunc(n.Children, func(c Node) bool { return c.Kind == "sandbox" }) {
			out = append(out, n.Children...)
			continue
		}
		out = append(out, n)
	}
	return out
}

const maxDepth = 1000 // a cycle read from a damaged disk must not recurse for ever

func subtree(tag string, family map[string]lineage.Snapshot, snapshots map[string]SnapshotView, sandboxes []View, depth int) Node {
	v := snapshots[tag]
	n := Node{
		Kind: "snapshot", Name: tag, State: string(v.Status), OwnBytes: v.Stored, MemoryOwn: v.MemoryOwn, MemoryShared: v.MemoryShared,
		DiskOwn: v.DiskOwn, DiskShared: v.DiskShared,
	}
	if depth > maxDepth {
		return n
	}
	for _, child := range lineage.Dependents(tag, family) {
		n.Children = append(n.Children, subtree(child, family, snapshots, sandboxes, depth+1))
	}
	for _, s := range sandboxes {
		if s.SnapshotTag == tag {
			n.Children = append(n.Children, Node{
				Kind: "sandbox", Name: s.ID, State: string(s.State), OwnBytes: s.Usage.OwnBytes, MemoryOwn: s.Usage.OwnBytes,
				MemoryShared: s.Usage.SharedBytes, DiskOwn: s.DiskOwn, DiskShared: v.DiskOwn + v.DiskShared,
			})
		}
	}
	return n
}
