package host

import (
	"context"
	"fmt"
	"strings"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// warmed is a machine that was warmed and frozen.
type warmed struct {
	checkpoint *engine.Checkpoint
	what       []string
	protocol   int
	talked     bool // its guest may have connections that leave the machine
	network    string
	boot, warm time.Duration
	root       store.Snapshot // the booted machine that it is a copy of; zero: it booted itself
}

// parentName is the host name a parent has while it is warmed; no child keeps it. It is as long as a child's, whose files
// are overwritten in place.
const parentName = "parent-of-forks"

// warm boots a machine from the image, runs the recipe's warm-up and freezes it. The machine is gone afterwards,
// whatever is returned.
func (b *build) warm(ctx context.Context, dir, overlay, base string) (*warmed, error) {
	b.say("boot", "booting")
	start := time.Now()
	if err := disk.CreateOverlay(overlay, base, "raw"); err != nil {
		return nil, fmt.Errorf("create disk: %w", err)
	}
	var u undo.Stack
	defer u.Run()
	net := &sandbox{id: newID(), egress: b.commandNetwork(egress.Policy{})}
	spec := &engine.Spec{
		ID: "warm-" + b.spec.Tag, Dir: dir, CPUs: b.recipe.Machine.CPUs, MemoryBytes: b.recipe.Machine.MemoryBytes,
		Disk: engine.Disk{Path: overlay, Format: "qcow2", Backing: []string{base}},
	}
	attached, err := b.h.attach(net, spec, &u)
	if err != nil {
		return nil, err
	}
	defer attached()
	machine, conn, err := b.boot(ctx, spec, "run")
	if err != nil {
		return nil, err
	}
	defer machine.Close()
	defer conn.Close()
	w := &warmed{protocol: conn.Hello().Version}
	dead, stop := untilDead(ctx, machine)
	defer stop()
	// The parent gets the right clock and entropy of its own before its programs start; every child gets its own again.
	parent := &sandbox{id: parentName, tag: b.spec.Tag, count: 1, hostname: parentName, state: lineage.Running}
	if _, err := conn.Awaken(dead, identity(parent, nil)); err != nil {
		return nil, withConsole(fmt.Errorf("prepare the parent: %w", causeOr(dead, err)), machine.Console())
	}
	if err := b.h.connect(ctx, net); err != nil {
		return nil, err
	}
	w.boot = time.Since(start)
	b.say("boot", "agent answered after %.1f s", w.boot.Seconds())
	if err := b.bringToRest(ctx, machine, conn, net, w); err != nil {
		return nil, err
	}
	// The connection stays open: every child wakes up in the middle of it.
	w.checkpoint, err = machine.Freeze(ctx)
	if err != nil {
		return nil, withConsole(fmt.Errorf("freeze machine: %w", err), machine.Console())
	}
	return w, nil
}

// bringToRest warms a machine and freezes its processes.
func (b *build) bringToRest(ctx context.Context, machine engine.Machine, conn *guest.Conn, net *sandbox, w *warmed) (err error) {
	dead, stop := untilDead(ctx, machine)
	defer stop()
	start := time.Now()
	w.what, err = b.warmup(dead, conn)
	if err != nil {
		return withConsole(fmt.Errorf("%w: %w", ErrWarmup, causeOr(dead, err)), machine.Console())
	}
	w.warm = time.Since(start)
	b.say("freeze", "freezing (warmed in %.1f s)", w.warm.Seconds())
	if err := conn.Quiesce(dead, wire.QuiesceRequest{Settle: true}); err != nil {
		return withConsole(fmt.Errorf("freeze processes: %w", causeOr(dead, err)), machine.Console())
	}
	if err := rest(dead); err != nil {
		return withConsole(fmt.Errorf("freeze processes: %w", err), machine.Console())
	}
	w.talked, w.network = b.h.hasTalked(ctx, net), net.id
	return nil
}

// restTime is how long a parent has nothing to do before it is frozen. What is still under way then, the end of the last
// call or the kernel tidying up after it, every child would do again, as the first thing it does.
const restTime = 300 * time.Millisecond

func rest(ctx context.Context) error {
	timer := time.NewTimer(restTime)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// warmup runs what the recipe says and returns what is warm now.
func (b *build) warmup(ctx context.Context, conn *guest.Conn) ([]string, error) {
	up := b.recipe.Warmup
	warm := []string{}
	if b.recipe.Init != "" {
		if err := b.startInit(ctx, conn); err != nil {
			return nil, err
		}
		warm = append(warm, b.recipe.Init)
	}
	if up == nil {
		return warm, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, up.Timeout, &lateError{fmt.Sprintf("it did not finish within %s (warmup.timeout)", up.Timeout)})
	defer cancel()
	for i := range up.Services {
		start := time.Now()
		s := &up.Services[i]
		b.say("warm-up", "starting %s: %s", s.Name, strings.Join(s.Command, " "))
		if err := startService(ctx, conn, s); err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
		b.say("warm-up", "%s is ready after %.1f s", s.Name, time.Since(start).Seconds())
		warm = append(warm, s.Name+": "+strings.Join(s.Command, " "))
	}
	if up.Command != nil {
		if err := b.warmCommand(ctx, conn, up); err != nil {
			return nil, err
		}
		warm = append(warm, strings.Join(up.Command, " "))
	}
	if up.Context != "" {
		if err := b.warmContext(ctx, conn, up); err != nil {
			return nil, err
		}
		warm = append(warm, up.Context+" context")
	}
	return warm, nil
}

func (b *build) warmContext(ctx context.Context, conn *guest.Conn, up *image.Warmup) error {
	b.say("warm-up", "evaluating %s code", up.Context)
	out := &tail{}
	// Whatever its language: what code without one is evaluated in.
	res, err := call.Eval(ctx, conn, wire.EvalRequest{Context: wire.DefaultContext(""), Language: up.Context, Code: b.plan.WarmupCode},
		call.Output{Stdout: out, Stderr: out})
	if err != nil {
		return fmt.Errorf("%w%s", err, output(out))
	}
	if res.Error != nil {
		return fmt.Errorf("the code raised %s: %s\n%s%s", res.Error.Name, res.Error.Value, res.Error.Traceback, output(out))
	}
	return nil
}

func output(t *tail) string {
	if text := t.text(); text != "" {
		return "\noutput:\n" + text
	}
	return ""
}

// warmCommand runs a command to its end.
func (b *build) warmCommand(ctx context.Context, conn *guest.Conn, up *image.Warmup) error {
	b.say("warm-up", "running %s", strings.Join(up.Command, " "))
	out := &tail{}
	end, err := call.Run(ctx, conn, wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: up.Command[0], Args: up.Command[1:]}, TimeoutMS: up.Timeout.Milliseconds(),
	}, nil, call.Output{Stdout: out, Stderr: out}, nil)
	if err != nil {
		return fmt.Errorf("%s: %w%s", strings.Join(up.Command, " "), err, output(out))
	}
	if end.Code() != 0 {
		return fmt.Errorf("%s: %s%s", strings.Join(up.Command, " "), end.Status, output(out))
	}
	return nil
}
