package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// ReceiveOptions say how a snapshot from elsewhere becomes one of this home.
type ReceiveOptions struct {
	Tag string // "": that of the pack
	// MayWiden: its children may reach what its record says. Without it a pack whose children may reach anything is refused.
	MayWiden bool
	// Dir is where members are kept until they are complete, below the home; it is kept when fetching fails, so that another
	// try finds them. "": one that goes in any case.
	Dir string
}

// Received is what came of it.
type Received struct {
	Snapshot SnapshotView
	Digest   layer.Digest      // of the manifest
	New      []string          // tags of the snapshots that were registered, root first
	Present  []string          // of those that were here
	Renamed  map[string]string // what the pack calls a snapshot → its tag here, where they differ
	Members  int               // of the pack
	Bytes    int64             // of all members
	Fetched  int64             // of those that were not here
	Scrub    *pack.Scrub
}

// ErrPack means that a pack was refused for what it says. Those of package pack are wrapped as well.
var ErrPack = errors.New("pack refused")

const receiveWhat = "unpack"

// Unpack makes snapshots of a pack file.
func (h *Host) Unpack(ctx context.Context, r io.Reader, opts ReceiveOptions) (Received, error) {
	p, err := pack.NewReader(r)
	if err != nil {
		return Received{}, fmt.Errorf("unpack: %w", err)
	}
	got, err := h.Receive(ctx, p.Manifest(), opts, func(ctx context.Context, sink *pack.Sink) error { return p.Receive(ctx, sink) })
	if err != nil {
		return got, fmt.Errorf("unpack: %w", err)
	}
	return got, nil
}

// Receive makes snapshots of what a manifest describes; fetch puts the members that the sink needs into it. What can be
// refused is refused before fetch is called. Nothing is registered until everything is there and verified, nothing that is
// here is changed, and after an error, or when the daemon dies, nothing is left but what opts.Dir keeps.
func (h *Host) Receive(ctx context.Context, m *pack.Manifest, opts ReceiveOptions, fetch func(context.Context, *pack.Sink) error,
) (Received, error) {
	text, err := m.Encode()
	if err != nil {
		return Received{}, err
	}
	got := Received{
		Digest: sha256.Sum256(text), Members: len(m.Members), Bytes: m.Bytes(), Scrub: m.Scrub, Renamed: map[string]string{},
	}
	head := m.Head()
	tag := head.Tag
	if opts.Tag != "" {
		tag = opts.Tag
	}
	if err := lineage.CheckTag(tag); err != nil {
		return got, err
	}
	release, err := h.hold(tag, receiveWhat)
	if err != nil {
		return got, err
	}
	defer release()
	if here, ok := h.sameAs(head, opts.Tag); ok {
		got.Snapshot = h.viewSnapshot(here)
		got.Present = []string{here.Tag}
		return got, nil
	}
	if err := h.acceptable(ctx, m, tag, opts); err != nil {
		return got, err
	}
	var u undo.Stack
	defer u.Run()
	dir := opts.Dir
	if dir == "" {
		if dir, err = h.TempDir("unpack-"); err != nil {
			return got, err
		}
	}
	sink, err := pack.NewSink(ctx, dir, h.layers, m)
	if err != nil {
		return got, h.explainFull(err)
	}
	if opts.Dir == "" {
		u.Add(func() { _ = sink.Close() })
	}
	if err := h.offerKernels(m, sink); err != nil {
		return got, h.explainFull(err)
	}
	if err := fetch(ctx, sink); err != nil {
		return got, h.explainFull(err)
	}
	got.Fetched = sink.Fetched()
	if err := h.enterPack(ctx, m, sink, tag, &got); err != nil {
		h.collect(context.WithoutCancel(ctx)) // layers that may be in the store already
		return got, h.explainFull(err)
	}
	h.tidy(context.WithoutCancel(ctx), tag)
	if opts.Dir != "" {
		return got, sink.Close()
	}
	return got, nil
}

