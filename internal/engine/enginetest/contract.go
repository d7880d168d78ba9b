package enginetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/testenv"
)

// fixture is one frozen machine that all tests of a run restore.
type fixture struct {
	engine     engine.Engine
	kit        *Kit
	checkpoint *engine.Checkpoint
	disk       string // what the machine's disk held when it was frozen; never written again
}

// Run tests that e keeps the contract of package engine.
func Run(t *testing.T, e engine.Engine) {
	f := &fixture{engine: e, kit: NewKit(t)}
	f.boot(t)
	for _, c := range []struct {
		name string
		test func(*testing.T, *fixture)
	}{
		{"ProbeNamesFormat", testProbe},
		{"RestoreGoesOn", testRestoreGoesOn},
		{"RestoresAreIsolated", testIsolation},
		{"ManyAtOnce", testManyAtOnce},
		{"CloseFreesEverything", testClose},
		{"KilledProcessIsNoticed", testKilled},
		{"GuestPowerOffIsNoticed", testPowerOff},
		{"NewConnectionSupersedes", testSupersede},
		{"ConsoleIsBounded", testConsole},
		{"IncompatibleIsRefused", testIncompatible},
		{"HostileStateIsAnError", testHostileState},
		{"BadSpecIsRefused", testBadSpec},
		{"RestoredCannotFreeze", testRestoredCannotFreeze},
		{"Link", testLink},
		{"LinkToNobody", testLinkToNobody},
		{"LinkNobodyReads", testLinkNobodyReads},
		{"Bury", testBury},
		{"Adopt", testAdopt},
		{"Capture", testCapture},
		{"CaptureUnderFire", testCaptureUnderFire},
		{"TalkedToWhileCaptured", testTalkedToWhileCaptured},
		{"FeaturesAreTrue", testFeatures},
		{"CaptureRefused", testCaptureRefused},
		{"CaptureCancelled", testCaptureCancelled},
		{"SilentInThePause", testSilentInThePause},
		{"CaptureOfTheDead", testCaptureOfTheDead},
		{"CaptureOfCaptures", testCaptureOfCaptures},
		{"ManyCaptures", testManyCaptures},
		{"Pause", testPause},
		{"Commit", testCommit},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, f) })
	}
}

// boot starts the guest, leaves traces in it, and freezes it.
func (f *fixture) boot(t *testing.T) {
	spec := f.kit.Spec(t, 1)
	m, err := f.engine.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	g := Talk(t, m)
	t.Log(g.Do("facts"))
	g.Do("set parent memory")
	g.Do("link")
	g.Do("write 4096 disk")
	f.checkpoint, err = m.Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.checkpoint.Memory.Close() })
	waitDone(t, m, time.Second)
	if err := m.Err(); err != nil {
		t.Errorf("a frozen machine's Err: %v, want nil", err)
	}
	f.disk = spec.Disk.Path
	t.Logf("device state %d bytes, image %d MiB allocated", len(f.checkpoint.State), f.checkpoint.Memory.AllocatedBytes()>>20)
}

// spec is for a child of the fixture: its disk is a copy, which on most engines would be a layer.
func (f *fixture) spec(t *testing.T) *engine.Spec {
	spec := f.kit.Spec(t, 1)
	spec.Boot = nil
	data, err := os.ReadFile(f.disk)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(spec.Disk.Path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return spec
}

func (f *fixture) restore(t *testing.T) engine.Machine {
	t.Helper()
	m, err := f.engine.Restore(t.Context(), f.spec(t), f.checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

func waitDone(t *testing.T, m engine.Machine, limit time.Duration) {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(testenv.Timeout(limit)):
		t.Fatalf("Done is not closed after %s", testenv.Timeout(limit))
	}
}

func testProbe(t *testing.T, f *fixture) {
	got, err := f.engine.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got.Format.Engine != f.engine.Name() || got.Format.Machine == "" || got.Format.CPUModel == "" || got.AcceleratorReason == "" {
		t.Errorf("Probe leaves out what a user must know: %+v", got)
	}
	if err := f.checkpoint.Format.Compatible(got.Format); err != nil {
		t.Errorf("a checkpoint made here does not run here: %v", err)
	}
	if f.checkpoint.Format.CPUs != 1 || f.checkpoint.Format.MemoryBytes != MemoryBytes {
		t.Errorf("the checkpoint's format does not say the machine's size: %+v", f.checkpoint.Format)
	}
	t.Logf("%+v", got)
}

func testRestoreGoesOn(t *testing.T, f *fixture) {
	g := Talk(t, f.restore(t))
	if got := g.Do("get parent"); got != "memory" {
		t.Errorf("memory after restore: %q, want what the parent had", got)
	}
	if got := g.Do("read 4096 4"); got != "disk" {
		t.Errorf("disk after restore: %q, want what the parent had", got)
	}
}

func testIsolation(t *testing.T, f *fixture) {
	before := make([]byte, 1<<20)
	if _, err := f.checkpoint.Memory.ReadAt(before, 1<<20); err != nil {
		t.Fatal(err)
	}
	state := bytes.Clone(f.checkpoint.State)
	a, b := Talk(t, f.restore(t)), Talk(t, f.restore(t))
	for name, g := range map[string]*Guest{"a": a, "b": b} {
		g.Do("set who " + name)
		g.Do("fill junk 8")
		g.Do("write 4096 " + name + "-disk")
	}
	for name, g := range map[string]*Guest{"a": a, "b": b} {
		if got := g.Do("get who"); got != name {
			t.Errorf("memory of %s says %q", name, got)
		}
		if got := g.Do("read 4096 6"); got != name+"-disk" {
			t.Errorf("disk of %s says %q", name, got)
		}
	}
	after := make([]byte, len(before))
	if _, err := f.checkpoint.Memory.ReadAt(after, 1<<20); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, after) || !bytes.Equal(state, f.checkpoint.State) {
		t.Error("running children changed their parent's checkpoint")
	}
	c := Talk(t, f.restore(t))
	if who, disk := c.Do("get who"), c.Do("read 4096 6"); who != "" || disk != "disk" {
		t.Errorf("a later child sees its siblings: memory %q, disk %q", who, disk)
	}
}

// testManyAtOnce: a fork of n restores in parallel.
func testManyAtOnce(t *testing.T, f *fixture) {
	const n = 8
	specs := make([]*engine.Spec, n)
	for i := range specs {
		specs[i] = f.spec(t)
	}
	var wg sync.WaitGroup
	for i, spec := range specs {
		wg.Go(func() {
			m, err := f.engine.Restore(t.Context(), spec, f.checkpoint)
			if err != nil {
				t.Error(err)
				return
			}
			defer m.Close()
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(40*time.Second))
			defer cancel()
			g, err := TryTalk(ctx, m)
			if err != nil {
				t.Error(err)
				return
			}
			defer g.Close()
			if _, err := g.Ask(fmt.Sprintf("set who %d", i)); err != nil {
				t.Error(err)
			}
			if got, err := g.Ask("get who"); err != nil || got != strconv.Itoa(i) {
				t.Errorf("child %d says %q, %v", i, got, err)
			}
		})
	}
	wg.Wait()
}

