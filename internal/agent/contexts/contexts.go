// Package contexts serves stateful interpreters in the guest: code goes in, output and results stream out, the value of
// a trailing expression or the exception comes back, and the next evaluation finds what the last one left. Each context
// is a process of its own, made of the guest's python3, node or shell and a small driver that is handed to it through the
// control channel (nothing is installed in the guest), or a driver that the image brings: docs/contexts.md. Before a freeze
// the manager asks every context what a clone could not renew; in a clone it renews the random state of each before any
// code runs in it.
//
// An evaluation whose caller goes away runs on, as a process would; whoever wants it to end calls Interrupt. A time
// limit interrupts it (KeyboardInterrupt in the code) and kills the context when that has not ended it two seconds
// later. What a background thread prints between evaluations is kept (the newest 64 KiB) and comes with the next one's
// output. Environment given with an evaluation holds for that evaluation.
//
// Only the agent imports it. Its tests run on any Linux with a python3.
package contexts

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/pipe"
	"forkd.dev/forkd/internal/agent/quick"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	defaultID  = "default"
	chunk      = 32 << 10
	keptBytes  = 64 << 10
	startLimit = 60 * time.Second
	killGrace  = 2 * time.Second
	// quiesceLimit is for a parent, which a search of its interpreters' objects may hold up; branchLimit for the source of
	// a branch, which somebody uses.
	quiesceLimit = 250 * time.Millisecond
	branchLimit  = 50 * time.Millisecond
	renewLimit   = 2 * time.Second
)

// Config is what a Manager needs.
type Config struct {
	Reaper   *reap.Reaper
	Accounts *account.Table
	// CgroupDir opens the directory of the cgroup of a context, made when missing; the manager closes it. Nil, or a nil
	// file: the agent's own cgroup.
	CgroupDir func(id string) (*os.File, error)
	// Gone is told, if set, that the process of a context has ended; no other of that id starts before it has returned.
	Gone func(id string)
	// OutOfMemory, if set, tells whether the kernel has killed a process for want of memory.
	OutOfMemory func(pid int) bool
	// StepClock, if set, puts the wall clock forward or back. See Renew.
	StepClock func(d time.Duration) error
	// DriverDirs are where drivers of further languages are; nil: /etc/forkd/contexts.d and /usr/lib/forkd/contexts.d.
	DriverDirs []string
}

// Manager holds the contexts. It is safe for concurrent use.
type Manager struct {
	cfg      Config
	creating chan struct{} // a token: one interpreter starts at a time

	mu       sync.Mutex
	contexts map[string]*Context
	watchers sync.WaitGroup
}

// New makes an empty manager.
func New(cfg Config) *Manager {
	return &Manager{cfg: cfg, creating: make(chan struct{}, 1), contexts: map[string]*Context{}}
}

// Context is one interpreter. The zero value is of no use.
type Context struct {
	id     string
	cfg    wire.ContextConfig // as it was asked for; Restart does it again
	cwd    string
	in     *interpreter
	oracle func(pid int) bool // Config.OutOfMemory
	ready  ready              // what the driver said of itself
	child  *reap.Child
	gone   chan struct{} // closed when the process has ended and what hung on it has been told
	ctl    *quick.Conn
	outs   []*pipe.Outlet

	// turn is a token: who holds it talks to the interpreter. It is handed on in the order of asking.
	turn      chan struct{}
	sequence  int             // of the last request; guarded by turn
	buf       []byte          // received and not yet parsed; guarded by turn
	parsed    int             // of buf: the last frame; guarded by turn
	out       []byte          // room for requests; guarded by turn
	seed      [seedBytes]byte // room for that; guarded by turn
	clock     bool            // the clock is ahead while it is renewed; guarded by turn
	signalled bool            // an interrupt was sent during the last evaluation and may have come late; guarded by turn

	// writeMu is held while something is written to the interpreter: an interrupt may have to.
	writeMu sync.Mutex

	// sinkMu is held while output is handed over, so that who changes the sink knows that the old one is out of use.
	sinkMu sync.Mutex
	sink   func(wire.Kind, []byte) error
	show   func(*wire.EvalEvent) error
	kept   pipe.Ring[wire.Kind]

	mu      sync.Mutex
	evals   int
	running *evaluation // nil when idle
	facts   *facts      // of the last Quiesce
	memory  bool        // it was killed for want of it
	late    *late       // a renewal that is due before the next evaluation
}

