package process

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/pipe"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
)

// plan is a request that has been checked: what to start, for whom.
type plan struct {
	request *wire.StartRequest
	config  wire.ProcessConfig // as it is listed
	command reap.Command
	user    *account.User
}

func (m *Manager) plan(req *wire.StartRequest) (*plan, error) {
	cfg := req.Process
	if req.Shell {
		cfg.Cmd, cfg.Args = "", nil
	}
	if cfg.Cmd == "" && !req.Shell {
		return nil, wire.Errorf(wire.CodeInvalid, "start a process: no command given")
	}
	if strings.ContainsRune(cfg.Cmd, 0) || slices.ContainsFunc(cfg.Args, func(a string) bool { return strings.ContainsRune(a, 0) }) {
		return nil, wire.Errorf(wire.CodeInvalid, "start %q: command and arguments cannot contain NUL", cfg.Cmd)
	}
	if req.TimeoutMS < 0 || req.TimeoutMS > int64(100*365*24*time.Hour/time.Millisecond) {
		return nil, wire.Errorf(wire.CodeInvalid, "start %s: time limit of %d ms", cfg.Cmd, req.TimeoutMS)
	}
	user, err := m.cfg.Accounts.User(req.User)
	if err != nil {
		return nil, err
	}
	env, err := m.cfg.Accounts.Environ(user, cfg.Envs)
	if err != nil {
		return nil, err
	}
	if req.PTY != nil {
		env = forTerminal(env, req.PTY.Term)
	}
	requested := ""
	if cfg.Cwd != nil {
		requested = *cfg.Cwd
	}
	dir, err := m.cfg.Accounts.Dir(user, requested)
	if err != nil {
		return nil, err
	}
	command := reap.Command{Env: env, Dir: dir}
	if req.Shell {
		command.Path, command.Args, err = loginShell(user)
		cfg.Cmd = command.Path
	} else {
		command.Path, err = LookPath(cfg.Cmd, dir, account.Getenv(env, "PATH"))
		command.Args = append([]string{cfg.Cmd}, cfg.Args...)
	}
	if err != nil {
		return nil, err
	}
	if command.Sys, err = Credential(user); err != nil {
		return nil, err
	}
	return &plan{request: req, config: cfg, user: user, command: command}, nil
}

// Credential makes the attributes with which a process runs as u in a session of its own. It is permission_denied when
// the agent is not root and u is somebody else.
func Credential(u *account.User) (*syscall.SysProcAttr, error) {
	sys := &syscall.SysProcAttr{Setsid: true}
	uid := os.Geteuid()
	if uid != 0 {
		if int(u.UID) != uid {
			return nil, wire.Errorf(wire.CodeDenied, "run as %s: the agent is not root (uid %d) and can start processes as itself only", u.Name, uid)
		}
		return sys, nil
	}
	sys.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
	return sys, nil
}

// LookPath finds the executable: a name without a slash in PATH. Whether it may be run is the kernel's to say.
func LookPath(cmd, dir, path string) (string, error) {
	if strings.Contains(cmd, "/") {
		full := cmd
		if !filepath.IsAbs(full) {
			full = filepath.Join(dir, cmd)
		}
		switch info, err := os.Stat(full); {
		case errors.Is(err, fs.ErrPermission):
			return "", wire.Errorf(wire.CodeInvalid, "start %s: permission denied", cmd)
		case err != nil:
			return "", wire.Errorf(wire.CodeInvalid, "start %s: there is no such file", cmd)
		case info.IsDir():
			return "", wire.Errorf(wire.CodeInvalid, "start %s: it is a directory", cmd)
		}
		return full, nil
	}
	for _, d := range filepath.SplitList(path) {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		full := filepath.Join(d, cmd)
		if info, err := os.Stat(full); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return full, nil
		}
	}
	return "", wire.Errorf(wire.CodeInvalid, "start %s: not found in PATH=%s; add its package to the image's recipe", cmd, path)
}

