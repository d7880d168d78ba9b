package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/qemu/qmp"
	"forkd.dev/forkd/internal/memory"
)

// How far QEMU may be ahead of the drain: first, while the daemon copies faster; then, with CAP_SYS_RESOURCE and without.
const (
	pipeBytesFirst = 16 << 10
	pipeBytes      = 16 << 20
	pipeBytesFewer = 1 << 20
)

// captureFD is the monitor's name of the stream's descriptor.
const captureFD = "capture"

// liveCapture is a capture by QEMU's background snapshot: it write-protects the RAM, lets the guest run, and streams
// the RAM of the instant, a page about to be written first.
type liveCapture struct {
	m       *machine
	scratch *memory.Scratch
	ram     *memory.Process
	disk    *diskSwitch
	early   early         // fixed before the flood
	jumped  []int64       // the drain's until drained
	held    bool          // QEMU has begun, and waits for the flood
	pipe    uint64        // inode of the stream, if it is held
	flood   chan struct{} // closed when the drain may begin
	stream  *os.File      // our end
	cut     chan struct{} // closed by discard: the drain ends
	armed   chan struct{} // closed when the first page has come
	drained chan struct{}
	ahead   ahead
	started bool // ahead runs
	sweep   sweep
	over    chan struct{} // closed when QEMU's snapshot has ended, and a machine whose stream was cut runs again
	state   []byte        // set when drained
	err     error
	resumed time.Time
	ended   time.Time

	unsettled error // set when over
}

func (m *machine) captureLive(ctx context.Context, spec *engine.CaptureSpec, ram *memory.Process) (*engine.Capture, error) {
	began := time.Now()
	l := &liveCapture{
		m: m, ram: ram, held: canHold(m.format.Version), flood: make(chan struct{}), cut: make(chan struct{}), armed: make(chan struct{}), drained: make(chan struct{}),
		over: make(chan struct{}), ahead: newAhead(m.spec.MemoryBytes), sweep: newSweep(m.spec.MemoryBytes),
	}
	theirs, err := l.prepare(ctx, ram)
	if err != nil {
		return nil, err
	}
	if !l.held {
		l.letFlow()
	}
	go l.drain(spec.Progress)
	// Ours goes once QEMU has its own: the stream ends when all of them are closed.
	err = l.give(ctx, theirs, spec.DiskTop)
	_ = theirs.Close()
	if err != nil {
		return nil, errors.Join(err, l.discard())
	}
	if l.held {
		if err := l.begin(ctx); err != nil {
			return nil, errors.Join(err, l.undo(ctx))
		}
	}
	setup := time.Since(began)
	if err := spec.Quiesce(ctx); err != nil {
		return nil, errors.Join(err, l.undo(ctx))
	}
	pause, err := l.take(ctx)
	if err != nil {
		return nil, err
	}
	return &engine.Capture{Mode: engine.CaptureLive, Pause: pause, Setup: setup, Finish: l.finish}, nil
}

// prepare reserves what the capture needs and returns QEMU's end of the stream.
func (l *liveCapture) prepare(ctx context.Context, ram *memory.Process) (*os.File, error) {
	m := l.m
	if err := m.populate(ctx, ram); err != nil {
		return nil, err
	}
	var err error
	if l.scratch, err = memory.NewScratch(m.spec.MemoryBytes); err != nil {
		return nil, err
	}
	ours, theirs, err := streamPipe()
	if err != nil {
		return nil, errors.Join(err, l.scratch.Close())
	}
	l.stream = ours
	if !l.held {
		return theirs, nil
	}
	if l.pipe, err = dam(theirs); err != nil {
		return nil, errors.Join(err, ours.Close(), theirs.Close(), l.scratch.Close())
	}
	likely := m.habits.known()
	if len(likely) == 0 {
		likely, _ = ram.Scattered(ctx, earlyMost) // Without them it is only slower.
	}
	l.early = newEarly(likely)
	return theirs, nil
}

