package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/testenv"
)

func removeSnapshot(t *testing.T, h *Host, tag string) error {
	t.Helper()
	_, err := h.RemoveSnapshot(t.Context(), tag, RemoveOptions{})
	return err
}

func machineOf(t *testing.T, h *Host, id string) *fakeMachine {
	t.Helper()
	s, err := h.find(id)
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.machine.(*fakeMachine)
	if !ok {
		t.Fatalf("sandbox %s has no machine", id)
	}
	return m
}

func forkOneOf(t *testing.T, h *Host, tag string) string {
	t.Helper()
	results, err := h.Fork(t.Context(), ForkSpec{Tag: tag, N: 1})
	if err != nil {
		t.Fatal(err)
	}
	if results[0].Err != nil {
		t.Fatal(results[0].Err)
	}
	return results[0].Sandbox.ID
}

func mustBranch(t *testing.T, h *Host, id, tag string, mode BranchMode) SnapshotView {
	t.Helper()
	v, err := h.Branch(t.Context(), id, BranchSpec{Tag: tag, Mode: mode})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func wantMemory(t *testing.T, h *Host, tag, want string) {
	t.Helper()
	id := forkOneOf(t, h, tag)
	if got := machineOf(t, h, id).get(); got != want {
		t.Errorf("a child of %s has %q in memory, want %q", tag, got, want)
	}
	if err := h.Kill(t.Context(), id); err != nil {
		t.Error(err)
	}
}

func TestBranchHoldsItsInstant(t *testing.T) {
	for _, mode := range []BranchMode{BranchAuto, BranchLive, BranchDiff, BranchFull} {
		t.Run(string(mode), func(t *testing.T) {
			e := newFakeEngine()
			e.live = true
			h := fakeHost(t, e, nil)
			id := forkOneOf(t, h, fakeTag)
			source := machineOf(t, h, id)
			source.set("one")
			a := mustBranch(t, h, id, "a", mode)
			source.set("two")
			b := mustBranch(t, h, id, "b", mode)
			source.set("three")
			parentA, parentB := fakeTag, "a"
			if mode == BranchFull {
				parentA, parentB = "", ""
			}
			if a.Parent != parentA || b.Parent != parentB {
				t.Errorf("parents are %q and %q, want %q and %q", a.Parent, b.Parent, parentA, parentB)
			}
			if a.Status != lineage.Ready || a.MemoryOwn == 0 || mode != BranchFull && a.MemoryOwn > memory.PageSize {
				t.Errorf("snapshot: %+v", a)
			}
			if source.frozen {
				t.Error("the source's processes are still frozen")
			}
			if n := h.hotBytes(); mode != BranchFull && n > fakeMemory+4*memory.PageSize {
				t.Errorf("hot images take %d bytes, though they share nearly all of one", n)
			}
			for range 2 { // hot, then from disk
				wantMemory(t, h, "a", "one")
				wantMemory(t, h, "b", "two")
				h.hot.evict()
			}
			v, err := h.Sandbox(id)
			if err != nil || v.Branches != 2 || v.LatestBranch != "b" || v.State != lineage.Running {
				t.Errorf("source: %+v, %v", v, err)
			}
		})
	}
}

func (h *Host) hotBytes() int64 {
	h.hot.mu.Lock()
	defer h.hot.mu.Unlock()
	return h.hot.bytes()
}

func TestModeAskedForIsNeverReplaced(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkOneOf(t, h, fakeTag)
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x", Mode: BranchLive}); !errors.Is(err, engine.ErrLiveUnavailable) {
		t.Errorf("live where there is none: %v", err)
	}
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x", Mode: "quick"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("unknown mode: %v", err)
	}
	if v := mustBranch(t, h, id, "x", BranchAuto); v.Branch.Mode != string(BranchDiff) || v.Branch.ModeReason == "" {
		t.Errorf("auto took %+v", v.Branch)
	}
}

// TestFailedBranchChangesNothing is invariant 1 on the host's side.
func TestFailedBranchChangesNothing(t *testing.T) {
	boom := errors.New("boom")
	for _, step := range []string{"start", "paused", "finish"} {
		t.Run(step, func(t *testing.T) {
			e := newFakeEngine()
			fail := true
			e.capture = func(at string) error {
				if at == step && fail {
					return boom
				}
				return nil
			}
			h := fakeHost(t, e, nil)
			id := forkOneOf(t, h, fakeTag)
			source := machineOf(t, h, id)
			source.set("one")
			if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x"}); !errors.Is(err, boom) {
				t.Errorf("Branch: %v", err)
			}
			if source.frozen {
				t.Error("the source's processes are still frozen")
			}
			if v, err := h.Snapshot("x"); err == nil && v.Status != lineage.FailedSnap {
				t.Errorf("half a snapshot: %+v", v)
			}
			checkEmpty(t, h.cfg.Home.Temp())
			fail = false
			mustBranch(t, h, id, "x", BranchAuto) // a failed one makes room for its tag
			wantMemory(t, h, "x", "one")
			if err := h.Kill(t.Context(), id); err != nil {
				t.Error(err)
			}
			if n := h.hotUsersBut(); n != 0 { // but for the branch's image, which stands on its parent's
				t.Errorf("hot images have %d users", n)
			}
		})
	}
}

