package host

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/store"
)

// rootStep is a machine of an image, booted and frozen: what steps on the image go on from. It is shared by all builds on
// that image with machines of that size. It is held until forget is called.
func (b *build) rootStep(ctx context.Context, img store.Image) (m store.Snapshot, forget func(), err error) {
	machine := b.recipe.Machine
	key := stepKey("booted", img.ID, b.kernel.Digest, b.agent, b.features.Format, machine.CPUs, machine.MemoryBytes)
	done, err := b.h.turn(ctx, key) // or many that begin at once would boot one each
	if err != nil {
		return store.Snapshot{}, nil, err
	}
	defer done()
	if m, forget, ok := b.h.step(key); ok {
		b.h.used(m.Tag)
		return m, forget, nil
	}
	bare := bareRecipe(img, machine)
	root := *b
	root.recipe, root.source = &bare, key
	root.spec.Tag, root.spec.Replace, root.spec.Recipe = newStepTag(), false, nil
	if _, err := root.snapshot(ctx, img); err != nil {
		return store.Snapshot{}, nil, err
	}
	m, forget, ok := b.h.step(key)
	if !ok {
		return m, nil, fmt.Errorf("the booted machine of image %s: %w: it was removed meanwhile", short(img.ID), ErrNotFound)
	}
	b.h.used(m.Tag)
	return m, forget, nil
}

// bareRecipe is that of a machine which others stand on, too: nothing of what one recipe says, least of all what may be reached.
func bareRecipe(img store.Image, machine image.Machine) image.Recipe {
	return image.Recipe{Name: img.Name, Base: img.Base, Machine: machine}
}

