// Package process serves the guest's processes with the messages and semantics of E2B's envd: start with pipes or a
// pty, attach, input, signals, resize, list. It owns every process it started until that has ended and for a while
// after. It is not a supervisor: nothing is restarted. Only the agent imports it; its tests run on any Linux.
//
// Where envd leaves a choice: an executable that is missing is invalid_argument, one that may not be run
// permission_denied. A caller that goes away leaves the process running; while nobody is attached the newest 256 KiB of
// output are kept for the next who attaches and the process is never held back, and while somebody is, it is held back
// by the slowest. SIGKILL goes to the process's group, since nothing could clean up after it; every other signal to
// the process alone. A process has ended when it exited and all that was written until then has arrived; descendants
// that keep its output open delay that by a tenth of a second at most and may go on writing into the void.
package process

import (
	"context"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/pipe"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	pipeChunk = 32 << 10 // envd's
	ptyChunk  = 16 << 10
	// drainGrace is how long descendants of an ended process may still add to its output: those of a pipeline usually
	// end with it.
	drainGrace    = 100 * time.Millisecond
	defaultRetain = 30 * time.Second
)

// Config is what a Manager needs.
type Config struct {
	Reaper   *reap.Reaper
	Accounts *account.Table
	// Cgroup opens the directory of the cgroup in which a process starts; the manager closes it. Nil, or a nil file: the
	// agent's own.
	Cgroup func() (*os.File, error)
	// Retain is how long the exit of a process can be asked for; 0: 30 s.
	Retain time.Duration
}

// Manager holds the processes. It is safe for concurrent use.
type Manager struct {
	cfg Config

	mu    sync.Mutex
	procs map[uint32]*proc
	order uint64
}

// New makes an empty manager.
func New(cfg Config) *Manager {
	if cfg.Retain == 0 {
		cfg.Retain = defaultRetain
	}
	return &Manager{cfg: cfg, procs: map[uint32]*proc{}}
}

// PIDs are the running processes with their command lines.
func (m *Manager) PIDs() map[int]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	pids := map[int]string{}
	for pid, p := range m.procs {
		if p.running() {
			pids[int(pid)] = strings.Join(append([]string{p.config.Cmd}, p.config.Args...), " ")
		}
	}
	return pids
}

// Close kills every process and returns when all have ended and nothing of theirs is left, or with ctx.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	procs := m.procs
	m.procs = map[uint32]*proc{}
	m.mu.Unlock()
	for _, p := range procs {
		_ = p.child.SignalGroup(unix.SIGKILL)
	}
	for _, p := range procs {
		select {
		case <-p.ended:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		p.forget()
	}
	return nil
}

// proc is one process, running or just ended.
type proc struct {
	child  *reap.Child
	config wire.ProcessConfig
	tag    *string
	order  uint64
	limit  time.Duration

	inputs chan struct{} // a token: who holds it writes to or closes stdin
	stdin  *os.File      // nil when there is none or it was closed; guarded by inputs
	tty    *os.File      // the pty, nil without one; also stdin then

	stdinEnd *os.File // the pipe, never changed, for closing beside a write that blocks

	outlets []*pipe.Outlet
	readers sync.WaitGroup

	// gate is a token: who holds it sends to the attached or changes who is. A slow one may block its holder, therefore
	// not a mutex: those who wait can give up.
	gate     chan struct{}
	attached []*attachment
	kept     pipe.Ring[wire.Kind]
	detached bool             // output goes nowhere any more
	end      *wire.ProcessEnd // set once, with ended

	ended  chan struct{} // closed after end was sent to all attached
	timer  *time.Timer
	timed  chan struct{} // closed by the time limit
	retain *time.Timer   // set with ended
}

func (p *proc) running() bool {
	select {
	case <-p.ended:
		return false
	case <-p.child.Done():
		return false
	default:
		return true
	}
}

// attachment is a stream that gets the output.
type attachment struct {
	stream *wire.Stream
	failed bool // guarded by gate
}