// start starts a process with s attached (after the start message; nil if the caller does not want to be), or returns
// why it could not.
func (m *Manager) start(ctx context.Context, pl *plan, s *wire.Stream) (*proc, *reader, error) {
	p := &proc{
		config: pl.config,
		tag:    pl.request.Tag,
		user:   pl.user.Name,
		limit:  time.Duration(pl.request.TimeoutMS) * time.Millisecond,
		inputs: make(chan struct{}, 1),
		ended:  make(chan struct{}),
		timed:  make(chan struct{}),
		out:    newOutput(),
	}
	// Before others can find the process: the caller is the first to be sent what it prints.
	var r *reader
	if !pl.request.Detach {
		r = p.out.attach(s, &wire.ConnectRequest{})
	}
	var err error
	if pl.request.PTY != nil {
		err = p.openTTY(pl)
	} else {
		err = p.openPipes(pl)
	}
	defer closeAll(pl.command.Files)
	if err == nil {
		err = m.launch(ctx, p, pl)
	}
	if err != nil {
		for _, o := range p.outlets {
			o.Close()
		}
		p.abandonInput()
		return nil, nil, err
	}

	// Nothing reads the output yet: the start message is the first.
	if err := s.SendMessage(wire.ProcessEvent{Start: p.start()}); err != nil && r != nil {
		p.out.took(r, 0, err)
	}
	for _, o := range p.outlets {
		p.readers.Go(o.Run)
	}
	if p.limit > 0 {
		p.timer = time.AfterFunc(p.limit, func() {
			close(p.timed)
			_ = p.child.SignalGroup(unix.SIGKILL)
		})
	}
	go m.finish(p)
	return p, r, nil
}

// launch starts the child and makes it known.
func (m *Manager) launch(ctx context.Context, p *proc, pl *plan) error {
	if m.cfg.Group != nil {
		group, err := m.cfg.Group()
		if err != nil {
			return wire.Errorf(wire.CodeInternal, "start %s: make its cgroup: %v", p.config.Cmd, err)
		}
		p.group = group
		pl.command.Sys.UseCgroupFD = true
		pl.command.Sys.CgroupFD = group.FD()
	}
	child, err := m.cfg.Reaper.Start(ctx, &pl.command)
	if err != nil {
		p.release()
		if ctx.Err() != nil {
			return context.Cause(ctx) // while the machine was frozen
		}
		return startError(p.config.Cmd, pl.command.Dir, err)
	}
	p.child = child
	p.started = time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.order++
	p.order = m.order
	if old := m.procs[uint32(child.PID())]; old != nil {
		m.drop(old) // the number is taken again
	}
	m.procs[uint32(child.PID())] = p
	return nil
}

func startError(cmd, dir string, err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return wire.Errorf(wire.CodeInvalid, "start %s: permission denied: the file is not executable, or the user may not enter %s", cmd, dir)
	case errors.Is(err, fs.ErrNotExist):
		return wire.Errorf(wire.CodeInvalid, "start %s: the file or its interpreter (first line, or dynamic loader) does not exist", cmd)
	case errors.Is(err, unix.ENOEXEC):
		return wire.Errorf(wire.CodeInvalid, "start %s: not a program this kernel can run; a script needs a #! line", cmd)
	case errors.Is(err, unix.E2BIG):
		return wire.Errorf(wire.CodeInvalid, "start %s: arguments and environment are too long together", cmd)
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return wire.Errorf(wire.CodeExhausted, "start %s: %v; the sandbox is out of memory or processes", cmd, err)
	default:
		return wire.Errorf(wire.CodeInternal, "start %s: %v", cmd, err)
	}
}