func testClose(t *testing.T, f *fixture) {
	before := openFiles(t)
	m, err := f.engine.Restore(t.Context(), f.spec(t), f.checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := m.DialGuest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pid := m.Ref().PID
	for range 2 {
		if err := m.Close(); err != nil {
			t.Fatalf("Close: %v", err)
		}
	}
	select {
	case <-m.Done():
	default:
		t.Error("Done is not closed when Close returns")
	}
	if err := m.Err(); err != nil {
		t.Errorf("Err after Close: %v", err)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d is still there after Close (%v)", pid, err)
	}
	_ = conn.Close()
	if after := openFiles(t); len(after) > len(before) {
		t.Errorf("Close left descriptors open:\n%s", strings.Join(after, "\n"))
	}
	if _, err := m.DialGuest(t.Context()); err == nil {
		t.Error("DialGuest of a closed machine succeeds")
	}
	m.Console() // Must not panic.
}

func openFiles(t *testing.T) []string {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		target, _ := os.Readlink("/proc/self/fd/" + e.Name())
		names = append(names, e.Name()+" → "+target)
	}
	return names
}

func testKilled(t *testing.T, f *fixture) {
	m := f.restore(t)
	if err := syscall.Kill(m.Ref().PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitDone(t, m, time.Second)
	if err := m.Err(); !errors.Is(err, engine.ErrDead) || !strings.Contains(err.Error(), "signal 9") {
		t.Errorf("Err: %v, want ErrDead naming signal 9", err)
	}
	if _, err := m.DialGuest(t.Context()); !errors.Is(err, engine.ErrDead) {
		t.Errorf("DialGuest of a dead machine: %v, want ErrDead", err)
	}
	if err := m.Close(); err != nil {
		t.Errorf("Close of a dead machine: %v", err)
	}
	if err := m.Err(); err == nil {
		t.Error("Close made the machine forget why it died")
	}
}

func testPowerOff(t *testing.T, f *fixture) {
	m := f.restore(t)
	g := Talk(t, m)
	_, _ = fmt.Fprintln(g.conn, "poweroff")
	waitDone(t, m, 20*time.Second)
	if err := m.Err(); !errors.Is(err, engine.ErrDead) || !strings.Contains(err.Error(), "powered off") {
		t.Errorf("Err: %v, want ErrDead saying that the guest powered off", err)
	}
}

func testSupersede(t *testing.T, f *fixture) {
	m := f.restore(t)
	first := Talk(t, m)
	first.Do("set x 1")
	_, _ = first.conn.Write([]byte("half a requ")) // Must not be taken for the next connection's.
	second := Talk(t, m)
	if got := second.Do("get x"); got != "1" {
		t.Errorf("over the second connection: %q", got)
	}
	if _, err := first.Ask("get x"); err == nil {
		t.Error("the superseded connection still works")
	}
}

func testConsole(t *testing.T, f *fixture) {
	m := f.restore(t)
	g := Talk(t, m)
	g.Do("print 1500 " + strings.Repeat("x", 60))
	g.Do("print 1 the-end")
	deadline := time.After(testenv.Timeout(20 * time.Second))
	for !strings.Contains(string(m.Console()), "the-end") {
		select {
		case <-deadline:
			t.Fatalf("the newest output is not on the console: %q", tail(m.Console()))
		case <-time.After(10 * time.Millisecond):
		}
	}
	if n := len(m.Console()); n > 64<<10 {
		t.Errorf("the console holds %d bytes, more than 64 KiB", n)
	}
}

func tail(b []byte) []byte { return b[max(0, len(b)-200):] }

func testIncompatible(t *testing.T, f *fixture) {
	for name, change := range map[string]func(*engine.Format){
		"engine":       func(f *engine.Format) { f.Engine = "other" },
		"accelerator":  func(f *engine.Format) { f.Accelerator = "other" },
		"machine type": func(f *engine.Format) { f.Machine = "pc-q35-99.1" },
		"CPU model":    func(f *engine.Format) { f.CPUModel = "other" },
		"architecture": func(f *engine.Format) { f.Arch = "other" },
		"version":      func(f *engine.Format) { f.Version = "99.0.0" },
		"cpus":         func(f *engine.Format) { f.CPUs = 2 },
		"memory":       func(f *engine.Format) { f.MemoryBytes *= 2 },
	} {
		c := *f.checkpoint
		change(&c.Format)
		m, err := f.engine.Restore(t.Context(), f.spec(t), &c)
		if err == nil {
			m.Close()
		}
		if !errors.Is(err, engine.ErrIncompatible) || !strings.Contains(err.Error(), name) {
			t.Errorf("another %s: %v, want ErrIncompatible naming it", name, err)
		}
	}
}

func testHostileState(t *testing.T, f *fixture) {
	good := f.checkpoint.State
	garbage := bytes.Clone(good)
	for i := 64; i < len(garbage); i += 7 {
		garbage[i] ^= 0x55
	}
	for name, state := range map[string][]byte{
		"empty":     nil,
		"truncated": good[:len(good)/2],
		"one byte":  good[:1],
		"garbage":   garbage,
		"text":      bytes.Repeat([]byte("no device state. "), 1000),
	} {
		t.Run(name, func(t *testing.T) {
			c := *f.checkpoint
			c.State = state
			start := time.Now()
			m, err := f.engine.Restore(t.Context(), f.spec(t), &c)
			if err == nil {
				m.Close()
				t.Fatal("restored a broken state")
			}
			if took := time.Since(start); took > testenv.Timeout(10*time.Second) {
				t.Errorf("it took %s to refuse: %v", took, err)
			}
			t.Log(err)
		})
	}
}

func testBadSpec(t *testing.T, f *fixture) {
	for name, change := range map[string]func(*engine.Spec){
		"0 cpus":     func(s *engine.Spec) { s.CPUs = 0 },
		"-1 cpus":    func(s *engine.Spec) { s.CPUs = -1 },
		"1000 cpus":  func(s *engine.Spec) { s.CPUs = 1000 },
		"memory":     func(s *engine.Spec) { s.MemoryBytes = -1 },
		"odd memory": func(s *engine.Spec) { s.MemoryBytes++ },
		"no disk":    func(s *engine.Spec) { s.Disk.Path += "-not-there" },
		"format":     func(s *engine.Spec) { s.Disk.Format = "vmdk" },
		"kernel":     func(s *engine.Spec) { s.Boot.Kernel += "-not-there" },
		"directory":  func(s *engine.Spec) { s.Dir += "-not-there" },
	} {
		spec := f.kit.Spec(t, 1)
		change(spec)
		m, err := f.engine.Boot(t.Context(), spec)
		if err == nil {
			m.Close()
			t.Errorf("%s: booted", name)
			continue
		}
		if !strings.Contains(err.Error(), spec.ID) {
			t.Errorf("%s: %q does not name the machine", name, err)
		}
	}
}

func testRestoredCannotFreeze(t *testing.T, f *fixture) {
	m := f.restore(t)
	if _, err := m.Freeze(t.Context()); err == nil {
		t.Error("froze a machine whose memory is not its own file")
	}
	waitDone(t, m, time.Second)
}

func testBury(t *testing.T, f *fixture) {
	m := f.restore(t)
	ref := m.Ref()
	other := ref
	other.StartTime++
	if err := f.engine.Bury(t.Context(), other); err != nil {
		t.Errorf("bury a process that is not the one meant: %v", err)
	}
	if err := syscall.Kill(ref.PID, 0); err != nil {
		t.Fatalf("burying another process ended process %d", ref.PID)
	}
	for range 2 {
		if err := f.engine.Bury(t.Context(), ref); err != nil {
			t.Errorf("bury: %v", err)
		}
	}
	waitDone(t, m, time.Second)
}

// ParseTime reads the guest's answer to "time".
func ParseTime(t testing.TB, answer string) (wall, monotonic time.Duration) {
	t.Helper()
	w, m, _ := strings.Cut(answer, " ")
	wallNS, err := strconv.ParseInt(w, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	monoNS, err := strconv.ParseInt(m, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(wallNS), time.Duration(monoNS)
}
