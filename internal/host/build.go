package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// BuildSpec asks for a snapshot made from a recipe.
type BuildSpec struct {
	Tag     string
	Recipe  []byte
	Files   fs.FS  // the recipe's directory
	Kernel  string // path of another kernel than Debian's
	Replace bool   // a snapshot of that tag made from something else

	NoCache bool // does all steps again

	Dockerfile *DockerfileSpec // instead of a recipe; nil: a recipe
	Rootfs     *RootfsSpec     // the same

	MayWiden bool // its networks may be more than what it stands on has
}

// Event is one line of a build's progress.
type Event struct {
	Step, Message string
	Cached        bool

	Title string // of a step of a build that is over: its instruction
	Took  time.Duration
}

const buildWhat = "build"

// build is one build in progress.
type build struct {
	h        *Host
	spec     BuildSpec
	recipe   *image.Recipe
	plan     *image.Plan
	kernel   *image.Kernel
	features *engine.Features
	agent    string // digest of the guest agent
	progress func(Event)

	source  string                                       // what determines the result, when it is not the recipe
	prefix  string                                       // of the names of steps
	prepare func(ctx context.Context, bl *builder) error // of a machine in which steps are done; may be nil
}

// Build makes a snapshot: image (or a cached one), boot, warm-up, freeze. All or nothing. Building the same recipe
// again finds the snapshot that is there.
func (h *Host) Build(ctx context.Context, spec BuildSpec, progress func(Event)) (SnapshotView, error) {
	if err := lineage.CheckTag(spec.Tag); err != nil {
		return SnapshotView{}, err
	}
	recipe, err := recipeOf(&spec)
	if err != nil {
		return SnapshotView{}, err
	}
	if recipe.Name == "" {
		recipe.Name = spec.Tag
	}
	if err := checkMachine(recipe); err != nil {
		return SnapshotView{}, err
	}
	if len(h.cfg.Agent) == 0 {
		return SnapshotView{}, hint(fmt.Errorf("%w: this forkd has no guest agent", ErrUnsupported), "build forkd with: make build")
	}
	release, err := h.hold(spec.Tag, buildWhat)
	if err != nil {
		return SnapshotView{}, err
	}
	defer release()
	if h.tagFree(spec.Tag) == nil { // else there is nothing to make, or nothing more
		if err := h.quota(ctx, spec.Tag); err != nil {
			return SnapshotView{}, fmt.Errorf("build %s: %w", spec.Tag, err)
		}
	}
	features, err := h.Features(ctx)
	if err != nil {
		return SnapshotView{}, err
	}
	agent := sha256.Sum256(h.cfg.Agent)
	b := &build{
		h: h, spec: spec, recipe: recipe, features: features, agent: hex.EncodeToString(agent[:]), progress: progress,
	}
	run, mode := b.run, ModeRecipe
	switch {
	case spec.Dockerfile != nil:
		mode = ModeDockerfile
		run = func(ctx context.Context) (store.Snapshot, error) { return b.dockerfile(ctx, spec.Dockerfile) }
	case spec.Rootfs != nil:
		run, mode = b.rootfs, ModeRootfs
	}
	h.events.Emit(events.Event{Type: events.BuildStarted, Snapshot: spec.Tag})
	began := time.Now()
	m, err := run(ctx)
	h.took(TimedBuild, mode, err, began)
	if err != nil {
		h.events.Emit(events.Event{Type: events.BuildFinished, Snapshot: spec.Tag, Reason: err.Error()})
		return SnapshotView{}, fmt.Errorf("build %s: %w", spec.Tag, err)
	}
	h.events.Emit(events.Event{Type: events.BuildFinished, Snapshot: spec.Tag})
	h.tidy(context.WithoutCancel(ctx), spec.Tag)
	return h.viewSnapshot(m), nil
}

// recipeOf is the recipe of a build, as far as it has one.
func recipeOf(spec *BuildSpec) (*image.Recipe, error) {
	switch {
	case spec.Dockerfile != nil:
		return &image.Recipe{Network: spec.Dockerfile.Network, Warmup: spec.Dockerfile.Warmup}, nil
	case spec.Rootfs != nil:
		return rootfsRecipe(spec)
	}
	r, err := image.ParseRecipe("recipe.yaml", spec.Recipe)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return r, nil
}