// TestDiskOfCaptureWithoutThaw: the machine writes its new disk from the instant of a capture on, also when its processes
// could not be let run afterwards; the next branch would miss all of it otherwise.
func TestDiskOfCaptureWithoutThaw(t *testing.T) {
	e := newFakeEngine()
	var refuse atomic.Bool
	e.thaw = func() *wire.Error {
		if refuse.Load() {
			return &wire.Error{Code: wire.CodeInternal, Message: "it is tired"}
		}
		return nil
	}
	h := fakeHost(t, e, nil)
	id := forkOneOf(t, h, fakeTag)
	source := machineOf(t, h, id)
	refuse.Store(true)
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x"}); err == nil || !strings.Contains(err.Error(), "it is tired") {
		t.Errorf("Branch: %v", err)
	}
	s := h.sandboxOf(t, id)
	if len(s.disks) != 2 || s.disks[1] != source.top {
		t.Errorf("the machine writes %s, the host has %v", source.top, s.disks)
	}
	if _, err := os.Stat(source.top); err != nil {
		t.Error(err)
	}
	refuse.Store(false)
	mustBranch(t, h, id, "x", BranchAuto)
	if source.isFrozen() {
		t.Error("its processes are still frozen")
	}
}

// TestProcessesAreLetRunLater: a source whose processes could not be let run after a capture does not stay so.
func TestProcessesAreLetRunLater(t *testing.T) {
	e := newFakeEngine()
	var asked atomic.Int32
	thawed := make(chan struct{})
	e.thaw = func() *wire.Error {
		switch asked.Add(1) {
		case 1, 2:
			return &wire.Error{Code: wire.CodeInternal, Message: "it is tired"}
		case 3:
			close(thawed)
		}
		return nil
	}
	h := fakeHost(t, e, nil)
	id := forkOneOf(t, h, fakeTag)
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x"}); err == nil {
		t.Error("a branch whose source's processes stay frozen went well")
	}
	<-thawed
	mustBranch(t, h, id, "x", BranchAuto) // waits until that is over
	if machineOf(t, h, id).isFrozen() {
		t.Error("its processes are still frozen")
	}
}

// TestFailedSuspendOfNobody: a client that went away is no reason to leave the processes frozen.
func TestFailedSuspendOfNobody(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	id := forkOneOf(t, h, fakeTag)
	source := machineOf(t, h, id)
	ctx, cancel := context.WithCancel(t.Context())
	s := h.sandboxOf(t, id)
	e.capture = func(step string) error {
		if step == "finish" {
			cancel()
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.conn.Close()
		}
		return nil
	}
	if _, err := h.Suspend(ctx, id); !errors.Is(err, context.Canceled) {
		t.Errorf("Suspend: %v", err)
	}
	if source.frozen || !s.is(lineage.Running) {
		t.Errorf("frozen %v, %s", source.frozen, s.state)
	}
}

// TestFailedBranchFreesItsMemory: nobody can ask for the memory of a branch that failed when it had all of it.
func TestFailedBranchFreesItsMemory(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkOneOf(t, h, fakeTag)
	if err := os.Mkdir(h.cfg.Home.Snapshot("x"), 0o700); err != nil { // its record finds no room
		t.Fatal(err)
	}
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x"}); !errors.Is(err, store.ErrExists) {
		t.Errorf("Branch: %v", err)
	}
	h.hot.mu.Lock()
	defer h.hot.mu.Unlock()
	if len(h.hot.entries) != 1 {
		t.Errorf("%d images are hot, want that of the source", len(h.hot.entries))
	}
}