// sameAs finds a snapshot with the content of one from elsewhere that is known by the same id; by any tag if none is given.
func (h *Host) sameAs(m store.Snapshot, tag string) (store.Snapshot, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sameAsLocked(m, tag)
}

func (h *Host) sameAsLocked(m store.Snapshot, tag string) (found store.Snapshot, ok bool) {
	id := m.ID()
	for _, s := range h.snapshots {
		if tag != "" && s.Tag != tag || lineage.IsStep(s.Tag) {
			continue
		}
		// An id is only claimed by Formerly, and anybody can claim: what counts is what a child is made of.
		same := s.Memory == m.Memory && s.Disk == m.Disk && s.ImageDisk == m.ImageDisk && s.State == m.State && s.Engine == m.Engine
		if same && (s.Is(id) || m.Is(s.ID())) && (!ok || s.Tag == m.Tag) {
			found, ok = s, true
		}
	}
	return found, ok
}

// acceptable refuses a pack for what its manifest says.
func (h *Host) acceptable(ctx context.Context, m *pack.Manifest, tag string, opts ReceiveOptions) error {
	head := m.Head()
	features, err := h.Features(ctx)
	if err != nil {
		return err
	}
	if err := head.Engine.Compatible(features.Format); err != nil {
		err = fmt.Errorf("snapshot %s: %w", head.Tag, err)
		if head.RecipeText != "" && head.Branch == nil {
			return hint(err, "build it here from the recipe that the pack has, with --rewarm; or pack it on a host that is like this one in that")
		}
		why := "it is a branch, which no recipe makes again"
		if head.Branch == nil {
			why = "it has no recipe that it could be built from"
		}
		return hint(err, "%s; use it on a host that is like the one it was made on in that", why)
	}
	// After that: whoever has it built from its recipe asks about the tag again.
	if err := h.tagFree(tag); err != nil {
		return takenBy(err, tag)
	}
	for _, s := range m.Snapshots {
		if err := checkLimits(s.Limits); err != nil {
			return fmt.Errorf("%w: snapshot %s: %w", ErrPack, s.Tag, err)
		}
		if err := s.Egress.Validate(); err != nil {
			return fmt.Errorf("%w: snapshot %s: %w", ErrPack, s.Tag, err)
		}
		if !opts.MayWiden && egress.Narrower(&s.Egress, &egress.Policy{}) != nil {
			return hint(fmt.Errorf("%w: children of %s may reach what they like or some of it, by its record", ErrWider, s.Tag),
				"ask somebody with a token of scope admin to unpack it")
		}
	}
	if err := h.quota(ctx, tag); err != nil {
		return err
	}
	free, size, err := h.cfg.Disk(h.cfg.Home.Root)
	if err != nil {
		return fmt.Errorf("read free space of the store: %w", err)
	}
	keep := min(int64(diskReserve), size/diskReservePart)
	if h.cfg.DiskReserve > 0 {
		keep = h.cfg.DiskReserve
	}
	// What is here already is not known yet, and may be much; more than this much is never needed.
	if need := m.Stored(); free < keep || free-keep < need && !h.mostlyHere(ctx, m) {
		return hint(fmt.Errorf("%w: the pack takes up to %s, and the store's disk has %s free and keeps %s", ErrExhausted, mib(need), mib(free), mib(keep)),
			"remove what nobody needs: forkd rmi, forkd images rm, forkd cleanup")
	}
	return nil
}

// takenBy says what to do where a tag is taken.
func takenBy(err error, tag string) error {
	return hint(err, "give it another tag with: -t TAG; or remove that one with: forkd rmi %s", tag)
}

// mostlyHere: a relative of it is here, and what is new of it will show whether there is room.
func (h *Host) mostlyHere(ctx context.Context, m *pack.Manifest) bool {
	for _, i := range m.Images {
		if _, err := h.layers.Stat(ctx, i.Disk); err == nil {
			return true
		}
	}
	return false
}

