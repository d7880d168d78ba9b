package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest/mux"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/store"
)

// fakeEngine makes machines without a VM: for what the host does when things fail, never for a claim about VMs.
type fakeEngine struct {
	mu       sync.Mutex
	restored int
	alive    map[*fakeMachine]bool
	fail     func(n int) error       // of the n-th restore
	awaken   func(n int) *wire.Error // what the n-th machine's agent answers
	silent   func(n int) bool        // its agent never answers
	lie      func(conn net.Conn)     // what its agent does instead of its duty; nil: that
	severed  []bool                  // of the machines awakened so far: whether they were told to end their parent's connections
	live     bool
	capture  func(step string) error // what happens at a step of a capture: "start", "paused", "finish"
	boot     func(n int) string      // what is in the memory of the n-th machine that boots; nil: none does
	booted   int
	thaw     func() *wire.Error // what an agent answers that is to let processes run; nil: it does
}

func newFakeEngine() *fakeEngine {
	return &fakeEngine{
		alive: map[*fakeMachine]bool{}, fail: func(int) error { return nil }, awaken: func(int) *wire.Error { return nil },
		silent: func(int) bool { return false }, capture: func(string) error { return nil },
	}
}

func (e *fakeEngine) Name() string { return "fake" }

func (e *fakeEngine) Probe(context.Context) (*engine.Features, error) {
	return &engine.Features{
		Format: engine.Format{Engine: "fake", Version: "1.0"}, Capture: true, Live: e.live, LiveReason: "the fake has none",
		Pause: true, Commit: true,
	}, nil
}

func (e *fakeEngine) Boot(_ context.Context, spec *engine.Spec) (engine.Machine, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.boot == nil {
		return nil, engine.ErrUnavailable
	}
	e.booted++
	m := &fakeMachine{
		e: e, n: -e.booted, dir: spec.Dir, done: make(chan struct{}), top: spec.Disk.Path, memory: make([]byte, spec.MemoryBytes),
		format: engine.Format{Engine: "fake", Version: "1.0", CPUs: spec.CPUs, MemoryBytes: spec.MemoryBytes},
	}
	m.set(e.boot(e.booted))
	e.alive[m] = true
	return m, nil
}

func (e *fakeEngine) Bury(context.Context, engine.Ref) error { return nil }

func (e *fakeEngine) Restore(_ context.Context, spec *engine.Spec, from *engine.Checkpoint) (engine.Machine, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := e.restored
	e.restored++
	if err := e.fail(n); err != nil {
		return nil, err
	}
	if _, err := os.Stat(spec.Disk.Path); err != nil {
		return nil, err
	}
	m := &fakeMachine{e: e, n: n, dir: spec.Dir, format: from.Format, done: make(chan struct{}), top: spec.Disk.Path}
	m.memory = make([]byte, from.Memory.Size())
	if _, err := (memory.View{Image: from.Memory, Pages: from.Pages}).ReadAt(m.memory, 0); err != nil {
		return nil, err
	}
	e.alive[m] = true
	return m, nil
}

func (e *fakeEngine) living() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.alive)
}

type fakeMachine struct {
	e    *fakeEngine
	n    int
	dir  string
	done chan struct{}

	format engine.Format

	mu     sync.Mutex
	memory []byte
	top    string // the disk it writes
	paused bool
	frozen bool // its agent was told to freeze
	err    error
	ended  bool
	wg     sync.WaitGroup
	conns  []net.Conn
}

func (m *fakeMachine) Ref() engine.Ref {
	return engine.Ref{Engine: "fake", PID: os.Getpid(), Dir: m.dir}
}
func (m *fakeMachine) Console() []byte       { return []byte("fake console\n") }
func (m *fakeMachine) Done() <-chan struct{} { return m.done }
func (m *fakeMachine) Freeze(context.Context) (*engine.Checkpoint, error) {
	if m.n >= 0 {
		return nil, engine.ErrUnavailable
	}
	image, err := m.image()
	if err != nil {
		return nil, err
	}
	return &engine.Checkpoint{Format: m.format, State: []byte("state of " + m.dir), Memory: image}, m.Close()
}

// image is what is in its memory.
func (m *fakeMachine) image() (*memory.Image, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	scratch, err := memory.NewScratch(int64(len(m.memory)))
	if err != nil {
		return nil, err
	}
	defer scratch.Close()
	if _, err := scratch.File().WriteAt(m.memory, 0); err != nil {
		return nil, err
	}
	return scratch.Seal()
}

func (m *fakeMachine) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

func (m *fakeMachine) Close() error { return m.end(nil) }