// TestMemoryOfBranchInProgress stays until the branch has its pages over it, whatever room others need.
func TestMemoryOfBranchInProgress(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	m, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	below, err := h.hot.acquire(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	e, err := h.hot.begin("x", "branch-x", memory.PageSize, below)
	if err != nil {
		t.Fatal(err)
	}
	h.hot.release(below) // its source was killed
	h.hot.mu.Lock()
	if h.hot.coolOne() {
		t.Error("the memory that the branch will stand on was freed")
	}
	h.hot.mu.Unlock()
	if image, err := h.hot.shareMemory(below); err != nil {
		t.Error(err)
	} else if err := image.Close(); err != nil {
		t.Error(err)
	}
	h.hot.fail(e, errors.New("enough"))
	h.hot.release(e)
}

// TestParentOfCaptureInProgress is not removed under it.
func TestParentOfCaptureInProgress(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	id := forkOneOf(t, h, fakeTag)
	mustBranch(t, h, id, "a", BranchDiff)
	for name, capture := range map[string]func() error{
		"branch": func() error {
			_, err := h.Branch(t.Context(), id, BranchSpec{Tag: "b"})
			return err
		},
		"suspend": func() error {
			_, err := h.Suspend(t.Context(), id)
			return err
		},
	} {
		parent := "a"
		if s := h.sandboxOf(t, id); s.latest != nil {
			parent = s.latest.Tag
		}
		entered, gate := make(chan struct{}), make(chan struct{})
		e.capture = func(step string) error {
			if step == "start" {
				close(entered)
				<-gate
			}
			return nil
		}
		done := make(chan error)
		go func() { done <- capture() }()
		<-entered
		for _, opts := range []RemoveOptions{{}, {Cascade: true}, {Force: true}} {
			if _, err := h.RemoveSnapshot(t.Context(), parent, opts); !errors.Is(err, ErrBusy) {
				t.Errorf("%s: removing its parent, %+v: %v", name, opts, err)
			}
		}
		close(gate)
		if err := <-done; err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if name == "suspend" {
			if _, err := h.Wake(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
	}
	if len(h.parents) != 0 {
		t.Errorf("still claimed: %v", h.parents)
	}
}

// TestChildOfBranchThatBecameReady while the child was made is one of the snapshot, whose record may be replaced.
func TestChildOfBranchThatBecameReady(t *testing.T) {
	e := newFakeEngine()
	copied, ready := make(chan struct{}), make(chan struct{})
	e.capture = func(step string) error {
		if step == "finish" {
			<-copied
		}
		return nil
	}
	e.fail = func(n int) error {
		if n == 1 {
			<-ready
		}
		return nil
	}
	h := fakeHost(t, e, nil)
	source := forkOneOf(t, h, fakeTag)
	if _, err := h.Branch(t.Context(), source, BranchSpec{Tag: "x", NoWait: true}); err != nil {
		t.Fatal(err)
	}
	born := make(chan []ForkResult)
	go func() {
		results, err := h.Fork(t.Context(), ForkSpec{Tag: "x", N: 1})
		if err != nil {
			results = []ForkResult{{Err: err}}
		}
		born <- results
	}()
	for h.hot.usersOf(h.writing["x"].hot) < 2 { // the fork waits for the memory
		runtime.Gosched()
	}
	close(copied)
	if _, err := h.AwaitSnapshot(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	close(ready)
	r := (<-born)[0]
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	if err := h.Kill(t.Context(), source); err != nil {
		t.Error(err)
	}
	if _, err := h.RemoveSnapshot(t.Context(), fakeTag, RemoveOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	e.capture = func(string) error { return nil }
	if v := mustBranch(t, h, r.Sandbox.ID, "y", BranchDiff); v.Parent != "x" {
		t.Errorf("the child's branch stands on %q", v.Parent)
	}
}

func (c *hotCache) usersOf(e *hotImage) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return e.users
}

// TestBranchWaitsForALongDisk: branches that follow each other closely do not make a machine's chain of disks ever longer.
func TestBranchWaitsForALongDisk(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkOneOf(t, h, fakeTag)
	mustBranch(t, h, id, "a", BranchAuto)
	s := h.sandboxOf(t, id)
	busy := &writing{
		m: store.Snapshot{Tag: "busy", Branch: &store.Branch{From: id}}, status: lineage.Writing, settled: make(chan struct{}),
	}
	s.mu.Lock()
	for len(s.disks) <= maxBehind {
		top := diskPath(s.dir, s.nextDisk)
		if err := disk.CreateOverlay(top, s.disks[len(s.disks)-1], "qcow2"); err != nil {
			t.Fatal(err)
		}
		s.disks, s.nextDisk = append(s.disks, top), s.nextDisk+1
	}
	s.cut, s.writing = len(s.disks)-1, 1 // as if a were of now
	s.mu.Unlock()
	h.mu.Lock()
	h.writing["busy"] = busy
	h.mu.Unlock()
	impatient, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := h.Branch(impatient, id, BranchSpec{Tag: "b"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a branch did not wait for the one that reads its disk: %v", err)
	}
	h.mu.Lock()
	delete(h.writing, "busy")
	h.mu.Unlock()
	s.writers(-1)
	close(busy.settled)
	mustBranch(t, h, id, "b", BranchAuto)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.disks) > 3 {
		t.Errorf("the machine has %d disk files", len(s.disks))
	}
}

// TestDiskStaysShort: neither branches that fail nor those of a paused sandbox make a machine's chain of disks ever longer.
func TestDiskStaysShort(t *testing.T) {
	testenv.OncePerRun(t)
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	id := forkOneOf(t, h, fakeTag)
	s := h.sandboxOf(t, id)
	check := func(what string) {
		t.Helper()
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.disks) > maxBehind+1 || s.cut >= len(s.disks) {
			t.Fatalf("%s: the machine has %d disk files, its latest branch holds %d", what, len(s.disks), s.cut)
		}
		for _, f := range s.disks {
			if _, err := os.Stat(f); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	for _, step := range []string{"paused", "finish"} {
		e.capture = func(at string) error {
			if at == step {
				return errors.New("boom")
			}
			return nil
		}
		for range maxBehind + 3 {
			if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x"}); err == nil {
				t.Fatal("no error")
			}
			check("failing at " + step)
		}
	}
	e.capture = func(string) error { return nil }
	mustBranch(t, h, id, "ready", BranchAuto)
	check("ready")
	if _, err := h.Pause(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	for i := range maxBehind + 3 {
		mustBranch(t, h, id, fmt.Sprint("paused-", i), BranchAuto)
		check("paused")
	}
}

// TestBranchOfEarlierMachine: a branch that becomes ready when its source was suspended and woken meanwhile is not what
// the source's next branch stands on: what was written between the two is in neither.
func TestBranchOfEarlierMachine(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkOneOf(t, h, fakeTag)
	s := h.sandboxOf(t, id)
	captured := s.machine
	a := mustBranch(t, h, id, "a", BranchAuto)
	if s.latest == nil {
		t.Error("a branch of its machine is not its latest")
	}
	for _, step := range []func(context.Context, string) (View, error){h.Suspend, h.Wake} {
		v, err := step(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		s.branched(a.Snapshot, captured, 1) // as one that was being written all the time
		if s.latest != nil || s.cut != 0 {
			t.Errorf("%s: its next branch would stand on %s and leave out %d of its disk files", v.State, s.latest.Tag, s.cut)
		}
	}
}

// TestCopyIsAdmitted: both make a copy of memory, and a host that has no room for it must not learn so by its OOM killer.
func TestCopyIsAdmitted(t *testing.T) {
	available := int64(64 << 30)
	h := fakeHost(t, newFakeEngine(), func(c *Config) { c.Available = func() (int64, error) { return available, nil } })
	id := forkOneOf(t, h, fakeTag)
	available = memoryReserve
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x"}); !errors.Is(err, ErrExhausted) {
		t.Errorf("branch: %v", err)
	}
	if _, err := h.Suspend(t.Context(), id); !errors.Is(err, ErrExhausted) {
		t.Errorf("suspend: %v", err)
	}
	if v, err := h.Sandbox(id); err != nil || v.State != lineage.Running || machineOf(t, h, id).frozen {
		t.Errorf("the sandbox is %s, %v", v.State, err)
	}
}

// TestNothingStandsOnAFailedBranch: what cannot be stored is not captured.
func TestNothingStandsOnAFailedBranch(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	id := forkOneOf(t, h, fakeTag)
	s := h.sandboxOf(t, id)
	boom := errors.New("boom")
	s.mu.Lock()
	s.from = &origin{tag: "x", writing: &writing{status: lineage.FailedSnap, err: boom}}
	s.mu.Unlock()
	e.capture = func(string) error {
		t.Error("it was captured")
		return nil
	}
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "y"}); !errors.Is(err, lineage.ErrState) || !errors.Is(err, boom) {
		t.Errorf("branch: %v", err)
	}
	if _, err := h.Suspend(t.Context(), id); !errors.Is(err, lineage.ErrState) {
		t.Errorf("suspend: %v", err)
	}
}

func TestNoWaitAndForkOfWriting(t *testing.T) {
	e := newFakeEngine()
	gate := make(chan struct{})
	e.capture = func(step string) error {
		if step == "finish" {
			<-gate
		}
		return nil
	}
	h := fakeHost(t, e, nil)
	id := forkOneOf(t, h, fakeTag)
	machineOf(t, h, id).set("one")
	v, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x", NoWait: true})
	if err != nil || v.Status != lineage.Writing {
		t.Fatalf("%+v, %v", v, err)
	}
	impatient, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := h.Branch(impatient, id, BranchSpec{Tag: "y"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second capture did not wait for the copy of the first: %v", err)
	}
	if _, err := h.RemoveSnapshot(t.Context(), fakeTag, RemoveOptions{Cascade: true}); !errors.Is(err, ErrBusy) {
		t.Errorf("removing under a branch that is written: %v", err)
	}
	forked := make(chan string)
	go func() {
		results, err := h.Fork(t.Context(), ForkSpec{Tag: "x", N: 1})
		if err != nil || results[0].Err != nil {
			forked <- fmt.Sprint(err, results)
			return
		}
		if results[0].Sandbox.Waited == 0 {
			t.Error("nobody was told that the fork waited for the snapshot")
		}
		forked <- machineOf(t, h, results[0].Sandbox.ID).get()
	}()
	select {
	case got := <-forked:
		t.Errorf("a fork did not wait for the memory: %s", got)
	case <-h.wCopying("x"):
	}
	close(gate)
	if got := <-forked; got != "one" {
		t.Errorf("the child has %q", got)
	}
	if v, err = h.AwaitSnapshot(t.Context(), "x"); err != nil || v.Status != lineage.Ready {
		t.Errorf("%+v, %v", v, err)
	}
	for _, v := range h.Sandboxes(nil) {
		if err := h.Kill(t.Context(), v.ID); err != nil {
			t.Error(err)
		}
	}
}

// TestReadyIsOver: as soon as a branch is seen to be ready it can be removed, and its tag used again.
func TestReadyIsOver(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkOneOf(t, h, fakeTag)
	for range 25 {
		if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x", NoWait: true}); err != nil {
			t.Fatal(err)
		}
		for v, err := h.Snapshot("x"); err != nil || v.Status != lineage.Ready; v, err = h.Snapshot("x") {
			if err != nil {
				t.Fatal(err)
			}
			runtime.Gosched()
		}
		if err := removeSnapshot(t, h, "x"); err != nil {
			t.Fatal(err)
		}
	}
}

// wCopying is closed: the snapshot is known and its memory is not complete.
func (h *Host) wCopying(tag string) <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	ch := make(chan struct{})
	if w := h.writing[tag]; w != nil && !isClosed(w.hot.ready) {
		close(ch)
	}
	return ch
}

func TestKillDuringCapture(t *testing.T) {
	e := newFakeEngine()
	started, gate := make(chan struct{}), make(chan struct{})
	e.capture = func(step string) error {
		if step == "start" {
			close(started)
			<-gate
		}
		return nil
	}
	h := fakeHost(t, e, nil)
	id := forkOneOf(t, h, fakeTag)
	failed := make(chan error)
	go func() {
		_, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x"})
		failed <- err
	}()
	<-started
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "y"}); !errors.Is(err, lineage.ErrState) {
		t.Errorf("a second capture during the first: %v", err)
	}
	if _, err := h.Pause(t.Context(), id); !errors.Is(err, lineage.ErrState) {
		t.Errorf("pause during a capture: %v", err)
	}
	if err := h.Kill(t.Context(), id); err != nil {
		t.Error(err)
	}
	close(gate)
	if err := <-failed; err == nil {
		t.Error("a killed sandbox was branched")
	}
	if _, err := h.Snapshot("x"); !errors.Is(err, ErrNotFound) {
		t.Errorf("snapshot of a killed sandbox: %v", err)
	}
	if n := h.hotUsers(); n != 0 {
		t.Errorf("hot images have %d users", n)
	}
}

