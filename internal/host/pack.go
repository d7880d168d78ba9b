package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/image/dockerfile"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
)

// PackOptions say how a snapshot is packed.
type PackOptions struct {
	NoScrub bool // do not look for secrets in it
	Blobs   bool // say of every member what a registry calls it
	AsMade  bool // it is packed when it was made: so that the same snapshot always gives the same manifest
}

// Packed is a snapshot ready to travel. Nothing that happens in the home changes it any more.
type Packed struct {
	Source   *pack.Source
	Encoded  []byte // the manifest
	dir      string
	cleaning func()
}

// Pack collects a snapshot with all it stands on. The caller closes what it returns.
func (h *Host) Pack(ctx context.Context, tag string, opts PackOptions) (_ *Packed, err error) {
	m, err := h.snapshot(tag)
	if err != nil {
		return nil, err
	}
	p := &Packed{cleaning: func() {}}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	scrub := &pack.Scrub{Skipped: "it was asked not to"}
	var clean *packable
	if !opts.NoScrub {
		scrub, clean, p.cleaning, err = h.scrub(ctx, m)
		if err != nil {
			return nil, hint(fmt.Errorf("pack %s: look for secrets: %w", tag, err), "pack it as it is with: --no-scrub")
		}
	}
	if p.dir, err = h.TempDir("pack-"); err != nil {
		return nil, err
	}
	if err := p.collect(ctx, h, m, clean, scrub, opts); err != nil {
		return nil, fmt.Errorf("pack %s: %w", tag, h.explainFull(err))
	}
	p.cleaning() // everything has a second name
	p.cleaning = func() {}
	return p, nil
}

func (p *Packed) collect(ctx context.Context, h *Host, m store.Snapshot, clean *packable, scrub *pack.Scrub, opts PackOptions) error {
	manifest := pack.Manifest{
		PackedAt: time.Now().UTC().Round(time.Second), Tool: h.cfg.Version, Scrub: scrub,
	}
	if opts.AsMade {
		manifest.PackedAt = m.CreatedAt.UTC()
	}
	spec := pack.Spec{Dir: p.dir, Layers: h.layers, State: h.store.State, Kernel: h.kernelOf, Blobs: opts.Blobs}
	if clean != nil {
		manifest.Snapshots, manifest.Images = []store.Snapshot{clean.snapshot}, []store.Image{clean.image}
		spec.State = func(store.Snapshot) ([]byte, error) { return clean.state, nil }
		return p.take(ctx, spec, manifest)
	}
	if err := h.ownLine(ctx, m.Tag); err != nil {
		return err
	}
	m, err := h.snapshot(m.Tag)
	if err != nil {
		return err
	}
	line, forget, err := h.claimLine(m)
	if err != nil {
		return err
	}
	defer forget()
	// Until everything has a second name.
	release, err := h.layers.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	manifest.Snapshots = line
	if manifest.Images, err = h.imagesOf(line); err != nil {
		return err
	}
	return p.take(ctx, spec, manifest)
}

func (p *Packed) take(ctx context.Context, spec pack.Spec, manifest pack.Manifest) (err error) {
	spec.Manifest = manifest
	if p.Source, err = pack.Collect(ctx, spec); err != nil {
		return err
	}
	p.Encoded, err = p.Source.Manifest().Encode()
	return err
}

// claimLine finds the snapshots that m stands on, root first, with m as the last, without steps of builds, and keeps them until
// forget is called.
func (h *Host) claimLine(m store.Snapshot) (line []store.Snapshot, forget func(), err error) {
	h.mu.Lock()
	tags := append(lineage.Ancestors(m.Tag, h.family()), m.Tag)
	h.mu.Unlock()
	tags = slices.DeleteFunc(tags, func(t string) bool { return lineage.IsStep(t) && t != m.Tag })
	var forgets []func()
	forget = func() {
		for _, f := range forgets {
			f()
		}
	}
	for _, tag := range tags {
		s, w, f, err := h.claim(tag)
		if err != nil {
			forget()
			return nil, nil, err
		}
		forgets = append(forgets, f)
		if w != nil {
			forget()
			return nil, nil, hint(fmt.Errorf("snapshot %s: %w: it is being written", tag, ErrBusy), "wait until forkd snapshots shows it as ready")
		}
		line = append(line, s)
	}
	return line, forget, nil
}

func (h *Host) imagesOf(line []store.Snapshot) ([]store.Image, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var images []store.Image
	for _, s := range line {
		if slices.ContainsFunc(images, func(i store.Image) bool { return i.ID == s.Image }) {
			continue
		}
		i, ok := h.images[s.Image]
		if !ok {
			return nil, fmt.Errorf("image %s of snapshot %s: %w", short(s.Image), s.Tag, ErrNotFound)
		}
		images = append(images, i)
	}
	return images, nil
}

// Size is how long the pack file is.
func (p *Packed) Size() int64 { return pack.Size(p.Source.Manifest(), p.Encoded) }

