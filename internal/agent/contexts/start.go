package contexts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/pipe"
	"forkd.dev/forkd/internal/agent/process"
	"forkd.dev/forkd/internal/agent/quick"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
)

// start starts an interpreter and returns when it is ready for code.
func (m *Manager) start(ctx context.Context, cfg wire.ContextConfig) (*Context, error) {
	user, err := m.cfg.Accounts.User(cfg.User)
	if err != nil {
		return nil, err
	}
	env, err := m.cfg.Accounts.Environ(user, cfg.Env)
	if err != nil {
		return nil, err
	}
	dir, err := m.cfg.Accounts.Dir(user, cfg.Cwd)
	if err != nil {
		return nil, err
	}
	in, err := m.interpreter(cfg, dir, env)
	if err != nil {
		return nil, err
	}
	sys, err := process.Credential(user)
	if err != nil {
		return nil, err
	}
	command := in.command(env, dir)
	command.Sys = sys
	c := &Context{
		id:     cfg.ID,
		cfg:    cfg,
		in:     in,
		oracle: m.cfg.OutOfMemory,
		cwd:    dir,
		gone:   make(chan struct{}),
		turn:   make(chan struct{}, 1),
		kept:   pipe.Ring[wire.Kind]{Max: keptBytes},
	}
	err = c.open(command, user)
	if err == nil {
		err = m.launch(ctx, c, command)
	}
	for _, fd := range command.Files {
		_ = unix.Close(fd)
	}
	if err != nil {
		for _, o := range c.outs {
			o.Close()
		}
		if c.ctl != nil {
			_ = c.ctl.Close()
		}
		return nil, err
	}
	m.watchers.Go(func() { m.watch(c) })
	if err := c.greet(ctx); err != nil {
		_ = c.child.SignalGroup(unix.SIGKILL)
		<-c.gone
		return nil, err
	}
	return c, nil
}

// open makes the channels of a context and the child's ends of them, which are the caller's to close.
func (c *Context) open(command *reap.Command, user *account.User) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return wire.Errorf(wire.CodeExhausted, "context %s: make a control channel: %v", c.id, err)
	}
	var stdin int
	if c.in.stdin {
		stdin, err = unix.FcntlInt(uintptr(pair[1]), unix.F_DUPFD_CLOEXEC, 3)
	} else {
		stdin, err = unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		_ = errors.Join(unix.Close(pair[0]), unix.Close(pair[1]))
		return wire.Errorf(wire.CodeInternal, "context %s: open its input: %v", c.id, err)
	}
	command.Files = append(command.Files, stdin)
	defer func() { command.Files = append(command.Files, pair[1]) }()
	// Only our end is not blocking: the driver's reads wait.
	if c.ctl, err = quick.NewConn(pair[0], "control", false); err != nil {
		return wire.Errorf(wire.CodeInternal, "context %s: %v", c.id, err)
	}
	for _, kind := range []wire.Kind{wire.KindStdout, wire.KindStderr} {
		r, w, err := pipe.New()
		if err != nil {
			return wire.Errorf(wire.CodeExhausted, "context %s: %v", c.id, err)
		}
		command.Files = append(command.Files, w)
		if os.Geteuid() == 0 {
			_ = unix.Fchown(w, int(user.UID), int(user.GID)) // for those who open /dev/stdout again
		}
		o, err := pipe.NewOutlet(r, "output", chunk, func(b []byte) { c.deliver(kind, b) })
		if err != nil {
			return wire.Errorf(wire.CodeInternal, "context %s: %v", c.id, err)
		}
		c.outs = append(c.outs, o)
	}
	pipe.Share(c.outs...)
	if _, err := c.ctl.Write(c.in.driver); err != nil {
		return wire.Errorf(wire.CodeInternal, "context %s: send the driver: %v", c.id, err)
	}
	return nil
}