// populate makes the guest's RAM quick to protect: once, its image is put together from huge pages; every time, what is
// missing in the page tables is read from outside. QEMU reads all of it before it protects as well, but in the pause.
func (m *machine) populate(ctx context.Context, ram *memory.Process) error {
	if !m.collapsed {
		// Not blocking: what the process has there is up to it, and opening a pipe would wait for a writer.
		image, err := os.OpenFile(procFD(m.process.PID(), fdRAM), os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		err = collapse(ctx, image, m.spec.MemoryBytes)
		_ = image.Close()
		if err != nil {
			return err
		}
		m.collapsed = true
	}
	return ram.Populate(ctx)
}

// give hands QEMU all it needs before the pause.
func (l *liveCapture) give(ctx context.Context, stream *os.File, diskTop string) error {
	ctx, cancel := answerContext(ctx)
	defer cancel()
	// Before it agrees QEMU registers all of the RAM and gives it back, which takes it 20 ms for 512 MiB, the guest waiting.
	if !l.m.capable {
		if err := l.m.monitor.Do(ctx, qmp.Command{Name: "migrate-set-capabilities", Args: capability(backgroundSnapshot)}, nil); err != nil {
			return err
		}
		l.m.capable = true
	}
	err := l.m.monitor.Do(ctx, qmp.Command{Name: "getfd", Args: map[string]string{"fdname": captureFD}, File: stream}, nil)
	if err != nil {
		return err
	}
	if l.disk, err = l.m.addTop(ctx, diskTop); err != nil {
		return errors.Join(err, l.closeStream(ctx))
	}
	return nil
}

const backgroundSnapshot = "background-snapshot"

func capability(name string) any {
	return map[string]any{"capabilities": []any{map[string]any{"capability": name, "state": true}}}
}

// closeStream has QEMU close a stream that it has not begun to write.
func (l *liveCapture) closeStream(ctx context.Context) error {
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	return l.m.monitor.Do(ctx, qmp.Command{Name: "closefd", Args: map[string]string{"fdname": captureFD}}, nil)
}

// undo gives back everything of a capture whose pause has not begun.
func (l *liveCapture) undo(ctx context.Context) error {
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	if !l.held {
		return errors.Join(l.m.dropTop(ctx, l.disk), l.closeStream(ctx), l.discard())
	}
	defer l.m.copying.Store(false)
	return errors.Join(l.m.settle(ctx, l.stream), l.m.dropTop(ctx, l.disk), l.discard())
}

// discard ends the drain and frees the memory.
func (l *liveCapture) discard() error {
	if !isClosed(l.cut) {
		close(l.cut)
	}
	l.letFlow()
	<-l.drained
	if l.started {
		<-l.ahead.over
	}
	return l.scratch.Close()
}

// letFlow lets the drain begin, and with it QEMU go on.
func (l *liveCapture) letFlow() {
	if !isClosed(l.flood) {
		close(l.flood)
	}
}

// drain runs until the stream ends, or is cut by discard.
func (l *liveCapture) drain(progress func(done, total int64)) {
	defer close(l.drained)
	defer func() { _ = l.stream.Close() }()
	<-l.flood
	if l.held {
		if l.err = undam(l.stream); l.err != nil {
			return
		}
		narrow(l.stream)
	}
	paced := pace{
		r: l.stream, cut: l.cut, hurried: l.ahead.over, hurry: func() { widen(l.stream) }, tick: time.NewTicker(paceTick),
	}
	defer paced.tick.Stop()
	size, sink := l.m.spec.MemoryBytes, fileSink{l.scratch.File()}
	var begun time.Time
	l.state, l.err = drain(&paced, sink, size, &l.ahead.taken, streamNews{
		begun: func() {
			begun = time.Now()
			paced.slow = true
			close(l.armed)
		},
		jumped: func(off int64) {
			if len(l.jumped) < earlyMost && time.Since(begun) < earlyTime {
				l.jumped = append(l.jumped, off)
			}
		},
		passed: l.sweep.past,
		copied: func(done int64) {
			if progress != nil {
				progress(done, size)
			}
		},
	})
	if l.err == nil {
		l.err = l.early.write(sink)
	}
	l.ended = time.Now()
}

// take is the pause.
func (l *liveCapture) take(ctx context.Context) (time.Duration, error) {
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	m := l.m
	running := m.announced.expect("RESUME", nil)
	defer m.announced.drop(running)
	m.copying.Store(true)
	stopped := time.Now()
	commands := []qmp.Command{{Name: "stop"}, l.disk.command()}
	if !l.held {
		commands = append(commands, qmp.Command{Name: "migrate", Args: map[string]string{"uri": "fd:" + captureFD}})
	}
	errs := m.monitor.Each(ctx, commands)
	moved := mayHave(errs[1])
	err := first(errs)
	if err == nil {
		l.early.read(ctx, l.ram)
		for _, off := range l.early.pages {
			l.ahead.taken.add(off)
		}
		l.letFlow()
		err = l.resume(ctx, running)
	}
	if err != nil {
		return 0, l.fail(ctx, err, moved)
	}
	l.resumed = time.Now()
	go l.sweep.run(m.process.PID(), l.ram)
	l.started = true
	go l.ahead.run(m.process.PID(), l.ram, fileSink{l.scratch.File()}, l.drained)
	go l.guard(context.WithoutCancel(ctx)) // until the stream ends, not the pause
	_ = l.early.unprotect(m.process.PID(), l.ram)
	return l.resumed.Sub(stopped), nil
}

// resume lets the machine run, or not if it was paused, as soon as QEMU has saved devices and CPUs and protected the
// RAM. QEMU 7.2 lets the CPUs run itself then, whatever they did before; newer ones leave them as they were, and no event
// says when, but the first page does: pages are sent after that. Sooner an order to run would be carried out before the
// instant, with the disk switched already.
func (l *liveCapture) resume(ctx context.Context, running *announcement) error {
	select {
	case <-running.seen:
		if !l.m.paused {
			return nil
		}
	case <-l.armed:
	case <-l.drained:
		if !isClosed(l.armed) {
			_, err := l.explain(ctx)
			return err
		}
	case <-l.m.done:
		return l.m.dead()
	case <-ctx.Done():
		return fmt.Errorf("wait for QEMU to protect the memory: %w", context.Cause(ctx))
	}
	order := "cont"
	if l.m.paused {
		order = "stop"
	}
	return l.m.monitor.Do(ctx, qmp.Command{Name: order}, nil)
}

// fail ends a capture whose pause has begun, and has the machine run.
func (l *liveCapture) fail(ctx context.Context, err error, moved bool) error {
	err = errors.Join(err, l.m.settle(ctx, l.stream), l.discard())
	l.m.copying.Store(false)
	if moved {
		return &engine.DiskMovedError{Err: err}
	}
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	return errors.Join(err, l.m.dropTop(ctx, l.disk))
}

// guard has the machine run if the stream ends before its time. It does not wait for finish, which comes after the guest's
// processes were asked to run again: a guest that hangs in what is protected does not answer.
func (l *liveCapture) guard(ctx context.Context) {
	defer close(l.over)
	<-l.drained
	l.sweep.end()
	<-l.ahead.over
	if l.err == nil {
		l.err = l.ahead.err
	}
	if l.err != nil {
		l.unsettled = l.m.settle(ctx, l.stream)
	}
}

// finish waits for the end of the stream.
func (l *liveCapture) finish(ctx context.Context) (*engine.Captured, error) {
	c, err := l.complete(ctx)
	if err != nil {
		return nil, fmt.Errorf("capture machine %s: copy its memory: %w", l.m.spec.ID, l.m.failed(err))
	}
	return c, nil
}

func (l *liveCapture) complete(ctx context.Context) (*engine.Captured, error) {
	defer l.m.copying.Store(false)
	select {
	case <-l.drained:
	case <-ctx.Done():
	}
	if err := context.Cause(ctx); err != nil && !isClosed(l.drained) {
		err = errors.Join(err, l.m.settle(ctx, l.stream), l.discard())
		<-l.over
		return nil, err
	}
	<-l.over
	status, err := l.explain(ctx)
	if err != nil {
		return nil, errors.Join(err, l.unsettled, l.discard())
	}
	l.m.habits.learn(append(l.ahead.served, l.jumped...))
	image, err := l.scratch.Seal()
	if err != nil {
		return nil, errors.Join(err, l.scratch.Close())
	}
	return &engine.Captured{
		Format: l.m.format, State: l.state, Image: image, Copied: l.ended.Sub(l.resumed), Downtime: time.Duration(status.Downtime) * time.Millisecond,
	}, nil
}

// explain says whether a stream that has ended is whole, and if not, what QEMU says of it.
func (l *liveCapture) explain(ctx context.Context) (*migrationStatus, error) {
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	if errors.Is(l.err, errSink) {
		return nil, l.err // What QEMU says follows from it.
	}
	if isClosed(l.m.process.Done()) {
		return nil, errors.Join(qmp.ErrClosed, l.err)
	}
	status, err := l.m.migration(ctx)
	switch {
	case err != nil:
		return nil, errors.Join(err, l.err)
	case l.err == nil && status.Status == "completed":
		return status, nil
	}
	err = fmt.Errorf("QEMU's snapshot %s", status.Status)
	if status.Error != "" {
		err = fmt.Errorf("%w: %s", err, status.Error)
	}
	return nil, errors.Join(err, l.err)
}

// migrationStatus is QEMU's view of the newest background snapshot.
type migrationStatus struct {
	Status string `json:"status"`
	Error  string `json:"error-desc"`
	// Downtime is for how many ms the machine stood still, from QEMU's order to stop until it was protected.
	Downtime int64 `json:"downtime"`
}

func (s *migrationStatus) over() bool {
	switch s.Status {
	case "", "none", "completed", "failed", "cancelled":
		return true
	}
	return false
}

func (m *machine) migration(ctx context.Context) (*migrationStatus, error) {
	var s migrationStatus
	if err := m.monitor.Do(ctx, qmp.Command{Name: "query-migrate"}, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

// settleTick is how often a QEMU that does not answer is rescued again.
const settleTick = 5 * time.Millisecond

// settle ends a background snapshot that failed or is not wanted, and returns when the monitor answers and the machine
// runs as it did before. stream, if there is one, is our end of what QEMU writes.
func (m *machine) settle(ctx context.Context, stream *os.File) error {
	ctx, cancel := pauseContext(ctx)
	defer cancel()
	if stream != nil {
		// A write that blocks does not notice a cancellation.
		_ = stream.Close()
	}
	if err := m.settled(ctx); err != nil {
		if isClosed(m.process.Done()) || errors.Is(err, qmp.ErrClosed) {
			return nil // Why it ended is said elsewhere.
		}
		go m.settleLater(context.WithoutCancel(ctx))
		return fmt.Errorf("end QEMU's snapshot: %w", err)
	}
	return nil
}

// settleLater goes on with it, however long it takes, for a QEMU that did not answer in time: what it was told it carries
// out when nobody waits any more, and its guest would hang at the first write to what is protected then. Until that is
// over nothing else is done with the machine.
func (m *machine) settleLater(ctx context.Context) {
	if m.acquire(ctx) != nil {
		return
	}
	defer m.release()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over := make(chan struct{})
	go func() {
		defer close(over)
		select {
		case <-m.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	_ = m.settled(ctx) // Ends with success or with the machine.
	cancel()
	<-over
}

func (m *machine) settled(ctx context.Context) error {
	if err := m.insist(ctx, qmp.Command{Name: "migrate_cancel"}, nil); err != nil {
		return err
	}
	tick := time.NewTicker(settleTick)
	defer tick.Stop()
	for {
		var s migrationStatus
		if err := m.insist(ctx, qmp.Command{Name: "query-migrate"}, &s); err != nil {
			return err
		}
		if s.over() {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for its end (%s): %w", s.Status, context.Cause(ctx))
		}
	}
	// Whatever is protected now has nobody to serve it.
	if err := rescue(m.process.PID()); err != nil {
		return err
	}
	var status struct {
		Running bool `json:"running"`
	}
	if err := m.insist(ctx, qmp.Command{Name: "query-status"}, &status); err != nil {
		return err
	}
	if status.Running == !m.paused {
		return nil
	}
	if m.paused {
		return m.insist(ctx, qmp.Command{Name: "stop"}, nil)
	}
	return m.insist(ctx, qmp.Command{Name: "cont"}, nil)
}

// insist runs a command on a QEMU that may hang in a page fault, which it is rescued from until it answers.
func (m *machine) insist(ctx context.Context, cmd qmp.Command, out any) error {
	answer := make(chan error, 1)
	var raw json.RawMessage
	go func() { answer <- m.monitor.Do(ctx, cmd, &raw) }()
	tick := time.NewTicker(settleTick)
	defer tick.Stop()
	for {
		select {
		case err := <-answer:
			if err != nil || out == nil {
				return err
			}
			return json.Unmarshal(raw, out)
		case <-tick.C:
			if err := rescue(m.process.PID()); err != nil {
				return err
			}
		}
	}
}