// turn waits until nobody else makes what has that key, which then is the caller's to make or to find, until done is called.
func (h *Host) turn(ctx context.Context, key string) (done func(), err error) {
	for {
		h.mu.Lock()
		before := h.turns[key]
		if before == nil {
			mine := make(chan struct{})
			h.turns[key] = mine
			h.mu.Unlock()
			return func() {
				h.mu.Lock()
				delete(h.turns, key)
				h.mu.Unlock()
				close(mine)
			}, nil
		}
		h.mu.Unlock()
		select {
		case <-before:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// recipeSteps are the commands of a recipe and its warm-up, in a machine whose key is at.
// Base is what the children of what they stand on may reach.
func (b *build) recipeSteps(at string, base egress.Policy) []buildStep {
	var steps []buildStep
	at = b.networkKey(at, base)
	for i, text := range b.recipe.Run {
		at = stepKey(at, "run", text)
		first, _, _ := strings.Cut(text, "\n")
		steps = append(steps, buildStep{key: at, title: "run: " + first, kept: true, do: func(ctx context.Context, m *builder) error {
			err := m.run(ctx, command{
				argv: []string{"/bin/sh", "-ec", text}, env: map[string]string{"HOME": "/root", "USER": "root", "LOGNAME": "root"}, dir: "/", user: "root",
			})
			if err != nil {
				return fmt.Errorf("run %d: %s: %w", i+1, first, err)
			}
			return nil
		}})
	}
	return append(steps, b.lastStep(at))
}

// lastStep warms the machine. What it leaves is what is forked.
func (b *build) lastStep(at string) buildStep {
	var what []string
	var took time.Duration
	return buildStep{
		key: stepKey(at, "warm-up", b.recipe.Init, b.recipe.Warmup, b.plan.WarmupCode), kept: true, settled: true,
		do: func(ctx context.Context, m *builder) (err error) {
			start := time.Now()
			what, err = b.warmup(ctx, m.conn)
			if err != nil {
				return fmt.Errorf("%w: %w", ErrWarmup, err)
			}
			took = time.Since(start)
			return nil
		},
		describe: func(m *store.Snapshot) { m.Warm, m.WarmMS = slices.Concat(m.Warm, what), millis(took) },
	}
}

// stepped makes the snapshot of a recipe whose image is there, step by step.
func (b *build) stepped(ctx context.Context, img store.Image) (store.Snapshot, error) {
	root, forget, err := b.rootStep(ctx, img)
	if err != nil {
		return store.Snapshot{}, err
	}
	defer forget()
	last, forgetLast, err := b.chain(ctx, root, b.recipeSteps(root.Source, root.Egress))
	if err != nil {
		return store.Snapshot{}, err
	}
	defer forgetLast()
	return b.tag(ctx, last)
}

// tag gives what a build ended with the name that was asked for: a snapshot of its own with the same layers, beside the
// step, which other builds find.
func (b *build) tag(ctx context.Context, step store.Snapshot) (store.Snapshot, error) {
	state, err := b.h.store.State(step)
	if err != nil {
		return store.Snapshot{}, err
	}
	m := step
	m.Tag, m.CreatedAt, m.Source = b.spec.Tag, time.Now().UTC().Round(time.Millisecond), b.digest()
	m.Recipe, m.RecipeText = b.recipe.Name, string(b.spec.Recipe)
	if l := recipeLimits(b.recipe); l != (Limits{}) { // else those of what it stands on
		m.Limits = l
	}
	m.Egress = b.sandboxNetwork(step.Egress)
	b.h.pins.hand(snapshotKey(&step), snapshotKey(&m))
	if err := b.h.enterSnapshot(ctx, m, state, b.spec.Replace); err != nil {
		return store.Snapshot{}, err
	}
	b.h.hot.rekey(step, m)
	b.ownImage(ctx, m)
	return m, nil
}

// ownImage gives a snapshot that was built step by step a memory image of its own, when what its steps have written is
// much: each child would have a copy of that otherwise. Without room for it children take their pages as they are.
func (b *build) ownImage(ctx context.Context, m store.Snapshot) {
	if !b.h.hot.has(m) {
		return
	}
	e, err := b.h.hot.acquire(ctx, m)
	if err != nil {
		return
	}
	defer b.h.hot.release(e)
	if pages := b.h.hot.memory(e).Pages; pages == nil || pages.Bytes() <= smallLayer {
		return
	}
	if err := b.h.hot.flattenFor(ctx, e, MaxForkN); err != nil {
		b.h.log.Warn("make a memory image of its own", "snapshot", m.Tag, "error", err)
	}
}

// baseImage finds an image to stand on: the newest of a name, or one by its id.
func (h *Host) baseImage(ref string) (store.Image, error) {
	h.mu.Lock()
	var newest store.Image
	for _, m := range h.images {
		if m.Name == ref && m.CreatedAt.After(newest.CreatedAt) {
			newest = m
		}
	}
	h.mu.Unlock()
	if newest.ID != "" {
		return newest, nil
	}
	return h.findImage(ref)
}

// onTop makes the snapshot of a recipe whose base is here already: an image, or a warm machine.
func (b *build) onTop(ctx context.Context) (store.Snapshot, error) {
	r := b.recipe
	if len(r.Packages) > 0 {
		return store.Snapshot{}, hint(invalid("packages are part of an image that is made of a Debian release, and %s is there already", r.Base),
			"put them into the recipe of the base, or install them with run")
	}
	files, err := image.StageFiles(b.spec.Files, r.Files)
	if err != nil {
		return store.Snapshot{}, resolveError(err)
	}
	code, err := image.WarmupCode(b.spec.Files, r.Warmup)
	if err != nil {
		return store.Snapshot{}, resolveError(err)
	}
	b.plan = &image.Plan{WarmupCode: code}
	if r.From.Kind == image.KindSnapshot {
		return b.onSnapshot(ctx, files)
	}
	return b.onImage(ctx, files)
}

func (b *build) onImage(ctx context.Context, files []image.StagedFile) (store.Snapshot, error) {
	r := b.recipe
	img, err := b.h.baseImage(r.From.Ref)
	if err == nil {
		err = b.checkNetwork(egress.Policy{})
	}
	if err != nil {
		return store.Snapshot{}, err
	}
	if r.Machine.DiskGiven {
		if err := sameDisk(img, r.Machine.DiskBytes); err != nil {
			return store.Snapshot{}, err
		}
	}
	if err := b.findKernelOf(ctx, img); err != nil {
		return store.Snapshot{}, err
	}
	steps := len(r.Run)+len(files)+len(r.Env) > 0 || r.User != "" || r.WorkDir != ""
	b.source = stepKey("recipe", string(b.spec.Recipe), img.ID, fileKeys(files), b.plan.WarmupCode, b.kernel.Digest, b.agent, b.features.Format)
	if m, ok, err := b.existing(); ok || err != nil {
		return m, err
	}
	if !steps {
		return b.fromBooted(ctx, img)
	}
	root, forget, err := b.rootStep(ctx, img)
	if err != nil {
		return store.Snapshot{}, err
	}
	defer forget()
	return b.finishOn(ctx, root, root.Source, files)
}

func (b *build) onSnapshot(ctx context.Context, files []image.StagedFile) (store.Snapshot, error) {
	if err := b.standsOn(b.recipe.From.Ref); err != nil {
		return store.Snapshot{}, err
	}
	m, _, forget, err := b.h.claim(b.recipe.From.Ref)
	if err != nil {
		return store.Snapshot{}, err
	}
	defer forget()
	if err := b.checkNetwork(m.Egress); err != nil {
		return store.Snapshot{}, err
	}
	machine := image.Machine{}
	if b.recipe.Machine.CPUsGiven {
		machine.CPUs = b.recipe.Machine.CPUs
	}
	if b.recipe.Machine.MemoryGiven {
		machine.MemoryBytes = b.recipe.Machine.MemoryBytes
	}
	if b.recipe.Machine.DiskGiven {
		machine.DiskBytes = b.recipe.Machine.DiskBytes
	}
	if err := b.h.sameMachine(m, machine); err != nil {
		return store.Snapshot{}, err
	}
	at := stepKey("snapshot", m.ID())
	b.source = stepKey(at, "recipe", string(b.spec.Recipe), fileKeys(files), b.plan.WarmupCode)
	if old, ok, err := b.existing(); ok || err != nil {
		return old, err
	}
	return b.finishOn(ctx, m, at, files)
}

// finishOn does what a recipe says in a machine that runs.
func (b *build) finishOn(ctx context.Context, root store.Snapshot, at string, files []image.StagedFile) (store.Snapshot, error) {
	r := b.recipe
	var steps []buildStep
	if r.User != "" {
		at = stepKey(at, "user", r.User)
		steps = append(steps, buildStep{key: at, title: "user: " + r.User, do: func(ctx context.Context, m *builder) error {
			return m.makeUser(ctx, r.User)
		}})
	}
	if len(files) > 0 {
		at = stepKey(at, "files", fileKeys(files))
		steps = append(steps, buildStep{key: at, title: "files", kept: true, do: func(ctx context.Context, m *builder) error {
			return m.extract(ctx, func(w io.Writer) error {
				return image.WriteStaged(w, b.spec.Files, files, func(owner string) (int, int, error) { return m.owner(ctx, owner) })
			})
		}})
	}
	config := configOf(root.Config)
	changed := len(r.Env) > 0 || r.User != "" || r.WorkDir != ""
	if changed {
		at = stepKey(at, "configuration", r.Env, r.User, r.WorkDir)
		config = config.With(r)
		steps = append(steps, buildStep{key: at, do: func(ctx context.Context, m *builder) error { return m.configure(ctx, config) }})
	}
	more := b.recipeSteps(at, root.Egress)
	last := &more[len(more)-1]
	warm := last.describe
	last.describe = func(m *store.Snapshot) {
		warm(m)
		if changed {
			kept := store.Config(config)
			m.Config = &kept
		}
	}
	tip, forget, err := b.chain(ctx, root, append(steps, more...))
	if err != nil {
		return store.Snapshot{}, err
	}
	defer forget()
	return b.tag(ctx, tip)
}

// makeUser makes a user that is not there, as in an image.
func (bl *builder) makeUser(ctx context.Context, name string) error {
	passwd, err := bl.read(ctx, "/etc/passwd", maxDatabase)
	if err != nil {
		return err
	}
	if lookUp(passwd, name, 3) != nil || name == "root" {
		return nil
	}
	script := `if command -v useradd >/dev/null; then useradd --create-home --shell /bin/sh "$1"; else adduser -D "$1"; fi`
	if err := bl.run(ctx, command{argv: []string{"/bin/sh", "-ec", script, "sh", name}, dir: "/"}); err != nil {
		return fmt.Errorf("make user %s: %w", name, err)
	}
	return nil
}

// fileKeys are what of files determines the result.
func fileKeys(files []image.StagedFile) []string {
	var keys []string
	for _, f := range files {
		keys = append(keys, fmt.Sprintf("%q %s %o %s %v", f.Path, f.Owner, f.Mode, f.SHA256, f.Dir))
	}
	return keys
}
