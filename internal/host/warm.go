package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/lineage"
)

// warmed is a machine that was warmed and frozen.
type warmed struct {
	checkpoint *engine.Checkpoint
	what       []string
	protocol   int
	boot, warm time.Duration
}

// parentName is the host name a parent has while it is warmed; no child keeps it. It is as long as a child's, whose files
// are overwritten in place.
const parentName = "parent-of-forks"

// warm boots a machine from the image, runs the recipe's warm-up and freezes it. The machine is gone afterwards,
// whatever is returned.
func (b *build) warm(ctx context.Context, dir, overlay, base string) (*warmed, error) {
	b.say("boot", "booting")
	start := time.Now()
	machine, conn, err := b.boot(ctx, &engine.Spec{
		ID: "warm-" + b.spec.Tag, Dir: dir, CPUs: b.recipe.Machine.CPUs, MemoryBytes: b.recipe.Machine.MemoryBytes,
		Disk: engine.Disk{Path: overlay, Format: "qcow2", Backing: []string{base}},
	}, "run")
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
	w.boot = time.Since(start)
	b.say("boot", "agent answered after %.1f s", w.boot.Seconds())
	start = time.Now()
	w.what, err = b.warmup(dead, conn)
	if err != nil {
		return nil, withConsole(fmt.Errorf("%w: %w", ErrWarmup, causeOr(dead, err)), machine.Console())
	}
	w.warm = time.Since(start)
	b.say("freeze", "freezing (warmed in %.1f s)", w.warm.Seconds())
	if err := conn.Quiesce(dead, wire.QuiesceRequest{Settle: true}); err != nil {
		return nil, withConsole(fmt.Errorf("freeze processes: %w", causeOr(dead, err)), machine.Console())
	}
	if err := rest(dead); err != nil {
		return nil, withConsole(fmt.Errorf("freeze processes: %w", err), machine.Console())
	}
	// The connection stays open: every child wakes up in the middle of it.
	w.checkpoint, err = machine.Freeze(ctx)
	if err != nil {
		return nil, withConsole(fmt.Errorf("freeze machine: %w", err), machine.Console())
	}
	return w, nil
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
	if up == nil {
		return []string{}, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, up.Timeout, fmt.Errorf("it did not finish within %s (warmup.timeout)", up.Timeout))
	defer cancel()
	if up.Context != "" {
		return []string{up.Context + " context"}, b.warmContext(ctx, conn, up)
	}
	return []string{strings.Join(up.Command, " ")}, b.warmCommand(ctx, conn, up)
}

func (b *build) warmContext(ctx context.Context, conn *guest.Conn, up *image.Warmup) error {
	b.say("warm-up", "evaluating %s code", up.Context)
	out := &tail{}
	res, err := call.Eval(ctx, conn, wire.EvalRequest{Language: up.Context, Code: b.plan.WarmupCode},
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

// warmCommand runs a command: to its end, or until its ready check holds, and then it goes on running in every child.
func (b *build) warmCommand(ctx context.Context, conn *guest.Conn, up *image.Warmup) error {
	b.say("warm-up", "running %s", strings.Join(up.Command, " "))
	if up.Ready == nil {
		out := &tail{}
		end, err := call.Run(ctx, conn, wire.StartRequest{
			Process: wire.ProcessConfig{Cmd: up.Command[0], Args: up.Command[1:]}, TimeoutMS: up.Timeout.Milliseconds(),
		}, nil, call.Output{Stdout: out, Stderr: out}, nil)
		if err != nil {
			return fmt.Errorf("%w%s", err, output(out))
		}
		if end.Code() != 0 {
			return fmt.Errorf("%s: %s%s", strings.Join(up.Command, " "), end.Status, output(out))
		}
		return nil
	}
	return startService(ctx, conn, up)
}

// service is a command that keeps running, watched from its start.
type service struct {
	mu    sync.Mutex
	out   tail
	lines *regexp.Regexp // nil: nobody asks
	line  []byte
	seen  bool

	ended chan struct{}
	end   *wire.ProcessEnd
	err   error
}

func startService(ctx context.Context, conn *guest.Conn, up *image.Warmup) error {
	s := &service{ended: make(chan struct{})}
	if up.Ready.Log != "" {
		re, err := regexp.Compile(up.Ready.Log)
		if err != nil {
			return fmt.Errorf("%w: ready.log: %w", ErrInvalid, err)
		}
		s.lines = re
	}
	// The stream is given up when the service is ready; the process stays.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer close(s.ended)
		s.end, s.err = call.Run(ctx, conn, wire.StartRequest{
			Process: wire.ProcessConfig{Cmd: up.Command[0], Args: up.Command[1:]},
		}, nil, call.Output{Stdout: s, Stderr: s}, nil)
	}()
	err := s.await(ctx, conn, up.Ready)
	s.mu.Lock()
	text := output(&s.out)
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: %w%s", strings.Join(up.Command, " "), err, text)
	}
	return nil
}

