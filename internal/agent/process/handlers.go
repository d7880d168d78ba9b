package process

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// Handlers are the calls this package serves.
func (m *Manager) Handlers() map[string]wire.Handler {
	return map[string]wire.Handler{
		wire.MethodProcessStart:      wire.Handle(m.handleStart),
		wire.MethodProcessConnect:    wire.Handle(m.handleConnect),
		wire.MethodProcessList:       wire.Handle(m.handleList),
		wire.MethodProcessUpdate:     wire.Handle(m.handleUpdate),
		wire.MethodProcessSendInput:  wire.Handle(m.handleSendInput),
		wire.MethodProcessInput:      wire.Handle(m.handleStreamInput),
		wire.MethodProcessSendSignal: wire.Handle(m.handleSendSignal),
		wire.MethodProcessCloseStdin: wire.Handle(m.handleCloseStdin),
	}
}

func (m *Manager) handleStart(ctx context.Context, s *wire.Stream, req *wire.StartRequest) error {
	pl, err := m.plan(req)
	if err != nil {
		return err
	}
	p, r, err := m.start(ctx, pl, s)
	if err != nil || r == nil {
		return err
	}
	return m.serve(ctx, s, p, r)
}

func (m *Manager) handleConnect(ctx context.Context, s *wire.Stream, req *wire.ConnectRequest) error {
	p, err := m.find(req.Process, true)
	if err != nil {
		return err
	}
	if err := s.SendMessage(wire.ProcessEvent{Start: p.start()}); err != nil {
		return err
	}
	return m.serve(ctx, s, p, p.out.attach(s, req))
}

// start is the first message to everybody who attaches.
func (p *proc) start() *wire.ProcessStart {
	return &wire.ProcessStart{PID: uint32(p.child.PID()), PTY: p.tty != nil}
}

// serve sends output to an attached stream, and takes input from it, until the process has ended or the caller is gone.
func (m *Manager) serve(ctx context.Context, s *wire.Stream, p *proc, r *reader) error {
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		if r.observe {
			return
		}
		p.takeInput(ctx, s)
	}()
	err := p.out.serve(ctx, r)
	p.out.leave(r)
	if ctx.Err() != nil {
		// Gone: what it sent before is input all the same. A process that ended takes no more.
		select {
		case <-taken:
		case <-p.ended:
		}
	}
	// Otherwise the receiver ends when the dispatcher closes the stream.
	return err
}

// takeInput writes what comes to stdin or the terminal. The caller is held back while the process does not read.
func (p *proc) takeInput(ctx context.Context, s *wire.Stream) {
	ctx = context.WithoutCancel(ctx)
	for {
		kind, data, err := s.Recv()
		if err != nil {
			return // gone: stdin stays open for the next who attaches
		}
		switch kind {
		case wire.KindStdin, wire.KindPTY, wire.KindData:
			// What a process no longer reads is dropped, as a shell drops what is typed ahead of it; its end says more.
			_ = p.write(ctx, data)
		case wire.KindHalfClose:
			if p.tty == nil {
				_ = p.closeInput(ctx)
			}
		default:
		}
	}
}

func (m *Manager) handleList(_ context.Context, s *wire.Stream, req *wire.ListRequest) error {
	m.mu.Lock()
	var procs []*proc
	for _, p := range m.procs {
		if req.Ended || p.running() {
			procs = append(procs, p)
		}
	}
	m.mu.Unlock()
	slices.SortFunc(procs, func(a, b *proc) int { return cmp.Compare(a.order, b.order) })
	list := wire.ProcessList{Processes: []wire.ProcessInfo{}}
	for _, p := range procs {
		list.Processes = append(list.Processes, p.info())
	}
	return s.SendMessage(list)
}

func (p *proc) info() wire.ProcessInfo {
	info := wire.ProcessInfo{
		Config: p.config, PID: uint32(p.child.PID()), Tag: p.tag, User: p.user, PTY: p.tty != nil,
		AgeMS: time.Since(p.started).Milliseconds(),
	}
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	info.Readers, info.Output, info.End = p.out.attended(), p.out.end, p.out.last
	return info
}