// end is the machine's death, by us (nil) or by itself.
func (m *fakeMachine) end(err error) error {
	m.mu.Lock()
	if !m.ended {
		m.ended, m.err = true, err
		for _, c := range m.conns {
			_ = c.Close()
		}
		close(m.done)
	}
	m.mu.Unlock()
	m.wg.Wait()
	m.e.mu.Lock()
	delete(m.e.alive, m)
	m.e.mu.Unlock()
	return nil
}

func (m *fakeMachine) DialGuest(context.Context) (net.Conn, error) {
	here, there, err := socketPair()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended {
		_, _ = here.Close(), there.Close()
		return nil, engine.ErrDead
	}
	m.conns = append(m.conns, there)
	m.wg.Go(func() { m.serve(there) })
	return here, nil
}

func socketPair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, cerr := net.FileConn(f)
		_ = f.Close()
		conns[i], err = c, errors.Join(err, cerr)
	}
	return conns[0], conns[1], err
}

type guestPort struct {
	net.Conn
	r *wire.Receiver
}

func (p *guestPort) Read(b []byte) (int, error) { return p.r.Read(b) }

// serve is an agent that knows only how to be awakened.
func (m *fakeMachine) serve(conn net.Conn) {
	defer conn.Close()
	if m.e.silent(m.n) {
		_, _ = io.Copy(io.Discard, conn)
		return
	}
	if m.e.lie != nil {
		m.e.lie(conn)
		return
	}
	port := &guestPort{conn, wire.NewReceiver(conn)}
	p, err := port.r.Await()
	if err != nil {
		return
	}
	hello := wire.Hello{Version: wire.Version, Generation: p.Generation, Phase: "ready", Features: []string{wire.FeatureThaw, wire.FeatureSteps}}
	if p.Awaken {
		req, _, err := wire.ReadAwaken(port, nil)
		if err != nil {
			return
		}
		m.e.mu.Lock()
		m.e.severed = append(m.e.severed, req.Sever)
		m.e.mu.Unlock()
		if hello.Refusal = m.e.awaken(m.n); hello.Refusal == nil {
			m.setFrozen(false)
			hello.Awakened = &wire.AwakenReport{Renewed: []string{"kernel_entropy"}}
			if req.Sever {
				hello.Awakened.Renewed = append(hello.Awakened.Renewed, wire.RenewedConnections)
			}
		}
	}
	b, _ := json.Marshal(hello)
	if _, err := conn.Write(wire.AppendAnswer(nil, p.Nonce, b)); err != nil {
		return
	}
	session := mux.NewServer(conn, 16, func(st *mux.Stream) { go m.answer(wire.NewStream(st)) })
	defer session.Close()
	buf := make([]byte, 4096)
	for {
		n, err := port.Read(buf)
		if err != nil || session.Feed(buf[:n]) != nil {
			return
		}
	}
}

func (m *fakeMachine) answer(s *wire.Stream) {
	defer s.Close()
	_, payload, err := s.Recv()
	if err != nil {
		return
	}
	m.mu.Lock()
	paused := m.paused
	m.mu.Unlock()
	if paused {
		_ = s.SendError(wire.CodeInternal, "a halted machine answers nobody")
		return
	}
	switch method, _, _ := wire.SplitRequest(payload); method {
	case wire.MethodQuiesce:
		m.setFrozen(true)
		_ = s.End()
		return
	case wire.MethodEndProcesses:
		_ = s.SendMessage(wire.EndProcessesReply{PIDs: []int{7}})
		_ = s.End()
		return
	case wire.MethodThaw:
		if thaw := m.e.thaw; thaw != nil {
			if refusal := thaw(); refusal != nil {
				_ = s.SendError(refusal.Code, refusal.Message)
				return
			}
		}
		m.setFrozen(false)
		_ = s.SendMessage(wire.ThawReport{})
		_ = s.End()
		return
	}
	if refusal := m.e.awaken(m.n); refusal != nil {
		_ = s.SendError(refusal.Code, refusal.Message)
		return
	}
	m.setFrozen(false)
	_ = s.SendMessage(wire.AwakenReport{Renewed: []string{"kernel_entropy"}})
	_ = s.End()
}

func (m *fakeMachine) setFrozen(frozen bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen = frozen
}

func (m *fakeMachine) isFrozen() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.frozen
}

// set writes the machine's memory, as its guest would.
func (m *fakeMachine) set(value string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	copy(m.memory[8192:], append([]byte(value), 0))
}

// get reads it.
func (m *fakeMachine) get() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	text, _, _ := bytes.Cut(m.memory[8192:], []byte{0})
	return string(text)
}

