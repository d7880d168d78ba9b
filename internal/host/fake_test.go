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
}

func newFakeEngine() *fakeEngine {
	return &fakeEngine{
		alive: map[*fakeMachine]bool{}, fail: func(int) error { return nil }, awaken: func(int) *wire.Error { return nil },
		silent: func(int) bool { return false },
	}
}

func (e *fakeEngine) Name() string { return "fake" }

func (e *fakeEngine) Probe(context.Context) (*engine.Features, error) {
	return &engine.Features{Format: engine.Format{Engine: "fake", Version: "1.0"}}, nil
}

func (e *fakeEngine) Boot(context.Context, *engine.Spec) (engine.Machine, error) {
	return nil, engine.ErrUnavailable
}

func (e *fakeEngine) Bury(context.Context, engine.Ref) error { return nil }

func (e *fakeEngine) Restore(_ context.Context, spec *engine.Spec, _ *engine.Checkpoint) (engine.Machine, error) {
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
	m := &fakeMachine{e: e, n: n, dir: spec.Dir, done: make(chan struct{})}
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

	mu    sync.Mutex
	err   error
	ended bool
	wg    sync.WaitGroup
	conns []net.Conn
}

func (m *fakeMachine) Ref() engine.Ref       { return engine.Ref{Engine: "fake", PID: 0, Dir: m.dir} }
func (m *fakeMachine) Console() []byte       { return []byte("fake console\n") }
func (m *fakeMachine) Done() <-chan struct{} { return m.done }
func (m *fakeMachine) Freeze(context.Context) (*engine.Checkpoint, error) {
	return nil, engine.ErrUnavailable
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
	port := &guestPort{conn, wire.NewReceiver(conn)}
	p, err := port.r.Await()
	if err != nil {
		return
	}
	hello := wire.Hello{Version: wire.Version, Generation: p.Generation, Phase: "ready"}
	if p.Awaken {
		if _, _, err := wire.ReadAwaken(port, nil); err != nil {
			return
		}
		if hello.Refusal = m.e.awaken(m.n); hello.Refusal == nil {
			hello.Awakened = &wire.AwakenReport{Renewed: []string{"kernel_entropy"}}
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
	if _, _, err := s.Recv(); err != nil {
		return
	}
	if refusal := m.e.awaken(m.n); refusal != nil {
		_ = s.SendError(refusal.Code, refusal.Message)
		return
	}
	_ = s.SendMessage(wire.AwakenReport{Renewed: []string{"kernel_entropy"}})
	_ = s.End()
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
