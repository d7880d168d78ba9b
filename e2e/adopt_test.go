package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// killDaemon ends the daemon in the hardest way.
func (f *forkd) killDaemon() {
	f.t.Helper()
	st := f.status()
	if !st.Running {
		f.t.Fatal("there is no daemon to kill")
	}
	if err := syscall.Kill(st.PID, syscall.SIGKILL); err != nil {
		f.t.Fatal(err)
	}
	await(f.t, 10*time.Second, "the daemon's end", func() bool { return !alive(st.PID) })
}

func (f *forkd) ids() []string {
	f.t.Helper()
	ids := strings.Fields(f.run("ls", "-q"))
	slices.Sort(ids)
	return ids
}

// TestKilledDaemon: the daemon dies, its sandboxes do not; the next daemon has them all, as they were.
func TestKilledDaemon(t *testing.T) {
	f := copied(t)
	children := f.fork(3, "--label", "test=adopt", "--ttl", "1h")
	var want []string
	for i, c := range children {
		want = append(want, c.ID)
		f.eval(c.ID, fmt.Sprintf("state = %d * 7", i))
		f.run("exec", c.ID, "--", "sh", "-c", fmt.Sprintf("echo %d > /root/mark; sync", i))
	}
	slices.Sort(want)
	before := f.sandbox(children[0].ID)
	machines := machinesOf(f.home)
	for round := range 2 { // What was adopted once can be adopted again.
		f.killDaemon()
		if got := machinesOf(f.home); !slices.Equal(got, machines) {
			t.Fatalf("machines after the daemon's death: %v, want %v", got, machines)
		}
		f.run("daemon", "start")
		up := time.Now()
		for i, c := range children {
			if got := f.eval(c.ID, "state"); got != fmt.Sprint(i*7) {
				t.Errorf("round %d: the state of child %d is %q", round, i, got)
			}
		}
		answered := time.Since(up)
		t.Logf("round %d: all have answered %s after the daemon was up", round, answered)
		if answered > testenv.Timeout(time.Second)*time.Duration(len(children)) {
			t.Errorf("round %d: the first answers took %s", round, answered)
		}
		if got := f.ids(); !slices.Equal(got, want) {
			t.Errorf("round %d: sandboxes %q, want %q", round, got, want)
		}
	}
	checkAdopted(t, f, children, before)
}

func checkAdopted(t *testing.T, f *forkd, children []api.Sandbox, before api.Sandbox) {
	t.Helper()
	after := f.sandbox(before.ID)
	if after.PID != before.PID || after.CreatedAtUnix != before.CreatedAtUnix || after.Labels["test"] != "adopt" || after.State != "running" {
		t.Errorf("it was\n%+v\nand is\n%+v", before, after)
	}
	for i, c := range children {
		if got := strings.TrimSpace(f.run("exec", c.ID, "--", "cat", "/root/mark")); got != fmt.Sprint(i) {
			t.Errorf("the file of child %d holds %q", i, got)
		}
		if off := clockError(t, f, c.ID); off > 50*time.Millisecond {
			t.Errorf("the clock of child %d is off by %s", i, off)
		}
	}
	// Its image is hot: the memory was found in the machines, and rmi knows who stands on it.
	if r := f.try("rmi", parentTag); r.code != 1 || !strings.Contains(r.stderr, "running") {
		t.Errorf("rmi under adopted sandboxes: %+v", r)
	}
	var snapshots []api.Snapshot
	f.json(&snapshots, "snapshots")
	if len(snapshots) != 1 || !snapshots[0].Hot {
		t.Errorf("the image of adopted sandboxes is not hot: %+v", snapshots)
	}
	sibling := f.one()
	if got := f.eval(sibling, "'state' in globals()"); got != "False" {
		t.Errorf("a new sibling has the state: %q", got)
	}
	f.run("kill", sibling)
	if out := f.run("logs", children[0].ID); strings.Contains(out, "anic") {
		t.Errorf("logs: %s", out)
	}
	for _, c := range children {
		f.run("kill", c.ID)
	}
	if pids := machinesOf(f.home); len(pids) != 0 {
		t.Errorf("machines %v outlive their kill", pids)
	}
}

