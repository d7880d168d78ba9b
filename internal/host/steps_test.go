package host

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/image/dockerfile"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// fakeSteps write their name to the end of a machine's memory, and into ran.
func fakeSteps(ran *[]string, names ...string) []buildStep {
	var steps []buildStep
	at := "root"
	for _, name := range names {
		kept := !strings.HasPrefix(name, "-")
		at = stepKey(at, name)
		steps = append(steps, buildStep{key: at, title: name, kept: kept, do: func(_ context.Context, m *builder) error {
			*ran = append(*ran, name)
			if strings.HasPrefix(name, "fail") {
				return fmt.Errorf("%w: exit status 1", ErrStep)
			}
			fake := m.s.machine.(*fakeMachine) //nolint:forcetypeassert // it is
			fake.set(fake.get() + name + ";")
			return nil
		}})
	}
	return steps
}

func fakeBuild(t *testing.T, h *Host) *build {
	t.Helper()
	features, err := h.Features(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return &build{h: h, features: features, progress: func(Event) {}}
}

// chained runs steps on the fake's snapshot; what ran is what was not there.
func chained(t *testing.T, b *build, names ...string) (store.Snapshot, []string, error) {
	t.Helper()
	root, err := b.h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	var ran []string
	m, forget, err := b.chain(t.Context(), root, fakeSteps(&ran, names...))
	if err == nil {
		forget()
	}
	return m, ran, err
}

func steps(h *Host) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []string
	for tag := range h.snapshots {
		if lineage.IsStep(tag) {
			list = append(list, tag)
		}
	}
	return list
}

func TestStepsAreKept(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	b := fakeBuild(t, h)
	m, ran, err := chained(t, b, "a", "-dir", "b", "c")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"a", "-dir", "b", "c"}, ran); d != "" {
		t.Error(d)
	}
	wantMemory(t, h, m.Tag, "a;-dir;b;c;")
	if got := h.viewSnapshot(m).Ancestors; len(got) != 3 || got[0] != fakeTag {
		t.Errorf("it stands on %v", got)
	}

	tests := []struct {
		name       string
		steps, ran []string
		memory     string
	}{
		{"the same", []string{"a", "-dir", "b", "c"}, nil, "a;-dir;b;c;"},
		{"another last", []string{"a", "-dir", "b", "d"}, []string{"d"}, "a;-dir;b;d;"},
		{"one more", []string{"a", "-dir", "b", "c", "e"}, []string{"e"}, "a;-dir;b;c;e;"},
		{"what is not kept is done again", []string{"a", "-dir", "x"}, []string{"-dir", "x"}, "a;-dir;x;"},
		{"another first", []string{"z", "b", "c"}, []string{"z", "b", "c"}, "z;b;c;"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m, ran, err := chained(t, b, tt.steps...)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.ran, ran); d != "" {
				t.Error(d)
			}
			wantMemory(t, h, m.Tag, tt.memory)
		})
	}
	t.Run("without the cache", func(t *testing.T) {
		again := *b
		again.spec.NoCache = true
		_, ran, err := chained(t, &again, "a", "-dir", "b", "c")
		if err != nil || len(ran) != 4 {
			t.Errorf("%v ran (%v)", ran, err)
		}
		fresh, ran, err := chained(t, b, "a", "-dir", "b", "c")
		if err != nil || len(ran) != 0 || fresh.Tag == m.Tag {
			t.Errorf("%v ran (%v), and the older result is used: %v", ran, err, fresh.Tag == m.Tag)
		}
	})
	if n := e.living(); n != 0 {
		t.Errorf("%d machines are left", n)
	}
}

// TestFailedStep: what was done before stays, and nothing of the machine.
func TestFailedStep(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	b := fakeBuild(t, h)
	if _, ran, err := chained(t, b, "a", "b", "fail", "c"); !errors.Is(err, ErrStep) || len(ran) != 3 {
		t.Errorf("%v ran: %v", ran, err)
	}
	if n := e.living(); n != 0 {
		t.Errorf("%d machines are left", n)
	}
	if _, ran, err := chained(t, b, "a", "b", "c"); err != nil || !slices.Equal(ran, []string{"c"}) {
		t.Errorf("%v ran (%v)", ran, err)
	}
	e.capture = func(step string) error {
		if step == "finish" {
			return errors.New("no more")
		}
		return nil
	}
	if _, _, err := chained(t, b, "a", "b", "c", "d"); err == nil || !strings.Contains(err.Error(), "no more") {
		t.Errorf("a step that could not be stored: %v", err)
	}
	for _, v := range h.Snapshots() {
		if v.Status != lineage.Ready {
			t.Errorf("%s is %s", v.Tag, v.Status)
		}
	}
}

