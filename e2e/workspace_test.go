package e2e

import (
	"strings"
	"syscall"
	"testing"

	"forkd.dev/forkd/api"
)

// TestWorkspace: a name for a machine that goes on where it was, over a suspension and its daemon's death; and when the machine
// is gone the name says so, until it is cleaned up.
func TestWorkspace(t *testing.T) {
	f := copied(t)
	var w api.Workspace
	f.json(&w, "workspace", "create", "my-work", "--snapshot", parentTag, "--label", "a=b", "--env", "TOKEN=x")
	if w.Status != "running" || w.LiveSandboxID == nil || *w.LiveSandboxID != w.SandboxID || w.ID != "ws-"+w.SandboxID {
		t.Fatalf("created: %+v", w)
	}
	f.run("exec", "my-work", "--", "sh", "-c", "echo $TOKEN > /root/mark")
	f.eval("my-work", "state = 41")
	f.json(&w, "workspace", "suspend", "my-work")
	if w.Status != "suspended" || w.LiveSandboxID != nil || len(machinesOf(f.home)) != 0 {
		t.Errorf("suspended: %+v, machines %v", w, machinesOf(f.home))
	}
	if r := f.try("exec", "my-work", "--", "true"); r.code != 125 || !strings.Contains(r.stderr, "forkd wake") {
		t.Errorf("exec in a suspended one: %+v", r)
	}
	f.killDaemon()
	f.json(&w, "workspace", "resume", "my-work")
	f.killDaemon()
	if got := f.eval("my-work", "state + 1"); got != "42" {
		t.Errorf("its state is %q", got)
	}
	if got := strings.TrimSpace(f.run("exec", "my-work", "--", "cat", "/root/mark")); got != "x" {
		t.Errorf("its file has %q", got)
	}
	if r := f.try("workspace", "create", "my-work", "--snapshot", parentTag); r.code != 1 || !strings.Contains(r.stderr, "already exists") {
		t.Errorf("the name again: %+v", r)
	}
	if err := syscall.Kill(f.sandbox("my-work").PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	f.awaitFailed("my-work")
	if out := f.run("workspace", "list"); !strings.Contains(out, "stale: ") {
		t.Errorf("with a dead machine:\n%s", out)
	}
	for range 2 { // To look changes nothing.
		if r := f.try("cleanup"); r.code != 0 || !strings.Contains(r.stdout, "failed sandbox") || !strings.Contains(r.stderr, "2 would be removed") {
			t.Errorf("cleanup: %+v", r)
		}
	}
	if r := f.try("cleanup", "--yes"); r.code != 0 || !strings.Contains(r.stderr, "removed 2") {
		t.Errorf("cleanup --yes: %+v", r)
	}
	if r := f.try("cleanup"); r.code != 0 || !strings.Contains(r.stderr, "nothing is left over") {
		t.Errorf("cleanup once more: %+v", r)
	}
	if out := f.run("workspace", "list", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("workspaces: %s", out)
	}
	f.clean()
}
