package host

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/testenv"
)

// forkLiving makes a sandbox with a life.
func forkLiving(t *testing.T, h *Host, ttl time.Duration, life Life) string {
	t.Helper()
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1, TTL: ttl, Life: life})
	if err != nil || results[0].Err != nil {
		t.Fatalf("%v %v", err, results)
	}
	return results[0].Sandbox.ID
}

// becomes waits until an event says what has become of a sandbox, and returns its reason.
func becomes(t *testing.T, h *Host, id string, what events.Type) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(20*time.Second))
	defer cancel()
	s := h.Events().Kept(keptEvents)
	for {
		e, err := s.Next(ctx)
		if err != nil {
			t.Fatalf("%s never became %s: %v", id, what, err)
		}
		if e.Sandbox == id && e.Type == what {
			return e.Reason
		}
	}
}

func TestIdleActions(t *testing.T) {
	testenv.OncePerRun(t)
	h := fakeHost(t, newFakeEngine(), nil)
	for action, event := range map[Action]events.Type{
		"": events.SandboxSuspended, ActionPause: events.SandboxPaused, ActionKill: events.SandboxEnded,
	} {
		id := forkLiving(t, h, 0, Life{Idle: minIdle, OnIdle: action})
		if got := becomes(t, h, id, event); !strings.Contains(got, "nobody used it for 1s") {
			t.Errorf("%q: the reason is %q", action, got)
		}
	}
}

// TestUsedIsNotIdle: a call into the guest that lasts keeps a sandbox from being idle; looking at it does not.
func TestUsedIsNotIdle(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkLiving(t, h, 0, Life{Idle: minIdle, OnIdle: ActionPause})
	ctx, done := context.WithCancel(t.Context())
	if _, err := h.Guest(ctx, id); err != nil {
		t.Fatal(err)
	}
	<-time.After(minIdle + minIdle/2)
	if v, err := h.Sandbox(id); err != nil || v.State != lineage.Running {
		t.Errorf("in use it became %s, %v", v.State, err)
	}
	done()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // while somebody looks at it
		tick := time.NewTicker(minIdle / 10)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_, _ = h.Look(t.Context(), id)
			case <-stop:
				return
			}
		}
	})
	becomes(t, h, id, events.SandboxPaused)
	close(stop)
	wg.Wait()
}

// TestAutoResume: many that use a sandbox at once which is paused or suspended find it running.
func TestAutoResume(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkLiving(t, h, 0, Life{AutoResume: true})
	for name, stop := range map[string]func(context.Context, string) (View, error){"pause": h.Pause, "suspend": h.Suspend} {
		if _, err := stop(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if _, err := h.Look(t.Context(), id); !errors.Is(err, lineage.ErrState) {
			t.Errorf("looking at it after %s: %v", name, err)
		}
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if _, err := h.Guest(t.Context(), id); err != nil {
					t.Errorf("after %s: %v", name, err)
				}
			})
		}
		wg.Wait()
	}
}

// TestUsedWhileItIsStopped: whoever uses a sandbox just when its idle time is over finds it running, each time.
func TestUsedWhileItIsStopped(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkLiving(t, h, 0, Life{AutoResume: true})
	s, err := h.find(id)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			h.act(s, ActionSuspend, "test", func() bool { return s.using == 0 && s.state == lineage.Running }, func() {})
		})
		ctx, done := context.WithCancel(t.Context())
		if _, err := h.Guest(ctx, id); err != nil {
			t.Fatal(err)
		}
		if !s.is(lineage.Running) {
			t.Error("in use it does not run")
		}
		done()
	}
	wg.Wait()
}

