package host

import (
	"errors"
	"os"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

func wantWorkspace(t *testing.T, h *Host, name string, status WorkspaceStatus) WorkspaceView {
	t.Helper()
	v, err := h.Workspace(name)
	if err != nil || v.Status != status {
		t.Fatalf("workspace %s: %+v, %v; want it %s", name, v, err, status)
	}
	return v
}

func TestWorkspace(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	ctx := t.Context()
	v, err := h.CreateWorkspace(ctx, "my.work-1", ForkSpec{Tag: fakeTag, Labels: map[string]string{"a": "b"}})
	if err != nil || v.Status != WorkspaceRunning || v.Source != fakeTag {
		t.Fatalf("%+v, %v", v, err)
	}
	if s, err := h.Sandbox("my.work-1"); err != nil || s.ID != v.Sandbox || s.Labels["a"] != "b" || s.Workspace != "my.work-1" {
		t.Errorf("its sandbox by its name: %+v, %v", s, err)
	}
	machineOf(t, h, v.Sandbox).set("one")
	if _, err := h.CreateWorkspace(ctx, "my.work-1", ForkSpec{Tag: fakeTag}); !errors.Is(err, store.ErrExists) {
		t.Errorf("the name again: %v", err)
	}
	for range 2 {
		s, err := h.SuspendWorkspace(ctx, "my.work-1")
		if err != nil || s.Status != WorkspaceSuspended || s.Sandbox != v.Sandbox || s.LastActive.Before(v.LastActive) {
			t.Fatalf("suspend: %+v, %v", s, err)
		}
	}
	for range 2 {
		if s, err := h.ResumeWorkspace(ctx, "my.work-1"); err != nil || s.Status != WorkspaceRunning {
			t.Fatalf("resume: %+v, %v", s, err)
		}
	}
	if got := machineOf(t, h, v.Sandbox).get(); got != "one" {
		t.Errorf("resumed with %q", got)
	}
	if _, err := h.Pause(ctx, v.Sandbox); err != nil {
		t.Fatal(err)
	}
	wantWorkspace(t, h, "my.work-1", WorkspaceRunning)
	if s, err := h.ResumeWorkspace(ctx, "my.work-1"); err != nil || !h.sandboxOf(t, s.Sandbox).is(lineage.Running) {
		t.Errorf("resume a paused one: %+v, %v", s, err)
	}
	if err := h.RemoveWorkspace(ctx, "my.work-1"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Workspace("my.work-1"); !errors.Is(err, ErrNotFound) {
		t.Errorf("a removed one: %v", err)
	}
	if list := h.Workspaces(); len(list) != 0 {
		t.Errorf("left: %+v", list)
	}
	checkEmpty(t, h.cfg.Home.Workspaces())
	checkEmpty(t, h.cfg.Home.Machines())
}

func TestWorkspaceRefusals(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	for _, name := range []string{"", "..", "a/b", "-x", strings.Repeat("x", 65)} {
		if _, err := h.CreateWorkspace(t.Context(), name, ForkSpec{Tag: fakeTag}); !errors.Is(err, lineage.ErrName) {
			t.Errorf("name %q: %v", name, err)
		}
	}
	if _, err := h.CreateWorkspace(t.Context(), "x", ForkSpec{Tag: "nothing"}); !errors.Is(err, ErrNotFound) {
		t.Errorf("of a snapshot that is not there: %v", err)
	}
	if _, err := h.SuspendWorkspace(t.Context(), "x"); !errors.Is(err, ErrNotFound) {
		t.Errorf("suspend one that is not there: %v", err)
	}
	checkEmpty(t, h.cfg.Home.Workspaces())
}

// TestStaleWorkspace: one whose sandbox was ended says so, and gives its name back.
func TestStaleWorkspace(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	v, err := h.CreateWorkspace(t.Context(), "x", ForkSpec{Tag: fakeTag})
	if err != nil {
		t.Fatal(err)
	}
	_ = machineOf(t, h, v.Sandbox).end(errors.New("its fan broke"))
	awaitFailed(t, h, v.Sandbox)
	if v := wantWorkspace(t, h, "x", WorkspaceStale); !strings.Contains(v.Reason, "its fan broke") {
		t.Errorf("the reason is %q", v.Reason)
	}
	if err := h.Kill(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	wantWorkspace(t, h, "x", WorkspaceStale)
	if _, err := h.ResumeWorkspace(t.Context(), "x"); !errors.Is(err, lineage.ErrState) {
		t.Errorf("resume: %v", err)
	}
	if _, err := h.Sandbox("x"); !errors.Is(err, lineage.ErrState) {
		t.Errorf("its sandbox: %v", err)
	}
	if err := h.RemoveWorkspace(t.Context(), "x"); err != nil {
		t.Error(err)
	}
	if _, err := h.CreateWorkspace(t.Context(), "x", ForkSpec{Tag: fakeTag}); err != nil {
		t.Errorf("the name again: %v", err)
	}
}

// TestWorkspacesOutliveTheirDaemon: running, suspended, and one that was killed in the middle of being made.
func TestWorkspacesOutliveTheirDaemon(t *testing.T) {
	h, _ := adoptingHost(t)
	ctx := t.Context()
	make1 := func(name string) WorkspaceView {
		v, err := h.CreateWorkspace(ctx, name, ForkSpec{Tag: fakeTag})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	running, unsaid := make1("running"), make1("unsaid")
	h, log := leaveAndOpen(t, h, func() {
		// Killed after the fork and before the record named it, and before the fork.
		unsaid.Workspace.Sandbox = ""
		if err := h.store.ReplaceWorkspace(ctx, unsaid.Workspace); err != nil {
			t.Error(err)
		}
		never := store.Workspace{FormatVersion: store.FormatVersion, Name: "never", Source: fakeTag}
		if err := h.store.AddWorkspace(ctx, never); err != nil {
			t.Error(err)
		}
		if err := os.Mkdir(h.cfg.Home.Workspace("damaged"), 0o700); err != nil {
			t.Error(err)
		}
	})
	if !strings.Contains(log, "damaged") {
		t.Errorf("the damaged record is not in the log: %s", log)
	}
	if v := wantWorkspace(t, h, "running", WorkspaceRunning); v.Sandbox != running.Sandbox {
		t.Errorf("it was %s and is %s", running.Sandbox, v.Sandbox)
	}
	v := wantWorkspace(t, h, "unsaid", WorkspaceRunning)
	if s, err := h.Sandbox(v.Sandbox); err != nil || s.Workspace != "unsaid" {
		t.Errorf("the sandbox of the one that was not written down: %+v, %v", s, err)
	}
	if _, err := h.Workspace("never"); !errors.Is(err, ErrNotFound) {
		t.Errorf("the one that has no sandbox: %v", err)
	}
	for _, name := range []string{"running", "unsaid"} {
		if err := h.RemoveWorkspace(ctx, name); err != nil {
			t.Error(err)
		}
	}
}
