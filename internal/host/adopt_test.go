package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/proc"
)

// adoptingEngine is a fake whose machines have a process each, and outlive their host.
type adoptingEngine struct {
	*fakeEngine
	t      *testing.T
	refuse func() error // to adopt

	mu       sync.Mutex
	machines map[string]*adoptable // by directory
}

// adoptable is one machine, whichever host has it.
type adoptable struct {
	*fakeMachine
	cmd    *exec.Cmd
	reaped chan struct{}
	ref    engine.Ref
	image  *memory.Image
	below  []string
}

// held is a host's hold of a machine.
type held struct {
	*adoptable
	once sync.Once
	gone chan struct{}
}

func newAdoptingEngine(t *testing.T, e *fakeEngine) *adoptingEngine {
	return &adoptingEngine{fakeEngine: e, t: t, refuse: func() error { return nil }, machines: map[string]*adoptable{}}
}

func (e *adoptingEngine) Restore(ctx context.Context, spec *engine.Spec, from *engine.Checkpoint) (engine.Machine, error) {
	m, err := e.fakeEngine.Restore(ctx, spec, from)
	if err != nil {
		return nil, err
	}
	image, err := from.Memory.Share()
	if err != nil {
		return nil, err
	}
	a := &adoptable{fakeMachine: m.(*fakeMachine), reaped: make(chan struct{}), image: image, below: spec.Disk.Backing}
	a.cmd = exec.Command("sleep", "1000") //nolint:forbidigo // Stands for a VM process, which outlives every context.
	a.cmd.Dir = spec.Dir
	if err := a.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = a.cmd.Wait()
		_ = a.end(errors.New("its process ended"))
		_ = image.Close()
		close(a.reaped)
	}()
	start, err := proc.StartTime(a.cmd.Process.Pid)
	if err != nil {
		return nil, err
	}
	a.ref = engine.Ref{Engine: "fake", PID: a.cmd.Process.Pid, StartTime: start, Dir: spec.Dir}
	e.mu.Lock()
	e.machines[spec.Dir] = a
	e.mu.Unlock()
	return a.hold(), nil
}

func (e *adoptingEngine) Adopt(_ context.Context, a *engine.Adoption) (engine.Adopted, error) {
	if err := e.refuse(); err != nil {
		return engine.Adopted{}, err
	}
	e.mu.Lock()
	m := e.machines[a.Spec.Dir]
	e.mu.Unlock()
	if m == nil || m.ref != a.Ref {
		return engine.Adopted{}, engine.ErrDead
	}
	m.mu.Lock()
	m.paused = a.Paused
	m.mu.Unlock()
	image, err := m.image.Share()
	if err != nil {
		return engine.Adopted{}, err
	}
	disks := append([]string{m.top}, m.below...)
	for n := 0; disks[0] != diskPath(a.Spec.Dir, n); n++ { // those it has frozen, too
		disks = slices.Insert(disks, 1, diskPath(a.Spec.Dir, n))
	}
	return engine.Adopted{Machine: m.hold(), Disks: disks, Memory: image}, nil
}

func (a *adoptable) hold() *held {
	h := &held{adoptable: a, gone: make(chan struct{})}
	go func() {
		select {
		case <-a.done:
			h.once.Do(func() { close(h.gone) })
		case <-h.gone:
		}
	}()
	return h
}

func (h *held) Ref() engine.Ref       { return h.ref }
func (h *held) Done() <-chan struct{} { return h.gone }

func (h *held) Close() error {
	detached := false
	select {
	case <-h.gone:
		detached = !isClosed(h.done)
	default:
	}
	if detached {
		return nil
	}
	_ = h.end(nil)
	_ = h.cmd.Process.Kill()
	<-h.reaped
	return nil
}

func (h *held) Detach() error {
	h.once.Do(func() { close(h.gone) })
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.conns {
		_ = c.Close()
	}
	h.conns = nil
	return nil
}

