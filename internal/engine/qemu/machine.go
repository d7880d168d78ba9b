package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/proc"
)

// machine is one QEMU process.
type machine struct {
	spec    engine.Spec
	format  engine.Format
	process *proc.Process
	monitor *qmp.Client // nil only until launch has connected
	state   *os.File    // the memfd that QEMU writes the device state to
	console *console
	screen  net.Conn      // our end of the guest's serial line
	printed chan struct{} // closed when the console has been read to its end
	resumed chan struct{} // closed when the guest's CPUs run for the first time
	done    chan struct{} // closed when the process is gone and err is set

	announced announcements
	layers    string                                // of confinement, that it was started with
	id        uint32                                // the user of its jail; 0: none
	live      func(context.Context) (string, error) // why it cannot be captured live, or ""
	operation chan struct{}                         // has room for one: who stops, starts or captures the machine holds it
	paused    bool                                  // by SetPaused; guarded by operation
	collapsed bool                                  // the image has been put together from huge pages; guarded by operation
	capable   bool                                  // QEMU has agreed to capture live; guarded by operation
	habits    *habits                               // what it writes first after a live capture
	copying   atomic.Bool                           // a live capture is not finished

	dialMu sync.Mutex // held while a connection supersedes another

	mu      sync.Mutex
	scratch *memory.Scratch // the RAM of a machine that booted, until Freeze or Close
	conn    net.Conn        // the newest control connection
	first   net.Conn        // made by Restore or SetPaused, for the next DialGuest
	ended   bool            // Close or Freeze ends the process
	why     string          // why QEMU stopped by itself, as it reported
	err     error
}

func newMachine(format engine.Format, spec *engine.Spec, process *proc.Process, state *os.File, screen net.Conn) *machine {
	m := &machine{
		spec: *spec, format: format, process: process, state: state, screen: screen,
		console: &console{}, printed: make(chan struct{}), resumed: make(chan struct{}), done: make(chan struct{}),
		operation: make(chan struct{}, 1), habits: &habits{},
	}
	m.format.CPUs, m.format.MemoryBytes = spec.CPUs, spec.MemoryBytes
	process.Ignore(afterSweep)
	go func() {
		defer close(m.printed)
		m.console.follow(m.screen)
	}()
	return m
}

// watch follows the monitor's events and then the process to its end. It runs until the machine has ended.
func (m *machine) watch() {
	defer close(m.done)
	resumed := false
	for ev := range m.monitor.Events() {
		m.announced.tell(ev)
		switch ev.Name {
		case "RESUME":
			if !resumed {
				resumed = true
				close(m.resumed)
			}
		case "SHUTDOWN":
			m.noteShutdown(ev.Data)
		case "GUEST_PANICKED":
			m.note("the guest's kernel panicked")
		}
	}
	<-m.process.Done()
	m.drainConsole()
	err := m.reason()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.ended {
		m.err = err
	}
}

// drainConsole waits for the guest's last words, which are still in the socket when the process is gone.
func (m *machine) drainConsole() {
	_ = m.screen.SetReadDeadline(time.Now().Add(time.Second))
	<-m.printed
	_ = m.screen.Close()
}

func (m *machine) noteShutdown(data json.RawMessage) {
	var d struct {
		Guest  bool   `json:"guest"`
		Reason string `json:"reason"`
	}
	if json.Unmarshal(data, &d) != nil {
		return
	}
	switch d.Reason {
	case "guest-shutdown":
		m.note("the guest powered off")
	case "guest-reset":
		m.note("the guest rebooted or its kernel panicked, which ends a sandbox")
	case "guest-panic":
		m.note("the guest's kernel panicked")
	case "host-signal":
		m.note("the VM process was told to end by a signal")
	}
}

func (m *machine) note(why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.why = why
}

// reason says why the process ended by itself.
func (m *machine) reason() error {
	m.mu.Lock()
	why := m.why
	m.mu.Unlock()
	err := m.process.Err()
	if errors.Is(err, proc.ErrUnknownExit) && why != "" { // QEMU itself has said how.
		err = nil
	}
	if err != nil {
		if why != "" {
			return fmt.Errorf("%w: %s: %w", engine.ErrDead, why, err)
		}
		return fmt.Errorf("%w: %w", engine.ErrDead, err)
	}
	if why == "" {
		why = "QEMU exited by itself"
		if said := sayQEMU(m.process.Output()); said != "" {
			why += ": " + said
		}
	}
	if last := lastLine(m.console.Bytes()); last != "" {
		why += fmt.Sprintf("; the guest's last words: %q", last)
	}
	return fmt.Errorf("%w: %s", engine.ErrDead, why)
}

