package netd

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/testenv"
)

const replacedEnv = "FORKD_TEST_REPLACED"

// TestReplaced: a daemon whose program another version has taken the place of starts its own, not the other.
func TestReplaced(t *testing.T) {
	if os.Getenv(replacedEnv) != "" {
		startReplaced(t)
		return
	}
	dir := t.TempDir()
	testenv.Enterable(t, dir)
	ours, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(dir, "netd.test")
	if err := os.WriteFile(copied, ours, 0o755); err != nil { //nolint:gosec // others are to run it
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), copied, "-test.run=^TestReplaced$")
	cmd.Env = append(os.Environ(), replacedEnv+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func startReplaced(t *testing.T) {
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\nexit 3\n"), 0o755); err != nil { //nolint:gosec // it stands for a program
		t.Fatal(err)
	}
	h := newHome(t)
	c := h.daemon()
	defer end(t, c)
	g, _ := attach(t, c, "sb1", allow(t, theWorld))
	if err := c.Open(t.Context(), "sb1"); err != nil {
		t.Fatal(err)
	}
	works(t, g)
}