// TestStopKeepsOrKills: the two ways to stop.
func TestStopKeepsOrKills(t *testing.T) {
	f := copied(t)
	id := f.one()
	f.eval(id, "state = 'kept'")
	pid := f.status().PID
	if r := f.try("daemon", "stop"); r.code != 0 || !strings.Contains(r.stderr, "1 sandboxes run on") {
		t.Errorf("daemon stop: %+v", r)
	}
	if alive(pid) || len(machinesOf(f.home)) != 1 {
		t.Fatalf("after a stop that keeps: daemon alive %v, machines %v", alive(pid), machinesOf(f.home))
	}
	if got := f.eval(id, "state"); got != "'kept'" { // starts a daemon
		t.Errorf("the state is %q", got)
	}
	f.run("daemon", "stop", "--keep")
	if r := f.try("daemon", "stop", "--kill"); r.code != 0 || !strings.Contains(r.stderr, "ended 1 sandboxes") {
		t.Errorf("stop --kill of what an earlier daemon left: %+v", r)
	}
	if left := leftovers(f.home); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if r := f.try("daemon", "stop", "--kill", "--keep"); r.code != 2 {
		t.Errorf("both flags: %+v", r)
	}
}

// TestAdoptedMachineDies: an adopted machine's death is noticed like any other's.
func TestAdoptedMachineDies(t *testing.T) {
	f := copied(t)
	children := f.fork(2, "--ttl", "1h")
	f.killDaemon()
	f.run("ls")
	if err := syscall.Kill(children[0].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if reason := f.awaitFailed(children[0].ID); !strings.Contains(reason, "earlier daemon") {
		t.Errorf("the reason is %q", reason)
	}
	f.try("exec", children[1].ID, "--", "sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo o > /proc/sysrq-trigger")
	if reason := f.awaitFailed(children[1].ID); !strings.Contains(reason, "powered off") {
		t.Errorf("the reason is %q", reason)
	}
}

// TestBuried: what cannot be adopted ends, with its reason in the log, and nothing of it is left.
func TestBuried(t *testing.T) {
	f := copied(t)
	children := f.fork(2)
	expiring := f.fork(1, "--ttl", "3s")[0]
	f.killDaemon()
	records, err := filepath.Glob(filepath.Join(f.home, "machines", "*", "sandbox.json"))
	if err != nil || len(records) != 3 {
		t.Fatalf("records: %v, %v", records, err)
	}
	damaged := ""
	for _, path := range records {
		if readJSON(t, path)["id"] == children[0].ID {
			damaged = path
		}
	}
	damage(t, damaged, "cut")
	await(t, 10*time.Second, "the time to live", func() bool { return time.Now().Unix() > expiring.CreatedAtUnix+4 })
	if got := f.ids(); !slices.Equal(got, []string{children[1].ID}) {
		t.Errorf("sandboxes %q, want only %s", got, children[1].ID)
	}
	log := readFile(t, filepath.Join(f.home, "daemon.log"))
	for _, want := range []string{"its record is damaged", "its time to live is over"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log does not say %q:\n%s", want, log)
		}
	}
}

// TestKilledDaemonWhileForking kills it while children are on their way: who had confirmed its identity is adopted, who
// had not is buried, and there is no third kind.
func TestKilledDaemonWhileForking(t *testing.T) {
	f := copied(t)
	f.run("daemon", "start")
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.try("fork", parentTag, "-n", "20")
	}()
	await(t, 20*time.Second, "a few machines", func() bool { return len(machinesOf(f.home)) > 5 })
	f.killDaemon()
	<-done
	ids := f.ids()
	t.Logf("%d of the children were adopted", len(ids))
	if pids := machinesOf(f.home); len(pids) != len(ids) {
		t.Errorf("%d sandboxes, machines %v", len(ids), pids)
	}
	for _, id := range ids {
		if got := f.eval(id, "6*7"); got != "42" {
			t.Errorf("%s evaluates to %q", id, got)
		}
		f.run("kill", id)
	}
}