// checkMachine says whether this host can have a recipe's machine.
func checkMachine(recipe *image.Recipe) error {
	if total := totalMemory(); recipe.Machine.MemoryBytes > total {
		return hint(invalid("the recipe's machine has %s of memory, this host has %s", mib(recipe.Machine.MemoryBytes),
			mib(total)), "set machine.memory in the recipe")
	}
	if n := runtime.NumCPU(); recipe.Machine.CPUs > n {
		return hint(invalid("the recipe's machine has %d cpus, this host has %d", recipe.Machine.CPUs, n),
			"set machine.cpus in the recipe")
	}
	return nil
}

// fullBelow is less free space than any build leaves over.
const fullBelow = 16 << 20

// explainFull says so when the disk is full: a guest whose disk cannot grow on the host sees only an I/O error. It must
// be asked before what was written is removed.
func (h *Host) explainFull(err error) error {
	free, statErr := freeSpace(h.cfg.Home.Root)
	if statErr != nil || free > fullBelow {
		return err
	}
	return hint(fmt.Errorf("%w: no space left on the disk of %s: %w", ErrExhausted, h.cfg.Home.Root, err),
		"free some space there, or give another directory with --home")
}

func (b *build) say(step, format string, args ...any) {
	b.progress(Event{Step: step, Message: fmt.Sprintf(format, args...)})
}

func (b *build) cached(step, format string, args ...any) {
	b.progress(Event{Step: step, Message: fmt.Sprintf(format, args...), Cached: true})
}

func (b *build) run(ctx context.Context) (store.Snapshot, error) {
	if kind := b.recipe.From.Kind; kind == image.KindImage || kind == image.KindSnapshot {
		return b.onTop(ctx)
	}
	if err := b.checkNetwork(egress.Policy{}); err != nil {
		return store.Snapshot{}, err
	}
	if err := b.resolve(ctx); err != nil {
		return store.Snapshot{}, err
	}
	defer b.plan.Close()
	if m, ok, err := b.existing(); ok || err != nil {
		return m, err
	}
	img, err := b.image(ctx)
	if err != nil {
		return store.Snapshot{}, err
	}
	if len(b.recipe.Run) > 0 {
		return b.stepped(ctx, img)
	}
	return b.fromBooted(ctx, img)
}

// resolve finds packages and kernel.
func (b *build) resolve(ctx context.Context) error {
	cfg := b.imageHost()
	b.say("packages", "resolving %s", b.recipe.Base)
	plan, err := image.Resolve(ctx, b.recipe, b.spec.Files, cfg)
	if err != nil {
		return resolveError(err)
	}
	b.plan = plan
	for _, note := range plan.Notes {
		b.say("packages", "%s", note)
	}
	if err := b.findKernel(ctx); err != nil {
		plan.Close()
		return err
	}
	return nil
}

// findKernel finds what the machine boots.
func (b *build) findKernel(ctx context.Context) (err error) {
	if b.spec.Kernel != "" {
		b.kernel, err = image.KernelAt(b.spec.Kernel, "")
	} else {
		b.kernel, err = image.FetchKernel(ctx, b.imageHost())
	}
	if err != nil {
		return resolveError(fmt.Errorf("find a kernel: %w", err))
	}
	return nil
}

// imageHost is what package image needs of this host.
func (b *build) imageHost() image.Host {
	return image.Host{
		Root: os.DirFS("/"), CacheDir: b.h.cfg.Home.Cache(), Arch: runtime.GOARCH, Now: time.Now,
		Progress: b.downloads(),
	}
}

// downloads reports now and then: a slow archive should not look like a hang, a fast one needs no words.
func (b *build) downloads() func(what string, done, total int64) {
	const interval = 2 * time.Second
	var mu sync.Mutex
	last := time.Now()
	return func(what string, done, total int64) {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(last) < interval {
			return
		}
		last = time.Now()
		b.say("download", "%s: %s of %s", what, mib(done), mib(total))
	}
}