// enterPack makes what has come the home's: layers, images, and then the records, the head's last.
func (h *Host) enterPack(ctx context.Context, m *pack.Manifest, sink *pack.Sink, tag string, got *Received) error {
	release, err := h.layers.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	if err := sink.Install(ctx); err != nil {
		return err
	}
	e := &entering{h: h, m: m, sink: sink, tag: tag, got: got}
	defer e.release()
	defer e.undo.Run()
	if err := e.plan(); err != nil {
		return err
	}
	// A daemon that dies now leaves some of the records: the next removes what the note names.
	head := e.records[len(e.records)-1]
	note := store.Unpacking{Images: e.imageIDs()}
	for _, r := range e.records[:len(e.records)-1] {
		note.Snapshots = append(note.Snapshots, r.Tag)
	}
	if err := h.store.BeginUnpacking(head, note); err != nil {
		return err
	}
	e.undo.Add(func() { h.warn(h.store.EndSnapshot(head.Tag)) })
	if err := e.write(ctx); err != nil {
		return err
	}
	e.undo.Keep()
	h.warn(h.store.EndSnapshot(head.Tag))
	entered, err := h.snapshot(head.Tag)
	if err != nil {
		return err
	}
	got.Snapshot = h.viewSnapshot(entered)
	return nil
}

func (h *Host) warn(err error) {
	if err != nil {
		h.log.Warn("forget what was being unpacked", "error", err)
	}
}

// entering is a pack on its way into the tables.
type entering struct {
	h    *Host
	m    *pack.Manifest
	sink *pack.Sink
	tag  string
	got  *Received

	images  []store.Image     // that are new
	imageID map[string]string // of the pack → here
	records []store.Snapshot  // that are new, root first; the last is the head's
	held    []func()          // end the holds on their tags
	undo    undo.Stack
}

func (e *entering) release() {
	for _, f := range e.held {
		f()
	}
}

func (e *entering) imageIDs() (ids []string) {
	for _, i := range e.images {
		ids = append(ids, i.ID)
	}
	return ids
}

// plan finds the name of everything here.
func (e *entering) plan() error {
	h := e.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return ErrClosed
	}
	e.imageID = map[string]string{}
	for _, i := range e.m.Images {
		id, here := h.imageHere(i)
		e.imageID[i.ID] = id
		if !here {
			i.ID = id
			e.images = append(e.images, i)
		}
	}
	var parent store.Snapshot // as it is here
	for n, s := range e.m.Snapshots {
		last := n == len(e.m.Snapshots)-1
		if here, ok := h.sameAsLocked(s, ""); ok && !last {
			e.got.Present = append(e.got.Present, here.Tag)
			e.rename(s.Tag, here.Tag)
			parent = here
			continue
		}
		tag := e.tag
		if !last {
			tag = e.freeTagLocked(s)
			releaseTag, err := e.holdLocked(tag)
			if err != nil {
				return err
			}
			e.held = append(e.held, releaseTag)
		}
		e.rename(s.Tag, tag)
		parent = e.record(s, tag, parent)
		e.records = append(e.records, parent)
		e.got.New = append(e.got.New, tag)
	}
	return nil
}

func (e *entering) rename(from, to string) {
	if from != to {
		e.got.Renamed[from] = to
	}
}

// holdLocked holds the tag of an ancestor.
func (e *entering) holdLocked(tag string) (release func(), err error) {
	h := e.h
	if doing, ok := h.busy[tag]; ok {
		return nil, hint(fmt.Errorf("snapshot %s: %w: %s is in progress", tag, ErrBusy, doing), "try again when that is over")
	}
	h.busy[tag] = receiveWhat
	return func() {
		h.mu.Lock()
		delete(h.busy, tag)
		h.mu.Unlock()
	}, nil
}

