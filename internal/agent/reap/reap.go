// Package reap starts the guest agent's children and is the one owner of every wait. As PID 1 the agent inherits every
// orphan of the guest: whoever waits for "any child" takes the exit status of children that os/exec waits for, so all
// children are started here and nowhere else in the agent. It knows nothing of users, output or protocols. Only the
// agent and its services import it.
package reap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Reaper starts children and collects them. It is safe for concurrent use.
type Reaper struct {
	all bool // owner of Wait4(-1)
	sig chan os.Signal

	// starting is a token, held while a child is between fork and exec, and by Pause. It is taken before mu.
	starting chan struct{}

	// mu makes start-and-register, collect-and-unregister and signal-by-pid exclude each other, so that no exit is
	// seen before its child is known and no signal goes to a pid that was given to somebody else. It is held while a
	// child is between fork and exec (milliseconds).
	mu       sync.Mutex
	children map[int]*Child
	inside   func(func()) // runs something where children are to be started; nil: here
	waiting  sync.WaitGroup
}

// New makes a reaper that waits for its own children only: for a process that is not PID 1. Run is not needed.
func New() *Reaper {
	return &Reaper{starting: make(chan struct{}, 1), children: map[int]*Child{}}
}

// NewInit makes a reaper that takes every exit of the process's children and of the orphans it inherits. Nothing else in
// the process may wait for a child. Run must be called.
func NewInit() *Reaper {
	r := &Reaper{all: true, starting: make(chan struct{}, 1), sig: make(chan os.Signal, 1), children: map[int]*Child{}}
	// Before the first child, or its signal could be missed.
	signal.Notify(r.sig, unix.SIGCHLD)
	return r
}

// Run collects until ctx ends. Only for a reaper made by NewInit.
func (r *Reaper) Run(ctx context.Context) {
	defer signal.Stop(r.sig)
	for {
		r.collect()
		select {
		case <-r.sig: // one signal may stand for many exits
		case <-ctx.Done():
			return
		}
	}
}

func (r *Reaper) collect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		r.ended(pid, ws)
	}
}

// ended needs mu.
func (r *Reaper) ended(pid int, ws unix.WaitStatus) {
	c := r.children[pid]
	if c == nil {
		return // an orphan
	}
	delete(r.children, pid)
	c.state = State{ws: syscall.WaitStatus(ws)}
	close(c.done)
}

// Pause keeps Start waiting until the returned function is called (once), and returns when no child is between fork and
// exec: frozen there, it would hold the thread that started it. Signals and exits go on.
func (r *Reaper) Pause(ctx context.Context) (resume func(), err error) {
	if err := r.enter(ctx); err != nil {
		return nil, err
	}
	return func() { <-r.starting }, nil
}

// enter takes the token for starting.
func (r *Reaper) enter(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case r.starting <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Command is what Start runs.
type Command struct {
	Path  string   // absolute, or relative to Dir
	Args  []string // with the program's name first
	Env   []string
	Dir   string
	Files []int // descriptors of the child from 0 on; the caller keeps its own
	Sys   *syscall.SysProcAttr
	// Outside is for the agent's own programs, which are started where the agent is.
	Outside bool
}

// StartInside makes Start run commands elsewhere from now on: inside runs a function on a thread that is in other
// namespaces.
func (r *Reaper) StartInside(inside func(func())) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inside = inside
}

// Start runs a command. The error is that of fork or exec, unwrapped enough for errors.Is with an Errno, or the end of
// ctx, which bounds the waiting for Pause to be over and nothing else.
func (r *Reaper) Start(ctx context.Context, c *Command) (*Child, error) {
	files := make([]uintptr, len(c.Files))
	for i, fd := range c.Files {
		files[i] = uintptr(fd)
	}
	if err := r.enter(ctx); err != nil {
		return nil, err
	}
	defer func() { <-r.starting }()
	r.mu.Lock()
	defer r.mu.Unlock()
	// Not os.StartProcess: it waits through a pidfd, which fails once the exit has been taken by Wait4(-1).
	var pid int
	var err error
	start := func() {
		runtime.LockOSThread() // the child is that of the thread whose priority was set
		defer runtime.UnlockOSThread()
		if r.all {
			// The agent has a thread of low priority, and threads that it has made have it until they are seen to.
			_ = unix.Setpriority(unix.PRIO_PROCESS, 0, 0)
		}
		pid, _, err = syscall.StartProcess(c.Path, c.Args, &syscall.ProcAttr{Dir: c.Dir, Env: c.Env, Files: files, Sys: c.Sys})
	}
	if r.inside != nil && !c.Outside {
		r.inside(start)
	} else {
		start()
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	child := &Child{reaper: r, pid: pid, done: make(chan struct{})}
	r.children[pid] = child
	if !r.all {
		r.waiting.Go(func() { r.await(pid) })
	}
	return child, nil
}

// await collects one child. It first only looks, so that the pid stays taken until mu is held.
func (r *Reaper) await(pid int) {
	for {
		if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var ws unix.WaitStatus
	for {
		if _, err := unix.Wait4(pid, &ws, 0, nil); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	r.ended(pid, ws)
}

// Wait returns when every child of a reaper made by New has been collected.
func (r *Reaper) Wait() { r.waiting.Wait() }

// Child is a started process.
type Child struct {
	reaper *Reaper
	pid    int
	done   chan struct{}
	state  State // valid once done is closed
}

// PID is the process's number; after Done it may be another's.
func (c *Child) PID() int { return c.pid }

// Done is closed when the process has ended and was collected.
func (c *Child) Done() <-chan struct{} { return c.done }

// State is how it ended; only after Done.
func (c *Child) State() State { return c.state }

// Signal sends a signal to the process; os.ErrProcessDone when it has ended.
func (c *Child) Signal(sig syscall.Signal) error { return c.kill(c.pid, sig) }

// SignalGroup sends a signal to the process's group, which it must lead; os.ErrProcessDone when the process has ended.
func (c *Child) SignalGroup(sig syscall.Signal) error { return c.kill(-c.pid, sig) }

func (c *Child) kill(pid int, sig syscall.Signal) error {
	c.reaper.mu.Lock()
	defer c.reaper.mu.Unlock()
	select {
	case <-c.done:
		return os.ErrProcessDone
	default:
	}
	err := unix.Kill(pid, sig)
	if errors.Is(err, unix.ESRCH) {
		return os.ErrProcessDone
	}
	return err
}

// State is how a process ended.
type State struct{ ws syscall.WaitStatus }

// Exited says that it ended by itself.
func (s State) Exited() bool { return s.ws.Exited() }

// ExitCode is its exit code, -1 when a signal ended it.
func (s State) ExitCode() int { return s.ws.ExitStatus() }

// Signal is what ended it, 0 when it exited.
func (s State) Signal() syscall.Signal {
	if !s.ws.Signaled() {
		return 0
	}
	return s.ws.Signal()
}

// String is the text of os.ProcessState: "exit status 1", "signal: killed".
func (s State) String() string {
	if s.Exited() {
		return "exit status " + strconv.Itoa(s.ExitCode())
	}
	text := "signal: " + s.Signal().String()
	if s.ws.CoreDump() {
		text += " (core dumped)"
	}
	return text
}
