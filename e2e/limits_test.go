package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// needGroups skips unless the shared daemon can limit memory, cpu and processes here. On most hosts that is so for root alone:
// what needs it is not left out of root's half of a run.
func needGroups(t *testing.T, f *forkd) {
	t.Helper()
	var info api.HostInfo
	f.json(&info, "doctor")
	for _, c := range info.Checks {
		if c.Name == "cgroups" && c.Status != "pass" {
			testenv.Missing(t, "cgroups", c.Detail)
		}
	}
}

// TestMemoryLimit: a machine that comes to its limit of memory ends, says so, and leaves nothing.
func TestMemoryLimit(t *testing.T) {
	f := shared(t)
	needGroups(t, f)
	id := f.one("--memory-limit", "160MiB")
	r := f.try("exec", id, "--", "python3", "-c", "x = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1")
	if r.code == 0 {
		t.Fatal("a guest took 300 MiB with a limit of 160 MiB")
	}
	var s api.Sandbox
	await(t, 10*time.Second, "it to have failed", func() bool {
		f.json(&s, "inspect", id)
		return s.State == "failed"
	})
	if !strings.HasPrefix(s.Reason, "memory limit") || !strings.Contains(s.Reason, "160 MiB") {
		t.Errorf("failed for %q", s.Reason)
	}
	f.run("kill", id)
	// So little that the machine does not even come up.
	r = f.try("fork", parentTag, "--memory-limit", "64MiB")
	if r.code == 0 {
		f.run("kill", strings.TrimSpace(r.stdout))
	} else if !strings.Contains(r.stderr, "memory limit") {
		t.Errorf("with 64 MiB: %s", r.stderr)
	}
}

// TestMemoryWish: the limit that the existing forkd's clients always ask for is made so large that the machine fits.
func TestMemoryWish(t *testing.T) {
	f := shared(t)
	needGroups(t, f)
	list, err := f.client().Fork(t.Context(), api.ForkRequest{SnapshotTag: parentTag, MemoryLimitMiB: 256})
	if err != nil || len(list) != 1 {
		t.Fatalf("%v, %+v", err, list)
	}
	defer f.run("kill", list[0].ID)
	s := list[0]
	if s.MemoryLimitMiB == nil {
		t.Fatalf("no limit: %q", s.Warnings)
	}
	if limit := *s.MemoryLimitMiB; limit < s.MemoryBytes>>20+64 || len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0], "raised to "+strconv.FormatInt(limit, 10)) {
		t.Errorf("a limit of %d MiB for %d MiB, said %q", limit, s.MemoryBytes>>20, s.Warnings)
	}
}

// spin counts how often a guest gets round in so many seconds of its clock.
const spin = `
import time
n, end = 0, time.monotonic() + %d
while time.monotonic() < end:
    for _ in range(1000): n += 1
print(n)`

func (f *forkd) spin(id string, seconds int) float64 {
	f.t.Helper()
	n, err := strconv.ParseFloat(strings.TrimSpace(f.run("exec", id, "--", "python3", "-c", fmt.Sprintf(spin, seconds))), 64)
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

// cpuOf is the processor time that a process has had.
func cpuOf(t *testing.T, pid int) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	const tick = 10 * time.Millisecond
	ticks := 0
	for _, n := range strings.Fields(rest)[11:13] {
		v, _ := strconv.Atoi(n)
		ticks += v
	}
	return time.Duration(ticks) * tick
}

// idleHost says whether this host had time to give: what was measured would say nothing of a limit otherwise.
func idleHost(t *testing.T) bool {
	t.Helper()
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return false
	}
	now, err := strconv.ParseFloat(strings.Fields(string(load))[0], 64)
	busy := err != nil || now > 1.5*float64(runtime.NumCPU())
	if busy {
		t.Logf("the host is busy (load %s): nothing is said of what is slow", strings.TrimSpace(string(load)))
	}
	return !busy
}

// TestCPULimit: a guest that wants all of a processor has what it was given of it, within a tenth.
func TestCPULimit(t *testing.T) {
	const share = 0.25
	f := shared(t)
	needGroups(t, f)
	id := f.one("--cpu-limit", "25%")
	var s api.Sandbox
	f.json(&s, "inspect", id)
	f.run("exec", id, "-d", "--", "sh", "-c", "while :; do :; done")
	<-time.After(500 * time.Millisecond) // what it saved up
	before, begin := cpuOf(t, s.PID), time.Now()
	<-time.After(5 * time.Second)
	got := (cpuOf(t, s.PID) - before).Seconds() / time.Since(begin).Seconds()
	t.Logf("%.3f of a processor", got)
	if got > share*1.1 {
		t.Errorf("%.3f of a processor, the limit is %g", got, share)
	}
	if got < share*0.9 && idleHost(t) {
		t.Errorf("%.3f of a processor, although the host has more and the limit is %g", got, share)
	}
}