// TestBranchInterrupted: the daemon dies in the middle of a branch. Its source answers within a second of the next
// daemon's being there, with its state, and can be branched.
func TestBranchInterrupted(t *testing.T) {
	f := copied(t, liveEnv()...)
	id := f.one()
	f.eval(id, "import os; state = os.urandom(64 << 20); import hashlib; digest = hashlib.sha256(state).hexdigest()")
	digest := f.eval(id, "digest")
	for _, mode := range []string{"diff", "live"} {
		for _, delay := range []time.Duration{0, 30 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond} {
			r := f.interruptBranch(id, mode, delay)
			if strings.Contains(r.stderr, "unavailable") {
				t.Logf("%s: %s", mode, r.stderr)
				break
			}
			f.run("daemon", "start")
			up := time.Now()
			if got := f.eval(id, "1+1"); got != "2" {
				t.Errorf("%s, killed after %s: it answers %q", mode, delay, got)
			}
			took := time.Since(up)
			t.Logf("%s, killed after %s: answers %s after the daemon was up", mode, delay, took)
			if took > testenv.Timeout(time.Second) {
				t.Errorf("%s, killed after %s: it answered after %s", mode, delay, took)
			}
			if got := f.eval(id, "hashlib.sha256(state).hexdigest()"); got != digest {
				t.Errorf("%s, killed after %s: its memory has changed", mode, delay)
			}
			f.run("exec", id, "--", "sh", "-c", "date > /root/now; sync")
		}
	}
	f.run("branch", id, "-t", "after")
	var grandchildren []api.Sandbox
	f.json(&grandchildren, "fork", "after")
	if got := f.eval(grandchildren[0].ID, "hashlib.sha256(state).hexdigest()"); got != digest {
		t.Error("a grandchild of the adopted source has other memory")
	}
	f.killDaemon() // and a machine that stands on a branch's image is adopted, too
	if got := f.eval(grandchildren[0].ID, "hashlib.sha256(state).hexdigest()"); got != digest {
		t.Error("after its adoption a grandchild has other memory")
	}
	f.json(&grandchildren, "fork", "after")
	if got := f.eval(grandchildren[0].ID, "hashlib.sha256(state).hexdigest()"); got != digest {
		t.Error("a grandchild forked after the restart has other memory")
	}
}

func (f *forkd) interruptBranch(id, mode string, delay time.Duration) result {
	f.t.Helper()
	pid := f.status().PID
	done := make(chan result, 1)
	go func() { done <- f.try("branch", id, "--mode", mode) }()
	timer := time.NewTimer(delay)
	defer timer.Stop()
	var r result
	over := false
	select {
	case r = <-done:
		over = true
		if strings.Contains(r.stderr, "unavailable") {
			return r
		}
	case <-timer.C:
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	await(f.t, 10*time.Second, "the daemon's end", func() bool { return !alive(pid) })
	if !over {
		r = <-done
	}
	return r
}

// TestPausedStaysPaused over a restart.
func TestPausedStaysPaused(t *testing.T) {
	f := copied(t)
	id := f.one()
	f.eval(id, "state = 5")
	f.run("pause", id)
	f.killDaemon()
	f.run("ls")
	if s := f.sandbox(id); s.State != "paused" {
		t.Errorf("it is %s", s.State)
	}
	f.run("resume", id)
	if got := f.eval(id, "state"); got != "5" {
		t.Errorf("its state is %q", got)
	}
	if off := clockError(t, f, id); off > 50*time.Millisecond {
		t.Errorf("its clock is off by %s", off)
	}
}

func readFile(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func readJSON(t testing.TB, path string) map[string]any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal([]byte(readFile(t, path)), &v); err != nil {
		t.Fatal(err)
	}
	return v
}
