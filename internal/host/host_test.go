package host

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

func (h *Host) hotUsers() int {
	h.hot.mu.Lock()
	defer h.hot.mu.Unlock()
	n := 0
	for _, e := range h.hot.entries {
		n += e.users
	}
	return n
}

func TestForkAndKill(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 5, Labels: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range results {
		if r.Err != nil || r.Index != i || r.Sandbox.State != lineage.Running || r.Sandbox.Report == nil {
			t.Errorf("result %d: %+v", i, r)
		}
	}
	if got := len(h.Sandboxes(map[string]string{"a": "b"})); got != 5 || e.living() != 5 {
		t.Errorf("%d listed, %d machines; want 5", got, e.living())
	}
	for _, r := range results {
		if err := h.Kill(t.Context(), r.Sandbox.ID); err != nil {
			t.Error(err)
		}
		if err := h.Kill(t.Context(), r.Sandbox.ID); !errors.Is(err, ErrNotFound) {
			t.Errorf("killing twice: %v", err)
		}
	}
	if e.living() != 0 || h.hotUsers() != 0 {
		t.Errorf("%d machines live, the image has %d users", e.living(), h.hotUsers())
	}
	checkEmpty(t, h.cfg.Home.Machines())
}

// TestUnconfirmedChildIsKilled is invariant 4 on the host's side: a child whose agent refuses or dies while it is
// awakened is no sandbox; its siblings live.
func TestUnconfirmedChildIsKilled(t *testing.T) {
	e := newFakeEngine()
	e.awaken = func(n int) *wire.Error {
		if n == 1 {
			return &wire.Error{Code: wire.CodeInternal, Message: "no entropy"}
		}
		return nil
	}
	e.fail = func(n int) error {
		if n == 2 {
			return engine.ErrDead
		}
		return nil
	}
	h := fakeHost(t, e, func(c *Config) { c.Parallel = 1 })
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 4})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"", "no entropy", "dead", ""} {
		got := ""
		if results[i].Err != nil {
			got = results[i].Err.Error()
		}
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("child %d: %q, want %q", i, got, want)
		}
	}
	if c, ok := errors.AsType[*ConsoleError](results[1].Err); !ok || !strings.Contains(c.Tail, "fake console") {
		t.Errorf("the refusal comes without the console: %v", results[1].Err)
	}
	if e.living() != 2 || len(h.Sandboxes(nil)) != 2 {
		t.Errorf("%d machines, %d sandboxes; want 2", e.living(), len(h.Sandboxes(nil)))
	}
}

// TestDeathWhileAwakening: nobody waits for a guest that is gone.
func TestDeathWhileAwakening(t *testing.T) {
	e := newFakeEngine()
	e.silent = func(int) bool { return true }
	h := fakeHost(t, e, nil)
	done := make(chan []ForkResult, 1)
	go func() {
		results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
		if err != nil {
			t.Error(err)
		}
		done <- results
	}()
	for e.living() == 0 {
		select {
		case <-done:
			t.Fatal("the fork ended without a machine")
		case <-time.After(time.Millisecond):
		}
	}
	e.mu.Lock()
	var m *fakeMachine
	for m = range e.alive {
	}
	e.mu.Unlock()
	_ = m.end(errors.New("killed by a test"))
	select {
	case results := <-done:
		if err := results[0].Err; !errors.Is(err, engine.ErrDead) || !strings.Contains(err.Error(), "killed by a test") {
			t.Errorf("the error is %v", err)
		}
	case <-time.After(testenv.Timeout(10 * time.Second)):
		t.Fatal("the fork still waits for a dead guest")
	}
}

func TestMachineDeathIsSeen(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil {
		t.Fatal(err)
	}
	id := results[0].Sandbox.ID
	h.mu.Lock()
	s := h.sandboxes[id]
	h.mu.Unlock()
	_ = s.machine.(*fakeMachine).end(errors.New("signal 9"))
	deadline := time.After(testenv.Timeout(10 * time.Second))
	for {
		v, err := h.Sandbox(id)
		if err != nil {
			t.Fatal(err)
		}
		if v.State == lineage.Failed {
			if !strings.Contains(v.Reason, "signal 9") {
				t.Errorf("the reason is %q", v.Reason)
			}
			break
		}
		select {
		case <-deadline:
			t.Fatal("the sandbox never failed")
		case <-time.After(time.Millisecond):
		}
	}
	if _, err := h.Guest(t.Context(), id); !errors.Is(err, lineage.ErrState) {
		t.Errorf("a call into a dead sandbox: %v", err)
	}
	if text, err := h.Logs(id); err != nil || !strings.Contains(string(text), "fake console") {
		t.Errorf("its console is %q, %v", text, err)
	}
	if err := h.Kill(t.Context(), id); err != nil {
		t.Error(err)
	}
}

