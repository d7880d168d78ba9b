package host

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/testenv"
)

// aged are snapshots of which each was used a day after the one before it, the last a day ago.
func aged(t *testing.T, h *Host, tags ...string) {
	t.Helper()
	for i, tag := range tags {
		addSnapshot(t, h, tag, h.snapshots[fakeTag].Protocol)
		h.mu.Lock()
		h.stepUse[tag] = time.Now().Add(-time.Duration(len(tags)-i) * 24 * time.Hour)
		h.mu.Unlock()
	}
}

// removals are the tags that events say were removed since the host began, with the reasons.
func removals(h *Host) (list []string) {
	s := h.Events().Kept(keptEvents)
	for e, ok := s.Now(); ok; e, ok = s.Now() {
		if e.Type == events.SnapshotRemoved {
			list = append(list, e.Snapshot+": "+e.Reason)
		}
	}
	return list
}

// kept is what the store needs.
func kept(t *testing.T, h *Host) int64 {
	t.Helper()
	u, err := h.layers.Usage(t.Context(), h.roots(nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	return u.Kept
}

// The daemon keeps its store's size by itself: after a snapshot was made the least recently used go, but for those that are
// pinned, in use, or were just made; and events tell.
func TestQuota(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	aged(t, h, "pinned", "forked", "old", "young")
	if _, err := h.Pin("pinned", true); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Pin(fakeTag, true); err != nil {
		t.Fatal(err)
	}
	s, err := h.Fork(t.Context(), ForkSpec{Tag: "forked", N: 1})
	if err != nil || s[0].Err != nil {
		t.Fatal(err, s)
	}
	h.cfg.Keep.MaxBytes = kept(t, h) + 1 // One more is too much.
	h.mu.Lock()
	h.stepUse["forked"] = time.Now().Add(-100 * 24 * time.Hour)
	h.mu.Unlock()
	if _, err := h.Branch(t.Context(), s[0].Sandbox.ID, BranchSpec{Tag: "made"}); err != nil {
		t.Fatal(err)
	}
	// It is applied when the branch is ready, and who waits for that has been told.
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(time.Minute))
	defer cancel()
	for seen := h.Events().Kept(keptEvents); ; {
		e, err := seen.Next(ctx)
		if err != nil {
			t.Fatalf("nothing was removed: %v", err)
		}
		if e.Type == events.SnapshotRemoved {
			break
		}
	}
	h.tidying.Lock() // until it is through
	defer h.tidying.Unlock()
	tags := h.Tags()
	if slices.Contains(tags, "old") || !slices.Contains(tags, "made") || !slices.Contains(tags, "pinned") || !slices.Contains(tags, "forked") {
		t.Errorf("left are %v", tags)
	}
	if got := removals(h); len(got) == 0 || !strings.HasPrefix(got[0], "old: least recently used") {
		t.Errorf("events tell of %v", got)
	}
	if n := kept(t, h); n > h.cfg.Keep.MaxBytes {
		t.Errorf("the store takes %d bytes, the most is %d", n, h.cfg.Keep.MaxBytes)
	}
}

// When nothing can go, new snapshots are refused with what is in the way, and what is there stays.
func TestQuotaRefuses(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	if _, err := h.Pin(fakeTag, true); err != nil {
		t.Fatal(err)
	}
	s, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil || s[0].Err != nil {
		t.Fatal(err, s)
	}
	h.cfg.Keep.MaxBytes, h.cfg.Agent = 1, []byte("agent")
	_, branch := h.Branch(t.Context(), s[0].Sandbox.ID, BranchSpec{Tag: "made"})
	_, compact := h.Compact(t.Context(), fakeTag, "made")
	_, build := h.Build(t.Context(), BuildSpec{Tag: "made", Recipe: []byte("name: x\nbase: debian:bookworm\n")}, func(Event) {})
	for what, err := range map[string]error{"branch": branch, "compact": compact, "build": build} {
		if !errors.Is(err, ErrExhausted) || !strings.Contains(fmt.Sprint(err), fakeTag+" (it is pinned)") {
			t.Errorf("%s: %v", what, err)
		}
		if e, ok := errors.AsType[*HintError](err); !ok || !strings.Contains(e.Try, "FORKD_STORE_MAX_BYTES") {
			t.Errorf("%s: no advice", what)
		}
	}
	if got := h.Tags(); !slices.Equal(got, []string{fakeTag}) {
		t.Errorf("there are %v", got)
	}
	if v, err := h.Sandbox(s[0].Sandbox.ID); err != nil || v.State != lineage.Running {
		t.Errorf("the sandbox: %+v, %v", v, err)
	}
	// Once something may go it does, and there is room.
	aged(t, h, "old")
	h.cfg.Keep.MaxBytes = kept(t, h)
	if _, err := h.Compact(t.Context(), fakeTag, "made"); err != nil {
		t.Error(err)
	}
	if got := h.Tags(); !slices.Equal(got, []string{fakeTag, "made"}) {
		t.Errorf("there are %v", got)
	}
}

// Age and number are kept as well; the newest of a recipe stay whatever the store takes.
func TestPolicyOfAgeAndNumber(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	aged(t, h, "a", "b", "c", "d")
	h.cfg.Keep = Keeping{OlderThan: 60 * time.Hour}
	h.tidy(t.Context(), "d")
	if got := h.Tags(); !slices.Equal(got, []string{"c", "d", fakeTag}) {
		t.Errorf("of an age there are %v", got)
	}
	h.cfg.Keep = Keeping{KeepLast: 2, MaxBytes: 1}
	h.tidy(t.Context(), "made") // the newest two of the recipe, which all have, are c and d
	if got := h.Tags(); !slices.Equal(got, []string{"c", "d"}) {
		t.Errorf("of a number there are %v", got)
	}
	if left, err := filepath.Glob(filepath.Join(h.cfg.Home.Layers(), "maps", "*")); err != nil || len(left) == 0 {
		t.Errorf("maps: %v, %v", left, err)
	}
}