func TestTimeToLiveActions(t *testing.T) {
	const ttl = 300 * time.Millisecond
	h := fakeHost(t, newFakeEngine(), nil)
	id := forkLiving(t, h, ttl, Life{})
	if got := becomes(t, h, id, events.SandboxEnded); got != "its time to live is over" {
		t.Errorf("the reason is %q", got)
	}
	id = forkLiving(t, h, ttl, Life{OnEnd: ActionSuspend})
	becomes(t, h, id, events.SandboxSuspended)
	if v, err := h.Sandbox(id); err != nil || !v.Expires.IsZero() {
		t.Errorf("suspended for its time it expires at %s, %v", v.Expires, err)
	}
	// It begins anew when it runs again.
	if v, err := h.Wake(t.Context(), id); err != nil || time.Until(v.Expires) > ttl {
		t.Errorf("woken it expires at %s, %v", v.Expires, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(20*time.Second))
	defer cancel()
	told := h.Events().Kept(keptEvents)
	for n := 0; n < 2; {
		e, err := told.Next(ctx)
		if err != nil {
			t.Fatalf("it was not suspended again: %v", err)
		}
		if e.Sandbox == id && e.Type == events.SandboxSuspended {
			n++
		}
	}
}

func TestLifeChecks(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	for says, life := range map[string]Life{
		"ttl_action is": {OnEnd: "eat"}, "idle_action is": {Idle: time.Second, OnIdle: "eat"}, "idle time is": {Idle: time.Millisecond},
		"no idle time": {OnIdle: ActionKill},
	} {
		if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1, Life: life}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v", life, err)
		}
	}
}

func TestLimitChecks(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	for says, l := range map[string]Limits{
		"memory limit": {MemoryBytes: 1}, "cpu limit": {CPUs: -1}, "processes": {PIDs: 1}, "io limit of 1 bytes": {IOBytes: 1},
		"io limit of 1 requests": {IORequests: 1},
	} {
		if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1, Limits: l}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v", l, err)
		}
	}
	// Nothing can be held here: what was asked for is refused, what only the existing clients wish for is not held and said.
	_, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1, Limits: Limits{CPUs: 0.5}})
	if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "cpu: it was switched off") {
		t.Errorf("without control groups: %v", err)
	}
	got, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1, MemoryWish: 256 << 20})
	if err != nil || len(got[0].Sandbox.Warnings) != 1 || !strings.Contains(got[0].Sandbox.Warnings[0], "not held: it was switched off") {
		t.Errorf("a wish: %v %+v", err, got)
	}
}

func TestOver(t *testing.T) {
	usual := Limits{MemoryBytes: 1, CPUs: 2, PIDs: 3, IOBytes: 4, IORequests: 5}
	if got := over(Limits{}, usual); got != usual {
		t.Errorf("nothing asked: %+v", got)
	}
	asked := Limits{MemoryBytes: 9, CPUs: 9, PIDs: 9, IOBytes: 9, IORequests: 9}
	if got := over(asked, usual); got != asked {
		t.Errorf("all asked: %+v", got)
	}
}

func TestDiskAdmission(t *testing.T) {
	free := int64(100 << 20)
	h := fakeHost(t, newFakeEngine(), func(c *Config) {
		c.Disk = func(string) (int64, int64, error) { return free, 1 << 30, nil }
		c.MaxForks = 3
	})
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 4}); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "at most 3") {
		t.Errorf("more than one call may: %v", err)
	}
	if got, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1}); err != nil || got[0].Err != nil {
		t.Errorf("with space: %v", err)
	}
	free = 20 << 20
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1}); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "store's disk") {
		t.Errorf("on a full disk: %v", err)
	}
}

// TestSuspendedIsNotCounted: sandboxes on disk take no place of those that run.
func TestSuspendedIsNotCounted(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), func(c *Config) { c.MaxSandboxes = 1 })
	id := forkOneOf(t, h, fakeTag)
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1}); !errors.Is(err, ErrExhausted) {
		t.Errorf("beyond the count: %v", err)
	}
	if _, err := h.Suspend(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	other := forkOneOf(t, h, fakeTag)
	if _, err := h.Wake(t.Context(), id); !errors.Is(err, ErrExhausted) {
		t.Errorf("waking beyond the count: %v", err)
	}
	if err := h.Kill(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Wake(t.Context(), id); err != nil {
		t.Errorf("waking within it: %v", err)
	}
}