// enter takes the gate.
func (p *proc) enter(ctx context.Context) error {
	select {
	case p.gate <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *proc) leave() { <-p.gate }

// deliver hands output to whoever is attached. It blocks while one of them does not read.
func (p *proc) deliver(kind wire.Kind, data []byte) {
	p.gate <- struct{}{}
	defer p.leave()
	if p.detached {
		return
	}
	sent := false
	for _, a := range p.attached {
		if a.failed {
			continue
		}
		if err := a.stream.Send(kind, data); err != nil {
			a.failed = true // its handler removes it
			continue
		}
		sent = true
	}
	if !sent {
		p.kept.Add(kind, data)
	}
}

// attach adds a stream: first the start message, then what was kept, then what comes. If the process has ended the end
// message follows at once. Detach must be called in any case.
func (p *proc) attach(ctx context.Context, s *wire.Stream) (*attachment, error) {
	if err := p.enter(ctx); err != nil {
		return nil, err
	}
	defer p.leave()
	if err := s.SendMessage(wire.ProcessEvent{Start: &wire.ProcessStart{PID: uint32(p.child.PID())}}); err != nil {
		return nil, err
	}
	if err := p.kept.Flush(s.Send); err != nil {
		return nil, err
	}
	a := &attachment{stream: s}
	if p.end != nil {
		return a, s.SendMessage(wire.ProcessEvent{End: p.end})
	}
	p.attached = append(p.attached, a)
	return a, nil
}

// follow returns when the process has ended and a was told, or when its caller is gone; a is detached then.
func (p *proc) follow(ctx context.Context, a *attachment) error {
	select {
	case <-p.ended:
		return nil
	case <-ctx.Done():
	}
	// Not with ctx: the stream must not be in use when the handler returns. A send to it fails now, so the gate is free
	// as soon as the others have taken what is being sent.
	p.gate <- struct{}{}
	defer p.leave()
	for i, other := range p.attached {
		if other == a {
			p.attached = append(p.attached[:i:i], p.attached[i+1:]...)
			break
		}
	}
	return context.Cause(ctx)
}

// finish waits for the end of the process and of its output, tells everybody and keeps the exit for a while.
func (m *Manager) finish(p *proc) {
	<-p.child.Done()
	if p.timer != nil {
		p.timer.Stop()
	}
	p.drain()
	state := p.child.State()
	end := &wire.ProcessEnd{
		ExitCode: state.ExitCode(),
		Exited:   state.Exited(),
		Status:   state.String(),
		Signal:   int(state.Signal()),
	}
	if !state.Exited() || state.ExitCode() != 0 {
		end.Error = state.String()
	}
	select {
	case <-p.timed:
		end.Error = "killed: it ran longer than its time limit of " + p.limit.String()
	default:
	}
	p.gate <- struct{}{}
	p.detached = true
	p.end = end
	for _, a := range p.attached {
		if !a.failed {
			_ = a.stream.SendMessage(wire.ProcessEvent{End: end})
		}
	}
	p.attached = nil
	m.mu.Lock()
	p.retain = time.AfterFunc(m.cfg.Retain, func() { m.remove(p) })
	m.mu.Unlock()
	close(p.ended)
	p.leave()

	p.abandonInput()
	p.readers.Wait() // as long as a descendant keeps the output open
	for _, o := range p.outlets {
		o.Close()
	}
}

// drain returns when all that was written before the exit has been delivered, and what descendants add within the
// grace.
func (p *proc) drain() {
	eof := true
	for _, o := range p.outlets {
		eof = o.Drain() && eof
	}
	if eof {
		return
	}
	all := make(chan struct{})
	go func() {
		p.readers.Wait()
		close(all)
	}()
	grace := time.NewTimer(drainGrace)
	defer grace.Stop()
	select {
	case <-all:
	case <-grace.C:
	}
}

func (m *Manager) remove(p *proc) {
	m.mu.Lock()
	defer m.mu.Unlock()
	pid := uint32(p.child.PID())
	if m.procs[pid] == p {
		delete(m.procs, pid)
	}
}

// forget drops the timer of an ended process.
func (p *proc) forget() {
	if p.retain != nil {
		p.retain.Stop()
	}
}

// find selects a process; one that has ended only where exited ones are wanted.
func (m *Manager) find(sel wire.ProcessSelector, ended bool) (*proc, error) {
	if sel.PID == 0 && sel.Tag == "" {
		return nil, wire.Errorf(wire.CodeInvalid, "no process named: give a pid or a tag")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if sel.PID != 0 {
		p := m.procs[sel.PID]
		if p == nil || !ended && !p.running() {
			return nil, wire.Errorf(wire.CodeNotFound, "no process with pid %d was started here and still runs; list them", sel.PID)
		}
		return p, nil
	}
	var newest *proc
	for _, p := range m.procs {
		if p.tag == nil || *p.tag != sel.Tag || !ended && !p.running() {
			continue
		}
		// A running one goes before one that has ended, the newest before older ones.
		if newest == nil || p.running() && !newest.running() || p.running() == newest.running() && p.order > newest.order {
			newest = p
		}
	}
	if newest == nil {
		return nil, wire.Errorf(wire.CodeNotFound, "no process with tag %q was started here and still runs; list them", sel.Tag)
	}
	return newest, nil
}
