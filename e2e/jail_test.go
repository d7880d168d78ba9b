package e2e

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/testenv"
)

// layersOf are what inspect says keeps a sandbox's VM process from the rest of the host.
func (f *forkd) layersOf(id string) (layers []string, pid int) {
	f.t.Helper()
	var s api.Sandbox
	f.json(&s, "inspect", id)
	return s.Confinement, s.PID
}

// TestJail: sandboxes are in jails by default, each in one of its own; that is said, and outlives the daemon.
func TestJail(t *testing.T) {
	f := shared(t)
	want := []string{proc.LayerCalls, proc.LayerIPC, proc.LayerNetwork, proc.LayerNoNewPriv, proc.LayerProcesses}
	if os.Geteuid() == 0 {
		want = append(want, proc.LayerUser, proc.LayerMounts)
	} else {
		want = append(want, proc.LayerUserSpace)
	}
	if ok, _ := proc.ConfinementAvailable(); ok {
		want = append(want, proc.LayerLandlock)
	}
	slices.Sort(want)
	var info api.HostInfo
	f.json(&info, "doctor")
	for _, c := range info.Checks {
		if c.Name == "confinement" && c.Status != "pass" {
			thing := "jail"
			if os.Geteuid() != 0 { // another matter: in a chroot nobody but root makes namespaces
				thing = "namespaces"
			}
			testenv.Missing(t, thing, c.Detail)
		}
	}
	children := f.fork(2)
	owners := map[uint32]bool{}
	for _, c := range children {
		layers, pid := f.layersOf(c.ID)
		if !slices.Equal(layers, want) {
			t.Errorf("%s: layers %q, want %q", c.ID, layers, want)
		}
		owner, err := proc.Owner(pid)
		if err != nil {
			t.Fatal(err)
		}
		owners[owner] = true
		if os.Geteuid() != 0 {
			continue
		}
		if owner < 3_100_000_000 {
			t.Errorf("%s runs as %d, which may be somebody", c.ID, owner)
		}
		root, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/root/")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range root {
			if slices.Contains([]string{"home", "root", "var", "sys", "boot", "run"}, e.Name()) && !strings.HasPrefix(f.home, "/"+e.Name()) {
				t.Errorf("%s has /%s", c.ID, e.Name())
			}
		}
	}
	if os.Geteuid() == 0 && len(owners) != len(children) {
		t.Errorf("%d sandboxes share %d users", len(children), len(owners))
	}
	f.restart()
	id := children[0].ID
	if layers, _ := f.layersOf(id); !slices.Equal(layers, want) {
		t.Errorf("after its adoption: layers %q, want %q", layers, want)
	}
	// Of an adopted machine, in its jail, all that needs its files and its memory.
	f.eval(id, "jailed = 42")
	s := f.branch(id, "-t", "jailed")
	if got := f.eval(f.forkOf(s.Tag, 1)[0].ID, "jailed"); got != "42" {
		t.Errorf("a branch has %q", got)
	}
	f.run("suspend", id)
	f.run("wake", id)
	if got := f.eval(id, "jailed"); got != "42" {
		t.Errorf("after its sleep it has %q", got)
	}
	if layers, _ := f.layersOf(id); !slices.Equal(layers, want) {
		t.Errorf("after its sleep: layers %q, want %q", layers, want)
	}
}

// TestJailAndLive: what a jail costs is said, and a sandbox without one has neither the cost nor the layers, whichever
// daemon has it now.
func TestJailAndLive(t *testing.T) {
	testenv.Need(t, "root")
	if len(liveEnv()) == 0 {
		t.Skip("the administrator has allowed userfaultfd: nothing is missing in jails")
	}
	f := shared(t)
	jailed := f.one()
	if s := f.branch(jailed); s.Mode != diff || !strings.Contains(s.ModeReason, "vm.unprivileged_userfaultfd=1") {
		t.Errorf("auto in a jail: %s: %s", s.Mode, s.ModeReason)
	}
	if r := f.try("branch", jailed, "--mode", live); r.code != 1 || !strings.Contains(r.stderr, "vm.unprivileged_userfaultfd=1") {
		t.Errorf("live in a jail: %+v", r)
	}
	f.freely()
	if s := f.branch(jailed); s.Mode != diff {
		t.Errorf("auto in a jail of an earlier daemon: %s: %s", s.Mode, s.ModeReason)
	}
	free := f.one()
	if s := f.branch(free); s.Mode != live {
		t.Errorf("auto without a jail: %s: %s", s.Mode, s.ModeReason)
	}
	if layers, _ := f.layersOf(free); slices.Contains(layers, proc.LayerUser) || !slices.Contains(layers, proc.LayerCalls) {
		t.Errorf("layers without a jail: %q", layers)
	}
	f.run("kill", free, jailed)
}

// TestJailSettings: what cannot be meant is said before anything starts.
func TestJailSettings(t *testing.T) {
	for _, env := range []string{"FORKD_JAIL=maybe", "FORKD_JAIL_UIDS=0-10", "FORKD_JAIL_UIDS=1000", "FORKD_JAIL_UIDS=20-10"} {
		f := alone(t, env)
		if r := f.try("ls"); r.code == 0 || !strings.Contains(r.stderr, strings.Split(env, "=")[0]) {
			t.Errorf("%s: %+v", env, r)
		}
	}
}