func TestPauseAndSuspend(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	ctx := t.Context()
	id := forkOneOf(t, h, fakeTag)
	machineOf(t, h, id).set("one")
	for range 2 {
		if v, err := h.Pause(ctx, id); err != nil || v.State != lineage.Paused {
			t.Fatalf("pause: %+v, %v", v, err)
		}
	}
	if _, err := h.Guest(ctx, id); !errors.Is(err, lineage.ErrState) {
		t.Errorf("a paused sandbox's agent: %v", err)
	}
	mustBranch(t, h, id, "x", BranchAuto)
	if m := machineOf(t, h, id); !m.paused || !m.frozen {
		t.Error("a branch of a paused sandbox let it run")
	}
	for range 2 {
		if v, err := h.Resume(ctx, id); err != nil || v.State != lineage.Running {
			t.Fatalf("resume: %+v, %v", v, err)
		}
	}
	if m := machineOf(t, h, id); m.paused || m.frozen {
		t.Error("a resumed sandbox does not run")
	}
	for range 2 {
		if v, err := h.Suspend(ctx, id); err != nil || v.State != lineage.Suspended || v.PID != 0 {
			t.Fatalf("suspend: %+v, %v", v, err)
		}
	}
	checkEmpty(t, h.cfg.Home.Machines())
	if err := removeSnapshot(t, h, fakeTag); !errors.Is(err, ErrBusy) {
		t.Errorf("removing under a suspended sandbox: %v", err)
	}
	h.hot.evict()
	h.collect(ctx)
	for range 2 {
		if v, err := h.Wake(ctx, id); err != nil || v.State != lineage.Running || v.ID != id {
			t.Fatalf("wake: %+v, %v", v, err)
		}
	}
	m := machineOf(t, h, id)
	if m.get() != "one" || m.frozen {
		t.Errorf("woken with %q, frozen %v", m.get(), m.frozen)
	}
	m.set("two")
	v := mustBranch(t, h, id, "y", BranchAuto)
	if v.Parent != "x" {
		t.Errorf("parent of the woken one's branch is %q", v.Parent)
	}
	h.hot.evict()
	wantMemory(t, h, "y", "two")
	if _, err := h.Suspend(ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := h.Kill(ctx, id); err != nil {
		t.Error(err)
	}
	checkEmpty(t, h.cfg.Home.Suspended())
}

func TestSuspendedSurvivesTheDaemon(t *testing.T) {
	e := newFakeEngine()
	var home string
	var kept Config
	h := fakeHost(t, e, func(c *Config) { kept, home = *c, c.Home.Root })
	id := forkOneOf(t, h, fakeTag)
	machineOf(t, h, id).set("one")
	if _, err := h.Suspend(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(home); err != nil {
		t.Fatal(err)
	}
	again, err := Open(t.Context(), kept)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close(context.WithoutCancel(t.Context())) }()
	if v, err := again.Wake(t.Context(), id); err != nil || v.State != lineage.Running {
		t.Fatalf("%+v, %v", v, err)
	}
	if got := machineOf(t, again, id).get(); got != "one" {
		t.Errorf("woken with %q", got)
	}
	if err := again.Kill(t.Context(), id); err != nil {
		t.Error(err)
	}
	h.mu.Lock()
	delete(h.sandboxes, id)
	h.mu.Unlock()
}

// chain makes snapshots a, b, c, d, each a branch of a child of the one before.
func chain(t *testing.T, h *Host, tags ...string) {
	t.Helper()
	below := fakeTag
	for _, tag := range tags {
		id := forkOneOf(t, h, below)
		machineOf(t, h, id).set("value " + tag)
		mustBranch(t, h, id, tag, BranchDiff)
		if err := h.Kill(t.Context(), id); err != nil {
			t.Error(err)
		}
		below = tag
	}
}

func TestRemove(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	ctx := t.Context()
	chain(t, h, "a", "b", "c", "d")
	if err := removeSnapshot(t, h, "b"); !errors.Is(err, ErrBusy) {
		t.Errorf("removing under dependents: %v", err)
	}
	if _, err := h.RemoveSnapshot(ctx, "b", RemoveOptions{Cascade: true, Force: true}); !errors.Is(err, ErrInvalid) {
		t.Errorf("both options: %v", err)
	}
	if gone, err := h.RemoveSnapshot(ctx, "b", RemoveOptions{Force: true}); err != nil || !slices.Equal(gone, []string{"b"}) {
		t.Fatalf("force: %v, %v", gone, err)
	}
	if v, err := h.Snapshot("d"); err != nil || !slices.Equal(v.Ancestors, []string{fakeTag, "a", "c"}) {
		t.Errorf("ancestors of d: %v, %v", v.Ancestors, err)
	}
	for range 2 {
		wantMemory(t, h, "c", "value c")
		wantMemory(t, h, "d", "value d")
		h.hot.evict()
	}
	if v, _ := h.Snapshot("c"); mustChain(t, h, v.Memory) != 3 || mustChain(t, h, v.Disk) != 4 {
		t.Errorf("chains of c have %d and %d links", mustChain(t, h, v.Memory), mustChain(t, h, v.Disk))
	}
	child := forkOneOf(t, h, "d")
	if _, err := h.RemoveSnapshot(ctx, "a", RemoveOptions{Cascade: true}); !errors.Is(err, ErrBusy) {
		t.Errorf("cascade over a running sandbox: %v", err)
	}
	if err := h.Kill(ctx, child); err != nil {
		t.Error(err)
	}
	if gone, err := h.RemoveSnapshot(ctx, fakeTag, RemoveOptions{Cascade: true}); err != nil || len(gone) != 4 {
		t.Errorf("cascade: %v, %v", gone, err)
	}
	if tags := h.Tags(); len(tags) != 0 {
		t.Errorf("left: %v", tags)
	}
}

// TestReplaceUnderCapture: a build does not replace the snapshot that a capture in progress will stand on.
func TestReplaceUnderCapture(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkOneOf(t, h, fakeTag)
	b := &branch{h: h, s: h.sandboxOf(t, id)}
	forget, err := b.findParent()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	m, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	state := []byte("another device state")
	next := m.WithState(state)
	if err := h.enterSnapshot(t.Context(), next, state, true); !errors.Is(err, ErrBusy) {
		t.Errorf("replaced under a capture: %v", err)
	}
	forget()
	if err := h.enterSnapshot(t.Context(), next, state, true); err != nil {
		t.Error(err)
	}
}

// TestInterruptedForce: a daemon that dies when some above the removed snapshot have their new records, and others not
// yet, leaves a family in which each has its parent.
func TestInterruptedForce(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	chain(t, h, "a", "b", "c", "d")
	b, err := h.snapshot("b")
	if err != nil {
		t.Fatal(err)
	}
	c, err := h.snapshot("c")
	if err != nil {
		t.Fatal(err)
	}
	mem, err := h.layers.Unlink(t.Context(), b.Memory, []layer.Digest{c.Memory})
	if err != nil {
		t.Fatal(err)
	}
	dsk, err := h.layers.Unlink(t.Context(), b.Disk, []layer.Digest{c.Disk})
	if err != nil {
		t.Fatal(err)
	}
	next, err := h.replace(t.Context(), c, b, mem, dsk, nil)
	if err != nil {
		t.Fatal(err)
	}
	if want := mem[c.Memory].StoredBytes + dsk[c.Disk].StoredBytes; next.Stored != want {
		t.Errorf("c takes %d bytes, want %d", next.Stored, want)
	}
	for tag, want := range map[string][]string{"d": {fakeTag, "a", "c"}, "c": {fakeTag, "a"}, "b": {fakeTag, "a"}} {
		if v, err := h.Snapshot(tag); err != nil || !slices.Equal(v.Ancestors, want) {
			t.Errorf("ancestors of %s: %v, %v", tag, v.Ancestors, err)
		}
	}
	wantMemory(t, h, "d", "value d")
}

func mustChain(t *testing.T, h *Host, d layer.Digest) int {
	t.Helper()
	c, err := h.layers.Chain(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	return len(c)
}

// TestForkKeepsItsSnapshot: what is forked is not removed meanwhile, and what is being removed is not forked.
func TestForkKeepsItsSnapshot(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	chain(t, h, "a")
	_, _, forget, err := h.claim("a")
	if err != nil {
		t.Fatal(err)
	}
	for _, opts := range []RemoveOptions{{}, {Force: true}, {Cascade: true}} {
		if _, err := h.RemoveSnapshot(t.Context(), "a", opts); !errors.Is(err, ErrBusy) {
			t.Errorf("removed under a fork with %+v: %v", opts, err)
		}
		if _, err := h.RemoveSnapshot(t.Context(), fakeTag, opts); !errors.Is(err, ErrBusy) {
			t.Errorf("its parent removed under a fork with %+v: %v", opts, err)
		}
	}
	forget()
	release, err := h.hold("a", removeWhat)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: "a", N: 1}); !errors.Is(err, ErrBusy) {
		t.Errorf("forked during a removal: %v", err)
	}
	release()
	if err := removeSnapshot(t, h, "a"); err != nil {
		t.Error(err)
	}
}