// evaluation is one that runs.
type evaluation struct {
	interrupted bool
	timedOut    bool
	sequence    int // of its request
}

const maxID = 64

// validID is no regular expression: the first evaluation of a fork would translate the code that runs one.
func validID(s string) bool {
	for i, c := range []byte(s) {
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '.' && c != '_' && c != '-') {
			return false
		}
	}
	return s != "" && len(s) <= maxID
}

// check fills in defaults and refuses what cannot be.
func check(cfg *wire.ContextConfig) error {
	cfg.Language = wire.Language(cfg.Language)
	if cfg.ID == "" {
		cfg.ID = wire.DefaultContext(cfg.Language)
	}
	if !validID(cfg.ID) {
		return wire.Errorf(wire.CodeInvalid, "context id %q: use 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit", cfg.ID)
	}
	if cfg.Language != python && !validID(cfg.Language) {
		return wire.Errorf(wire.CodeInvalid, "language %q: a name has 1 to 64 of A-Z a-z 0-9 . _ - and begins with a letter or digit", cfg.Language)
	}
	return nil
}

// resolve is the id of the context that a request means.
func (m *Manager) resolve(id, language string) string {
	if id != "" {
		return id
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.contexts[defaultID]
	if language == "" {
		if c == nil && len(m.contexts) == 1 {
			for id := range m.contexts {
				return id
			}
		}
		return defaultID
	}
	language = wire.Language(language)
	if c != nil && c.cfg.Language == language {
		return defaultID
	}
	return wire.DefaultContext(language)
}

// Create starts a context. One of that id that lives is already_exists; one that died is replaced.
func (m *Manager) Create(ctx context.Context, cfg wire.ContextConfig) (wire.ContextInfo, error) {
	if err := check(&cfg); err != nil {
		return wire.ContextInfo{}, err
	}
	c, made, err := m.obtain(ctx, cfg, true)
	if err != nil {
		return wire.ContextInfo{}, err
	}
	if !made && !c.alive() {
		return wire.ContextInfo{}, wire.Errorf(wire.CodeUnavailable, "context %s is just ending; try again", cfg.ID)
	}
	if !made {
		return wire.ContextInfo{}, wire.Errorf(wire.CodeExists, "context %s exists and lives; remove it first, or use another id", cfg.ID)
	}
	return c.info(), nil
}

func (m *Manager) lookup(id string) *Context {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.contexts[id]
}

// obtain returns the context of an id; it starts one when there is none, and when there is a dead one if replace.
func (m *Manager) obtain(ctx context.Context, cfg wire.ContextConfig, replace bool) (c *Context, made bool, err error) {
	usable := func() bool {
		c = m.lookup(cfg.ID)
		return c != nil && (!replace || !c.buried())
	}
	if usable() {
		return c, false, nil
	}
	select {
	case m.creating <- struct{}{}:
	case <-ctx.Done():
		return nil, false, context.Cause(ctx)
	}
	defer func() { <-m.creating }()
	if usable() { // made meanwhile
		return c, false, nil
	}
	c, err = m.start(ctx, cfg)
	if err != nil {
		return nil, false, err
	}
	m.mu.Lock()
	m.contexts[cfg.ID] = c
	m.mu.Unlock()
	return c, true, nil
}

func (c *Context) alive() bool { return !closed(c.child.Done()) }

// buried says that nothing of the context is in the way of another of its id.
func (c *Context) buried() bool { return closed(c.gone) }

func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func (c *Context) info() wire.ContextInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	info := wire.ContextInfo{
		ID: c.id, Language: c.cfg.Language, Version: c.ready.Version, Cwd: c.cwd, User: c.cfg.User, PID: c.child.PID(),
		Alive: c.alive(), Busy: c.running != nil, Evals: c.evals,
	}
	if !info.Alive {
		info.Ended = c.child.State().String()
		if c.memory {
			info.Ended += ": out of memory"
		}
	}
	return info
}

