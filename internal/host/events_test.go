package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/testenv"
)

// told is what a host has told, as "type sandbox snapshot reason", sandboxes by their number in ids.
func told(s *events.Subscription, ids ...string) []string {
	var got []string
	for e, ok := s.Now(); ok; e, ok = s.Now() {
		words := []string{string(e.Type)}
		if i := slices.Index(ids, e.Sandbox); i >= 0 {
			words = append(words, fmt.Sprint(i))
		}
		if e.Snapshot != "" {
			words = append(words, e.Snapshot)
		}
		if e.Reason != "" {
			words = append(words, e.Reason)
		}
		got = append(got, strings.Join(words, " "))
	}
	return got
}

// TestEvents: all that becomes of a sandbox and a snapshot is told once, in the order in which it happened.
func TestEvents(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	from := h.Events().Kept(0)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1, Labels: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	id := results[0].Sandbox.ID
	for _, change := range []func() error{
		func() error { _, err := h.Pause(t.Context(), id); return err },
		func() error { _, err := h.Pause(t.Context(), id); return err }, // changes nothing
		func() error { _, err := h.Resume(t.Context(), id); return err },
		func() error { _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "b"}); return err },
		func() error { _, err := h.Suspend(t.Context(), id); return err },
		func() error { _, err := h.Wake(t.Context(), id); return err },
		func() error { return h.Kill(t.Context(), id) },
		func() error { _, err := h.RemoveSnapshot(t.Context(), "b", RemoveOptions{}); return err },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Kill(t.Context(), id); !errors.Is(err, ErrNotFound) {
		t.Errorf("killed twice: %v", err)
	}
	want := []string{
		"sandbox.forked 0 fake", "sandbox.paused 0 fake", "sandbox.resumed 0 fake", "snapshot.created 0 b", "snapshot.ready 0 b",
		"sandbox.suspended 0 fake", "sandbox.woken 0 fake", "sandbox.ended 0 fake killed", "snapshot.removed b",
	}
	if diff := cmp.Diff(want, told(from, id)); diff != "" {
		t.Error(diff)
	}
}

func TestEventsOfFailures(t *testing.T) {
	e := newFakeEngine()
	e.capture = func(step string) error {
		if step == "finish" {
			return errors.New("no memory")
		}
		return nil
	}
	h := fakeHost(t, e, nil)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 2, TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	ids := []string{results[0].Sandbox.ID, results[1].Sandbox.ID}
	from := h.Events().Kept(0)
	next := func() string {
		t.Helper()
		e, err := from.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join([]string{string(e.Type), e.Snapshot, e.Reason}, " ")
	}
	if _, err := h.Branch(t.Context(), ids[0], BranchSpec{Tag: "b"}); err == nil {
		t.Error("a branch without memory succeeded")
	}
	for _, want := range []string{"snapshot.created b ", "snapshot.failed b copy memory: no memory"} {
		if got := next(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	h.expire(ids[0], 0)
	if got := next(); !strings.Contains(got, "sandbox.ended fake its time to live is over") {
		t.Errorf("%q", got)
	}
	h.mu.Lock()
	s := h.sandboxes[ids[1]]
	h.mu.Unlock()
	_ = s.machine.(*fakeMachine).end(errors.New("signal 9"))
	if got := next(); !strings.Contains(got, "sandbox.failed fake signal 9") {
		t.Errorf("%q", got)
	}
}

// TestFigures counts what there is.
func TestFigures(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 3})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Pause(t.Context(), results[0].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Suspend(t.Context(), results[1].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	f := h.Figures()
	want := map[lineage.State]int{lineage.Running: 1, lineage.Paused: 1, lineage.Suspended: 1, lineage.Failed: 0}
	if diff := cmp.Diff(want, f.Sandboxes); diff != "" {
		t.Error(diff)
	}
	if f.Snapshots[lineage.Ready] != 1 || f.Images != 1 || f.Forking != 0 || f.Memory.OwnBytes == 0 || f.Hot == 0 || f.HotReserved < f.Hot ||
		f.DiskFree == 0 || f.Available == 0 || f.EventsTold == 0 {
		t.Errorf("figures: %+v", f)
	}
}

// TestUsageNeverGetsLess: not when the machine is another one, and not with another daemon.
func TestUsageNeverGetsLess(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil {
		t.Fatal(err)
	}
	id := results[0].Sandbox.ID
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); { // the fake's process is this one
	}
	look := func(h *Host) Usage {
		t.Helper()
		u, err := h.Usage(id)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	first := look(h)
	if first.Taken.CPU <= 0 || first.Memory.OwnBytes == 0 || first.Memory.ProportionalBytes == 0 {
		t.Errorf("usage: %+v", first)
	}
	if list := h.Usages(nil); len(list) != 1 || list[0].ID != id || list[0].Memory.OwnBytes == 0 {
		t.Errorf("usages: %+v", list)
	}
	if list := h.Usages(map[string]string{"a": "b"}); len(list) != 0 {
		t.Errorf("usages of others: %+v", list)
	}
	if _, err := h.Suspend(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	second := look(h)
	if second.Taken.CPU < first.Taken.CPU || second.Memory.OwnBytes != 0 {
		t.Errorf("suspended: %+v, before that %+v", second, first)
	}
	if err := h.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	cfg := h.cfg
	h.mu.Unlock()
	next, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close(t.Context())
	third := look(next)
	if third.Taken.CPU < first.Taken.CPU || third.Created.Unix() != first.Created.Unix() {
		t.Errorf("with another daemon: %+v, before that %+v", third, first)
	}
	if _, err := next.Wake(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if woken := look(next); woken.Taken.CPU < third.Taken.CPU+first.Taken.CPU { // the process that it had, once more
		t.Errorf("woken: %+v, before that %+v", woken, third)
	}
}

// TestTook: what is timed is told, once, with how it ended.
func TestTook(t *testing.T) {
	e := newFakeEngine()
	e.fail = func(n int) error {
		if n == 1 {
			return errors.New("no machine")
		}
		return nil
	}
	got := make(chan string, 64)
	h := fakeHost(t, e, func(c *Config) {
		c.Parallel = 1
		c.Took = func(what Timed, mode string, how Outcome, took time.Duration) {
			if took < 0 {
				t.Errorf("%s took %s", what, took)
			}
			got <- strings.Join([]string{string(what), mode, string(how)}, " ")
		}
	})
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 2})
	if err != nil {
		t.Fatal(err)
	}
	id := results[0].Sandbox.ID
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: "nothing", N: 1}); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if _, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1}); err != nil {
		t.Error(err)
	}
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "b", Mode: BranchLive}); err == nil {
		t.Error("live, where there is none")
	}
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "b", Mode: "colour"}); err == nil {
		t.Error("a mode that nobody knows")
	}
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "b"}); err != nil {
		t.Error(err)
	}
	if _, err := h.Pause(t.Context(), id); err != nil {
		t.Error(err)
	}
	want := []string{
		"fork_child  ok", "fork_child  error", "fork cold error", "fork cold refused", "fork_child  ok", "fork hot ok",
		"branch none refused", "branch none refused", "branch_frozen diff ok", "branch_pause diff ok", "branch diff ok", "pause  ok",
	}
	for i, w := range want {
		select {
		case g := <-got:
			if g != w {
				t.Errorf("%d: %q, want %q", i, g, w)
			}
		case <-time.After(testenv.Timeout(10 * time.Second)):
			t.Fatalf("%q is never told", w)
		}
	}
	if len(got) > 0 {
		t.Errorf("told as well: %s", <-got)
	}
}