func (s *service) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = s.out.Write(p)
	if s.lines == nil || s.seen {
		return len(p), nil
	}
	s.line = append(s.line, p...)
	for {
		i := bytes.IndexByte(s.line, '\n')
		if i < 0 {
			break
		}
		s.seen = s.seen || s.lines.Match(s.line[:i])
		s.line = s.line[i+1:]
	}
	s.seen = s.seen || s.lines.Match(s.line)
	if len(s.line) > 2*maxTail {
		s.line = s.line[len(s.line)-maxTail:]
	}
	return len(p), nil
}

// readyInterval is how often a check is repeated: a guest under emulation should spend its time on starting.
const readyInterval = 100 * time.Millisecond

func (s *service) await(ctx context.Context, conn *guest.Conn, r *image.Ready) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.Timeout, fmt.Errorf("it was not ready within %s: %s", r.Timeout, describe(r)))
	defer cancel()
	tick := time.NewTicker(readyInterval)
	defer tick.Stop()
	for {
		ok, err := s.check(ctx, conn, r)
		if err != nil && ctx.Err() == nil {
			return err
		}
		if ok {
			return nil
		}
		select {
		case <-tick.C:
		case <-s.ended:
			return s.early()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *service) early() error {
	if s.err != nil {
		return s.err
	}
	return fmt.Errorf("it ended before it was ready: %s", s.end.Status)
}

func describe(r *image.Ready) string {
	switch {
	case r.Port != 0:
		return fmt.Sprintf("nothing listens on port %d", r.Port)
	case r.File != "":
		return fmt.Sprintf("%s does not exist", r.File)
	case r.Log != "":
		return fmt.Sprintf("no line of its output matches %q", r.Log)
	}
	return fmt.Sprintf("%q does not exit with 0", strings.Join(r.Command, " "))
}

func (s *service) check(ctx context.Context, conn *guest.Conn, r *image.Ready) (bool, error) {
	switch {
	case r.Port != 0:
		return listens(ctx, conn, r.Port)
	case r.File != "":
		return exists(ctx, conn, r.File)
	case r.Log != "":
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.seen, nil
	}
	end, err := call.Run(ctx, conn, wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: r.Command[0], Args: r.Command[1:]}, TimeoutMS: r.Timeout.Milliseconds(),
	}, nil, call.Output{}, nil)
	if err != nil {
		return false, fmt.Errorf("ready check: %w", err)
	}
	return end.Code() == 0, nil
}

func exists(ctx context.Context, conn *guest.Conn, path string) (bool, error) {
	err := conn.Call(ctx, wire.MethodFileStat, wire.PathRequest{Path: path}, &wire.EntryReply{})
	if e, ok := errors.AsType[*wire.Error](err); ok && e.Code == wire.CodeNotFound {
		return false, nil
	}
	return err == nil, err
}

// listens asks the guest's kernel and not a program: an image need not have one that could tell.
func listens(ctx context.Context, conn *guest.Conn, port int) (bool, error) {
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		var text bytes.Buffer
		if err := call.Download(ctx, conn, wire.MethodFileRead, wire.ReadRequest{Path: table}, &text); err != nil {
			return false, fmt.Errorf("ready check: %w", err)
		}
		for line := range strings.Lines(text.String()) {
			if listening(line, port) {
				return true, nil
			}
		}
	}
	return false, nil
}

// listening reads a line of /proc/net/tcp: "sl local_address rem_address st …", addresses as hex ip:port, 0A = listen.
func listening(line string, port int) bool {
	f := strings.Fields(line)
	if len(f) < 4 || f[3] != "0A" {
		return false
	}
	_, hex, ok := strings.Cut(f[1], ":")
	n, err := strconv.ParseUint(hex, 16, 16)
	return ok && err == nil && int(n) == port
}