// openPipes makes the child's three descriptors. What is in command.Files is closed by the caller, whatever happens.
func (p *proc) openPipes(pl *plan) error {
	files := &pl.command.Files
	if wanted := pl.request.Stdin; wanted == nil || *wanted {
		r, w, err := pipe.New()
		if err != nil {
			return wire.Errorf(wire.CodeExhausted, "start %s: %v", p.config.Cmd, err)
		}
		*files = append(*files, r)
		if err := unix.SetNonblock(w, true); err != nil {
			_ = unix.Close(w)
			return wire.Errorf(wire.CodeInternal, "start %s: %v", p.config.Cmd, err)
		}
		p.stdin = os.NewFile(uintptr(w), "stdin")
		p.stdinEnd = p.stdin
	} else {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return wire.Errorf(wire.CodeInternal, "start %s: open /dev/null: %v", p.config.Cmd, err)
		}
		*files = append(*files, fd)
	}
	for _, kind := range []wire.Kind{wire.KindStdout, wire.KindStderr} {
		r, w, err := pipe.New()
		if err != nil {
			return wire.Errorf(wire.CodeExhausted, "start %s: %v", p.config.Cmd, err)
		}
		*files = append(*files, w)
		// Programs open /dev/stdout again, which asks for the pipe's owner.
		if os.Geteuid() == 0 {
			_ = unix.Fchown(w, int(pl.user.UID), int(pl.user.GID))
		}
		o, err := pipe.NewOutlet(r, "output", pipeChunk, func(b []byte) { p.out.write(kind, b) })
		if err != nil {
			return wire.Errorf(wire.CodeInternal, "start %s: %v", p.config.Cmd, err)
		}
		p.outlets = append(p.outlets, o)
	}
	return nil
}

// openTTY makes a pty the child's three descriptors and its controlling terminal.
func (p *proc) openTTY(pl *plan) error {
	master, slave, err := openPTY(pl.user, pl.request.PTY.Size)
	if refusal := (*wire.Error)(nil); errors.As(err, &refusal) {
		return refusal
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		return wire.Errorf(wire.CodeExhausted, "start %s: open a terminal: %v; end processes that have one", p.config.Cmd, err)
	}
	if err != nil {
		return wire.Errorf(wire.CodeInternal, "start %s: open a terminal: %v", p.config.Cmd, err)
	}
	pl.command.Files = []int{slave, slave, slave}
	pl.command.Sys.Setctty = true
	pl.command.Sys.Ctty = 0
	o, err := pipe.NewOutlet(master, "terminal", ptyChunk, func(b []byte) { p.out.write(wire.KindPTY, b) })
	if err != nil {
		return wire.Errorf(wire.CodeInternal, "start %s: %v", p.config.Cmd, err)
	}
	p.outlets = []*pipe.Outlet{o}
	p.tty = o.File()
	p.stdin = p.tty
	return nil
}

func closeAll(fds []int) {
	last := -1
	for _, fd := range fds {
		if fd != last {
			_ = unix.Close(fd)
		}
		last = fd
	}
}

// write puts input into the process's stdin or terminal; it blocks while the process does not read.
func (p *proc) write(ctx context.Context, data []byte) error {
	select {
	case p.inputs <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-p.inputs }()
	if p.stdin == nil {
		return wire.Errorf(wire.CodePrecondition, "process %d has no standard input: it was started without, or it is closed", p.child.PID())
	}
	stdin, interrupted := p.stdin, make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = stdin.SetWriteDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	_, err := stdin.Write(data)
	if !stop() {
		<-interrupted
		_ = stdin.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return context.Cause(ctx)
	default:
		return wire.Errorf(wire.CodePrecondition, "process %d does not take input any more: it closed its end or has ended", p.child.PID())
	}
}

// closeInput closes stdin; a terminal has no such end.
func (p *proc) closeInput(ctx context.Context) error {
	if p.tty != nil {
		return wire.Errorf(wire.CodePrecondition, "process %d has a terminal, whose input cannot be closed; send it byte 0x04 instead", p.child.PID())
	}
	select {
	case p.inputs <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-p.inputs }()
	if p.stdin != nil {
		_ = p.stdin.Close()
		p.stdin = nil
	}
	return nil
}

// abandonInput closes a stdin pipe, which ends a write that blocks on it.
func (p *proc) abandonInput() {
	if p.stdinEnd != nil {
		_ = p.stdinEnd.Close()
	}
}