// TestPassing: what is made for its children alone says so in its record, and what a user makes of it does not.
func TestPassing(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkOneOf(t, h, fakeTag)
	for tag, passing := range map[string]bool{"mine": false, "ours": true} {
		v, err := h.Branch(t.Context(), id, BranchSpec{Tag: tag, Passing: passing})
		if err != nil || v.Branch.Passing != passing {
			t.Errorf("%s: %+v, %v", tag, v.Branch, err)
		}
	}
	v, err := h.Compact(t.Context(), "ours", "kept")
	if err != nil || v.Branch == nil || v.Branch.Passing {
		t.Errorf("of what is passing: %+v, %v", v.Branch, err)
	}
	if v, err := h.Snapshot("ours"); err != nil || !v.Branch.Passing {
		t.Errorf("it is not any more: %+v, %v", v.Branch, err)
	}
}

func TestCompact(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	chain(t, h, "a", "b")
	v, err := h.Compact(t.Context(), "b", "flat")
	if err != nil || v.Parent != "" || mustChain(t, h, v.Memory) != 1 || mustChain(t, h, v.Disk) != 2 {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := h.Compact(t.Context(), "b", "a"); !errors.Is(err, store.ErrExists) {
		t.Errorf("onto a tag that is there: %v", err)
	}
	if gone, err := h.RemoveSnapshot(t.Context(), fakeTag, RemoveOptions{Cascade: true}); err != nil {
		t.Errorf("%v, %v", gone, err)
	}
	h.hot.evict()
	wantMemory(t, h, "flat", "value b")
}

// TestUnfinishedIsFailedAfterRestart: what a daemon was writing when it died is listed as failed by the next.
func TestUnfinishedIsFailedAfterRestart(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	m, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	m.Tag, m.Parent = "half", fakeTag
	if err := h.store.BeginSnapshot(m); err != nil {
		t.Fatal(err)
	}
	if err := h.loadUnfinished(); err != nil {
		t.Fatal(err)
	}
	v, err := h.Snapshot("half")
	if err != nil || v.Status != lineage.FailedSnap || v.Reason == "" {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: "half", N: 1}); !errors.Is(err, lineage.ErrState) {
		t.Errorf("fork of a failed one: %v", err)
	}
	if err := h.store.FailSnapshot(m, errors.New("the disk was full")); err != nil {
		t.Fatal(err)
	}
	if err := h.loadUnfinished(); err != nil {
		t.Fatal(err)
	}
	if v, err := h.Snapshot("half"); err != nil || v.Reason != "the disk was full" {
		t.Errorf("the reason is %q, %v", v.Reason, err)
	}
	if err := removeSnapshot(t, h, "half"); err != nil {
		t.Error(err)
	}
	checkEmpty(t, h.cfg.Home.Unfinished())
}

