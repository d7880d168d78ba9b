package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/store"
)

// bootable is a fake host whose machines say in their memory which boot they come from.
func bootable(t *testing.T, change func(*Config)) (*Host, *fakeEngine, store.Image) {
	t.Helper()
	e := newFakeEngine()
	e.boot = func(n int) string { return fmt.Sprintf("boot %d", n) }
	h := fakeHost(t, e, change)
	return h, e, h.images["image-of-"+fakeTag]
}

// made builds a recipe on an image as tag.
func made(t *testing.T, h *Host, img store.Image, tag string, change func(*build)) (store.Snapshot, error) {
	t.Helper()
	b := fakeBuild(t, h)
	b.spec.Tag, b.spec.Recipe = tag, []byte("name: some")
	b.recipe = &image.Recipe{Name: "some", Machine: image.Machine{CPUs: 1, MemoryBytes: fakeMemory}}
	b.plan, b.kernel = &image.Plan{}, &image.Kernel{Digest: "kernel"}
	if change != nil {
		change(b)
	}
	return b.fromBooted(t.Context(), img)
}

// TestBootedOnce: builds on one image are of one boot, and what they make is as if each had booted itself. It goes like a step.
func TestBootedOnce(t *testing.T) {
	h, e, img := bootable(t, nil)
	network, err := image.ParseNetwork("network", "packages")
	if err != nil {
		t.Fatal(err)
	}
	for _, tag := range []string{"a", "b", "c"} {
		m, err := made(t, h, img, tag, func(b *build) {
			if tag == "a" { // the first, for which it boots
				b.spec.MayWiden, b.recipe.Network, b.recipe.Limits.PIDs = true, network, 7
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if tag != "a" { // whose limit nobody holds here
			wantMemory(t, h, m.Tag, "boot 1")
		}
		if m.Parent != "" || m.Branch != nil || m.Recipe != "some" || m.Kernel != " kernel" || m.Source == "" || m.Image != img.ID {
			t.Errorf("its record is %+v", m)
		}
		if chain, err := h.layers.Chain(t.Context(), m.Memory); err != nil || len(chain) != 1 {
			t.Errorf("its memory stands on others: %v, %v", chain, err)
		}
		if open := !reflect.DeepEqual(m.Egress, egress.Policy{}); open != (tag == "a") || (m.Limits.PIDs == 7) != (tag == "a") {
			t.Errorf("%s: its children may reach %+v, with limits of %+v", tag, m.Egress, m.Limits)
		}
	}
	root := steps(h)
	if e.booted != 1 || len(root) != 1 {
		t.Fatalf("%d machines booted, the steps are %v", e.booted, root)
	}
	if m := h.snapshots[root[0]]; !reflect.DeepEqual(m.Egress, egress.Policy{}) || m.Limits != (Limits{}) {
		t.Errorf("what is one recipe's is everybody's: %+v, %+v", m.Egress, m.Limits)
	}

	// Each of these has one of its own.
	for what, change := range map[string]func(*build){
		"no cache":       func(b *build) { b.spec.NoCache = true },
		"another size":   func(b *build) { b.recipe.Machine.MemoryBytes *= 2 },
		"another kernel": func(b *build) { b.kernel = &image.Kernel{Digest: "another"} },
		"another agent":  func(b *build) { b.agent = "another" },
	} {
		before := e.booted
		if _, err := made(t, h, img, strings.ReplaceAll(what, " ", "-"), change); err != nil || e.booted != before+1 {
			t.Errorf("%s: %d machines booted (%v)", what, e.booted-before, err)
		}
	}

	// It is only a cache: what was made of it stays, and the next build boots another.
	if _, err := h.GC(t.Context(), GCSpec{OlderThan: time.Nanosecond, KeepLast: 100}); err != nil {
		t.Fatal(err)
	}
	if left := steps(h); len(left) > 0 {
		t.Errorf("steps are left: %v", left)
	}
	wantMemory(t, h, "b", "boot 1")
	h.hot.evict()
	before := e.booted
	if _, err := made(t, h, img, "d", nil); err != nil || e.booted != before+1 {
		t.Errorf("%d machines booted (%v)", e.booted-before, err)
	}
}

// TestImageGoesWithSteps: a booted machine is no reason for gc to keep an image, unless somebody uses it.
func TestImageGoesWithSteps(t *testing.T) {
	h, _, img := bootable(t, nil)
	if _, err := made(t, h, img, "a", nil); err != nil {
		t.Fatal(err)
	}
	root := steps(h)[0]
	goes := func(what string, dry bool, want ...string) {
		t.Helper()
		res, err := h.GC(t.Context(), GCSpec{Images: true, DryRun: dry})
		if slices.Sort(want); err != nil || !slices.Equal(res.names(), want) {
			t.Errorf("%s: %v goes, want %v (%v)", what, res.names(), want, err)
		}
		for _, i := range res.Items {
			if i.Removed == dry || i.Err != nil {
				t.Errorf("%s: %+v", what, i)
			}
		}
	}
	goes("with two snapshots", true)
	for _, tag := range []string{fakeTag, "a"} {
		if _, err := h.RemoveSnapshot(t.Context(), tag, RemoveOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	goes("without", true, root, img.ID)
	id := forkOneOf(t, h, root)
	goes("with a sandbox of the step", true)
	if err := h.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	goes("for good", false, root, img.ID)
	if len(steps(h)) > 0 || len(h.Images()) > 0 {
		t.Errorf("left are %v and %v", steps(h), h.Images())
	}
}

// TestBootedAtTheSameTime: builds that begin together wait for the one that boots, and for no longer than they are wanted.
func TestBootedAtTheSameTime(t *testing.T) {
	h, e, img := bootable(t, func(c *Config) { c.HotMaxBytes = 64 << 20 })
	errs := make(chan error)
	for i := range 6 {
		go func() {
			_, err := made(t, h, img, fmt.Sprintf("t%d", i), nil)
			errs <- err
		}()
	}
	for range 6 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if e.booted != 1 {
		t.Errorf("%d machines booted", e.booted)
	}
	done, err := h.turn(t.Context(), "key")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.turn(ctx, "key"); !errors.Is(err, context.Canceled) {
		t.Errorf("waited: %v", err)
	}
	done()
	if again, err := h.turn(t.Context(), "key"); err != nil {
		t.Error(err)
	} else {
		again()
	}
}

// TestBootedOfNoUse: a build boots a machine for itself when no copy is to be had, and fails without a trace when its own fails.
func TestBootedOfNoUse(t *testing.T) {
	var free int64 = 64 << 30
	h, e, img := bootable(t, func(c *Config) {
		c.StepMaxBytes = 1 << 40
		c.Available = func() (int64, error) { return free, nil }
		c.MemoryReserve = 1
	})
	if _, err := made(t, h, img, "first", nil); err != nil || len(steps(h)) != 1 {
		t.Fatal(err)
	}
	tests := []struct {
		name      string
		spoil     func()
		boots     int
		fails     bool
		rootAfter int
	}{
		{name: "no room", spoil: func() { free = 2 * fakeMemory }, boots: 1, rootAfter: 1},
		{name: "it cannot be captured", spoil: func() { e.capture = func(string) error { return errors.New("no") } }, fails: true, rootAfter: 1},
		{name: "it does not awaken", spoil: func() {
			e.awaken = func(n int) *wire.Error {
				if n < 0 {
					return nil
				}
				return &wire.Error{Code: wire.CodeInternal, Message: "no"}
			}
		}, boots: 1, rootAfter: 0},
		{name: "after that", boots: 1, rootAfter: 1},
		{name: "its memory is damaged", spoil: func() {
			damage(t, h, h.snapshots[steps(h)[0]])
		}, boots: 1, rootAfter: 0},
	}
	for i, tt := range tests {
		free, e.capture, e.awaken = 64<<30, func(string) error { return nil }, func(int) *wire.Error { return nil }
		h.hot.evict()
		if tt.spoil != nil {
			tt.spoil()
		}
		before, tag := e.booted, fmt.Sprintf("s%d", i)
		_, err := made(t, h, img, tag, nil)
		if (err != nil) != tt.fails || e.booted-before != tt.boots || len(steps(h)) != tt.rootAfter {
			t.Errorf("%s: %v; %d booted, steps are %v", tt.name, err, e.booted-before, steps(h))
		}
		if slices.Contains(h.Tags(), tag) == tt.fails {
			t.Errorf("%s: snapshots are %v", tt.name, h.Tags())
		}
		if n := e.living(); n != 0 {
			t.Errorf("%s: %d machines are left", tt.name, n)
		}
		checkEmpty(t, h.cfg.Home.Machines())
	}
}

// damage makes a snapshot's memory unreadable.
func damage(t *testing.T, h *Host, m store.Snapshot) {
	t.Helper()
	if err := os.Truncate(filepath.Join(h.cfg.Home.Layers(), "maps", m.Memory.String()), 10); err != nil {
		t.Fatal(err)
	}
}

// TestAlike: a copy of a booted machine shares with that, unless something was made of it since that has all it has.
func TestAlike(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	now := time.Now()
	enter := func(tag, recipe string, at time.Time) store.Snapshot {
		m := h.snapshots[fakeTag]
		m.Tag, m.Recipe, m.CreatedAt, m.Memory = tag, recipe, at, layer.Digest([]byte(fmt.Sprintf("%-32s", tag)))
		h.mu.Lock()
		defer h.mu.Unlock()
		h.snapshots[tag] = m
		return m
	}
	fake := h.snapshots[fakeTag]
	root := enter(".step-00000000000000000000000000000000", "some", now.Add(time.Hour))
	old := enter("old", "some", now.Add(time.Minute))
	like := func(root store.Snapshot) []layer.Digest { return h.alike("new", "some", fake.Image, fake.Engine, root) }
	if got := like(store.Snapshot{}); !slices.Equal(got, []layer.Digest{old.Memory}) {
		t.Errorf("booted by itself: like %v", got)
	}
	if got := like(root); !slices.Equal(got, []layer.Digest{root.Memory, old.Memory}) {
		t.Errorf("the first of a booted machine: like %v", got)
	}
	next := enter("next", "some", now.Add(2*time.Hour))
	if got := like(root); !slices.Equal(got, []layer.Digest{next.Memory}) {
		t.Errorf("the second: like %v", got)
	}
	h.mu.Lock()
	for _, tag := range []string{root.Tag, "old", "next"} { // their layers are not there
		delete(h.snapshots, tag)
	}
	h.mu.Unlock()
}