func TestCancelledBuild(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	b := fakeBuild(t, h)
	root, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var ran []string
	list := fakeSteps(&ran, "a", "b")
	list[1].do = func(ctx context.Context, _ *builder) error {
		cancel()
		<-ctx.Done()
		return context.Cause(ctx)
	}
	if _, _, err := b.chain(ctx, root, list); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if n := e.living(); n != 0 {
		t.Errorf("%d machines are left", n)
	}
}

// TestStepsAreTrimmed: the least recently used go, from the leaves, and none that a user's snapshot stands on.
func TestStepsAreTrimmed(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	b := fakeBuild(t, h)
	build := func(names ...string) store.Snapshot {
		m, _, err := chained(t, b, names...)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	old, kept := build("a", "b"), build("a", "c")
	b.spec.Tag, b.recipe = "mine", nil
	m, err := h.store.State(kept)
	if err != nil {
		t.Fatal(err)
	}
	mine := kept
	mine.Tag, mine.Source = "mine", "x"
	if err := h.enterSnapshot(t.Context(), mine, m, false); err != nil {
		t.Fatal(err)
	}
	young := build("d", "e")
	h.mu.Lock()
	for i, tag := range []string{old.Tag, kept.Tag} {
		h.stepUse[tag] = time.Now().Add(time.Duration(i-10) * time.Hour)
	}
	h.mu.Unlock()
	before := len(steps(h))
	h.cfg.StepMaxBytes = 1 << 40
	h.trimSteps(t.Context())
	if n := len(steps(h)); n != before {
		t.Errorf("%d of %d steps are left, though they take little", n, before)
	}

	user := forkOneOf(t, h, young.Tag)
	h.cfg.StepMaxBytes = 1
	h.trimSteps(t.Context())
	left := steps(h)
	parent := func(m store.Snapshot) string { return m.Parent }
	for _, want := range []string{parent(kept), young.Tag, parent(young)} {
		if !slices.Contains(left, want) {
			t.Errorf("%s is gone; %v are left", want, left)
		}
	}
	if slices.Contains(left, old.Tag) {
		t.Error("the oldest is still there")
	}
	wantMemory(t, h, "mine", "a;c;")
	if err := h.Kill(t.Context(), user); err != nil {
		t.Fatal(err)
	}
	if err := removeSnapshot(t, h, "mine"); err != nil {
		t.Fatal(err)
	}
	h.trimSteps(t.Context())
	if left := steps(h); len(left) != 0 {
		t.Errorf("%v are left", left)
	}
}

// TestRemoveUnderSteps: the cache is no reason to keep what a user removes, and a user's snapshot on it is.
func TestRemoveUnderSteps(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	b := fakeBuild(t, h)
	m, _, err := chained(t, b, "a", "b")
	if err != nil {
		t.Fatal(err)
	}
	if got := h.Tags(); !slices.Equal(got, []string{fakeTag}) {
		t.Errorf("the tags are %v", got)
	}
	id := forkOneOf(t, h, m.Tag)
	mustBranch(t, h, id, "branch", BranchDiff)
	if err := h.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	err = removeSnapshot(t, h, fakeTag)
	if !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "snapshots branch stand on it") {
		t.Errorf("removing what a user's snapshot stands on: %v", err)
	}
	if err := removeSnapshot(t, h, "branch"); err != nil {
		t.Fatal(err)
	}
	if err := removeSnapshot(t, h, fakeTag); err != nil {
		t.Fatal(err)
	}
	if left := steps(h); len(left) != 0 {
		t.Errorf("%v are left", left)
	}
}

// TestReplaceUnderSteps: the cache is no reason to keep what a build replaces, and what a user has on it is, with what to do said.
func TestReplaceUnderSteps(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	b := fakeBuild(t, h)
	m, _, err := chained(t, b, "a", "b")
	if err != nil {
		t.Fatal(err)
	}
	old, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	state, err := h.store.State(old)
	if err != nil {
		t.Fatal(err)
	}
	replace := func() error {
		release, err := h.hold(fakeTag, buildWhat)
		if err != nil {
			t.Fatal(err)
		}
		defer release()
		next := old
		next.Source = "another"
		return h.enterSnapshot(t.Context(), next, state, true)
	}
	refused := func(words, try string) {
		t.Helper()
		err := replace()
		if !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), ".step-") {
			t.Errorf("%v, want %q", err, words)
		}
		if told, ok := errors.AsType[*HintError](err); !ok || !strings.Contains(told.Try, try) {
			t.Errorf("%v does not say to try %q", err, try)
		}
	}
	id := forkOneOf(t, h, m.Tag)
	mustBranch(t, h, id, "branch", BranchDiff)
	if err := h.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	refused("snapshots branch stand on it", "rmi --force "+fakeTag)
	if err := removeSnapshot(t, h, "branch"); err != nil {
		t.Fatal(err)
	}
	id = forkOneOf(t, h, fakeTag)
	refused("sandboxes of it are there: 1", "kill --tag "+fakeTag)
	if err := h.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := replace(); err != nil {
		t.Error(err)
	}
	if left := steps(h); len(left) != 0 {
		t.Errorf("%v are left", left)
	}
	if now, err := h.snapshot(fakeTag); err != nil || now.Source != "another" {
		t.Errorf("%s is of %s, %v", fakeTag, now.Source, err)
	}
	self := &build{h: h, spec: BuildSpec{Tag: fakeTag, Replace: true}}
	if err := self.standsOn(fakeTag); !errors.Is(err, ErrInvalid) {
		t.Errorf("it may stand on itself: %v", err)
	}
}