// TestRandomInterleavings drives many clients at once against one host and compares what every snapshot and sandbox
// holds with a model of it. Each operation may be refused by state; what succeeds must be true.
func TestRandomInterleavings(t *testing.T) {
	testenv.OncePerRun(t)
	rounds := 3
	if os.Getenv("FORKD_SOAK") != "" {
		rounds = 60
	}
	for seed := range rounds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomRound(t, uint64(seed)) })
	}
}

type model struct {
	mu        sync.Mutex
	snapshots map[string]string // tag → value
	next      int
}

func randomRound(t *testing.T, seed uint64) {
	e := newFakeEngine()
	e.live = seed%2 == 0
	h := fakeHost(t, e, func(c *Config) { c.HotMaxBytes = 24 << 20 })
	mo := &model{snapshots: map[string]string{fakeTag: ""}}
	var wg sync.WaitGroup
	for client := range 6 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(client)))
			for range 25 {
				mo.step(t, h, r)
			}
		})
	}
	wg.Wait()
	for _, v := range h.Sandboxes(nil) {
		if err := h.Kill(t.Context(), v.ID); err != nil {
			t.Errorf("kill %s: %v", v.ID, err)
		}
	}
	for _, v := range h.Snapshots() {
		if v, err := h.AwaitSnapshot(t.Context(), v.Tag); err == nil && v.Status == lineage.Ready {
			mo.check(t, h, v.Tag)
		}
	}
	h.hot.evict()
	h.collect(t.Context())
	for _, tag := range h.Tags() {
		mo.check(t, h, tag)
	}
	if n := h.hotUsersBut(); n != 0 {
		t.Errorf("hot images have %d users that nobody knows", n)
	}
	checkEmpty(t, h.cfg.Home.Temp())
}