// TestIOLimit: what a guest writes and reads on its disk is held up as its limit says, within a tenth.
func TestIOLimit(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one("--io-limit", "16MiB")
	for what, command := range map[string]string{
		"write": "dd if=/dev/zero of=/var/tmp/x bs=1M count=%d oflag=direct",
	} {
		took := func(mib int) time.Duration {
			begin := time.Now()
			f.run("exec", id, "--", "sh", "-c", fmt.Sprintf(command, mib))
			return time.Since(begin)
		}
		took(4)
		short := took(8)
		rate := 24 / (took(32) - short).Seconds()
		t.Logf("%s: %.2f MiB/s", what, rate)
		if rate > 16*1.1 || rate < 16*0.8 && idleHost(t) {
			t.Errorf("%s: %.2f MiB/s, the limit is 16", what, rate)
		}
	}
	begin := time.Now()
	f.run("exec", id, "--", "sh", "-c", "dd if=/var/tmp/x of=/dev/null bs=1M iflag=direct count=32")
	if rate := 32 / time.Since(begin).Seconds(); rate > 16*1.15 {
		t.Errorf("read: %.2f MiB/s, the limit is 16", rate)
	}
}

// TestNeighbours: twenty that want all they can get and are capped at a twentieth of a processor each slow another by at
// most two. They are stopped and let run by turns, so that what else this host does is in both halves.
func TestNeighbours(t *testing.T) {
	f := shared(t)
	needGroups(t, f)
	id := f.one()
	n, rounds := 20, 5
	if !testenv.Soak() {
		n, rounds = 8, 2 // they take a while to start; internal/cgroup has twenty processes that are no machines
	}
	var wg sync.WaitGroup
	neighbours := f.fork(n, "--cpu-limit", "5%")
	for _, s := range neighbours {
		wg.Go(func() { f.try("exec", s.ID, "-d", "--", "sh", "-c", "while :; do :; done") })
	}
	wg.Wait()
	theirs := func() (all time.Duration) {
		for _, s := range neighbours {
			all += cpuOf(t, s.PID)
		}
		return all
	}
	signal := func(sig syscall.Signal) {
		for _, s := range neighbours {
			if err := syscall.Kill(s.PID, sig); err != nil {
				t.Fatal(err)
			}
		}
	}
	defer signal(syscall.SIGCONT)
	f.spin(id, 1)
	var alone, beside float64
	var used, took time.Duration
	for range rounds {
		signal(syscall.SIGSTOP)
		alone += f.spin(id, 2)
		signal(syscall.SIGCONT)
		before, begin := theirs(), time.Now()
		beside += f.spin(id, 2)
		used, took = used+theirs()-before, took+time.Since(begin)
	}
	share := used.Seconds() / took.Seconds()
	t.Logf("alone %.0f, beside %d neighbours %.0f: slower by %.2f; they had %.2f of a processor", alone, n, beside, alone/beside, share)
	if most := 0.05 * float64(n) * 1.1; share > most {
		t.Errorf("they had %.2f of a processor, their limits allow %.2f", share, most)
	}
	if alone/beside > 2 {
		t.Errorf("slower by %.2f", alone/beside)
	}
}

// TestGroupsOfVersion2: our own tests of control groups, in a guest, whose kernel has version 2 whatever the host has.
func TestGroupsOfVersion2(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("the test that runs in the guest is built here, and there is no go in PATH; root's half of a run has one")
	}
	f := shared(t)
	program := filepath.Join(t.TempDir(), "cgroup.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", program, "forkd.dev/forkd/internal/cgroup")
	build.Env = append(build.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	id := f.one()
	f.run("cp", program, id+":/root/cgroup.test")
	r := f.try("exec", id, "--", "env", testenv.EnvRequire+"=cgroup-2 cgroup-memory cgroup-cpu cgroup-pids cgroup-io",
		"/root/cgroup.test", "-test.v")
	t.Log(r.stdout)
	if r.code != 0 || !strings.Contains(r.stdout, "version 2 at") {
		t.Errorf("exit code %d\n%s", r.code, r.stderr)
	}
}