// TestStepsSurviveTheDaemon: they are found by a later one, with when they were used, and what was not finished is forgotten.
func TestStepsSurviveTheDaemon(t *testing.T) {
	e := newFakeEngine()
	h := fakeHost(t, e, nil)
	m, _, err := chained(t, fakeBuild(t, h), "a", "b")
	if err != nil {
		t.Fatal(err)
	}
	unfinished := m
	unfinished.Tag = newStepTag()
	if err := h.store.BeginSnapshot(unfinished); err != nil {
		t.Fatal(err)
	}
	if err := h.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := Open(t.Context(), h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close(t.Context()) }()
	if _, ran, err := chained(t, fakeBuild(t, again), "a", "b"); err != nil || len(ran) != 0 {
		t.Errorf("%v ran (%v)", ran, err)
	}
	for _, v := range again.Snapshots() {
		if v.Status != lineage.Ready {
			t.Errorf("%s is %s: %s", v.Tag, v.Status, v.Reason)
		}
	}
	again.mu.Lock()
	defer again.mu.Unlock()
	if used := again.stepUse[m.Tag]; time.Since(used) > time.Hour {
		t.Errorf("it was used at %s", used)
	}
}

func TestStepKey(t *testing.T) {
	base := stepKey("root", "run", []string{"sh", "-c", "x"}, map[string]string{"A": "1"})
	for name, other := range map[string]string{
		"before": stepKey("other", "run", []string{"sh", "-c", "x"}, map[string]string{"A": "1"}),
		"kind":   stepKey("root", "copy", []string{"sh", "-c", "x"}, map[string]string{"A": "1"}),
		"words":  stepKey("root", "run", []string{"sh", "-c x"}, map[string]string{"A": "1"}),
		"env":    stepKey("root", "run", []string{"sh", "-c", "x"}, map[string]string{"A": "2"}),
	} {
		if other == base {
			t.Errorf("%s does not count", name)
		}
	}
	if lineage.CheckTag(newStepTag()) == nil || !lineage.IsStep(newStepTag()) {
		t.Error("a step's tag could be a user's")
	}
}