func TestAdmission(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, func(c *Config) {
		c.MaxSandboxes = 3
		c.Available = func() (int64, error) { return memoryReserve + 2*childOwn + fakeMemory, nil }
	})
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 4}); !errors.Is(err, ErrExhausted) {
		t.Errorf("beyond the count: %v", err)
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 3}); !errors.Is(err, ErrExhausted) {
		t.Errorf("beyond the memory: %v", err)
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 2}); err != nil {
		t.Errorf("within both: %v", err)
	}
}

func TestHotImagesAreBoundedAndEvicted(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, func(c *Config) { c.HotMaxBytes = 2 * fakeMemory })
	for _, tag := range []string{"b", "c"} {
		addSnapshot(t, h, tag, 1)
	}
	ids := map[string]string{}
	for _, tag := range []string{fakeTag, "b"} {
		results, err := h.Fork(t.Context(), ForkSpec{Tag: tag, N: 1})
		if err != nil || results[0].Err != nil {
			t.Fatal(err, results)
		}
		ids[tag] = results[0].Sandbox.ID
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: "c", N: 1}); !errors.Is(err, ErrExhausted) {
		t.Errorf("a third image while two are in use: %v", err)
	}
	if err := h.Kill(t.Context(), ids[fakeTag]); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: "c", N: 1}); err != nil {
		t.Errorf("a third image after one went cold: %v", err)
	}
	h.mu.Lock()
	evicted := h.snapshots[fakeTag]
	h.mu.Unlock()
	if h.hot.has(evicted) {
		t.Error("the cold image was not evicted")
	}
	if _, err := os.Stat(h.cfg.Home.HotDisk(evicted.ID())); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its disk is still there: %v", err)
	}
}

// TestGivenUpUnpacking: who asked first for an image's disk may be gone before it is there; others wait for it.
func TestGivenUpUnpacking(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	const image = "image-of-" + fakeTag
	if _, err := h.hot.base(ctx, image); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	h.hot.mu.Lock()
	b := h.hot.bases[image]
	h.hot.mu.Unlock()
	if b == nil || b.err != nil {
		t.Fatalf("it was given up for all: %+v", b)
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1}); err != nil {
		t.Error(err)
	}
}

// TestDamageAfterEviction: what was good when it was made hot the first time is verified again the next time.
func TestDamageAfterEviction(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Kill(t.Context(), results[0].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	h.hot.evict()
	err = filepath.WalkDir(filepath.Join(h.cfg.Home.Layers(), "chunks"), func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		b[len(b)/2] ^= 1
		return errors.Join(os.Remove(path), os.WriteFile(path, b, 0o600))
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if !errors.Is(err, layer.ErrCorrupt) {
		t.Errorf("fork of a damaged snapshot: %v", err)
	}
	if hint, ok := errors.AsType[*HintError](err); !ok || hint.Try == "" {
		t.Errorf("the error has no advice: %v", err)
	}
}

func TestRemoveSnapshot(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := removeSnapshot(t, h, fakeTag); !errors.Is(err, ErrBusy) {
		t.Errorf("removing a snapshot in use: %v", err)
	}
	if err := h.RemoveImage(t.Context(), "image-of-"+fakeTag); !errors.Is(err, ErrBusy) {
		t.Errorf("removing an image in use: %v", err)
	}
	if err := h.Kill(t.Context(), results[0].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{removeSnapshot(t, h, fakeTag), h.RemoveImage(t.Context(), fakeTag)} {
		if err != nil {
			t.Error(err)
		}
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1}); !errors.Is(err, ErrNotFound) {
		t.Errorf("forking a removed snapshot: %v", err)
	}
	chunks, err := filepath.Glob(filepath.Join(h.cfg.Home.Layers(), "chunks", "*", "*"))
	if err != nil || len(chunks) != 0 {
		t.Errorf("chunks are left: %v, %v", chunks, err)
	}
}

// TestReopen: the directories are the truth a daemon starts from.
func TestReopen(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	before, err := h.Snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Open(t.Context(), h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close(t.Context())
	after, err := again.Snapshot(fakeTag)
	if err != nil || after.ID() != before.ID() {
		t.Errorf("the snapshot became %v, %v; it was %v", after.ID(), err, before.ID())
	}
	if err := again.store.AddSnapshot(t.Context(), after.Snapshot, []byte("device state of "+fakeTag)); !errors.Is(err, store.ErrExists) {
		t.Errorf("adding it again: %v", err)
	}
}

func TestTimeToLive(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1, TTL: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(testenv.Timeout(10 * time.Second))
	for len(h.Sandboxes(nil)) > 0 || e.living() > 0 {
		select {
		case <-deadline:
			t.Fatal("the sandbox did not expire")
		case <-time.After(time.Millisecond):
		}
	}
}
