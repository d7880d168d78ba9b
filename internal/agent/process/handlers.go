package process

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"

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
		wire.MethodProcessSendSignal: wire.Handle(m.handleSendSignal),
		wire.MethodProcessCloseStdin: wire.Handle(m.handleCloseStdin),
	}
}

func (m *Manager) handleStart(ctx context.Context, s *wire.Stream, req *wire.StartRequest) error {
	pl, err := m.plan(req)
	if err != nil {
		return err
	}
	p, a, err := m.start(ctx, pl, s)
	if err != nil {
		return err
	}
	return m.serve(ctx, s, p, a)
}

func (m *Manager) handleConnect(ctx context.Context, s *wire.Stream, req *wire.ConnectRequest) error {
	p, err := m.find(req.Process, true)
	if err != nil {
		return err
	}
	a, err := p.attach(ctx, s)
	if err != nil {
		return err
	}
	return m.serve(ctx, s, p, a)
}

// serve takes input from an attached stream until the process has ended or the caller is gone.
func (m *Manager) serve(ctx context.Context, s *wire.Stream, p *proc, a *attachment) error {
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		p.takeInput(ctx, s)
	}()
	if err := p.follow(ctx, a); err != nil {
		// Gone: what it sent before is input all the same. A process that ended takes no more.
		select {
		case <-taken:
		case <-p.ended:
		}
		return err
	}
	// The receiver ends when the dispatcher closes the stream.
	return nil
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

func (m *Manager) handleList(_ context.Context, s *wire.Stream, _ *struct{}) error {
	m.mu.Lock()
	var procs []*proc
	for _, p := range m.procs {
		if p.running() {
			procs = append(procs, p)
		}
	}
	m.mu.Unlock()
	slices.SortFunc(procs, func(a, b *proc) int { return int(a.order) - int(b.order) })
	list := wire.ProcessList{Processes: []wire.ProcessInfo{}}
	for _, p := range procs {
		list.Processes = append(list.Processes, wire.ProcessInfo{Config: p.config, PID: uint32(p.child.PID()), Tag: p.tag})
	}
	return s.SendMessage(list)
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
	data := req.Stdin
	switch {
	case req.Stdin != nil && req.PTY != nil:
		return wire.Errorf(wire.CodeInvalid, "send input: both stdin and pty given")
	case req.Stdin != nil && p.tty != nil:
		return wire.Errorf(wire.CodeInvalid, "process %d has a terminal: send pty input, not stdin", p.child.PID())
	case req.PTY != nil && p.tty == nil:
		return wire.Errorf(wire.CodeInvalid, "process %d has no terminal: send stdin, not pty input", p.child.PID())
	case req.PTY != nil:
		data = req.PTY
	}
	if len(data) > 0 {
		if err := p.write(ctx, data); err != nil {
			return err
		}
	}
	return s.SendMessage(struct{}{})
}

func (m *Manager) handleSendSignal(_ context.Context, s *wire.Stream, req *wire.SendSignalRequest) error {
	if req.Signal < 1 || req.Signal > 64 {
		return wire.Errorf(wire.CodeInvalid, "signal %d; signals are 1 to 64", req.Signal)
	}
	p, err := m.find(req.Process, false)
	if err != nil {
		return err
	}
	send := p.child.Signal
	if req.Group || req.Signal == int(unix.SIGKILL) {
		send = p.child.SignalGroup
	}
	switch err := send(syscall.Signal(req.Signal)); {
	case errors.Is(err, os.ErrProcessDone):
		return wire.Errorf(wire.CodeNotFound, "process %d has ended", p.child.PID())
	case err != nil:
		return wire.Errorf(wire.CodeDenied, "send signal %d to process %d: %v", req.Signal, p.child.PID(), err)
	}
	return s.SendMessage(struct{}{})
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
