package enginetest

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/testenv"
)

// Source is a restored machine that is captured while it runs.
type Source struct {
	M     engine.Machine
	From  *engine.Checkpoint // what it was restored from
	Spec  *engine.Spec
	chain []string // files of the disk, the present top last
	tops  int
}

// NewSource restores a machine for captures.
func NewSource(t testing.TB, e engine.Engine, spec *engine.Spec, from *engine.Checkpoint) *Source {
	t.Helper()
	m, err := e.Restore(t.Context(), spec, from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	chain := append([]string{spec.Disk.Path}, spec.Disk.Backing...)
	slices.Reverse(chain)
	return &Source{M: m, From: from, Spec: spec, chain: chain}
}

func (s *Source) format(i int) string {
	if i == 0 {
		return "raw"
	}
	return "qcow2"
}

// NextTop makes the empty file that a capture switches the disk to.
func (s *Source) NextTop(t testing.TB) string {
	t.Helper()
	s.tops++
	top := filepath.Join(s.Spec.Dir, fmt.Sprintf("%d.qcow2", s.tops))
	if err := disk.CreateOverlay(top, s.chain[len(s.chain)-1], s.format(len(s.chain)-1)); err != nil {
		t.Fatal(err)
	}
	return top
}

// remove takes files out of the chain that a commit made superfluous.
func (s *Source) remove(t *testing.T, from, to int) {
	t.Helper()
	for _, name := range s.chain[from:to] {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	s.chain = append(s.chain[:from:from], s.chain[to:]...)
}

// Taken is a capture and what a machine needs to be restored from it.
type Taken struct {
	*engine.Capture
	captured   *engine.Captured
	Checkpoint *engine.Checkpoint
	disks      []string
}

// Begin captures; Finish must follow.
func (s *Source) Begin(t testing.TB, mode engine.CaptureMode) *Taken {
	t.Helper()
	return s.BeginAt(t, mode, func(context.Context) error { return nil })
}

// BeginAt is Begin with something to do immediately before the pause.
func (s *Source) BeginAt(t testing.TB, mode engine.CaptureMode, quiesce func(context.Context) error) *Taken {
	t.Helper()
	top := s.NextTop(t)
	c, err := s.M.(engine.Capturer).Capture(t.Context(), &engine.CaptureSpec{
		Mode: mode, DiskTop: top, Quiesce: quiesce,
	})
	if err != nil {
		t.Fatalf("capture %s: %v", mode, err)
	}
	taken := &Taken{Capture: c, disks: append([]string(nil), s.chain...)}
	s.chain = append(s.chain, top)
	return taken
}

// End finishes a capture.
func (s *Source) End(t testing.TB, c *Taken) {
	t.Helper()
	captured, err := c.Finish(t.Context())
	if err != nil {
		t.Fatalf("finish capture %s: %v", c.Mode, err)
	}
	c.captured = captured
	c.Checkpoint = &engine.Checkpoint{Format: captured.Format, State: captured.State}
	switch {
	case captured.Image != nil && captured.Pages == nil:
		t.Cleanup(func() { captured.Image.Close() })
		c.Checkpoint.Memory = captured.Image
	case captured.Pages != nil && captured.Image == nil:
		t.Cleanup(func() { captured.Pages.Close() })
		c.Checkpoint.Memory, c.Checkpoint.Pages = s.From.Memory, captured.Pages
	default:
		t.Fatalf("captured image %v and pages %v: exactly one is expected", captured.Image, captured.Pages)
	}
}

// Copied is how long the copy took after the machine ran again.
func (c *Taken) Copied() time.Duration { return c.captured.Copied }

// Downtime is what the engine's own program needed of the pause.
func (c *Taken) Downtime() time.Duration { return c.captured.Downtime }

// Drop frees what was captured.
func (c *Taken) Drop() {
	if c.captured.Image != nil {
		_ = c.captured.Image.Close()
	}
	if c.captured.Pages != nil {
		_ = c.captured.Pages.Close()
	}
}

// Capture is Begin and End.
func (s *Source) Capture(t testing.TB, mode engine.CaptureMode) *Taken {
	t.Helper()
	c := s.Begin(t, mode)
	s.End(t, c)
	return c
}

// Grandchild restores a machine from a capture, over the frozen disk.
func (s *Source) Grandchild(t testing.TB, e engine.Engine, kit *Kit, c *Taken) engine.Machine {
	t.Helper()
	return s.Child(t, e, kit, c).M
}

// Child is Grandchild, to be captured itself. A capture by difference stands on the image of s, so what is captured of
// such a child does too.
func (s *Source) Child(t testing.TB, e engine.Engine, kit *Kit, c *Taken) *Source {
	t.Helper()
	spec := kit.Spec(t, s.Spec.CPUs)
	spec.Boot, spec.MemoryBytes = nil, s.Spec.MemoryBytes
	over := filepath.Join(spec.Dir, "over.qcow2")
	last := len(c.disks) - 1
	if err := disk.CreateOverlay(over, c.disks[last], s.format(last)); err != nil {
		t.Fatal(err)
	}
	below := slices.Clone(c.disks)
	slices.Reverse(below)
	spec.Disk = engine.Disk{Path: over, Format: "qcow2", Backing: below}
	return NewSource(t, e, spec, c.Checkpoint)
}

// modes are the capture modes of this engine on this host.
func (f *fixture) modes(t *testing.T) []engine.CaptureMode {
	features, err := f.engine.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !features.Capture {
		t.Skip("this engine cannot capture")
	}
	if !features.Live {
		t.Logf("live is not tested: %s", features.LiveReason)
		return []engine.CaptureMode{engine.CaptureDiff}
	}
	return []engine.CaptureMode{engine.CaptureDiff, engine.CaptureLive}
}

func (f *fixture) eachMode(t *testing.T, test func(*testing.T, *fixture, engine.CaptureMode)) {
	for _, mode := range f.modes(t) {
		t.Run(string(mode), func(t *testing.T) { test(t, f, mode) })
	}
}

func (f *fixture) source(t *testing.T) *Source {
	return NewSource(t, f.engine, f.spec(t), f.checkpoint)
}

// testCapture: a grandchild goes on from the instant, the source runs on, and they do not see each other.
func testCapture(t *testing.T, f *fixture) {
	f.eachMode(t, func(t *testing.T, f *fixture, mode engine.CaptureMode) {
		s := f.source(t)
		g := Talk(t, s.M)
		g.Do("set who source")
		g.Do("fill junk 8")
		sum := g.Do("sum junk")
		g.Do("write 4096 before")
		c := s.Begin(t, mode)
		g.Do("set who later")
		g.Do("write 4096 later!")
		s.End(t, c)
		t.Logf("setup %s, pause %s, copied in %s, state %d bytes", c.Setup, c.Pause, c.captured.Copied, len(c.captured.State))
		if c.Mode != mode || c.Pause <= 0 {
			t.Errorf("asked for %s: mode %s, pause %s", mode, c.Mode, c.Pause)
		}
		child := Talk(t, s.Grandchild(t, f.engine, f.kit, c))
		if who, disk := child.Do("get who"), child.Do("read 4096 6"); who != "source" || disk != "before" {
			t.Errorf("the grandchild finds memory %q and disk %q, not those of the instant", who, disk)
		}
		if got := child.Do("sum junk"); got != sum {
			t.Error("the grandchild finds other memory than the source had")
		}
		child.Do("set who child")
		child.Do("write 4096 child!")
		if who, disk := g.Do("get who"), g.Do("read 4096 6"); who != "later" || disk != "later!" {
			t.Errorf("the source goes on with memory %q and disk %q", who, disk)
		}
		if got := g.Do("get parent"); got != "memory" {
			t.Errorf("the source lost what it was restored with: %q", got)
		}
		again := Talk(t, s.Grandchild(t, f.engine, f.kit, c))
		if who, disk := again.Do("get who"), again.Do("read 4096 6"); who != "source" || disk != "before" {
			t.Errorf("a second grandchild finds memory %q and disk %q, not those of the instant", who, disk)
		}
	})
}

// testCaptureUnderFire: memory and disk are of one instant while both are rewritten without a pause.
func testCaptureUnderFire(t *testing.T, f *fixture) {
	f.eachMode(t, func(t *testing.T, f *fixture, mode engine.CaptureMode) {
		s := f.source(t)
		g := Talk(t, s.M)
		g.Do("churn 24 0")
		rounds := 3
		if testenv.Soak() {
			rounds = 200
		}
		for range rounds {
			was := progress(t, g.Do("check"))
			c := s.Capture(t, mode)
			child := Talk(t, s.Grandchild(t, f.engine, f.kit, c))
			if is := progress(t, child.Do("check")); is < was {
				t.Errorf("the grandchild is at step %d, the source was at %d before", is, was)
			}
			_ = child.m.Close()
		}
		g.Do("check")
	})
}

// progress is how far a churn was.
func progress(t testing.TB, answer string) int {
	t.Helper()
	steps, _, _ := strings.Cut(answer, " ")
	n, err := strconv.Atoi(steps)
	if err != nil {
		t.Fatalf("check says %q", answer)
	}
	return n
}

// within asks the guest and fails if it does not answer in time.
func within(t *testing.T, g *Guest, limit time.Duration, request string) {
	t.Helper()
	start := time.Now()
	g.Do(request)
	if took := time.Since(start); took > testenv.Timeout(limit) {
		t.Errorf("the guest answered after %s", took)
	}
}

// testTalkedToWhileCaptured: what is said to a machine while it is captured is heard by it, whole and once; and a machine
// restored from the capture hears the first thing it is told. The device of the control channel moves what it is sent into
// the guest's memory also while the guest stands still: if that falls between what is taken of the device and what of the
// memory, one of the two is lost.
func testTalkedToWhileCaptured(t *testing.T, f *fixture) {
	f.eachMode(t, func(t *testing.T, f *fixture, mode engine.CaptureMode) {
		s := f.source(t)
		g := Talk(t, s.M)
		g.Do("churn 16 -1")
		for range 8 {
			asked := make(chan int, 1)
			over := make(chan struct{})
			taken := s.BeginAt(t, mode, func(context.Context) error {
				go func() { asked <- g.tellUntil(over) }()
				return nil
			})
			close(over)
			g.hear(<-asked)
			s.End(t, taken)
			child := s.Grandchild(t, f.engine, f.kit, taken)
			hears(t, child)
			if err := child.Close(); err != nil {
				t.Error(err)
			}
			taken.Drop()
		}
		g.Do("check")
	})
}

// tellUntil asks again and again, without waiting for answers, and returns how often.
func (g *Guest) tellUntil(over chan struct{}) int {
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-over:
			return n
		case <-tick.C:
		}
		if _, err := fmt.Fprintln(g.conn, "get nothing"); err != nil {
			g.t.Error(err)
			return n
		}
	}
}

// hear takes so many answers.
func (g *Guest) hear(n int) {
	g.t.Helper()
	for i := range n {
		_ = g.conn.SetReadDeadline(time.Now().Add(testenv.Timeout(5 * time.Second)))
		if line, err := g.r.ReadString('\n'); err != nil || line != "ok\n" && line != "ok \n" {
			g.t.Fatalf("answer %d of %d: %q, %v", i, n, line, err)
		}
	}
}

// hears fails unless the guest answers what it is told first, said once.
func hears(t *testing.T, m engine.Machine) {
	t.Helper()
	conn, err := m.DialGuest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	g := &Guest{t: t, m: m, conn: conn, r: bufio.NewReader(conn)}
	defer g.Close()
	if _, err := fmt.Fprintf(conn, "\nping once\n"); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(testenv.Timeout(5 * time.Second)))
	if !g.readUntil("pong once") {
		t.Errorf("a machine restored from a capture does not hear the first thing it is told")
	}
}
