// Package process serves the guest's processes with the messages and semantics of E2B's envd: start with pipes or a
// pty, attach, input, signals, resize, list. It owns every process it started until that has ended and for a while
// after. It is not a supervisor: nothing is restarted. Only the agent imports it; its tests run on any Linux.
//
// A caller that goes away leaves the process running. Attached readers hold the process back: it is at most 64 KiB ahead
// of the slowest. While nobody is attached it is never held back, and the newest 256 KiB that nobody was sent are kept
// for the next who attaches, and 64 KiB of what somebody was. SIGKILL goes to the process's group, since nothing could clean up
// after it; every other signal to the process alone, unless asked otherwise. A process has ended when it exited and all
// that was written until then has arrived; descendants that keep its output open delay that by a tenth of a second at
// most and may go on writing into the void. Its exit and what is kept of its output can be asked for during 30 s, and
// during an hour if nobody was attached to hear of it.
package process

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/oom"
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
	defaultRetain = 30 * time.Second // envd's
	// retainUnheard is how long an exit is kept that nobody was told of, and maxUnheard how many.
	retainUnheard = time.Hour
	maxUnheard    = 64
	// maxEndedBytes is how much output of ended processes is kept together.
	maxEndedBytes = 1 << 20
)

// Config is what a Manager needs.
type Config struct {
	Reaper   *reap.Reaper
	Accounts *account.Table
	// Group lends a cgroup for a process. Nil: processes run in the agent's own, and their trees are not known.
	Group func() (Group, error)
	// Retain is how long the exit of a process can be asked for; 0: 30 s.
	Retain time.Duration
}

// Group is a cgroup that one process has for itself and its descendants.
type Group interface {
	// FD is its directory.
	FD() int
	// Signal sends a signal to all processes in it.
	Signal(sig syscall.Signal) error
	// Empty says that no process is in it.
	Empty() bool
	// Release says that it is no longer needed; there may still be processes in it.
	Release()
}

// Manager holds the processes. It is safe for concurrent use.
type Manager struct {
	cfg Config

	mu      sync.Mutex
	procs   map[uint32]*proc
	order   uint64
	unheard []*proc // ended, nobody was told; the oldest first
	printed []*proc // ended, with output that is kept; the oldest first
	kept    int     // bytes of theirs
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
	child   *reap.Child
	config  wire.ProcessConfig
	tag     *string
	user    string
	order   uint64
	limit   time.Duration
	started time.Time

	inputs chan struct{} // a token: who holds it writes to or closes stdin
	stdin  *os.File      // nil when there is none or it was closed; guarded by inputs
	tty    *os.File      // the pty, nil without one; also stdin then

	stdinEnd *os.File // the pipe, never changed, for closing beside a write that blocks

	outlets []*pipe.Outlet
	readers sync.WaitGroup
	out     *output

	ended chan struct{} // closed after the end was set
	timer *time.Timer
	timed chan struct{} // closed by the time limit

	// Guarded by the manager's mutex.
	group  Group       // nil without, and when nothing of the process is left
	retain *time.Timer // until it is forgotten, once it has ended
	kept   int         // bytes of its output, once it has ended
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
	if v, ok := starved(p, end); ok {
		end.Error = v.String()
	}
	timedOut := false
	select {
	case <-p.timed:
		timedOut = true
		end.Error = "killed: it ran longer than its time limit of " + p.limit.String()
	default:
	}
	end.TimedOut = timedOut
	m.keep(p, p.out.finish(end))
	close(p.ended)

	p.abandonInput()
	m.lend(p)
	p.readers.Wait() // as long as a descendant keeps the output open
	for _, o := range p.outlets {
		o.Close()
	}
}

// killedExit is the exit code of a shell whose last command was killed.
const killedExit = 128 + int(unix.SIGKILL)

// starved says whether the process, or what made it end as it did, was killed for want of memory.
func starved(p *proc, end *wire.ProcessEnd) (oom.Victim, bool) {
	switch {
	case end.Signal == int(unix.SIGKILL):
		return oom.Killed(p.child.PID(), p.started)
	case end.ExitCode == killedExit:
		return oom.Any(p.started)
	}
	return oom.Victim{}, false
}

// keep sees to it that a process that has ended is forgotten in time, and that not too much is kept of those that have.
func (m *Manager) keep(p *proc, unheard bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.procs[uint32(p.child.PID())] != p {
		return // its number was taken again, or all is over
	}
	retain := m.cfg.Retain
	if unheard {
		retain = max(retain, retainUnheard)
		m.unheard = append(m.unheard, p)
		if len(m.unheard) > maxUnheard {
			m.drop(m.unheard[0])
		}
	}
	p.retain = time.AfterFunc(retain, func() { m.remove(p) })
	if p.kept = p.out.kept(); p.kept == 0 {
		return
	}
	m.kept += p.kept
	m.printed = append(m.printed, p)
	for m.kept > maxEndedBytes {
		oldest := m.printed[0]
		m.kept -= oldest.kept
		oldest.kept = 0
		oldest.out.clear()
		m.printed = m.printed[1:]
	}
}

// lend gives the cgroup of a process that has ended back at once if nothing of it is left, as is usual.
func (m *Manager) lend(p *proc) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.group != nil && p.group.Empty() {
		p.release()
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
		m.drop(p)
	}
}

// drop forgets a process that has ended; it needs mu.
func (m *Manager) drop(p *proc) {
	if pid := uint32(p.child.PID()); m.procs[pid] == p {
		delete(m.procs, pid)
	}
	m.kept -= p.kept
	p.kept = 0
	is := func(other *proc) bool { return other == p }
	m.printed = slices.DeleteFunc(m.printed, is)
	m.unheard = slices.DeleteFunc(m.unheard, is)
	p.forget()
}

// forget stops the timer of an ended process and gives its cgroup back; it needs the manager's mutex, or that nobody
// else knows the process.
func (p *proc) forget() {
	if p.retain != nil {
		p.retain.Stop()
	}
	p.release()
}

func (p *proc) release() {
	if p.group != nil {
		p.group.Release()
		p.group = nil
	}
}

// find selects a process; one that has ended only where exited ones are wanted.
func (m *Manager) find(sel wire.ProcessSelector, ended bool) (*proc, error) {
	if sel.PID == 0 && sel.Tag == "" {
		return nil, wire.Errorf(wire.CodeUnimplemented, "no process named: give a pid or a tag")
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