func lastLine(console []byte) string {
	text := strings.TrimSpace(string(console))
	return text[strings.LastIndexByte(text, '\n')+1:]
}

// Ref implements engine.Machine.
func (m *machine) Ref() engine.Ref {
	return engine.Ref{Engine: Name, PID: m.process.PID(), StartTime: m.process.StartTime(), Dir: m.spec.Dir, Layers: m.layers}
}

// DialGuest implements engine.Machine.
func (m *machine) DialGuest(ctx context.Context) (net.Conn, error) {
	m.dialMu.Lock()
	defer m.dialMu.Unlock()
	m.mu.Lock()
	old, first := m.conn, m.first
	m.conn, m.first = nil, nil
	if first != nil && !isClosed(m.done) {
		m.conn = first
		m.mu.Unlock()
		return first, nil
	}
	m.mu.Unlock()
	// QEMU serves one connection of a port and accepts the next when this one has ended.
	for _, conn := range []net.Conn{old, first} {
		if conn != nil {
			_ = conn.Close()
		}
	}
	conn, err := m.dialControl(ctx)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conn = conn
	return conn, nil
}

func (m *machine) dialControl(ctx context.Context) (net.Conn, error) {
	if isClosed(m.done) { // Dead, or given up: the process of the second would answer.
		return nil, fmt.Errorf("connect to guest of %s: %w", m.spec.ID, errors.Join(engine.ErrDead, m.Err()))
	}
	dir, err := os.Open(m.spec.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	conn, err := dialUnix(ctx, dir, controlSocket)
	if err != nil && isClosed(m.done) {
		err = errors.Join(engine.ErrDead, m.Err())
	}
	if err != nil {
		return nil, fmt.Errorf("connect to guest of %s: %w", m.spec.ID, err)
	}
	return conn, nil
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// ConsoleFrom implements engine.Teller.
func (m *machine) ConsoleFrom(at int64) (text []byte, next int64, more <-chan struct{}) {
	return m.console.From(at)
}

// Console implements engine.Machine.
func (m *machine) Console() []byte {
	text := m.console.Bytes()
	said := m.process.Output()
	if len(said) > 0 {
		text = append(text, "\n[QEMU] "...)
		text = append(text, said...)
	}
	if len(text) > consoleMax {
		text = text[len(text)-consoleMax:]
	}
	return text
}

// Done implements engine.Machine.
func (m *machine) Done() <-chan struct{} { return m.done }

// Err implements engine.Machine.
func (m *machine) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Close implements engine.Machine.
func (m *machine) Close() error {
	err := m.end()
	m.mu.Lock()
	scratch, conns := m.scratch, []net.Conn{m.conn, m.first}
	m.scratch, m.conn, m.first = nil, nil, nil
	m.mu.Unlock()
	for _, conn := range conns {
		if conn != nil {
			_ = conn.Close()
		}
	}
	if scratch != nil {
		_ = scratch.Close()
	}
	_ = m.state.Close()
	m.process.Release()
	return err
}

// end kills the process, if it still runs, and waits until everything that watched it has ended.
func (m *machine) end() error {
	m.mu.Lock()
	m.ended = true
	m.mu.Unlock()
	if err := m.process.Kill(); err != nil {
		return err
	}
	if m.monitor == nil { // Launch failed before anything watched.
		m.drainConsole()
		return nil
	}
	_ = m.monitor.Close()
	<-m.done
	return nil
}

// failed turns the error of a start into what the user needs: what QEMU said, if it has died of it.
func (m *machine) failed(err error) error {
	if !errors.Is(err, qmp.ErrClosed) {
		return err
	}
	select {
	case <-m.done:
	case <-time.After(5 * time.Second): // The monitor is gone and the process is not: it hangs in its exit.
		return err
	}
	if why := m.Err(); why != nil {
		return why
	}
	return err
}