// TestIdle: what nobody uses is suspended, and is there again when somebody does.
func TestIdle(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one("--idle", "2s", "--auto-resume")
	f.run("exec", id, "--", "sh", "-c", "echo kept >/tmp/x; sleep 3") // in use all that time
	var s api.Sandbox
	f.json(&s, "inspect", id)
	if s.State != "running" {
		t.Errorf("while it was used it became %s", s.State)
	}
	await(t, 60*time.Second, "it to be suspended", func() bool {
		f.json(&s, "inspect", id)
		return s.State == "suspended"
	})
	if len(groupsOfMachine(f, id)) != 0 {
		t.Error("a suspended sandbox has control groups")
	}
	if got := f.run("exec", id, "--", "cat", "/tmp/x"); got != "kept\n" {
		t.Errorf("woken it has %q", got)
	}
	// Limits and times are what they were.
	f.json(&s, "inspect", id)
	if s.State != "running" || s.IdleSeconds != 2 || !s.AutoResume {
		t.Errorf("woken it is %+v", s.Bounds)
	}
	paused := f.one("--ttl", "2s", "--ttl-action", "pause")
	await(t, 60*time.Second, "it to be paused", func() bool {
		f.json(&s, "inspect", paused)
		return s.State == "paused"
	})
	if r := f.try("exec", paused, "--", "true"); r.code == 0 {
		t.Error("a paused sandbox that is not to resume by itself did")
	}
	killed := f.one("--idle", "1s", "--idle-action", "kill")
	await(t, 60*time.Second, "it to end", func() bool { return !slices.Contains(ids(f), killed) })
}

func ids(f *forkd) (list []string) {
	var all []api.Sandbox
	f.json(&all, "ls")
	for _, s := range all {
		list = append(list, s.ID)
	}
	return list
}

func groupsOfMachine(f *forkd, id string) []string {
	var s api.Sandbox
	f.json(&s, "inspect", id)
	if s.PID == 0 {
		return nil
	}
	return groupsOf(f.home)
}

// TestLimitsSurvive: a later daemon has a sandbox in its group with its limits, and removes the group with it.
func TestLimitsSurvive(t *testing.T) {
	f := copied(t)
	needGroups(t, f)
	var child []api.Sandbox
	f.json(&child, "fork", parentTag, "--memory-limit", "160MiB", "--cpu-limit", "0.5")
	id := child[0].ID
	before := groupsOf(f.home)
	f.run("daemon", "stop")
	if diff := groupsOf(f.home); !slices.Equal(before, diff) {
		t.Errorf("without a daemon its groups are %v", diff)
	}
	var s api.Sandbox
	f.json(&s, "inspect", id)
	if s.Limits == nil || s.Limits.MemoryBytes != 160<<20 || s.Limits.CPUs != 0.5 {
		t.Errorf("adopted it has %+v", s.Limits)
	}
	f.try("exec", id, "--", "python3", "-c", "x = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1")
	await(t, 10*time.Second, "it to have failed", func() bool {
		f.json(&s, "inspect", id)
		return strings.HasPrefix(s.Reason, "memory limit")
	})
	f.run("kill", id)
	f.run("daemon", "stop", "--kill")
	if left := groupsOf(f.home); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestLimitsRefused: what cannot be, and what makes no sense.
func TestLimitsRefused(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	for flag, says := range map[string]string{
		"--memory-limit=1MiB": "the VM process alone needs", "--cpu-limit=0.001": "allowed is", "--cpu-limit=x": "no number of CPUs",
		"--pids-limit=5": "may need up to", "--io-limit=1": "the least is", "--iops-limit=1": "the least is", "--ttl-action=eat": "kill",
		"--idle=1ms": "allowed is", "--idle-action=kill": "--idle",
	} {
		if r := f.try("fork", parentTag, flag); r.code == 0 || !strings.Contains(r.stderr, says) {
			t.Errorf("%s: %d %s", flag, r.code, r.stderr)
		}
	}
	none := copied(t, "FORKD_CGROUPS=off")
	r := none.try("fork", parentTag, "--memory-limit", "300MiB")
	if r.code == 0 || !strings.Contains(r.stderr, "cannot hold that limit: memory: it was switched off") {
		t.Errorf("without control groups: %d %s", r.code, r.stderr)
	}
	list, err := none.client().Fork(t.Context(), api.ForkRequest{
		SnapshotTag: parentTag, MemoryLimitMiB: 256, Bounds: api.Bounds{Limits: &api.Limits{IOBytesPerSecond: 8 << 20}},
	})
	if err != nil || !strings.Contains(fmt.Sprint(list[0].Warnings), "not held") {
		t.Errorf("the existing clients' wish without control groups: %v %+v", err, list)
	}
}