// hotUsersBut counts users of hot images that are not other hot images.
func (h *Host) hotUsersBut() int {
	h.hot.mu.Lock()
	defer h.hot.mu.Unlock()
	n := 0
	for _, e := range h.hot.entries {
		n += e.users - len(e.below)
	}
	return n
}

// value is what a snapshot holds. It is not known from the instant when others can see the snapshot on, but a little later.
func (mo *model) value(tag string) (value string, known bool) {
	mo.mu.Lock()
	defer mo.mu.Unlock()
	value, known = mo.snapshots[tag]
	return value, known
}

func (mo *model) check(t *testing.T, h *Host, tag string) {
	t.Helper()
	if want, known := mo.value(tag); known {
		wantMemory(t, h, tag, want)
	}
}

// refused are the errors a client may meet when others are at work on the same things.
func refused(err error) bool {
	for _, ok := range []error{ErrBusy, ErrNotFound, lineage.ErrState, ErrExhausted, store.ErrExists, engine.ErrDead} {
		if errors.Is(err, ok) {
			return true
		}
	}
	return false
}

func (mo *model) step(t *testing.T, h *Host, r *rand.Rand) {
	ctx := t.Context()
	tag, id := pick(r, h.Tags()), ""
	if all := h.Sandboxes(nil); len(all) > 0 {
		id = all[r.IntN(len(all))].ID
	}
	var err error
	switch what := r.IntN(20); {
	case id == "" || what < 3:
		if tag == "" {
			return
		}
		want, known := mo.value(tag)
		var results []ForkResult
		if results, err = h.Fork(ctx, ForkSpec{Tag: tag, N: 1 + r.IntN(2)}); err == nil && known {
			mo.checkChildren(t, h, tag, want, results)
		}
	case what < 8:
		err = mo.branch(t, h, r, id)
	case what < 10:
		_, err = h.Pause(ctx, id)
	case what < 13:
		_, err = h.Resume(ctx, id)
	case what < 14:
		_, err = h.Suspend(ctx, id)
	case what < 16:
		_, err = h.Wake(ctx, id)
	case what < 17:
		err = h.Kill(ctx, id)
	case what < 18 && tag != fakeTag:
		_, err = h.RemoveSnapshot(ctx, tag, RemoveOptions{Force: r.IntN(2) == 0})
	case what < 19 && tag != "":
		to := mo.newTag()
		if want, known := mo.value(tag); known {
			mo.mu.Lock()
			mo.snapshots[to] = want
			mo.mu.Unlock()
		}
		_, err = h.Compact(ctx, tag, to)
	default:
		h.hot.evict()
	}
	if err != nil && !refused(err) {
		t.Errorf("unexpected: %v", err)
	}
}

