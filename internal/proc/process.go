package proc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Process is a running or ended child. It is safe for concurrent use.
type Process struct {
	name      string
	pid       int
	startTime uint64
	output    *output
	child     *os.Process
	adopted   bool // it is no child of ours: nobody tells us how it ended
	exit      *exitWaiter
	done      chan struct{}
	joined    chan struct{} // closed when it is in its control group; nil: it was born there
	joinErr   error         // set before joined is closed
	ignored   atomic.Pointer[func(line string) bool]

	mu     sync.Mutex
	killed bool
	err    error // set before done is closed
	over   bool  // it has ended, or been given up
}

// hold takes over a started child: on failure it is ended.
func hold(child *os.Process, pidfd int, out *output, cmd *Command) (*Process, error) {
	p := &Process{
		name: filepath.Base(cmd.Path), pid: child.Pid, output: out, child: child, done: make(chan struct{}),
	}
	if err := p.prepare(); err != nil {
		_ = child.Kill()
		_, _ = child.Wait()
		_ = unix.Close(pidfd)
		_ = out.close()
		return nil, err
	}
	var err error
	if p.exit, err = newExitWaiter(pidfd); err != nil {
		_ = child.Kill()
		_, _ = child.Wait()
		_ = out.close()
		return nil, err
	}
	go p.wait()
	return p, nil
}

// prepare runs before anything waits for the child, so that its entry in /proc stays even if it ends at once.
func (p *Process) prepare() error {
	var err error
	if p.startTime, err = startTime(p.pid); err != nil {
		return err
	}
	return nil
}

func (p *Process) wait() {
	ended := p.exit.wait()
	var state *os.ProcessState
	var err error
	if ended && !p.adopted {
		state, err = p.child.Wait()
	}
	p.mu.Lock()
	p.over = true
	if ended {
		p.err = p.reason(state, err)
	}
	p.mu.Unlock()
	if !ended || p.adopted {
		_ = p.child.Release()
	}
	close(p.done)
}

// reason is called with mu held.
func (p *Process) reason(state *os.ProcessState, err error) error {
	if p.killed {
		return nil
	}
	if err != nil {
		return fmt.Errorf("wait for %s: %w", p.name, err)
	}
	if p.adopted {
		if said := p.said(); said != "" {
			return fmt.Errorf("%s: %w: %s", p.name, ErrUnknownExit, said)
		}
		return fmt.Errorf("%s: %w", p.name, ErrUnknownExit)
	}
	if state.Success() {
		return nil
	}
	text := describe(state)
	if said := p.said(); said != "" {
		text += ": " + said
	}
	return fmt.Errorf("%s %s", p.name, text)
}

// said is the newest output on one line, without the program's name that many put before each.
func (p *Process) said() string {
	var lines []string
	for line := range strings.Lines(string(p.output.tail(2 << 10))) {
		if line = strings.TrimPrefix(strings.TrimSpace(line), p.name+": "); line != "" && !p.idle(line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "; ")
}

// Ignore names lines of output that are of no concern: they do not explain an end.
func (p *Process) Ignore(idle func(line string) bool) { p.ignored.Store(&idle) }

func (p *Process) idle(line string) bool {
	idle := p.ignored.Load()
	return idle != nil && (*idle)(line)
}

func describe(state *os.ProcessState) string {
	status, ok := state.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		s := status.Signal()
		text := fmt.Sprintf("was killed by signal %d (%s)", int(s), s)
		if s == syscall.SIGKILL {
			text += ", sent by someone else or by the kernel when memory ran out"
		}
		return text
	}
	return fmt.Sprintf("exited with status %d", state.ExitCode())
}

// PID is the process id.
func (p *Process) PID() int { return p.pid }

// StartTime is the start of the process in clock ticks after boot: with the PID it names the process for ever.
func (p *Process) StartTime() uint64 { return p.startTime }

// Done is closed when the process has ended and been reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err says why the process ended: nil while it runs, after an exit with status 0, and after Kill.
func (p *Process) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Output is the newest 64 KiB of what the process wrote so far; see Command.OutputMax. It works after the end, too.
func (p *Process) Output() []byte { return p.output.tail(defaultOutputMax) }

// Release frees the output. Call it when the process has ended; it is idempotent.
func (p *Process) Release() { _ = p.output.close() }

// Kill ends the process and waits until it is gone. It is idempotent, and no error if the process has ended already.
func (p *Process) Kill() error {
	p.mu.Lock()
	if !p.over {
		p.killed = true
		// Under the lock, so that a process given up meanwhile is not met.
		if err := p.child.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			p.mu.Unlock()
			return fmt.Errorf("kill %s (process %d): %w", p.name, p.pid, err)
		}
	}
	p.mu.Unlock()
	<-p.done
	return nil
}
