package qemu_test

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
)

// captureCase is one row of the table in docs/engines.md.
type captureCase struct {
	memory, used int // MiB; used is what the snapshot's memory holds
	own, rate    int // MiB that the child has written of its own, and how much it rewrites of it a second (-1: nothing)
	mode         engine.CaptureMode
}

func (c captureCase) String() string {
	return fmt.Sprintf("%s-%dMiB-used%d-own%d-rate%d", c.mode, c.memory, c.used, c.own, c.rate)
}

// TestCaptureTimes measures what a capture costs the guest and its client. FORKD_CAPTURES is how often each.
func TestCaptureTimes(t *testing.T) {
	if os.Getenv("FORKD_CAPTURES") == "" {
		t.Skip("set FORKD_CAPTURES=20 to measure captures")
	}
	e, kit := newEngine(t), enginetest.NewKit(t)
	bases := map[[2]int]*engine.Checkpoint{}
	for _, c := range []captureCase{
		{512, 64, 0, -1, engine.CaptureLive},
		{512, 64, 64, 50, engine.CaptureLive},
		{1536, 1024, 0, -1, engine.CaptureLive},
		{1536, 1024, 256, 100, engine.CaptureLive},
		{512, 64, 0, -1, engine.CaptureDiff},
		{512, 64, 64, -1, engine.CaptureDiff},
		{512, 64, 256, -1, engine.CaptureDiff},
		{512, 64, 64, 50, engine.CaptureDiff},
		{1536, 1024, 256, 100, engine.CaptureDiff},
	} {
		t.Run(c.String(), func(t *testing.T) {
			key := [2]int{c.memory, c.used}
			if bases[key] == nil {
				bases[key] = frozen(t, e, kit, c)
			}
			measure(t, e, kit, c, bases[key])
		})
	}
	for _, c := range bases {
		_ = c.Memory.Close()
	}
}

// frozen is a snapshot of a machine with so much memory in use.
func frozen(t *testing.T, e engine.Engine, kit *enginetest.Kit, c captureCase) *engine.Checkpoint {
	t.Helper()
	spec := kit.Spec(t, 1)
	spec.MemoryBytes = int64(c.memory) << 20
	m, err := e.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	g := enginetest.Talk(t, m)
	g.Do(fmt.Sprintf("churn %d -1", c.used))
	f, err := m.Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func measure(t *testing.T, e engine.Engine, kit *enginetest.Kit, c captureCase, base *engine.Checkpoint) {
	spec := kit.Spec(t, 1)
	spec.Boot, spec.MemoryBytes = nil, int64(c.memory)<<20
	s := enginetest.NewSource(t, e, spec, base)
	prefer(t, s.M.Ref().PID)
	g := enginetest.Talk(t, s.M)
	if c.own > 0 {
		g.Do(fmt.Sprintf("churn %d %d", c.own, c.rate))
	}
	g.Do("tick")
	var pause, own, setup, client, ticker, copied []time.Duration
	quiet := []time.Duration{}
	p := enginetest.Ping(t, g)
	for range fromEnv("FORKD_CAPTURES", 12) {
		p.Stop(t)
		g.Do("tick")
		p = enginetest.Ping(t, g)
		<-time.After(300 * time.Millisecond)
		gap, _ := p.Take(t)
		quiet = append(quiet, gap)
		p.Stop(t)
		g.Do("tick")
		p = enginetest.Ping(t, g)
		taken := s.Capture(t, c.mode)
		gap, _ = p.Take(t)
		p.Stop(t)
		var ns int64
		if _, err := fmt.Sscan(g.Do("tick"), &ns); err != nil {
			t.Fatal(err)
		}
		p = enginetest.Ping(t, g)
		pause, setup, client = append(pause, taken.Pause), append(setup, taken.Setup), append(client, gap)
		own = append(own, taken.Downtime())
		ticker, copied = append(ticker, time.Duration(ns)), append(copied, taken.Copied())
		taken.Drop()
	}
	p.Stop(t)
	if c.own > 0 {
		g.Do("check")
	}
	t.Logf("client without a capture %s", spread(quiet))
	t.Logf("client %s", spread(client))
	t.Logf("ticker %s", spread(ticker))
	t.Logf("pause %s", spread(pause))
	t.Logf("of which QEMU's own %s", spread(own))
	t.Logf("setup %s", spread(setup))
	t.Logf("copied %s", spread(copied))
	if n := len(client); n >= 6 {
		t.Logf("client, first and sixth: %s and %s", client[0].Round(time.Millisecond/10), client[5].Round(time.Millisecond/10))
	}
}

// prefer lets other work on this host count less, if FORKD_PREFER is set: the scheduler shares the processors among
// sessions, of which ours and each machine's is one. It needs root.
func prefer(t *testing.T, pid int) {
	t.Helper()
	if os.Getenv("FORKD_PREFER") == "" {
		return
	}
	for _, p := range []int{pid, os.Getpid()} {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/autogroup", p), []byte("-20"), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// spread is how durations are distributed.
func spread(d []time.Duration) string {
	first := d[0]
	d = slices.Sorted(slices.Values(d))
	at := func(q float64) time.Duration {
		return d[min(len(d)-1, int(q*float64(len(d))))].Round(time.Millisecond / 10)
	}
	return fmt.Sprintf("p50 %s, p90 %s, p99 %s, max %s; first %s (%d)", at(0.5), at(0.9), at(0.99), d[len(d)-1].Round(time.Millisecond/10),
		first.Round(time.Millisecond/10), len(d))
}