// TestDockerfileKeys: what a step depends on changes its key, and nothing else does.
func TestDockerfileKeys(t *testing.T) {
	keys := func(text, file string, args map[string]string) []string {
		t.Helper()
		c := dockerfile.NewContext(discard{})
		if err := c.Add("f", &tar.Header{Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(file))}, strings.NewReader(file)); err != nil {
			t.Fatal(err)
		}
		parsed, err := dockerfile.Parse("Dockerfile", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		target, err := parsed.Target(dockerfile.Options{Args: args})
		if err != nil {
			t.Fatal(err)
		}
		ops, _, err := target.Eval(image.Config{Env: map[string]string{"PATH": "/bin"}})
		if err != nil {
			t.Fatal(err)
		}
		d := &dockerBuild{build: &build{}, spec: &DockerfileSpec{Name: "Dockerfile", Context: c}}
		var list []string
		at := "root"
		for i := range ops {
			s, err := d.step(t.Context(), at, &ops[i])
			if err != nil {
				t.Fatal(err)
			}
			at = s.key
			list = append(list, at)
		}
		return list
	}
	const text = "FROM a\nARG X\nENV A=1\nRUN one\nWORKDIR /w\nCOPY f /f\nUSER u\nRUN two\nCMD x\n"
	base := keys(text, "content", nil)
	tests := []struct {
		name, text, file string
		args             map[string]string
		same             int // so many steps of the four are as before
	}{
		{"nothing", text, "content", nil, 4},
		{"comments, labels, ports, command", strings.NewReplacer("RUN one", "# c\nLABEL l=1\nEXPOSE 1\nRUN one", "CMD x", "CMD y").Replace(text), "content", nil, 4},
		{"an argument that is not given", text, "content", map[string]string{"Y": "1"}, 4},
		{"a proxy", strings.Replace(text, "ARG X", "ARG X\nARG http_proxy", 1), "content", map[string]string{"http_proxy": "p"}, 4},
		{"an argument", text, "content", map[string]string{"X": "1"}, 0},
		{"environment", strings.Replace(text, "A=1", "A=2", 1), "content", nil, 0},
		{"environment of the last", strings.Replace(text, "RUN two", "ENV B=1\nRUN two", 1), "content", nil, 3},
		{"command", strings.Replace(text, "one", "1", 1), "content", nil, 0},
		{"directory", strings.Replace(text, "/w", "/v", 1), "content", nil, 1},
		{"file", text, "other", nil, 2},
		{"destination", strings.Replace(text, "f /f", "f /g", 1), "content", nil, 2},
		{"mode", strings.Replace(text, "f /f", "--chmod=700 f /f", 1), "content", nil, 2},
		{"owner", strings.Replace(text, "COPY", "COPY --chown=1", 1), "content", nil, 2},
		{"user", strings.Replace(text, "USER u", "USER v", 1), "content", nil, 3},
		{"shell", strings.Replace(text, "RUN two", "SHELL [\"/bin/bash\", \"-c\"]\nRUN two", 1), "content", nil, 3},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := keys(tt.text, tt.file, tt.args)
			same := 0
			for i := range got {
				if got[i] == base[i] {
					same++
				}
			}
			if len(got) != 4 || same != tt.same {
				t.Errorf("%d of %d steps are the same, want %d of 4", same, len(got), tt.same)
			}
		})
	}
}

// discard is a spool of which nothing is read.
type discard struct{}

func (discard) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (discard) ReadAt([]byte, int64) (int, error)      { return 0, io.EOF }
func (discard) Close() error                           { return nil }

// TestRemoveImageUnderSteps: an image on which nothing but the cache stands can be removed.
func TestRemoveImageUnderSteps(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	root, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	state, err := h.store.State(root)
	if err != nil {
		t.Fatal(err)
	}
	booted := root
	booted.Tag, booted.Source = newStepTag(), "booted"
	if err := h.enterSnapshot(t.Context(), booted, state, false); err != nil {
		t.Fatal(err)
	}
	var ran []string
	_, forget, err := fakeBuild(t, h).chain(t.Context(), booted, fakeSteps(&ran, "a", "b"))
	if err != nil {
		t.Fatal(err)
	}
	if err := h.RemoveImage(t.Context(), root.Image); !errors.Is(err, ErrBusy) || strings.Contains(err.Error(), ".step-") {
		t.Errorf("with a user's snapshot: %v", err)
	}
	if err := removeSnapshot(t, h, fakeTag); err != nil {
		t.Fatal(err)
	}
	if err := h.RemoveImage(t.Context(), root.Image); !errors.Is(err, ErrBusy) {
		t.Errorf("while a build uses a step: %v", err)
	}
	forget()
	if err := h.RemoveImage(t.Context(), root.Image); err != nil {
		t.Fatal(err)
	}
	if left := steps(h); len(left) != 0 || len(h.Images()) != 0 {
		t.Errorf("%v are left", left)
	}
}

func TestSizeOnTop(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	m, err := h.snapshot(fakeTag)
	if err != nil {
		t.Fatal(err)
	}
	for _, asked := range []image.Machine{{}, {CPUs: 1}, {MemoryBytes: fakeMemory}} {
		if err := h.sameMachine(m, asked); err != nil {
			t.Errorf("%+v: %v", asked, err)
		}
	}
	for _, asked := range []image.Machine{{CPUs: 2}, {MemoryBytes: 2 * fakeMemory}, {DiskBytes: 1 << 40}} {
		if err := h.sameMachine(m, asked); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: %v", asked, err)
		}
	}
}

func TestBaseImage(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	now := time.Now()
	h.mu.Lock()
	for i, id := range []string{"aaaa1", "bbbb2", "cccc3"} {
		h.images[id] = store.Image{ID: id, Name: "twice", CreatedAt: now.Add(time.Duration(i%2) * time.Hour)}
	}
	h.mu.Unlock()
	for ref, want := range map[string]string{"twice": "bbbb2", "aaaa": "aaaa1", "cccc3": "cccc3"} {
		if m, err := h.baseImage(ref); err != nil || m.ID != want {
			t.Errorf("%s is %q (%v), want %s", ref, m.ID, err, want)
		}
	}
	if _, err := h.baseImage("none"); !errors.Is(err, ErrNotFound) {
		t.Errorf("got %v", err)
	}
}