func (m *Manager) launch(ctx context.Context, c *Context, command *reap.Command) error {
	if m.cfg.CgroupDir != nil {
		dir, err := m.cfg.CgroupDir(c.id)
		if err != nil {
			return wire.Errorf(wire.CodeInternal, "context %s: open its cgroup: %v", c.id, err)
		}
		if dir != nil {
			defer dir.Close()
			command.Sys.UseCgroupFD = true
			command.Sys.CgroupFD = int(dir.Fd())
		}
	}
	child, err := m.cfg.Reaper.Start(ctx, command)
	if ctx.Err() != nil && err != nil {
		return context.Cause(ctx) // while the machine was frozen
	}
	if err != nil {
		return wire.Errorf(wire.CodePrecondition, "context %s: %v; is the image's %s complete?", c.id, err, c.in.name)
	}
	c.child = child
	return nil
}

// watch sees to it that the end of the process is noticed and everything of it closed.
func (m *Manager) watch(c *Context) {
	var readers sync.WaitGroup
	for _, o := range c.outs {
		readers.Go(o.Run)
	}
	<-c.child.Done()
	// Who waits for an answer stops waiting; a child of user code may still hold the other end.
	_ = c.ctl.SetDeadline(time.Unix(1, 0))
	if m.cfg.OutOfMemory != nil && c.child.State().Signal() == unix.SIGKILL && m.cfg.OutOfMemory(c.child.PID()) {
		c.mu.Lock()
		c.memory = true
		c.mu.Unlock()
	}
	if m.cfg.Gone != nil {
		m.cfg.Gone(c.id)
	}
	close(c.gone)
	c.turn <- struct{}{}
	_ = c.ctl.Close()
	<-c.turn
	readers.Wait() // until the last descendant has closed its output
	for _, o := range c.outs {
		o.Close()
	}
}

// greet waits until the driver is ready.
func (c *Context) greet(ctx context.Context) error {
	deadline := time.Now().Add(startLimit)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = c.ctl.SetReadDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = c.child.SignalGroup(unix.SIGKILL) })
	reply, err := c.receive(0)
	stop()
	_ = c.ctl.SetReadDeadline(time.Time{})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return c.stillborn(err)
	}
	if a, ok := reply.(*answer); ok && a.Ready != nil {
		c.ready = *a.Ready
		c.ready.Version = strings.TrimSpace(c.ready.Version)
		if c.in.quiet {
			c.hush()
		}
		return nil
	}
	version, ok := reply.(string)
	if !ok {
		return c.stillborn(errMarshal)
	}
	var major, minor int
	if n, _ := fmt.Sscanf(version, "%d.%d", &major, &minor); n < 2 || major < 3 || major == 3 && minor < 8 {
		return wire.Errorf(wire.CodePrecondition, "context %s: the image's python3 is version %s; 3.8 or newer is needed", c.id, version)
	}
	c.ready = ready{Version: version, Ops: []string{"facts", "renew"}}
	return nil
}

// hush drops what the interpreter has printed so far.
func (c *Context) hush() {
	for _, o := range c.outs {
		o.Drain()
	}
	c.sinkMu.Lock()
	c.kept.Clear()
	c.sinkMu.Unlock()
}

// can says whether the driver knows an operation.
func (c *Context) can(op string) bool { return slices.Contains(c.ready.Ops, op) }

// stillborn says why an interpreter did not come up, with what it printed.
func (c *Context) stillborn(err error) error {
	why := "it did not answer"
	if errors.Is(err, os.ErrDeadlineExceeded) && c.alive() {
		why = "it did not answer within " + startLimit.String()
	}
	_ = c.child.SignalGroup(unix.SIGKILL)
	<-c.child.Done()
	if c.child.State().Signal() != unix.SIGKILL {
		why = c.child.State().String()
	}
	for _, o := range c.outs {
		o.Drain()
	}
	var said strings.Builder
	c.sinkMu.Lock()
	defer c.sinkMu.Unlock()
	_ = c.kept.Flush(func(_ wire.Kind, b []byte) error { said.Write(b); return nil })
	text := strings.TrimSpace(strings.ToValidUTF8(said.String(), "?"))
	if len(text) > 2000 {
		text = "…" + text[len(text)-2000:]
	}
	if text != "" {
		why += "; it said: " + text
	}
	return wire.Errorf(wire.CodePrecondition, "context %s: %s did not start: %s", c.id, c.in.name, why)
}
