package host

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// gone are the names of what goes, or has gone.
func (r GCResult) names() (names []string) {
	for _, i := range r.Items {
		names = append(names, i.Name)
	}
	slices.Sort(names)
	return names
}

func TestGC(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	ctx := t.Context()
	for i, tag := range []string{"oldest", "older", "young"} {
		addSnapshot(t, h, tag, h.snapshots[fakeTag].Protocol)
		h.mu.Lock()
		h.stepUse[tag] = time.Now().Add(-time.Duration(72-24*i) * time.Hour)
		h.mu.Unlock()
	}
	dry := GCSpec{OlderThan: 36 * time.Hour, DryRun: true}
	res, err := h.GC(ctx, dry)
	if err != nil || !slices.Equal(res.names(), []string{"older", "oldest"}) || res.Freed <= 0 {
		t.Fatalf("a dry run: %+v, %v", res, err)
	}
	if len(h.Tags()) != 4 {
		t.Fatalf("a dry run has removed something: %v", h.Tags())
	}
	// Pinned: neither collected nor removed, also by a later daemon.
	if _, err := h.Pin("oldest", true); err != nil {
		t.Fatal(err)
	}
	if res, err = h.GC(ctx, dry); err != nil || !slices.Equal(res.names(), []string{"older"}) || res.Kept["oldest"] != "it is pinned" {
		t.Errorf("with a pin: %+v, %v", res, err)
	}
	if _, err := h.RemoveSnapshot(ctx, "oldest", RemoveOptions{}); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "pinned") {
		t.Errorf("removed though it is pinned: %v", err)
	}
	// What has sandboxes stays, and what was forked lately.
	forked, err := h.Fork(ctx, ForkSpec{Tag: "older", N: 1})
	if err != nil || forked[0].Err != nil {
		t.Fatal(err, forked)
	}
	if res, err = h.GC(ctx, GCSpec{MaxBytes: 1, DryRun: true}); err != nil || slices.Contains(res.names(), "older") || res.Kept["older"] == "" {
		t.Errorf("with a sandbox: %+v, %v", res, err)
	}
	if err := h.Kill(ctx, forked[0].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	if res, err = h.GC(ctx, dry); err != nil || len(res.Items) != 0 {
		t.Errorf("after a fork: %+v, %v", res, err)
	}
	if _, err := h.Pin("oldest", false); err != nil {
		t.Fatal(err)
	}
	// All of them are of one recipe, the empty one.
	res, err = h.GC(ctx, GCSpec{KeepLast: 2, Images: true})
	if err != nil || len(h.Tags()) != 2 {
		t.Fatalf("all but two: %+v, %v; left are %v", res, err, h.Tags())
	}
	for _, i := range res.Items {
		if !i.Removed || i.Err != nil {
			t.Errorf("not removed: %+v", i)
		}
	}
	if n := len(h.Images()); n != 2 {
		t.Errorf("%d images are left", n)
	}
	left, err := h.layers.Usage(ctx, h.roots(nil, nil))
	if err != nil || left.Total != left.Kept || left.Total != res.Left {
		t.Errorf("the store takes %+v, %v; it was to be %d", left, err, res.Left)
	}
}

// What a pull has left is kept for a while.
func TestOldPulls(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	dir, err := h.pullDir(strings.Repeat("ab", 32))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "member"), []byte("something"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := h.trimPulls(); n != 0 {
		t.Errorf("%d bytes of a young one are gone", n)
	}
	then := time.Now().Add(-8 * 24 * time.Hour)
	if err := os.Chtimes(dir, then, then); err != nil {
		t.Fatal(err)
	}
	if n := h.trimPulls(); n == 0 {
		t.Error("an old one is kept")
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is there: %v", err)
	}
}

// Damage that is found on the way to a guest names what it breaks.
func TestDamageNamesWhatItBreaks(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	m, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Compact(t.Context(), fakeTag, "copy"); err != nil { // of the same chunks
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(h.cfg.Home.Layers(), "maps", m.Memory.String()), 10); err != nil {
		t.Fatal(err)
	}
	_, err = h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err == nil || !strings.Contains(err.Error(), "damaged by this: copy, "+fakeTag) {
		t.Errorf("forked of damaged memory: %v", err)
	}
}
