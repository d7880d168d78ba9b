package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/image/dockerfile"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// DockerfileSpec is a Dockerfile with all that it may use.
type DockerfileSpec struct {
	Name    string // for messages
	Text    []byte
	Context *dockerfile.Context
	Args    map[string]string
	Target  string
	Bases   map[string]fs.FS // the files of bases that are paths on the client's machine, by what FROM says
	Machine image.Machine    // of zero fields the defaults, or what the base has
	Network *image.Network   // nil: none, or that of the snapshot it stands on
	Titles  map[int]string   // what instructions are called in progress and errors, by their line; others by their own text
	Warmup  *image.Warmup    // what runs last, in the machine that is kept, as a recipe's; its code is not read from a file
}

// dockerBuild is the build of a Dockerfile, stage by stage.
type dockerBuild struct {
	*build
	spec   *DockerfileSpec
	stages map[int]*stage
	bases  map[string]*stage
	undo   undo.Stack // what holds the snapshots of stages
}

// stage is a stage that is there, or something else to stand on.
type stage struct {
	tip    store.Snapshot // the machine
	key    string
	config image.Config
}

// dockerfile makes a snapshot of a Dockerfile: each of its stages is a chain of steps on the machine of what it stands on.
func (b *build) dockerfile(ctx context.Context, spec *DockerfileSpec) (store.Snapshot, error) {
	d := &dockerBuild{build: b, spec: spec, stages: map[int]*stage{}, bases: map[string]*stage{}}
	defer d.undo.Run()
	file, err := dockerfile.Parse(spec.Name, spec.Text)
	if err != nil {
		return store.Snapshot{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	target, err := file.Target(dockerfile.Options{Args: spec.Args, Target: spec.Target})
	if err != nil {
		return store.Snapshot{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	// Commands get what the Dockerfile says and nothing of what the base's own recipe would give to its processes.
	b.prepare = func(ctx context.Context, bl *builder) error { return bl.configure(ctx, image.Config{}) }
	return d.target(ctx, target, len(file.Stages) > 1)
}

// at names a place in the Dockerfile in an error.
func (d *dockerBuild) at(line int, err error) error {
	return fmt.Errorf("%s:%d: %w", d.spec.Name, line, err)
}

// target makes the stage that was asked for, and the snapshot of it.
func (d *dockerBuild) target(ctx context.Context, t *dockerfile.Build, several bool) (store.Snapshot, error) {
	from, steps, config, err := d.plan(ctx, t)
	if err != nil {
		return store.Snapshot{}, err
	}
	if names := t.Unused(); len(names) > 0 {
		d.say("arguments", "no ARG line takes the build argument %s", strings.Join(names, ", "))
	}
	key := from.key
	if len(steps) > 0 {
		key = steps[len(steps)-1].key
	}
	final := config
	if final.WorkDir == "" {
		final.WorkDir = "/"
	}
	last := buildStep{
		key: stepKey(key, "configuration", final), kept: true, settled: true,
		do: func(ctx context.Context, m *builder) error { return m.configure(ctx, final) },
		describe: func(m *store.Snapshot) {
			kept := store.Config(final)
			m.Config = &kept
		},
	}
	steps = append(steps, last)
	if w := d.spec.Warmup; w != nil {
		d.build.plan = &image.Plan{WarmupCode: w.Code}
		steps[len(steps)-1].kept = false // the warm-up's machine is
		warm := d.lastStep(last.key)
		told := warm.describe
		warm.describe = func(m *store.Snapshot) {
			last.describe(m)
			told(m)
		}
		steps = append(steps, warm)
	}
	d.source = steps[len(steps)-1].key
	if m, ok, err := d.existing(); ok || err != nil {
		return m, err
	}
	d.name(t, several)
	tip, forget, err := d.chain(ctx, from.tip, steps)
	if err != nil {
		return store.Snapshot{}, err
	}
	defer forget()
	d.recipe.Name = path.Base(d.spec.Name)
	d.build.spec.Recipe = d.spec.Text
	return d.tag(ctx, tip)
}

func (d *dockerBuild) name(t *dockerfile.Build, several bool) {
	d.prefix = ""
	if several {
		d.prefix = t.Name() + " "
	}
}

// stage makes a stage that others use.
func (d *dockerBuild) stage(ctx context.Context, t *dockerfile.Build) (*stage, error) {
	if s := d.stages[t.Index()]; s != nil {
		return s, nil
	}
	from, steps, config, err := d.plan(ctx, t)
	if err != nil {
		return nil, err
	}
	s := &stage{tip: from.tip, key: from.key, config: config}
	if len(steps) > 0 {
		last := &steps[len(steps)-1]
		last.kept = true
		d.name(t, true)
		tip, forget, err := d.chain(ctx, from.tip, steps)
		if err != nil {
			return nil, err
		}
		d.undo.Add(forget)
		s.tip, s.key = tip, last.key
	}
	d.stages[t.Index()] = s
	return s, nil
}

// plan makes what a stage stands on, and what its copies are from, and says what is to be done then.
func (d *dockerBuild) plan(ctx context.Context, t *dockerfile.Build) (*stage, []buildStep, image.Config, error) {
	none := image.Config{}
	base, err := t.Base()
	if err != nil {
		return nil, nil, none, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	from, err := d.base(ctx, &base, t.Line())
	if err != nil {
		return nil, nil, none, err
	}
	ops, config, err := t.Eval(from.config)
	if err != nil {
		return nil, nil, none, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if err := d.checkNetwork(from.tip.Egress); err != nil {
		return nil, nil, none, d.at(t.Line(), err)
	}
	var steps []buildStep
	key := d.networkKey(from.key, from.tip.Egress)
	for i := range ops {
		step, err := d.step(ctx, key, &ops[i])
		if err != nil {
			return nil, nil, none, err
		}
		key = step.key
		steps = append(steps, step)
	}
	return from, steps, config, nil
}

// step is an operation as a step.
func (d *dockerBuild) step(ctx context.Context, at string, op *dockerfile.Op) (buildStep, error) {
	s := buildStep{title: op.Text, kept: true}
	if title, ok := d.spec.Titles[op.Line]; ok {
		s.title = title
	}
	fail := func(err error) error {
		if err == nil {
			return nil
		}
		return d.at(op.Line, fmt.Errorf("%s: %w", s.title, err))
	}
	switch {
	case op.Run != nil:
		r := op.Run
		s.key = stepKey(at, "run", r.Argv, dockerfile.CountedEnv(r.Env), r.Dir, r.User)
		s.do = func(ctx context.Context, m *builder) error {
			dir := r.Dir
			if dir == "" {
				dir = "/"
			}
			return fail(m.run(ctx, command{argv: r.Argv, env: r.Env, dir: dir, user: r.User}))
		}
	case op.Dir != nil:
		s.kept = false
		s.key = stepKey(at, "dir", op.Dir.Path)
		s.do = func(ctx context.Context, m *builder) error {
			return fail(m.extract(ctx, func(w io.Writer) error { return dockerfile.WriteDir(w, op.Dir.Path) }))
		}
	default:
		return s, d.copy(ctx, at, op, &s, fail)
	}
	return s, nil
}

// copy makes a step of a copy. Its sources are looked up now, those in another machine when it is done.
func (d *dockerBuild) copy(ctx context.Context, at string, op *dockerfile.Op, s *buildStep, fail func(error) error) error {
	cp := op.Copy
	if cp.From != nil {
		from, err := d.base(ctx, cp.From, op.Line)
		if err != nil {
			return err
		}
		s.key = stepKey(at, "copy from", from.key, cp.Sources, cp.Dest, cp.Chown, cp.Chmod)
		s.do = func(ctx context.Context, m *builder) error {
			return fail(d.fetch(ctx, m, from, cp))
		}
		return nil
	}
	selected, err := d.spec.Context.Select(cp)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, fail(err))
	}
	s.key = stepKey(at, "copy", selected.Digest(), cp.Dest, cp.Chown, cp.Chmod)
	s.do = func(ctx context.Context, m *builder) error { return fail(m.copy(ctx, selected, cp)) }
	return nil
}

// copy puts files into the machine.
func (bl *builder) copy(ctx context.Context, s *dockerfile.Selection, cp *dockerfile.Copy) error {
	uid, gid, err := bl.owner(ctx, cp.Chown)
	if err != nil {
		return err
	}
	isDir := false
	if s.NeedsDest() {
		if isDir, err = bl.isDir(ctx, cp.Dest); err != nil {
			return err
		}
	}
	return bl.extract(ctx, func(w io.Writer) error { return s.Write(ctx, w, isDir, dockerfile.Owner{UID: uid, GID: gid}) })
}

// fetch copies from another stage or image, out of a machine that runs only for that.
func (d *dockerBuild) fetch(ctx context.Context, m *builder, from *stage, cp *dockerfile.Copy) error {
	spool, err := d.h.TempDir("copy-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(spool)
	f, err := os.Create(path.Join(spool, "files"))
	if err != nil {
		return fmt.Errorf("make room for the copy: %w", err)
	}
	defer f.Close()
	files := dockerfile.NewContext(f)
	source, err := d.startBuilder(ctx, from.tip)
	if err != nil {
		return err
	}
	defer source.close()
	alive, stop := untilDead(ctx, source.s.machine)
	defer stop()
	for _, src := range cp.Sources {
		if err := source.gather(alive, files, src); err != nil {
			return causeOr(alive, err)
		}
	}
	source.close()
	selected, err := files.Select(cp)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return m.copy(ctx, selected, cp)
}

// gather reads what a source names, or may match, into a context.
func (bl *builder) gather(ctx context.Context, into *dockerfile.Context, src string) error {
	name := path.Clean("/" + src)
	for strings.ContainsAny(name, `*?[\`) {
		name = path.Dir(name)
	}
	// A link names something elsewhere in the machine: that is what is copied.
	r, w := io.Pipe()
	go func() {
		_ = w.CloseWithError(call.Download(ctx, bl.conn, wire.MethodArchive, wire.ArchiveRequest{Path: name}, w))
	}()
	defer r.Close()
	if err := into.AddArchive(strings.TrimPrefix(path.Dir(name), "/"), r); err != nil {
		return fmt.Errorf("%s: %w", src, err)
	}
	return nil
}

// base is the machine of what a stage stands on, or copies from.
func (d *dockerBuild) base(ctx context.Context, base *dockerfile.Base, line int) (*stage, error) {
	if base.Stage != nil {
		return d.stage(ctx, base.Stage)
	}
	if s := d.bases[base.Ref]; s != nil {
		return s, nil
	}
	s, err := d.foreign(ctx, base.Ref)
	if err != nil {
		return nil, d.at(line, fmt.Errorf("%s: %w", base.Ref, err))
	}
	d.bases[base.Ref] = s
	return s, nil
}

// foreign is the machine of a base, which a recipe could have as well.
func (d *dockerBuild) foreign(ctx context.Context, ref string) (*stage, error) {
	if tag, ok := strings.CutPrefix(ref, "snapshot:"); ok {
		return d.onSnapshot(tag)
	}
	files := d.spec.Bases[ref]
	if ref == scratch {
		dir, err := d.emptyBase()
		if err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
		ref, files = "tar:"+scratch, os.DirFS(dir)
	}
	text := "base: " + strconv.Quote(ref) + "\n" + machineText(d.spec.Machine)
	recipe, err := image.ParseRecipe("FROM", []byte(text))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, withoutPlace(err))
	}
	recipe.Name = imageName(ref)
	sub := *d.build
	sub.recipe, sub.spec.Recipe, sub.spec.Files, sub.prepare = recipe, []byte(text), files, nil
	if err := checkMachine(recipe); err != nil {
		return nil, err
	}
	img, err := d.imageOf(ctx, &sub)
	if err != nil {
		return nil, err
	}
	root, forget, err := sub.rootStep(ctx, img)
	if err != nil {
		return nil, err
	}
	d.undo.Add(forget)
	config := d.withoutOwn(configOf(img.Config), img.ID)
	if recipe.From.Kind == image.KindDebian { // and not a recipe's, which may name them
		config.WorkDir, config.User = "", ""
	}
	return &stage{tip: root, key: root.Source, config: config}, nil
}

// scratch is Docker's name for nothing.
const scratch = "scratch"

// emptyBase is the files of a base without any: a directory with an empty archive.
func (d *dockerBuild) emptyBase() (string, error) {
	dir, err := d.h.TempDir("scratch-")
	if err != nil {
		return "", err
	}
	const endOfArchive = 1024 // zeros
	err = os.Mkdir(path.Join(dir, image.LocalDir), 0o700)
	if err == nil {
		err = os.WriteFile(path.Join(dir, image.LocalFile), make([]byte, endOfArchive), 0o600)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("make an empty base: %w", err), os.RemoveAll(dir))
	}
	return dir, nil
}

// onSnapshot is a machine that is warm already.
func (d *dockerBuild) onSnapshot(tag string) (*stage, error) {
	if err := d.standsOn(tag); err != nil {
		return nil, err
	}
	m, _, forget, err := d.h.claim(tag)
	if err != nil {
		return nil, err
	}
	d.undo.Add(forget)
	if err := d.h.sameMachine(m, d.spec.Machine); err != nil {
		return nil, err
	}
	return &stage{tip: m, key: stepKey("snapshot", m.ID()), config: d.withoutOwn(configOf(m.Config), m.Image)}, nil
}

// sameDisk says whether an image's disk has the size that was asked for, if one was.
func sameDisk(img store.Image, asked int64) error {
	if asked == 0 || asked == img.DiskBytes {
		return nil
	}
	return hint(invalid("the disk of image %s has %s, not %s", img.Name, mib(img.DiskBytes), mib(asked)),
		"leave its size out: what stands on an image has that image's disk")
}

// sameMachine says whether a snapshot's machine has the size that was asked for, as far as one was.
func (h *Host) sameMachine(m store.Snapshot, asked image.Machine) error {
	h.mu.Lock()
	img := h.images[m.Image]
	h.mu.Unlock()
	if err := sameDisk(img, asked.DiskBytes); err != nil {
		return err
	}
	if asked.CPUs != 0 && asked.CPUs != m.Engine.CPUs {
		return hint(invalid("the machine of snapshot %s has %d cpus, not %d", m.Tag, m.Engine.CPUs, asked.CPUs),
			"leave the machine's size out: what goes on in a machine has that machine")
	}
	if asked.MemoryBytes != 0 && asked.MemoryBytes != m.Engine.MemoryBytes {
		return hint(invalid("the machine of snapshot %s has %s of memory, not %s", m.Tag, mib(m.Engine.MemoryBytes), mib(asked.MemoryBytes)),
			"leave the machine's size out: what goes on in a machine has that machine")
	}
	return nil
}

// imageName calls an image after its base.
func imageName(ref string) string {
	name := strings.Trim(strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '.' || r == '_' {
			return r
		}
		return '-'
	}, strings.ToLower(ref)), "-._")
	if name == "" {
		return "image"
	}
	return name[:min(len(name), 63)]
}

func machineText(m image.Machine) string {
	var lines []string
	if m.CPUs != 0 {
		lines = append(lines, fmt.Sprintf("  cpus: %d\n", m.CPUs))
	}
	if m.MemoryBytes != 0 {
		lines = append(lines, fmt.Sprintf("  memory: %dMiB\n", m.MemoryBytes>>20))
	}
	if m.DiskBytes != 0 {
		lines = append(lines, fmt.Sprintf("  disk: %dMiB\n", m.DiskBytes>>20))
	}
	if len(lines) == 0 {
		return ""
	}
	return "machine:\n" + strings.Join(lines, "")
}

// withoutPlace drops the places of a recipe that nobody wrote.
func withoutPlace(err error) error {
	e, ok := errors.AsType[*image.FileError](err)
	if !ok || len(e.Faults) == 0 {
		return err
	}
	return errors.New(e.Faults[0].Message)
}

// imageOf is the image of a base; kernel is set afterwards.
func (d *dockerBuild) imageOf(ctx context.Context, sub *build) (store.Image, error) {
	if sub.recipe.From.Kind == image.KindImage {
		img, err := d.h.baseImage(sub.recipe.From.Ref)
		if err != nil {
			return img, err
		}
		if err := sameDisk(img, d.spec.Machine.DiskBytes); err != nil {
			return img, err
		}
		return img, sub.findKernelOf(ctx, img)
	}
	if err := sub.resolve(ctx); err != nil {
		return store.Image{}, err
	}
	defer sub.plan.Close()
	return sub.image(ctx)
}

// withoutOwn drops what processes of our own Debian get that no image of a registry says: who they run as decides it.
func (d *dockerBuild) withoutOwn(c image.Config, img string) image.Config {
	d.h.mu.Lock()
	base := d.h.images[img].Base
	d.h.mu.Unlock()
	if strings.HasPrefix(base, string(image.KindDebian)+":") {
		c.Env = maps.Clone(c.Env)
		delete(c.Env, "HOME")
		delete(c.Env, "USER")
	}
	return c
}

// configOf is the configuration that a record has, if it has one.
func configOf(c *store.Config) image.Config {
	if c == nil {
		return image.Config{}
	}
	return image.Config(*c)
}