func (h *held) DialGuest(ctx context.Context) (net.Conn, error) {
	if isClosed(h.gone) {
		return nil, engine.ErrDead
	}
	return h.fakeMachine.DialGuest(ctx)
}

// leaveAndOpen stops a host without ending its sandboxes and starts the next. Between the two change may do harm.
func leaveAndOpen(t *testing.T, h *Host, change func()) (*Host, string) {
	t.Helper()
	if err := h.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	change()
	var log bytes.Buffer
	cfg := h.cfg
	cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	next, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := next.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		checkEmpty(t, cfg.Home.Hot())
	})
	return next, log.String()
}

func adoptingHost(t *testing.T) (*Host, *adoptingEngine) {
	t.Helper()
	fake := newFakeEngine()
	e := newAdoptingEngine(t, fake)
	h := fakeHost(t, fake, func(c *Config) { c.Engine = e })
	return h, e
}

func (h *Host) one(t *testing.T, spec ForkSpec) View {
	t.Helper()
	spec.Tag, spec.N = fakeTag, 1
	results, err := h.Fork(t.Context(), spec)
	if err != nil || results[0].Err != nil {
		t.Fatal(err, results)
	}
	return results[0].Sandbox
}

func (h *Host) sandboxOf(t *testing.T, id string) *sandbox {
	t.Helper()
	s, err := h.find(id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestAdopt(t *testing.T) {
	h, e := adoptingHost(t)
	want := h.one(t, ForkSpec{Labels: map[string]string{"a": "b"}, TTL: time.Hour})
	halted := h.one(t, ForkSpec{})
	if _, err := h.Pause(t.Context(), halted.ID); err != nil {
		t.Fatal(err)
	}
	h.sandboxOf(t, want.ID).machine.(*held).set("its state")
	m, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	generation := h.sandboxOf(t, want.ID).generation
	stray := filepath.Join(h.cfg.Home.Hot(), "disk-stray.qcow2")
	// What the daemon before had begun in the guest.
	h.sandboxOf(t, want.ID).machine.(*held).setFrozen(true)

	h, log := leaveAndOpen(t, h, func() {
		if e.living() != 2 {
			t.Errorf("%d machines live without a host, want 2", e.living())
		}
		if err := os.WriteFile(stray, nil, 0o600); err != nil {
			t.Error(err)
		}
	})
	got, err := h.Sandbox(want.ID)
	if err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	if got.PID != want.PID || got.State != lineage.Running || !got.Created.Equal(want.Created) || !got.Expires.Equal(want.Expires) ||
		got.Labels["a"] != "b" || got.Report == nil || got.SnapshotTag != fakeTag || got.Format != want.Format {
		t.Errorf("it was\n%+v\nand is\n%+v", want, got)
	}
	s := h.sandboxOf(t, want.ID)
	if machine := s.machine.(*held); machine.get() != "its state" || machine.frozen {
		t.Errorf("its memory holds %q, its processes are frozen: %v", machine.get(), machine.frozen)
	}
	if s.generation <= generation || s.onEnd == nil {
		t.Errorf("generation %d after %d, timer %v", s.generation, generation, s.onEnd)
	}
	conn, err := h.Guest(t.Context(), want.ID)
	if err != nil {
		t.Fatal(err)
	}
	if conn.Hello().Generation <= generation {
		t.Errorf("the agent is in generation %d, as before", conn.Hello().Generation)
	}
	if v, err := h.Sandbox(halted.ID); err != nil || v.State != lineage.Paused {
		t.Errorf("the paused one is %s, %v", v.State, err)
	}
	if _, err := h.Resume(t.Context(), halted.ID); err != nil {
		t.Error(err)
	}
	checkHotAgain(t, h, m.ID(), 2)
	if _, err := os.Stat(stray); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file nobody stands on is still there: %v", err)
	}
	if _, err := h.RemoveSnapshot(t.Context(), fakeTag, RemoveOptions{}); !errors.Is(err, ErrBusy) {
		t.Errorf("remove the snapshot of adopted sandboxes: %v", err)
	}
	// Once more: what was adopted is recorded again.
	h, log = leaveAndOpen(t, h, func() {})
	if got, err := h.Sandbox(want.ID); err != nil || got.PID != want.PID {
		t.Errorf("after the second restart: %+v, %v\n%s", got, err, log)
	}
	for _, id := range []string{want.ID, halted.ID} {
		if err := h.Kill(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	if h.hotUsers() != 0 || e.living() != 0 {
		t.Errorf("after their kill the image has %d users, %d machines live", h.hotUsers(), e.living())
	}
}

// TestAdoptedAfterItsSleep: what a sandbox was when it slept has no tag and, once it is awake, no device state. Its next branch
// stands on that, also in a daemon that has to read it from disk.
func TestAdoptedAfterItsSleep(t *testing.T) {
	h, _ := adoptingHost(t)
	id := h.one(t, ForkSpec{}).ID
	h.sandboxOf(t, id).machine.(*held).set("one")
	if _, err := h.Suspend(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Wake(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	h.sandboxOf(t, id).machine.(*held).set("two")
	h, log := leaveAndOpen(t, h, func() {})
	if v, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x", Mode: BranchDiff}); err != nil {
		t.Fatalf("branch: %+v, %v\n%s", v, err, log)
	}
	if _, err := h.Suspend(t.Context(), id); err != nil {
		t.Errorf("suspend: %v", err)
	}
	if _, err := h.Wake(t.Context(), id); err != nil {
		t.Errorf("wake: %v", err)
	}
	if got := h.sandboxOf(t, id).machine.(*held).get(); got != "two" {
		t.Errorf("woken with %q", got)
	}
	if err := h.Kill(t.Context(), id); err != nil {
		t.Error(err)
	}
	h.hot.mu.Lock()
	defer h.hot.mu.Unlock()
	for key, e := range h.hot.entries {
		if (e.tag == "" || strings.HasPrefix(key, keptPrefix)) && e.users == 0 {
			t.Errorf("image %q is left, which nobody uses and nobody can ask for", key)
		}
	}
}

// checkHotAgain: forks of an adopted machine's snapshot map the memory that it maps.
func checkHotAgain(t *testing.T, h *Host, key string, users int) {
	t.Helper()
	h.hot.mu.Lock()
	e := h.hot.entries[key]
	h.hot.mu.Unlock()
	if e == nil || e.users != users {
		t.Fatalf("the image is %+v, want it hot with %d users", e, users)
	}
	sibling := h.one(t, ForkSpec{})
	s := h.sandboxOf(t, sibling.ID)
	if id, err := e.checkpoint.Memory.ID(); err != nil || s.mapped != id || s.hot != e {
		t.Errorf("a new sibling maps %+v, the adopted ones %+v, %v", s.mapped, id, err)
	}
	if err := h.Kill(t.Context(), sibling.ID); err != nil {
		t.Error(err)
	}
}

// TestAdoptedMachineIsWatched: its death and the end of its time are seen as any other's.
func TestAdoptedMachineIsWatched(t *testing.T) {
	h, _ := adoptingHost(t)
	dies, expires := h.one(t, ForkSpec{}), h.one(t, ForkSpec{TTL: 2 * time.Second})
	h, _ = leaveAndOpen(t, h, func() {})
	_ = h.sandboxOf(t, dies.ID).machine.(*held).cmd.Process.Kill()
	deadline := time.After(20 * time.Second)
	for {
		v, err := h.Sandbox(dies.ID)
		_, gone := h.Sandbox(expires.ID)
		if err == nil && v.State == lineage.Failed && errors.Is(gone, ErrNotFound) {
			break
		}
		select {
		case <-deadline:
			t.Fatalf("the dead one is %s, %v; the expired one: %v", v.State, err, gone)
		case <-time.After(5 * time.Millisecond):
		}
	}
	if err := h.Kill(t.Context(), dies.ID); err != nil {
		t.Error(err)
	}
}

func editRecord(t *testing.T, dir string, change func(*machineRecord)) {
	t.Helper()
	path := layout.MachineRecord(dir)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	rec := &machineRecord{}
	if err := json.Unmarshal(text, rec); err != nil {
		t.Fatal(err)
	}
	change(rec)
	if text, err = json.Marshal(rec); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestBuriedWithAReason: whatever cannot be trusted ends, and the log says why.
func TestBuriedWithAReason(t *testing.T) {
	edit := func(change func(*machineRecord)) func(t *testing.T, e *adoptingEngine, dir string) {
		return func(t *testing.T, _ *adoptingEngine, dir string) {
			t.Helper()
			editRecord(t, dir, change)
		}
	}
	for name, c := range map[string]struct {
		harm func(t *testing.T, e *adoptingEngine, dir string)
		says string
	}{
		"no record": {func(t *testing.T, _ *adoptingEngine, dir string) {
			t.Helper()
			if err := os.Remove(layout.MachineRecord(dir)); err != nil {
				t.Fatal(err)
			}
		}, "before it had confirmed its identity"},
		"damaged": {func(t *testing.T, _ *adoptingEngine, dir string) {
			t.Helper()
			if err := os.Truncate(layout.MachineRecord(dir), 100); err != nil {
				t.Fatal(err)
			}
		}, "damaged"},
		"another boot":    {edit(func(r *machineRecord) { r.BootID = "another" }), "another boot"},
		"another version": {edit(func(r *machineRecord) { r.FormatVersion++ }), "version"},
		"another process": {edit(func(r *machineRecord) { r.Ref.PID = os.Getpid() }), "not the process that its record names"},
		"reused pid":      {edit(func(r *machineRecord) { r.Ref.StartTime++ }), "dead"},
		"another place":   {edit(func(r *machineRecord) { r.Ref.Dir += "x" }), "its record is of"},
		"bad id":          {edit(func(r *machineRecord) { r.ID = "../x" }), "damaged"},
		"failed":          {edit(func(r *machineRecord) { r.State = lineage.Failed }), "damaged"},
		"disk elsewhere":  {edit(func(r *machineRecord) { r.Disks[0] = "/etc/passwd" }), "none of its disks"},
		"image elsewhere": {edit(func(r *machineRecord) { r.Images[0].Own = "/etc/passwd" }), "no disk of ours"},
		"no image":        {edit(func(r *machineRecord) { r.Hot = "x" }), "restored from"},
		"unknown below":   {edit(func(r *machineRecord) { r.Images[0].Below = []string{"x"} }), "not named before"},
		"expired":         {edit(func(r *machineRecord) { r.Expires = time.Now().Add(-time.Second) }), "time to live"},
		"engine refuses": {func(_ *testing.T, e *adoptingEngine, _ string) {
			e.refuse = func() error { return errors.New("it had not been loaded yet") }
		}, "it had not been loaded yet"},
		"forged memory": {func(t *testing.T, e *adoptingEngine, dir string) {
			t.Helper()
			scratch, err := memory.NewScratch(fakeMemory)
			if err != nil {
				t.Fatal(err)
			}
			image, err := scratch.Seal()
			if err != nil {
				t.Fatal(err)
			}
			a := e.machines[dir]
			_ = a.image.Close()
			a.image = image
		}, "not the image it was given"},
		"process gone": {func(_ *testing.T, e *adoptingEngine, dir string) {
			m := e.machines[dir]
			_ = m.cmd.Process.Kill()
			<-m.reaped
		}, "died while no daemon ran"},
	} {
		t.Run(name, func(t *testing.T) {
			h, e := adoptingHost(t)
			s := h.sandboxOf(t, h.one(t, ForkSpec{}).ID)
			machine := e.machines[s.dir]
			next, log := leaveAndOpen(t, h, func() { c.harm(t, e, s.dir) })
			if list := next.Sandboxes(nil); len(list) != 0 {
				t.Errorf("adopted: %+v", list)
			}
			if !strings.Contains(log, c.says) {
				t.Errorf("the log does not say %q:\n%s", c.says, log)
			}
			checkEmpty(t, h.cfg.Home.Machines())
			checkEmpty(t, h.cfg.Home.Hot())
			<-machine.reaped
		})
	}
}

// TestPagesEndWithTheirDaemon: the memory of a branch that was pages over another's image cannot be found in the machines
// that stand on it. It is made anew for the next fork; the disk stays as long as anybody stands on it.
func TestPagesEndWithTheirDaemon(t *testing.T) {
	h, _ := adoptingHost(t)
	s := h.sandboxOf(t, h.one(t, ForkSpec{}).ID)
	m, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	h, log := leaveAndOpen(t, h, func() {
		editRecord(t, s.dir, func(r *machineRecord) { r.Images[0].Pages = true })
	})
	s, err = h.find(s.id)
	if err != nil {
		t.Fatalf("%v\n%s", err, log)
	}
	if h.hot.has(m) {
		t.Error("half of a memory is hot")
	}
	if id, err := h.hot.memory(s.hot).Memory.ID(); err != nil || id != s.mapped {
		t.Errorf("its own branches would be over %+v, %v, it maps %+v", id, err, s.mapped)
	}
	sibling := h.sandboxOf(t, h.one(t, ForkSpec{}).ID) // made anew from the layers
	text := make([]byte, len("memory of "+fakeTag))
	if _, err := h.hot.memory(sibling.hot).Memory.ReadAt(text, 4096); err != nil || string(text) != "memory of "+fakeTag {
		t.Errorf("a sibling's memory holds %q, %v", text, err)
	}
	if sibling.hot == s.hot {
		t.Error("a sibling stands on half of a memory")
	}
	if err := h.Kill(t.Context(), sibling.id); err != nil {
		t.Error(err)
	}
	h.hot.evict()
	if _, err := os.Stat(s.hot.disks[0]); err != nil {
		t.Errorf("the disk of the adopted one: %v", err)
	}
}

// TestFlattenedImageIsRestored: what machines have of their own that map the memory which an image got of its own is not
// over the memory that those before them map, whichever is adopted first.
func TestFlattenedImageIsRestored(t *testing.T) {
	h, _ := adoptingHost(t)
	source := h.sandboxOf(t, h.one(t, ForkSpec{}).ID)
	m := source.machine.(*held)
	m.mu.Lock()
	copy(m.memory[16<<10:], bytes.Repeat([]byte("own"), 100<<10))
	m.mu.Unlock()
	mustBranch(t, h, source.id, "x", BranchDiff)
	fork := func(n int) *sandbox {
		results, err := h.Fork(t.Context(), ForkSpec{Tag: "x", N: n})
		if err != nil || results[0].Err != nil {
			t.Fatal(err, results)
		}
		return h.sandboxOf(t, results[0].Sandbox.ID)
	}
	before, after := fork(1), fork(2)
	if before.hot != after.hot || before.mapped == after.mapped {
		t.Fatalf("the image was not given memory of its own: both map %+v", before.mapped)
	}
	adoptions := func(all ...*sandbox) (list []*adoption) {
		for _, s := range all {
			rec := readBack(t, s.dir)
			image, err := s.machine.(*held).image.Share()
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, &adoption{record: rec, memory: image})
		}
		return list
	}
	for _, order := range [][]*sandbox{{before, after}, {after, before}} {
		list := adoptions(order...)
		c := newHotCache(h)
		images := c.restore(list)
		e := images[list[0].record.Hot]
		if id, err := e.checkpoint.Memory.ID(); err != nil || id != after.mapped || e.users != 2 {
			t.Errorf("branches would be over %+v, %v, with %d users; want %+v", id, err, e.users, after.mapped)
		}
		for _, a := range list {
			a.closeMemory()
		}
		for _, e := range c.entries {
			if e.checkpoint != nil {
				closeMemory(e.checkpoint)
			}
		}
	}
}

func readBack(t *testing.T, dir string) *machineRecord {
	t.Helper()
	text, err := os.ReadFile(layout.MachineRecord(dir))
	if err != nil {
		t.Fatal(err)
	}
	rec, err := parseRecord(text)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// TestLeaveEndsCopiesFirst: a machine is not given up before the copy of its memory has been ended well: it would hang
// until another daemon comes.
func TestLeaveEndsCopiesFirst(t *testing.T) {
	h, e := adoptingHost(t)
	id := h.one(t, ForkSpec{}).ID
	m := h.sandboxOf(t, id).machine.(*held)
	given := make(chan bool, 1)
	e.capture = func(step string) error {
		if step != "finish" {
			return nil
		}
		<-h.life.Done()
		grace := time.NewTimer(100 * time.Millisecond)
		defer grace.Stop()
		select {
		case <-m.gone:
			given <- true
		case <-grace.C:
			given <- false
		}
		return context.Canceled
	}
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "x", NoWait: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Leave(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Leave: %v", err)
	}
	if <-given {
		t.Error("the machine was given up in the middle of a copy")
	}
	next, err := Open(t.Context(), h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if v, err := next.Snapshot("x"); err != nil || v.Status != lineage.FailedSnap {
		t.Errorf("%+v, %v", v, err)
	}
	if err := next.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestInterruptedStart: a daemon told to stop while it starts ends nothing.
func TestInterruptedStart(t *testing.T) {
	h, e := adoptingHost(t)
	id := h.one(t, ForkSpec{}).ID
	next, log := leaveAndOpen(t, h, func() {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Open(ctx, h.cfg); !errors.Is(err, context.Canceled) {
			t.Errorf("Open: %v", err)
		}
		if e.living() != 1 {
			t.Error("the machine was ended")
		}
	})
	if _, err := next.Sandbox(id); err != nil {
		t.Errorf("%v\n%s", err, log)
	}
}

func TestCutNow(t *testing.T) {
	list := func(s string) []string { return strings.Fields(s) }
	for name, c := range map[string]struct {
		recorded string
		cut      int
		now      string
		want     int
		ok       bool
	}{
		"unchanged":            {"0 1 2", 2, "0 1 2", 2, true},
		"a new top":            {"0 1 2", 2, "0 1 2 3", 2, true},
		"made one":             {"0 1 2 3", 3, "0 3", 1, true},
		"made one, and on":     {"0 1 2 3", 3, "0 3 4", 1, true},
		"nothing held":         {"0 1", 0, "0 1 2", 0, true},
		"held nothing, other":  {"0", 0, "7", 0, true},
		"not to be told":       {"0 1 2", 2, "1 0 2", 0, false},
		"a cut beyond the end": {"0 1", 3, "0 1", 0, false},
		"negative":             {"0 1", -1, "0 1", 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := cutNow(list(c.recorded), c.cut, list(c.now))
			if got != c.want || ok != c.ok {
				t.Errorf("cutNow is %d, %v; want %d, %v", got, ok, c.want, c.ok)
			}
		})
	}
}

// FuzzRecord: a record that passes names only files that are ours.
func FuzzRecord(f *testing.F) {
	const dir, hot = "/home/machines/abc", "/home/hot"
	good := machineRecord{
		FormatVersion: recordVersion, ID: newID(), State: lineage.Running, Disks: []string{dir + "/disk/0.qcow2"}, Hot: "k",
		Format: engine.Format{CPUs: 1, MemoryBytes: 1}, Images: []imageRecord{{Key: "k", Own: hot + "/disk-k.qcow2"}},
	}
	text, err := json.Marshal(good)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte("{}"))
	f.Add([]byte(`{"format_version":1,"disks":["/home/machines/abc/disk/../../x"]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		rec, err := parseRecord(text)
		if err != nil || rec.check(dir, hot) != nil {
			return
		}
		files := slices.Clone(rec.Disks)
		for _, img := range rec.Images {
			files = append(append(files, img.Disks...), img.Own)
		}
		for _, file := range files {
			if file != "" && filepath.Dir(file) != dir+"/disk" && filepath.Dir(file) != hot {
				t.Errorf("a record may name %q", file)
			}
		}
	})
}