// digest is everything that determines the snapshot.
func (b *build) digest() string {
	if b.source != "" {
		return b.source
	}
	text, err := json.Marshal([]any{
		string(b.spec.Recipe), b.plan.Digest, b.plan.WarmupCode, b.kernel.Digest, b.agent, b.features.Format,
	})
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// existing returns the snapshot of the tag if it is what this build would make.
func (b *build) existing() (m store.Snapshot, found bool, err error) {
	b.h.mu.Lock()
	m, found = b.h.snapshots[b.spec.Tag]
	b.h.mu.Unlock()
	if !found {
		return m, false, nil
	}
	if m.Source == b.digest() && !b.spec.Replace {
		b.cached("snapshot", "%s is up to date", m.Tag)
		return m, true, nil
	}
	if !b.spec.Replace {
		return m, true, hint(fmt.Errorf("snapshot %s: %w, made from another recipe, kernel or forkd", m.Tag, store.ErrExists),
			"forkd build … -t %s --replace, or another tag", m.Tag)
	}
	return m, false, b.h.replaceable(m)
}

// replaceable says whether nothing of a user's stands on a snapshot: the steps of builds on it go with it.
func (h *Host) replaceable(m store.Snapshot) error {
	h.mu.Lock()
	sandboxes := h.sandboxesOf(m.Tag)
	down := descendants(m.Tag, h.family())
	h.mu.Unlock()
	if sandboxes > 0 {
		return hint(fmt.Errorf("snapshot %s: %w: sandboxes of it are there: %d", m.Tag, ErrBusy, sandboxes),
			"end them with: forkd kill --tag %s; or use another tag", m.Tag)
	}
	if lineage.OnlySteps(down) {
		return nil
	}
	return hint(fmt.Errorf("snapshot %s: %w: snapshots %s stand on it", m.Tag, ErrBusy,
		strings.Join(slices.DeleteFunc(down, lineage.IsStep), ", ")),
		"use another tag; or remove it and keep what they need of it: forkd rmi --force %s", m.Tag)
}

// standsOn refuses to replace a snapshot by what goes on in its machine: it would stand on what is gone.
func (b *build) standsOn(tag string) error {
	if !b.spec.Replace || tag != b.spec.Tag {
		return nil
	}
	return hint(invalid("snapshot %s cannot be replaced by what stands on it", tag), "build it as another tag")
}

// snapshot boots, warms and freezes a machine of the image.
func (b *build) snapshot(ctx context.Context, img store.Image) (store.Snapshot, error) {
	return b.snapshotOf(ctx, img, b.warm)
}

// snapshotOf keeps the machine that warm leaves, its own disk in overlay over the image's, which is base. Dir is for the
// machine's files.
func (b *build) snapshotOf(ctx context.Context, img store.Image,
	warm func(ctx context.Context, dir, overlay, base string) (*warmed, error),
) (store.Snapshot, error) {
	base, err := b.h.hot.base(ctx, img.ID)
	if err != nil {
		return store.Snapshot{}, err
	}
	var u undo.Stack
	defer u.Run()
	dir, err := b.h.machineDir()
	if err != nil {
		return store.Snapshot{}, err
	}
	u.Add(func() { _ = os.RemoveAll(dir) })
	overlay := diskPath(dir, 0)
	if err := os.Mkdir(filepath.Dir(overlay), 0o700); err != nil {
		return store.Snapshot{}, fmt.Errorf("create disk: %w", err)
	}
	w, err := warm(ctx, dir, overlay, base)
	if err != nil {
		return store.Snapshot{}, b.h.explainFull(err)
	}
	u.Add(func() { _ = w.checkpoint.Memory.Close() })
	m, err := b.keep(ctx, img, w, overlay, base)
	if err != nil {
		return store.Snapshot{}, b.h.explainFull(err)
	}
	u.Keep()
	return m, os.RemoveAll(dir)
}

// keep stores a frozen machine and makes it known.
func (b *build) keep(ctx context.Context, img store.Image, w *warmed, overlay, base string) (store.Snapshot, error) {
	b.say("store", "storing %s of memory", mib(w.checkpoint.Memory.AllocatedBytes()))
	// Until the record names the layers a sweep would take them for garbage.
	release, err := b.h.layers.Hold(ctx)
	if err != nil {
		return store.Snapshot{}, err
	}
	defer release()
	if err := b.keepKernel(); err != nil {
		return store.Snapshot{}, err
	}
	like := b.h.alike(b.spec.Tag, b.recipe.Name, img.ID, w.checkpoint.Format, w.root)
	mem, err := memory.SaveLike(ctx, b.h.layers, memory.View{Image: w.checkpoint.Memory}, nil, layer.Digest{}, nil, like)
	if err != nil {
		return store.Snapshot{}, fmt.Errorf("store memory: %w", err)
	}
	dsk, err := disk.SaveOverlay(ctx, b.h.layers, overlay, img.Disk)
	if err != nil {
		return store.Snapshot{}, fmt.Errorf("store disk: %w", err)
	}
	m := store.Snapshot{
		FormatVersion: store.FormatVersion, Tag: b.spec.Tag, CreatedAt: time.Now().UTC().Round(time.Millisecond),
		Engine: w.checkpoint.Format, Image: img.ID, ImageDisk: img.Disk, Memory: mem.Digest, Disk: dsk.Digest,
		MemoryOwn: mem.OwnBytes, DiskOwn: dsk.OwnBytes, Stored: mem.StoredBytes + dsk.StoredBytes,
		Kernel: b.kernel.Version + " " + b.kernel.Digest, Agent: b.agent, Protocol: w.protocol, Source: b.digest(),
		Recipe: b.recipe.Name, RecipeText: string(b.spec.Recipe), Warm: w.what,
		BootMS: w.boot.Seconds() * 1000, WarmMS: w.warm.Seconds() * 1000, Config: img.Config,
		Limits: recipeLimits(b.recipe), Egress: b.sandboxNetwork(egress.Policy{}), Talked: w.talked,
		Tool: b.h.cfg.Version,
	}
	m = m.WithState(w.checkpoint.State)
	b.h.pins.hand(w.network, snapshotKey(&m))
	if err := b.h.enterSnapshot(ctx, m, w.checkpoint.State, b.spec.Replace); err != nil {
		return store.Snapshot{}, err
	}
	b.adopt(m, w, overlay, base)
	return m, nil
}

// adopt keeps the memory and disk that are at hand for the first fork. Nothing is lost if that fails.
func (b *build) adopt(m store.Snapshot, w *warmed, overlay, base string) {
	hotDisk := b.h.cfg.Home.HotDisk(m.ID())
	if errors.Join(os.Chmod(overlay, readOnly), os.Rename(overlay, hotDisk)) != nil {
		_ = w.checkpoint.Memory.Close()
		return
	}
	b.h.hot.adopt(m, w.checkpoint, hotDisk, base)
}

// enterSnapshot makes a snapshot durable and known, in place of an older one of its tag if that is allowed.
func (h *Host) enterSnapshot(ctx context.Context, m store.Snapshot, state []byte, replace bool) error {
	h.mu.Lock()
	old, exists := h.snapshots[m.Tag]
	h.mu.Unlock()
	if exists && replace {
		if err := h.replaceable(old); err != nil {
			return err
		}
		if err := h.removeStepsOn(m.Tag); err != nil {
			return err
		}
		restore, err := h.claimForRemoval(m.Tag)
		if err != nil {
			return err
		}
		defer restore()
		h.hot.forget(old)
		if err := h.store.RemoveSnapshot(m.Tag); err != nil {
			return err
		}
		h.mu.Lock()
		delete(h.snapshots, m.Tag)
		h.mu.Unlock()
		h.tellSnapshot(events.SnapshotRemoved, m.Tag, "", "replaced")
	}
	if err := h.store.AddSnapshot(ctx, m, state); err != nil {
		return err
	}
	h.mu.Lock()
	h.snapshots[m.Tag] = m
	h.tellSnapshot(events.SnapshotCreated, m.Tag, "", "")
	h.tellSnapshot(events.SnapshotReady, m.Tag, "", "")
	h.mu.Unlock()
	h.cfg.Changed(h.Tags())
	return nil
}
