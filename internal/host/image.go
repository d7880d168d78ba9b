package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// agentTuning reaches the agent as an environment variable, which is what the kernel makes of words it does not know.
// Go then starts goroutines with stacks of the usual size instead of growing each: growing is code too, and in a fork
// all code runs for the first time.
const agentTuning = " GODEBUG=adaptivestackstart=1"

const (
	builderMemory   = 1 << 30 // package scripts and their page cache; the snapshot's machine may be smaller
	bootTimeout     = 3 * time.Minute
	stepTimeout     = 60 * time.Minute
	powerOffTimeout = time.Minute
)

// resolveError makes a refusal out of what the user can mend, and leaves the rest.
func resolveError(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrInvalid, err)
}

// image returns the image of the plan, building it if there is none.
func (b *build) image(ctx context.Context) (store.Image, error) {
	id := b.plan.Digest
	release, err := b.h.hold(id, "build image")
	if err != nil {
		return store.Image{}, err
	}
	defer release()
	b.h.mu.Lock()
	img, ok := b.h.images[id]
	b.h.mu.Unlock()
	if ok {
		b.cached("image", "image %s is in the cache%s", short(id), packages(len(img.Packages)))
		return img, nil
	}
	b.say("image", "building image %s%s", short(id), packages(len(b.plan.Packages)))
	if err := b.plan.Prepare(ctx); err != nil {
		return store.Image{}, resolveError(err)
	}
	if layers, size := b.plan.Unpacked(); layers > 0 {
		b.say("image", "layers: %d, which unpack to %d files of %s", layers, size.Files, mib(size.Bytes))
	}
	var u undo.Stack
	defer u.Run()
	dir, err := b.h.machineDir()
	if err != nil {
		return store.Image{}, err
	}
	u.Add(func() { _ = os.RemoveAll(dir) })
	raw := filepath.Join(dir, "disk.raw")
	if err := disk.Format(ctx, raw, b.plan.DiskBytes()); err != nil {
		return store.Image{}, fmt.Errorf("make a file system: %w", err)
	}
	if err := b.install(ctx, dir, raw); err != nil {
		return store.Image{}, b.h.explainFull(err)
	}
	img, err = b.keepImage(ctx, raw)
	if err != nil {
		return store.Image{}, b.h.explainFull(err)
	}
	u.Keep()
	return img, os.RemoveAll(dir)
}

// packages says how many packages an image has; one whose base is not Debian is not made of any.
func packages(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" (%d packages)", n)
}

// keepImage stores the disk and makes the image known.
func (b *build) keepImage(ctx context.Context, raw string) (store.Image, error) {
	release, err := b.h.layers.Hold(ctx)
	if err != nil {
		return store.Image{}, err
	}
	defer release()
	b.say("store", "storing the image")
	layer, err := disk.SaveBase(ctx, b.h.layers, raw)
	if err != nil {
		return store.Image{}, fmt.Errorf("store disk: %w", err)
	}
	config := store.Config(b.plan.Config)
	img := store.Image{
		FormatVersion: store.FormatVersion, ID: b.plan.Digest, Name: b.recipe.Name, Base: b.recipe.Base, CreatedAt: time.Now().UTC(),
		Disk: layer.Digest, DiskBytes: layer.Size, OwnBytes: layer.OwnBytes, StoredBytes: layer.StoredBytes,
		Config: &config,
	}
	for _, p := range b.plan.Packages {
		img.Packages = append(img.Packages, p.Name+"="+p.Version)
	}
	if err := b.h.store.AddImage(ctx, img); err != nil {
		return store.Image{}, err
	}
	hot := b.h.cfg.Home.HotBase(img.ID)
	if errors.Join(os.Chmod(raw, readOnly), os.Rename(raw, hot)) == nil {
		b.h.hot.adoptBase(img.ID)
	}
	b.h.mu.Lock()
	b.h.images[img.ID] = img
	b.h.mu.Unlock()
	return img, nil
}

// install runs the plan in a VM: the packages are unpacked onto the empty disk from outside and configured inside.
func (b *build) install(ctx context.Context, dir, raw string) error {
	machine, conn, err := b.boot(ctx, &engine.Spec{
		ID: "build-" + b.spec.Tag, Dir: dir, CPUs: min(2, runtime.NumCPU()), MemoryBytes: builderMemory,
		Disk: engine.Disk{Path: raw, Format: "raw"},
	}, "build")
	if err != nil {
		return err
	}
	defer machine.Close()
	defer conn.Close()
	if err := b.unpack(ctx, conn); err != nil {
		return withConsole(deathOr(machine, err), machine.Console())
	}
	for _, step := range b.plan.Steps() {
		b.say("install", "%s", step.Name)
		if err := b.step(ctx, conn, step); err != nil {
			return withConsole(deathOr(machine, err), machine.Console())
		}
	}
	return powerOff(ctx, machine, conn)
}

