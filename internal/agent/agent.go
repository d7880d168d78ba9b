// Package agent is the core of the guest agent: it brings the guest up as PID 1, answers the host on the control
// channel, hands calls to the services (process, files, contexts below it), and does itself what concerns the machine
// as a whole: quiesce, awaken, extract, archive, pivot, power-off, metrics. It is not a general init: it starts nothing
// on its own. Only cmd/forkd-agent imports it. Its session runs in tests against the real host side over a socket;
// what needs a guest kernel is tested in VMs.
package agent

import (
	"bytes"
	"context"
	"io"
	"maps"
	"sync"
	"sync/atomic"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/agent/systemd"
	"forkd.dev/forkd/internal/guest/wire"
)

// Phases of the guest, as Hello names them.
const (
	PhaseBuild = "build"
	PhaseReady = "ready"
)

// Contexts is what the agent needs of the interpreters when the machine is frozen and forked.
type Contexts interface {
	// Quiesce is called before they are frozen; with search for a machine that does not run on.
	Quiesce(ctx context.Context, search bool) error
	// Renew gives every interpreter fresh random state and the environment. The interpreters are frozen when it is
	// called; thaw lets one run. It returns when all have confirmed.
	Renew(ctx context.Context, env map[string]string, thaw func(id string) error) ([]string, []wire.NotRenewed, error)
	// PIDs are the interpreters themselves.
	PIDs() map[int]string
}

// Service is a part of the agent that serves calls of its own.
type Service interface {
	Handlers() map[string]wire.Handler
}

// Config is what an agent is made of.
type Config struct {
	Version  string
	Phase    string
	System   System
	Console  io.Writer
	Reaper   *reap.Reaper
	Accounts *account.Table
	Cgroups  *Cgroups
	Contexts Contexts
	Services []Service
	Begin    func() // runs at the beginning of every call; may be nil
}

// Agent serves the control channel.
type Agent struct {
	cfg      Config
	bootID   string
	handlers map[string]wire.Handler
	// generation of the newest preamble: the connection on which this machine is awakened.
	generation atomic.Uint64

	sessions uint64 // how many there were; Serve's own

	mu    sync.Mutex
	phase string
	held  chan struct{} // closed when calls that start something are admitted again; nil while they are

	idle chan chan func() // workers without work
	room []byte           // for the request to awaken; Serve's alone

	sampled lastSample
	ending  atomic.Bool   // powerOff has begun
	inner   *systemd.Init // the image's own init, if one was asked for; needs awakening

	// awakening is a token: quiesce, awaken, thaw, pivot and power-off exclude each other by it.
	awakening chan struct{}
	prepared  *prepared // of a machine whose user processes are frozen, else nil; needs awakening
	sandbox   string    // that the machine was awakened as; needs awakening
	last      freeze    // the newest that was ended or called off by number; needs awakening
	spent     *prepared // of the last thaw, still to be closed; needs awakening
}

// New makes an agent. BootID is random for each start of the agent.
func New(cfg Config, bootID string) *Agent {
	a := &Agent{cfg: cfg, bootID: bootID, phase: cfg.Phase, handlers: map[string]wire.Handler{}, awakening: make(chan struct{}, 1), idle: make(chan chan func(), maxIdle)}
	a.room = bytes.Repeat([]byte{1}, 4<<10) // written, so that it is there in a fork
	for _, service := range cfg.Services {
		for method, h := range service.Handlers() {
			a.handlers[method] = a.whenReady(method, h)
		}
	}
	maps.Copy(a.handlers, map[string]wire.Handler{
		wire.MethodPing:     func(context.Context, *wire.Stream, []byte) error { return nil },
		wire.MethodQuiesce:  a.alone(a.quiesce),
		wire.MethodAwaken:   a.alone(a.awaken),
		wire.MethodThaw:     a.thawCall,
		wire.MethodMetrics:  a.metrics,
		wire.MethodExtract:  a.extract,
		wire.MethodArchive:  a.archive,
		wire.MethodPivot:    a.alone(a.pivot),
		wire.MethodPowerOff: a.alone(a.powerOff),
		wire.MethodInit:     a.alone(a.startInit),
		wire.MethodSever:    a.alone(a.sever),

		wire.MethodEndProcesses: a.endStarted,
		wire.MethodConfigure:    a.configure,
	})
	return a
}

// maxIdle is how many workers wait for the next call.
const maxIdle = 4

// run runs f beside the caller. It goes to a worker that is there already, if it can: one of a fork's parent, whose
// stack has grown to what a call needs. A new one would begin with a small stack and run the code that moves it.
func (a *Agent) run(f func()) {
	select {
	case w := <-a.idle:
		w <- f
	default:
		go a.work(f)
	}
}

func (a *Agent) work(f func()) {
	w := make(chan func(), 1)
	for {
		f()
		select {
		case a.idle <- w:
		default:
			return
		}
		f = <-w
	}
}

// starting are the calls that make something run. They wait while user processes are frozen: begun in a freeze, they
// would go on in every copy of the machine as well, and an interpreter would be found at work that could have renewed
// its random state.
var starting = map[string]bool{wire.MethodProcessStart: true, wire.MethodContextNew: true, wire.MethodContextEval: true}

// whenReady refuses calls to services while there is no root file system, and lets those wait that start something while
// the machine is frozen.
func (a *Agent) whenReady(method string, h wire.Handler) wire.Handler {
	starts := starting[method]
	return func(ctx context.Context, s *wire.Stream, request []byte) error {
		if a.Phase() != PhaseReady {
			return wire.Errorf(wire.CodePrecondition, "the machine is being built and has no root file system yet; call %s first", wire.MethodPivot)
		}
		if starts {
			if err := a.admitted(ctx); err != nil {
				return err
			}
		}
		return h(ctx, s, request)
	}
}

func (a *Agent) holdCalls() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.held == nil {
		a.held = make(chan struct{})
	}
}

func (a *Agent) admitCalls() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.held != nil {
		close(a.held)
		a.held = nil
	}
}

// admitted waits until calls are not held. In a copy of the machine they never are: their callers are the original's,
// and gone before it is awakened.
func (a *Agent) admitted(ctx context.Context) error {
	for {
		a.mu.Lock()
		held := a.held
		a.mu.Unlock()
		if held == nil {
			return context.Cause(ctx) // of a caller that went while they were; it must not begin in a copy
		}
		select {
		case <-held:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// alone lets one of the machine's changes of state run at a time.
func (a *Agent) alone(h wire.Handler) wire.Handler {
	return func(ctx context.Context, s *wire.Stream, request []byte) error {
		select {
		case a.awakening <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		defer func() { <-a.awakening }()
		if ctx.Err() != nil { // the other way on offer
			return context.Cause(ctx)
		}
		return h(ctx, s, request)
	}
}

// Phase is what Hello says.
func (a *Agent) Phase() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.phase
}

func (a *Agent) setPhase(phase string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.phase = phase
}