func (mo *model) checkChildren(t *testing.T, h *Host, tag, want string, results []ForkResult) {
	for _, res := range results {
		if res.Err != nil {
			if !refused(res.Err) {
				t.Errorf("child of %s: %v", tag, res.Err)
			}
			continue
		}
		s, err := h.find(res.Sandbox.ID)
		if err != nil {
			continue // killed by another client
		}
		s.mu.Lock()
		m, _ := s.machine.(*fakeMachine)
		fresh := s.branches == 0
		s.mu.Unlock()
		if m == nil || !fresh {
			continue
		}
		if got := m.get(); got != want && !isOwn(got) {
			t.Errorf("a child of %s has %q, want %q", tag, got, want)
		}
	}
}

// isOwn tells a value that a client has written to a running machine since.
func isOwn(value string) bool { return len(value) > 3 && value[:3] == "own" }

func (mo *model) newTag() string {
	mo.mu.Lock()
	defer mo.mu.Unlock()
	mo.next++
	return fmt.Sprintf("t%d", mo.next)
}

// branch writes a value of its own and branches; the capture holds whatever was last written before it, by us or by
// another client between the two, so the value is read back from the first child.
func (mo *model) branch(t *testing.T, h *Host, r *rand.Rand, id string) error {
	tag := mo.newTag()
	if s, err := h.find(id); err == nil {
		s.mu.Lock()
		m, _ := s.machine.(*fakeMachine)
		running := s.state == lineage.Running
		s.mu.Unlock()
		if m != nil && running {
			m.set("own " + tag)
		}
	}
	modes := []BranchMode{BranchAuto, BranchDiff, BranchFull}
	v, err := h.Branch(t.Context(), id, BranchSpec{Tag: tag, Mode: modes[r.IntN(len(modes))], NoWait: r.IntN(2) == 0})
	if err != nil {
		return err
	}
	if v, err = h.AwaitSnapshot(t.Context(), tag); err != nil || v.Status != lineage.Ready {
		return err
	}
	results, err := h.Fork(t.Context(), ForkSpec{Tag: tag, N: 1})
	if err != nil {
		return err
	}
	if results[0].Err != nil {
		return results[0].Err
	}
	s, err := h.find(results[0].Sandbox.ID)
	if err != nil {
		return err
	}
	s.mu.Lock()
	m, _ := s.machine.(*fakeMachine)
	s.mu.Unlock()
	if m == nil {
		return nil
	}
	mo.mu.Lock()
	mo.snapshots[tag] = m.get()
	mo.mu.Unlock()
	return nil
}

func pick(r *rand.Rand, list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[r.IntN(len(list))]
}