// boot starts a machine and waits for its agent.
func (b *build) boot(ctx context.Context, spec *engine.Spec, phase string) (_ engine.Machine, _ *guest.Conn, err error) {
	began := time.Now()
	defer func() { b.h.took(TimedBoot, "", err, began) }()
	if err := b.h.admitBuild(spec.MemoryBytes); err != nil {
		return nil, nil, err
	}
	initrd := filepath.Join(spec.Dir, "initrd")
	if err := b.writeInitrd(initrd); err != nil {
		return nil, nil, err
	}
	spec.Boot = &engine.Boot{Kernel: b.kernel.Path, Initrd: initrd, Cmdline: "forkd.phase=" + phase + agentTuning}
	machine, err := b.h.cfg.Engine.Boot(ctx, spec)
	if err != nil {
		return nil, nil, fmt.Errorf("boot: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, bootTimeout, fmt.Errorf("the guest's agent did not answer within %s", bootTimeout))
	defer cancel()
	ctx, stop := untilDead(ctx, machine)
	defer stop()
	conn, err := guest.Dial(ctx, machine.DialGuest, 1)
	if err != nil {
		console := machine.Console()
		return nil, nil, withConsole(errors.Join(fmt.Errorf("boot: %w", causeOr(ctx, err)), machine.Close()), console)
	}
	return machine, conn, nil
}

func (b *build) writeInitrd(path string) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := image.WriteInitramfs(f, b.h.cfg.Agent, b.kernel); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	return nil
}

// unpack streams the root file system into the guest and makes it the root.
func (b *build) unpack(ctx context.Context, conn *guest.Conn) error {
	b.say("install", "unpacking")
	r, w := io.Pipe()
	go func() { _ = w.CloseWithError(b.plan.WriteRootfs(ctx, w)) }()
	defer r.Close()
	steady, from, stop := steadily(ctx, r)
	defer stop()
	if err := call.Upload(steady, conn, wire.MethodExtract, wire.ExtractRequest{Path: "/newroot"}, from, nil); err != nil {
		return fmt.Errorf("unpack: %w", err)
	}
	if err := conn.Pivot(ctx); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	return nil
}

// step runs one command of the plan and keeps its last lines for the error.
func (b *build) step(ctx context.Context, conn *guest.Conn, step image.Step) error {
	out := &tail{}
	end, err := call.Run(ctx, conn, wire.StartRequest{
		Process:   wire.ProcessConfig{Cmd: step.Argv[0], Args: step.Argv[1:], Envs: step.Env, Cwd: &step.Dir},
		TimeoutMS: stepTimeout.Milliseconds(), User: "root",
	}, nil, call.Output{Stdout: out, Stderr: out}, nil)
	if err != nil {
		return fmt.Errorf("%s: %w", step.Name, err)
	}
	if end.Code() == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s\n%s", step.Name, end.Status, out.text())
}

func powerOff(ctx context.Context, machine engine.Machine, conn *guest.Conn) error {
	if err := conn.PowerOff(ctx); err != nil && !isClosed(conn.Closed()) {
		return fmt.Errorf("power off: %w", err)
	}
	timeout := time.NewTimer(powerOffTimeout)
	defer timeout.Stop()
	select {
	case <-machine.Done():
		return machine.Close()
	case <-timeout.C:
		return withConsole(fmt.Errorf("power off: the guest did not end within %s", powerOffTimeout), machine.Console())
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// untilDead ends a context when the machine dies: a call into a dead guest would otherwise wait for its time-out.
func untilDead(ctx context.Context, m engine.Machine) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-m.Done():
			cancel(fmt.Errorf("%w: %s", engine.ErrDead, deathReason(m)))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// deathNotice is how long after its connections a machine's end may be noticed.
const deathNotice = time.Second

// deathOr prefers the machine's death as the explanation of a broken call. The call may break a little before the death
// is known, so a call that was not refused by a living guest is given a moment.
func deathOr(m engine.Machine, err error) error {
	if _, refused := errors.AsType[*wire.Error](err); refused {
		return err
	}
	moment := time.NewTimer(deathNotice)
	defer moment.Stop()
	select {
	case <-m.Done():
		return fmt.Errorf("%w: %s (%w)", engine.ErrDead, deathReason(m), err)
	case <-moment.C:
		return err
	}
}

// tail keeps the last part of an output.
type tail struct {
	buf []byte
}

const maxTail = 8 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p...)
	if len(t.buf) > 2*maxTail {
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-maxTail:]...)
	}
	return len(p), nil
}

func (t *tail) text() string {
	return string(t.buf[max(0, len(t.buf)-maxTail):])
}