// List describes the contexts, in the order of their ids.
func (m *Manager) List() []wire.ContextInfo {
	list := []wire.ContextInfo{}
	for _, c := range m.all() {
		list = append(list, c.info())
	}
	return list
}

func (m *Manager) all() []*Context {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]*Context, 0, len(m.contexts))
	for _, c := range m.contexts {
		list = append(list, c)
	}
	if len(list) > 1 {
		slices.SortFunc(list, func(a, b *Context) int { return strings.Compare(a.id, b.id) })
	}
	return list
}

// PIDs are the interpreters that live, with a word on each.
func (m *Manager) PIDs() map[int]string {
	pids := map[int]string{}
	for _, c := range m.all() {
		if c.alive() {
			pids[c.child.PID()] = "context " + c.id
		}
	}
	return pids
}

// Interrupt raises KeyboardInterrupt in what a context evaluates; without an evaluation it does nothing.
func (m *Manager) Interrupt(id string) error {
	c := m.lookup(id)
	if c == nil {
		return notFound(id)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.interrupt()
}

// interrupt needs mu.
func (c *Context) interrupt() error {
	if c.running == nil {
		return nil
	}
	c.running.interrupted = true
	send := c.child.Signal
	if c.in.group {
		send = c.child.SignalGroup
	}
	if err := send(unix.SIGINT); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return wire.Errorf(wire.CodeInternal, "interrupt context %s: %v", c.id, err)
	}
	if s, ok := c.in.dialect.(shell); ok {
		c.askAgain(s, c.running, 0)
	}
	return nil
}

// askAgain has an interrupted shell report again: the interrupt may have hit the report, and some shells drop what they
// have read ahead. One that takes no notice for long is interrupted again, as somebody at a terminal would: a program that was just
// being started has not got the signal. It needs mu.
func (c *Context) askAgain(s shell, run *evaluation, round int) {
	const rounds = 8
	time.AfterFunc(50*time.Millisecond<<round, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.running != run || round >= rounds {
			return
		}
		if round == 4 || round == 6 { // after 1.5 and 6 seconds
			_ = c.child.SignalGroup(unix.SIGINT)
		}
		_ = c.write(s.report(nil, run.sequence))
		c.askAgain(s, run, round+1)
	})
}

// Remove kills a context and forgets it; it returns when the process is gone.
func (m *Manager) Remove(ctx context.Context, id string) error {
	m.mu.Lock()
	c := m.contexts[id]
	delete(m.contexts, id)
	m.mu.Unlock()
	if c == nil {
		return notFound(id)
	}
	return c.kill(ctx)
}

// Restart kills a context and starts it again as it was asked for: with its language, directory, user and environment. It
// returns when the new one is ready. What waits for the old one is told of its end.
func (m *Manager) Restart(ctx context.Context, id string) (wire.ContextInfo, error) {
	c := m.lookup(id)
	if c == nil {
		return wire.ContextInfo{}, notFound(id)
	}
	if err := c.kill(ctx); err != nil {
		return wire.ContextInfo{}, err
	}
	return m.Create(ctx, c.cfg)
}

func (c *Context) kill(ctx context.Context) error {
	_ = c.child.SignalGroup(unix.SIGKILL)
	select {
	case <-c.gone:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close kills every context and returns when nothing of them is left, or with ctx.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	contexts := m.contexts
	m.contexts = map[string]*Context{}
	m.mu.Unlock()
	for _, c := range contexts {
		if err := c.kill(ctx); err != nil {
			return err
		}
	}
	m.watchers.Wait()
	return nil
}

func notFound(id string) error {
	return wire.Errorf(wire.CodeNotFound, "no context %q; list them, or evaluate in it to make it", id)
}