// freeTagLocked is the tag that an ancestor gets: its own, unless another snapshot has it.
func (e *entering) freeTagLocked(s store.Snapshot) string {
	free := func(tag string) bool {
		_, ready := e.h.snapshots[tag]
		_, writing := e.h.writing[tag]
		taken := slices.ContainsFunc(e.records, func(r store.Snapshot) bool { return r.Tag == tag })
		return !ready && !writing && !taken && tag != e.tag
	}
	if free(s.Tag) {
		return s.Tag
	}
	id := s.ID()
	for n := 8; ; n++ {
		suffix := "." + id[:min(n, len(id))]
		tag := s.Tag[:min(len(s.Tag), lineage.MaxName-len(suffix))] + suffix
		if free(tag) || n > len(id) {
			return tag
		}
	}
}

// record is a snapshot's record as it is here. Builds must not take it for what they have made themselves, whatever it says.
func (e *entering) record(s store.Snapshot, tag string, parent store.Snapshot) store.Snapshot {
	id := s.ID()
	s.Tag, s.Image, s.Source = tag, e.imageID[s.Image], "unpacked of "+id
	s.Formerly = append(slices.Clone(s.Formerly), id)
	s.KernelContent, _ = e.m.Kernel(s.Kernel)
	s.Parent, s.ParentID = "", ""
	if s.Branch != nil && s.Branch.Passing { // it is here to stay
		kept := *s.Branch
		kept.Passing = false
		s.Branch = &kept
	}
	if parent.Tag != "" {
		s.Parent, s.ParentID = parent.Tag, parent.ID()
	}
	return s
}

// imageHere is the id that an image has, or will have, here. One of a build is named by what determined it, which is a claim
// when it comes from elsewhere; so it is named by its content, unless that is what is here under its name. The caller holds mu.
func (h *Host) imageHere(i store.Image) (id string, here bool) {
	if have, ok := h.images[i.ID]; ok && have.Disk == i.Disk {
		return i.ID, true
	}
	id = foreignImage(i.Disk)
	have, ok := h.images[id]
	return id, ok && have.Disk == i.Disk
}

// foreignImage is the id of an image from elsewhere.
func foreignImage(disk layer.Digest) string {
	sum := sha256.Sum256([]byte("forkd image from elsewhere\n" + disk.String()))
	return hex.EncodeToString(sum[:])
}

// write makes the records durable and known.
func (e *entering) write(ctx context.Context) error {
	h := e.h
	for _, i := range e.images {
		if err := h.store.AddImage(ctx, i); err != nil {
			return err
		}
		e.undo.Add(func() {
			h.mu.Lock()
			delete(h.images, i.ID)
			h.mu.Unlock()
			h.warn(h.store.RemoveImage(i.ID))
		})
		h.mu.Lock()
		h.images[i.ID] = i
		h.mu.Unlock()
	}
	if err := e.keepKernels(); err != nil {
		return err
	}
	for _, s := range e.records {
		state, err := e.sink.State(s)
		if err != nil {
			return err
		}
		if err := h.enterSnapshot(ctx, s, state, false); err != nil {
			return err
		}
		e.undo.Add(func() { h.warn(h.removeLeaf(s.Tag, "")) })
	}
	return nil
}

// forgetUnpacking removes what a daemon that died while unpacking has left. It runs before anything else knows the records.
func (h *Host) forgetUnpacking(u store.Unfinished) error {
	for _, tag := range slices.Backward(u.Unpacking.Snapshots) {
		if _, ok := h.snapshots[tag]; !ok {
			continue
		}
		if err := h.store.RemoveSnapshot(tag); err != nil {
			return err
		}
		delete(h.snapshots, tag)
	}
	for _, id := range u.Unpacking.Images {
		if _, ok := h.images[id]; !ok {
			continue
		}
		if err := h.store.RemoveImage(id); err != nil {
			return err
		}
		delete(h.images, id)
	}
	h.log.Warn("a pack was not unpacked to its end; nothing of it is left", "snapshot", u.Tag)
	return h.store.EndSnapshot(u.Tag)
}