func (m *fakeMachine) SetPaused(_ context.Context, paused bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = paused
	return nil
}

func (m *fakeMachine) CommitDisk(context.Context, string, string) error { return nil }

// Capture keeps the contract of engine.Capturer on a byte array.
func (m *fakeMachine) Capture(ctx context.Context, spec *engine.CaptureSpec) (*engine.Capture, error) {
	if err := m.e.capture("start"); err != nil {
		return nil, err
	}
	if err := spec.Quiesce(ctx); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended {
		return nil, engine.ErrDead
	}
	if !m.frozen {
		return nil, errors.New("captured while its processes run")
	}
	m.top = spec.DiskTop
	if err := m.e.capture("paused"); err != nil {
		return nil, &engine.DiskMovedError{Err: err}
	}
	instant := bytes.Clone(m.memory)
	return &engine.Capture{Mode: spec.Mode, Pause: time.Millisecond, Finish: func(ctx context.Context) (*engine.Captured, error) {
		if err := m.e.capture("finish"); err != nil {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if spec.Progress != nil {
			spec.Progress(int64(len(instant)), int64(len(instant)))
		}
		scratch, err := memory.NewScratch(int64(len(instant)))
		if err != nil {
			return nil, err
		}
		defer scratch.Close()
		if _, err := scratch.File().WriteAt(instant, 0); err != nil {
			return nil, err
		}
		image, err := scratch.Seal()
		if err != nil {
			return nil, err
		}
		return &engine.Captured{Format: m.format, State: []byte("state of " + m.dir), Image: image}, nil
	}}, nil
}

// fakeTag is a snapshot with real layers and a fake machine's state.
const fakeTag = "fake"

const fakeMemory = 1 << 20

func fakeHost(t *testing.T, e *fakeEngine, change func(*Config)) *Host {
	t.Helper()
	home := layout.Home{Root: filepath.Join(t.TempDir(), "home"), Runtime: t.TempDir()}
	cfg := Config{
		Home: home, Engine: e, Log: slog.New(slog.DiscardHandler), HotMaxBytes: 4 << 20,
		Available: func() (int64, error) { return 64 << 30, nil },
	}
	if change != nil {
		change(&cfg)
	}
	h, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		if n := e.living(); n != 0 {
			t.Errorf("%d machines outlive their host", n)
		}
		checkEmpty(t, home.Machines())
	})
	addSnapshot(t, h, fakeTag, wire.Version)
	return h
}

func checkEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		t.Errorf("left behind: %s", filepath.Join(dir, e.Name()))
	}
}

// addSnapshot adds one whose agent speaks a version of the protocol.
func addSnapshot(t *testing.T, h *Host, tag string, protocol int) {
	t.Helper()
	ctx := t.Context()
	raw := filepath.Join(t.TempDir(), "disk.raw")
	if err := os.WriteFile(raw, bytes.Repeat([]byte("disk"), 64<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	base, err := disk.SaveBase(ctx, h.layers, raw)
	if err != nil {
		t.Fatal(err)
	}
	img := store.Image{FormatVersion: store.FormatVersion, ID: "image-of-" + tag, Name: tag, Disk: base.Digest, CreatedAt: time.Now()}
	if err := h.store.AddImage(ctx, img); err != nil {
		t.Fatal(err)
	}
	overlay := filepath.Join(t.TempDir(), "overlay.qcow2")
	if err := disk.CreateOverlay(overlay, raw, "raw"); err != nil {
		t.Fatal(err)
	}
	top, err := disk.SaveOverlay(ctx, h.layers, overlay, base.Digest)
	if err != nil {
		t.Fatal(err)
	}
	scratch, err := memory.NewScratch(fakeMemory)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := scratch.File().WriteAt([]byte("memory of "+tag), 4096); err != nil {
		t.Fatal(err)
	}
	image, err := scratch.Seal()
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	mem, err := memory.Save(ctx, h.layers, image, [32]byte{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	m := store.Snapshot{
		FormatVersion: store.FormatVersion, Tag: tag, CreatedAt: time.Now().UTC(), Image: img.ID, ImageDisk: base.Digest,
		Memory: mem.Digest, Disk: top.Digest, Warm: []string{}, Protocol: protocol,
		Engine: engine.Format{Engine: "fake", Version: "1.0", CPUs: 1, MemoryBytes: fakeMemory},
	}
	m = m.WithState([]byte("device state of " + tag))
	h.mu.Lock()
	h.images[img.ID] = img
	h.mu.Unlock()
	if err := h.enterSnapshot(ctx, m, []byte("device state of "+tag), false); err != nil {
		t.Fatal(err)
	}
}