// Digest is the pack's name.
func (p *Packed) Digest() layer.Digest { return sha256.Sum256(p.Encoded) }

// Write writes the pack file.
func (p *Packed) Write(ctx context.Context, w io.Writer) error { return pack.Write(ctx, w, p.Source) }

// Close removes what was collected.
func (p *Packed) Close() {
	if p.dir != "" {
		_ = os.RemoveAll(p.dir)
	}
	p.cleaning()
}

// Verified is what Verify has found.
type Verified struct {
	Snapshots []string // that were looked at: it, and all it stands on
	Layers    int
	Chunks    int
	Bytes     int64 // of their content
	Damages   []Damaged
}

// Damaged is something that is not what it was.
type Damaged struct {
	What   string
	Reason string
	Breaks []string // tags
}

// Verify reads everything that a snapshot and those it stands on are made of. Damage is no error.
func (h *Host) Verify(ctx context.Context, tag string) (Verified, error) {
	m, err := h.snapshot(tag)
	if err != nil {
		return Verified{}, err
	}
	line, forget, err := h.claimLine(m)
	if err != nil {
		return Verified{}, err
	}
	defer forget()
	var v Verified
	var roots []layer.Digest
	for _, s := range line {
		v.Snapshots = append(v.Snapshots, s.Tag)
		roots = append(roots, s.Memory, s.Disk, s.ImageDisk)
		if _, err := h.store.State(s); err != nil {
			v.Damages = append(v.Damages, Damaged{What: "device state of " + s.Tag, Reason: err.Error(), Breaks: []string{s.Tag}})
		}
		if err := h.verifyKernel(s); err != nil {
			v.Damages = append(v.Damages, Damaged{What: "kernel of " + s.Tag, Reason: err.Error() + "; it is needed to boot its image where none can be fetched, and by packs"})
		}
	}
	rep, err := h.layers.Verify(ctx, roots)
	if err != nil {
		return v, err
	}
	v.Layers, v.Chunks, v.Bytes = rep.Layers, rep.Chunks, rep.Bytes
	for _, d := range rep.Damages {
		v.Damages = append(v.Damages, Damaged{What: d.Digest.String(), Reason: d.Err.Error(), Breaks: h.brokenBy(ctx, d.Digest)})
	}
	return v, nil
}

// brokenBy lists the snapshots that need a map or chunk.
func (h *Host) brokenBy(ctx context.Context, d layer.Digest) []string {
	h.mu.Lock()
	all := make([]store.Snapshot, 0, len(h.snapshots))
	for _, m := range h.snapshots {
		all = append(all, m)
	}
	h.mu.Unlock()
	tags := []string{}
	for _, m := range all {
		if h.layers.Needs(ctx, m.Memory, d) || h.layers.Needs(ctx, m.Disk, d) {
			tags = append(tags, m.Tag)
		}
	}
	slices.Sort(tags)
	return tags
}

// Provenance says where a snapshot comes from, link by link, what was packed or is here last.
type Provenance struct {
	Links  []Origin
	Images []store.Image
}

// Origin is one link.
type Origin struct {
	store.Snapshot
	ID           string
	Content      string // of its kernel, as packs have it; "": it is not here any more
	RecipeDigest string // of its text; "": there is none
	Commands     []string
}

// Provenance of a snapshot.
func (h *Host) Provenance(tag string) (Provenance, error) {
	m, err := h.snapshot(tag)
	if err != nil {
		return Provenance{}, err
	}
	line, forget, err := h.claimLine(m)
	if err != nil {
		return Provenance{}, err
	}
	defer forget()
	images, err := h.imagesOf(line)
	if err != nil {
		return Provenance{}, err
	}
	links := origins(line)
	known := map[string]string{}
	for i, l := range links {
		key := l.Kernel + " " + l.KernelContent.String()
		if _, ok := known[key]; !ok {
			known[key] = ""
			if d := h.contentOf(l.Snapshot); !d.IsZero() {
				known[key] = d.String()
			}
		}
		links[i].Content = known[key]
	}
	return Provenance{Links: links, Images: images}, nil
}

// commandsOf are what a recipe or a Dockerfile runs, in order.
func commandsOf(text string) []string {
	if r, err := image.ParseRecipe("recipe", []byte(text)); err == nil {
		return r.Run
	}
	f, err := dockerfile.Parse("Dockerfile", []byte(text))
	if err != nil {
		return nil
	}
	var all []string
	for _, stage := range f.Stages {
		for _, i := range stage.Instructions {
			if i.Name == "RUN" {
				all = append(all, i.Rest)
			}
		}
	}
	return all
}

func origins(line []store.Snapshot) []Origin {
	var all []Origin
	for _, s := range line {
		o := Origin{Snapshot: s, ID: s.ID()}
		if s.RecipeText != "" {
			sum := sha256.Sum256([]byte(s.RecipeText))
			o.RecipeDigest = hex.EncodeToString(sum[:])
			o.Commands = commandsOf(s.RecipeText)
		}
		all = append(all, o)
	}
	return all
}
