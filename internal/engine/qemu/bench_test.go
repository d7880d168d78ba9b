package qemu_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/testenv"
)

// TestRestoreTimes reports what a restore costs on this host; it asserts nothing but that it works.
func TestRestoreTimes(t *testing.T) {
	e, kit := newEngine(t), enginetest.NewKit(t)
	spec := kit.Spec(t, 1)
	m, err := e.Boot(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	enginetest.Talk(t, m)
	start := time.Now()
	c, err := m.Freeze(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Memory.Close()
	t.Logf("freeze: %s, device state %d bytes", time.Since(start), len(c.State))
	var running, answered, cpu []time.Duration
	var usage memory.Usage
	n := 4 // it is for its figures, which a busy host makes worthless
	if testenv.Soak() {
		n = 20
	}
	for range n {
		r, a, p, u := restoreOnce(t, e, kit, c)
		running, answered, cpu, usage = append(running, r), append(answered, a), append(cpu, p), u
	}
	slices.Sort(running)
	slices.Sort(answered)
	slices.Sort(cpu)
	t.Logf("restore until running: p50 %s, best %s, worst %s", running[n/2], running[0], running[n-1])
	t.Logf("restore until the guest answers: p50 %s, best %s, worst %s", answered[n/2], answered[0], answered[n-1])
	t.Logf("processor time of QEMU until running: p50 %s, best %s, worst %s", cpu[n/2], cpu[0], cpu[n-1])
	t.Logf("a child's memory: own %d KiB, shared %d KiB", usage.OwnBytes>>10, usage.SharedBytes>>10)
}

func restoreOnce(t *testing.T, e engine.Engine, kit *enginetest.Kit, c *engine.Checkpoint) (running, answered, cpu time.Duration, u memory.Usage) {
	t.Helper()
	spec := kit.Spec(t, 1)
	spec.Boot = nil
	start := time.Now()
	m, err := e.Restore(t.Context(), spec, c)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	running = time.Since(start)
	cpu = cpuTime(t, m.Ref().PID)
	g := enginetest.Talk(t, m)
	answered = time.Since(start)
	g.Do("facts")
	if u, err = memory.Measure(m.Ref().PID); err != nil {
		t.Fatal(err)
	}
	return running, answered, cpu, u
}

// cpuTime is what all threads of a process have used of the processors, which says more on a busy host than a clock.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		t.Fatal(err)
	}
	var sum time.Duration
	for _, path := range stats {
		b, _ := os.ReadFile(path)
		first, _, _ := strings.Cut(string(b), " ")
		ns, _ := strconv.ParseInt(first, 10, 64)
		sum += time.Duration(ns)
	}
	return sum
}
