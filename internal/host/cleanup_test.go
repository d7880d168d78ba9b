package host

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/lineage"
)

// sleeper runs a program of that name in a directory until it is ended.
func sleeper(t *testing.T, name, dir string) (pid int) {
	t.Helper()
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skip("no sleep in the path")
	}
	if sleep, err = filepath.EvalSymlinks(sleep); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, text, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, "600")
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait() }()
	return cmd.Process.Pid
}

func old(t *testing.T, path string) {
	t.Helper()
	then := time.Now().Add(-48 * time.Hour)
	if err := os.Chtimes(path, then, then); err != nil {
		t.Fatal(err)
	}
}

func TestCleanup(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	ctx := t.Context()
	healthy := h.one(t, ForkSpec{})
	old(t, h.sandboxOf(t, healthy.ID).dir)
	if found, err := h.Leftovers(ctx); err != nil || len(found) != 0 {
		t.Fatalf("of a healthy host: %+v, %v", found, err)
	}

	stray := filepath.Join(h.cfg.Home.Machines(), strings.Repeat("a", 24))
	young := filepath.Join(h.cfg.Home.Machines(), strings.Repeat("b", 24))
	for _, dir := range []string{stray, young} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = os.RemoveAll(young) })
	worker := sleeper(t, "worker", stray)
	old(t, stray)
	gone := filepath.Join(t.TempDir(), "home", "machines", strings.Repeat("c", 24))
	if err := os.MkdirAll(gone, 0o700); err != nil {
		t.Fatal(err)
	}
	stranded := sleeper(t, "qemu-system-none", gone)
	other := sleeper(t, "not-ours", gone)
	if err := os.RemoveAll(filepath.Dir(filepath.Dir(gone))); err != nil {
		t.Fatal(err)
	}
	temp := filepath.Join(h.cfg.Home.Temp(), "upload-1")
	if err := os.WriteFile(temp, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	old(t, temp)
	if err := os.Mkdir(h.cfg.Home.Snapshot("broken"), 0o700); err != nil {
		t.Fatal(err)
	}
	failed := h.one(t, ForkSpec{})
	_ = machineOf(t, h, failed.ID).end(errors.New("its fan broke"))
	w, err := h.CreateWorkspace(ctx, "w", ForkSpec{Tag: fakeTag})
	if err == nil {
		err = h.Kill(ctx, w.Sandbox)
	}
	if err != nil {
		t.Fatal(err)
	}
	awaitFailed(t, h, failed.ID)

	want := []string{
		"process " + strconv.Itoa(worker), "machine directory " + filepath.Base(stray), "process " + strconv.Itoa(stranded),
		"temporary file upload-1", "failed sandbox " + failed.ID, "stale workspace w", "damaged record " + h.cfg.Home.Snapshots(),
	}
	for range 2 { // To look changes nothing.
		if got := leftoverNames(h.Leftovers(ctx)); !slices.Equal(got, want) {
			t.Fatalf("found\n%q, want\n%q", got, want)
		}
	}
	for _, l := range must(h.Cleanup(ctx)) {
		if l.Err != nil || l.Removed == l.Kept {
			t.Errorf("%s %s: removed %v, kept %v: %v", l.Kind, l.Name, l.Removed, l.Kept, l.Err)
		}
	}
	if got := leftoverNames(h.Leftovers(ctx)); !slices.Equal(got, want[6:]) {
		t.Errorf("left\n%q, want\n%q", got, want[6:])
	}
	for _, path := range []string{stray, temp} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	if _, err := os.Stat(filepath.Join("/proc", strconv.Itoa(other))); err != nil {
		t.Error("a process that is not ours was ended")
	}
	if v, err := h.Sandbox(healthy.ID); err != nil || v.State != lineage.Running {
		t.Errorf("the healthy one: %+v, %v", v, err)
	}
}

func awaitFailed(t *testing.T, h *Host, id string) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for !h.sandboxOf(t, id).is(lineage.Failed) {
		select {
		case <-deadline:
			t.Fatal("its death is not seen")
		case <-time.After(time.Millisecond):
		}
	}
}

func must(all []Leftover, err error) []Leftover {
	if err != nil {
		panic(err)
	}
	return all
}

func leftoverNames(all []Leftover, err error) []string {
	var names []string
	for _, l := range must(all, err) {
		names = append(names, l.Kind+" "+l.Name)
	}
	return names
}
