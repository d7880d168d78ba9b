package qemu_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/testenv"
)

// The numbers of decision 0002. FORKD_SOAK_BOOTS and FORKD_SOAK_MINUTES shorten a run.
const (
	soakBoots   = 300
	soakMinutes = 10
	// hung is how long a boot may take on an overloaded host; one that hangs does so for ever.
	hung = 4 * time.Minute
	// maxDrift is what a clock may be off after soakMinutes.
	maxDrift = 50 * time.Millisecond
)

func needSoak(t *testing.T) {
	t.Helper()
	if !testenv.Soak() {
		t.Skipf("set %s=1: this takes minutes to hours", testenv.EnvSoak)
	}
}

func fromEnv(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return otherwise
}

// TestSoakBoots boots machines of one and two CPUs, two at a time, on a host that is kept busy, and none may hang.
func TestSoakBoots(t *testing.T) {
	needSoak(t)
	e, kit := newEngine(t), enginetest.NewKit(t)
	stop := keepBusy()
	defer stop()
	var (
		mu    sync.Mutex
		took  [3][]time.Duration // by number of CPUs
		facts = map[string]int{}
		wg    sync.WaitGroup
	)
	work := make(chan int)
	for range 2 {
		wg.Go(func() {
			for cpus := range work {
				d, source, err := bootOnce(t, e, kit, cpus)
				mu.Lock()
				if err != nil {
					t.Errorf("boot with %d cpus: %v", cpus, err)
				}
				took[cpus] = append(took[cpus], d)
				facts[fmt.Sprintf("%d cpus, %s", cpus, source)]++
				mu.Unlock()
			}
		})
	}
	for i := range fromEnv("FORKD_SOAK_BOOTS", soakBoots) {
		work <- 1 + i%2
		if i%20 == 19 {
			t.Logf("%d boots started", i+1)
		}
	}
	close(work)
	wg.Wait()
	for cpus := 1; cpus <= 2; cpus++ {
		d := took[cpus]
		slices.Sort(d)
		if len(d) > 0 {
			t.Logf("%d cpus: %d boots, p50 %s, best %s, worst %s", cpus, len(d), d[len(d)/2], d[0], d[len(d)-1])
		}
	}
	t.Log(facts)
	for what := range facts {
		if strings.Contains(what, "jiffies") || strings.Contains(what, "refined") {
			t.Errorf("a machine keeps time by ticks: %s", what)
		}
	}
}

func bootOnce(t *testing.T, e engine.Engine, kit *enginetest.Kit, cpus int) (time.Duration, string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), hung)
	defer cancel()
	spec := kit.Spec(t, cpus)
	defer os.RemoveAll(spec.Dir)
	start := time.Now()
	m, err := e.Boot(ctx, spec)
	if err != nil {
		return 0, "", err
	}
	defer m.Close()
	g, err := enginetest.TryTalk(ctx, m)
	if err != nil {
		return time.Since(start), "", fmt.Errorf("%w; console: %s", err, m.Console())
	}
	took := time.Since(start)
	facts, err := g.Ask("facts")
	g.Close()
	source, _, _ := strings.Cut(facts, " ")
	return took, source, err
}

// keepBusy occupies one core.
func keepBusy() (stop func()) {
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !done.Load() { // Spinning is the purpose.
		}
	})
	return func() {
		done.Store(true)
		wg.Wait()
	}
}

// TestSoakDrift compares the clocks of machines with the host's for ten minutes: of one and two CPUs, booted and
// restored, all at once.
func TestSoakDrift(t *testing.T) {
	needSoak(t)
	e, kit := newEngine(t), enginetest.NewKit(t)
	minutes := fromEnv("FORKD_SOAK_MINUTES", soakMinutes)
	machines := map[string]*enginetest.Guest{}
	for cpus := 1; cpus <= 2; cpus++ {
		machines[fmt.Sprintf("%d cpus, booted", cpus)] = enginetest.Talk(t, boot(t, e, kit, cpus))
		frozen := boot(t, e, kit, cpus)
		enginetest.Talk(t, frozen)
		c, err := frozen.Freeze(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Memory.Close() })
		spec := kit.Spec(t, cpus)
		spec.Boot = nil
		m, err := e.Restore(t.Context(), spec, c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		machines[fmt.Sprintf("%d cpus, restored", cpus)] = enginetest.Talk(t, m)
	}
	start := map[string]time.Duration{}
	began := time.Now()
	for name, g := range machines {
		start[name] = offset(t, g)
		t.Logf("%s: %s; reading the clock costs %s ns", name, g.Do("facts"), g.Do("clockcost"))
	}
	for range minutes {
		select {
		case <-time.After(time.Minute):
		case <-t.Context().Done():
			return
		}
		for name, g := range machines {
			drift := offset(t, g) - start[name]
			t.Logf("after %s %s drifted %s", time.Since(began).Round(time.Second), name, drift)
			if drift.Abs() > maxDrift {
				t.Errorf("%s: drift of %s, more than %s", name, drift, maxDrift)
			}
		}
	}
}

func boot(t *testing.T, e engine.Engine, kit *enginetest.Kit, cpus int) engine.Machine {
	t.Helper()
	m, err := e.Boot(t.Context(), kit.Spec(t, cpus))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// offset is how far the guest's clock is ahead of the host's, by the quickest of several answers.
func offset(t *testing.T, g *enginetest.Guest) time.Duration {
	t.Helper()
	var (
		best     time.Duration
		quickest = time.Hour
	)
	for range 40 {
		before := time.Now()
		answer := g.Do("time")
		took := time.Since(before)
		if took < quickest {
			quickest = took
			wall, _ := enginetest.ParseTime(t, answer)
			best = wall - time.Duration(before.Add(took/2).UnixNano())
		}
	}
	return best
}