func (m *Manager) handleUpdate(_ context.Context, s *wire.Stream, req *wire.UpdateRequest) error {
	p, err := m.find(req.Process, false)
	if err != nil {
		return err
	}
	if req.PTY != nil {
		if p.tty == nil {
			return wire.Errorf(wire.CodePrecondition, "process %d has no terminal to resize", p.child.PID())
		}
		conn, err := p.tty.SyscallConn()
		if err != nil {
			return err
		}
		var resizeErr error
		if err := conn.Control(func(fd uintptr) { resizeErr = resizePTY(int(fd), req.PTY.Size) }); err != nil {
			return wire.Errorf(wire.CodeNotFound, "process %d has ended", p.child.PID())
		}
		if resizeErr != nil {
			return resizeErr
		}
	}
	return s.SendMessage(struct{}{})
}

func (m *Manager) handleSendInput(ctx context.Context, s *wire.Stream, req *wire.SendInputRequest) error {
	p, err := m.find(req.Process, false)
	if err != nil {
		return err
	}
	data, kind := req.Stdin, wire.KindStdin
	switch {
	case req.Stdin != nil && req.PTY != nil:
		return wire.Errorf(wire.CodeInvalid, "send input: both stdin and pty given")
	case req.Stdin == nil && req.PTY == nil:
		return wire.Errorf(wire.CodeUnimplemented, "send input: neither stdin nor pty given")
	case req.PTY != nil:
		data, kind = req.PTY, wire.KindPTY
	}
	if err := p.input(ctx, kind, data); err != nil {
		return err
	}
	return s.SendMessage(struct{}{})
}

// input writes to stdin or the terminal, whichever the process has.
func (p *proc) input(ctx context.Context, kind wire.Kind, data []byte) error {
	switch {
	case kind == wire.KindStdin && p.tty != nil:
		return wire.Errorf(wire.CodePrecondition, "process %d has a terminal: send pty input, not stdin", p.child.PID())
	case kind == wire.KindPTY && p.tty == nil:
		return wire.Errorf(wire.CodePrecondition, "process %d has no terminal: send stdin, not pty input", p.child.PID())
	case len(data) == 0:
		return nil
	}
	return p.write(ctx, data)
}

func (m *Manager) handleStreamInput(ctx context.Context, s *wire.Stream, req *wire.StreamInputRequest) error {
	p, err := m.find(req.Process, false)
	if err != nil {
		return err
	}
	for {
		kind, data, err := s.Recv()
		switch {
		case err != nil:
			return err
		case kind == wire.KindHalfClose:
			return s.SendMessage(struct{}{})
		case kind != wire.KindStdin && kind != wire.KindPTY:
			return wire.Errorf(wire.CodeUnimplemented, "unexpected frame %q in a stream of input", byte(kind))
		}
		if err := p.input(ctx, kind, data); err != nil {
			return err
		}
	}
}

func (m *Manager) handleSendSignal(_ context.Context, s *wire.Stream, req *wire.SendSignalRequest) error {
	if req.Signal < 1 || req.Signal > 64 {
		return wire.Errorf(wire.CodeUnimplemented, "signal %d; signals are 1 to 64", req.Signal)
	}
	p, err := m.find(req.Process, req.Tree)
	if err != nil {
		return err
	}
	sig := syscall.Signal(req.Signal)
	switch {
	case req.Tree:
		err = m.signalTree(p, sig)
	case req.Group || sig == unix.SIGKILL:
		err = p.child.SignalGroup(sig)
	default:
		err = p.child.Signal(sig)
	}
	switch {
	case errors.Is(err, os.ErrProcessDone):
		return wire.Errorf(wire.CodeNotFound, "process %d has ended", p.child.PID())
	case err != nil:
		return wire.Errorf(wire.CodeDenied, "send signal %d to process %d: %v", req.Signal, p.child.PID(), err)
	}
	return s.SendMessage(wire.SendSignalReply{Tree: req.Tree})
}

func (m *Manager) signalTree(p *proc, sig syscall.Signal) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case p.group != nil:
		return p.group.Signal(sig)
	case !p.running():
		return os.ErrProcessDone // and nothing of it is left
	}
	return errors.New("this guest has no cgroups to know its descendants by; leave tree away")
}

func (m *Manager) handleCloseStdin(ctx context.Context, s *wire.Stream, req *wire.CloseStdinRequest) error {
	p, err := m.find(req.Process, false)
	if err != nil {
		return err
	}
	if err := p.closeInput(ctx); err != nil {
		return err
	}
	return s.SendMessage(struct{}{})
}
