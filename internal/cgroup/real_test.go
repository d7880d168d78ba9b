package cgroup

import (
	"bufio"
	"context"
	"errors"
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

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

// These tests make real groups, where this user may. The e2e tests run them inside a guest as well, whose kernel has
// version 2.

const envChild = "FORKD_CGROUP_CHILD"

func TestMain(m *testing.M) {
	if what := os.Getenv(envChild); what != "" {
		child(what)
		return
	}
	os.Exit(m.Run()) //nolint:forbidigo // a main of its own.
}

// child waits for a line on its standard input, does what it is told to, and says how it went.
func child(what string) {
	in := bufio.NewReader(os.Stdin)
	_, _ = in.ReadString('\n')
	switch what {
	case "memory":
		var all [][]byte
		for range 200 {
			b := make([]byte, 1<<20)
			for i := range b {
				b[i] = byte(i)
			}
			all = append(all, b)
			fmt.Fprintln(os.Stdout, len(all), "MiB")
		}
	case "spin":
		for n := 1; n > 0; n = n%3 + 1 {
		}
	case "processes":
		n := 0
		for range 200 {
			cmd := exec.CommandContext(context.Background(), "/proc/self/exe")
			cmd.Env = []string{envChild + "=wait"}
			in, _ := cmd.StdinPipe()
			if err := cmd.Start(); err != nil {
				break
			}
			defer func() { _ = in.Close(); _ = cmd.Wait() }()
			n++
		}
		_, _ = os.Stdout.WriteString(strconv.Itoa(n) + "\n")
	case "write":
		f, err := os.CreateTemp("/var/tmp", "forkd-io-")
		if err != nil {
			panic(err)
		}
		defer os.Remove(f.Name())
		b := make([]byte, 1<<20)
		for range 20 {
			if _, err := f.Write(b); err != nil {
				panic(err)
			}
			if err := unix.Fdatasync(int(f.Fd())); err != nil {
				panic(err)
			}
		}
		_, _ = os.Stdout.WriteString("written\n")
	case "wait":
		_, _ = in.ReadString('\n')
	}
}

// tree is a place of this test's own. It must be left as it was found.
func tree(t *testing.T, need ...Controller) *Tree {
	t.Helper()
	dir := "/var/tmp" // Temporary directories may be in memory.
	tr := Open(Config{Name: "forkd-test-" + strconv.Itoa(os.Getpid()), Disk: dir})
	for _, c := range need {
		if why := tr.Missing(c); why != "" {
			tr.Close()
			testenv.Missing(t, "cgroup-"+string(c), why)
		}
	}
	if slices.Contains(strings.Fields(os.Getenv(testenv.EnvRequire)), "cgroup-2") && tr.Version() != 2 {
		t.Fatalf("version %d", tr.Version())
	}
	t.Cleanup(func() {
		for _, left := range tr.Left(nil) {
			t.Errorf("left behind: %s", left)
		}
		tr.Close()
		for _, dir := range tr.each() {
			if _, err := os.Stat(dir); err == nil {
				t.Errorf("left behind: %s", dir)
			}
		}
	})
	t.Logf("version %d at %s", tr.Version(), tr.Place())
	return tr
}

type running struct {
	*exec.Cmd
	out   *bufio.Reader
	in    interface{ Close() error }
	begin func()
}

// start starts a child in a group, as package proc does.
func start(t *testing.T, g *Group, what string, late bool) *running {
	t.Helper()
	entry, err := g.Entry()
	if err != nil {
		t.Fatal(err)
	}
	defer entry.Close()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = []string{envChild + "=" + what, "GOMAXPROCS=1"}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if entry.Dir != nil && !late {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(entry.Dir.Fd())}
	}
	onThread(func() {
		if err = entry.EnterThread(); err == nil {
			err = cmd.Start()
		}
	})
	if err == nil && entry.Dir != nil && late {
		err = entry.Enter(cmd.Process.Pid)
	}
	if err != nil {
		t.Fatal(err)
	}
	r := &running{Cmd: cmd, out: bufio.NewReader(out), in: in, begin: func() { _, _ = in.Write([]byte("\n")) }}
	t.Cleanup(func() { r.end(); _ = g.Remove() })
	return r
}

// onThread runs f on a thread that ends with it. The first thread never ends.
func onThread(f func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread() // Never unlocked, but for the first.
		if unix.Gettid() == os.Getpid() {
			defer runtime.UnlockOSThread()
			onThread(f)
			return
		}
		f()
	})
	wg.Wait()
}

func (r *running) end() {
	_ = r.Process.Kill()
	_ = r.in.Close()
	_ = r.Wait()
}

func group(t *testing.T, tr *Tree, name string, l Limits) *Group {
	t.Helper()
	g, err := tr.Make(name, l, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
	})
	return g
}

func TestMemoryLimit(t *testing.T) {
	tr := tree(t, Memory)
	for _, late := range []bool{false, true} {
		g := group(t, tr, fmt.Sprintf("memory-%t", late), Limits{MemoryBytes: 64 << 20})
		c := start(t, g, "memory", late)
		c.begin()
		last := ""
		for {
			line, err := c.out.ReadString('\n')
			if err != nil {
				break
			}
			last = line
		}
		err := c.Wait()
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Errorf("after %s it ended with %v", last, err)
		}
		u := g.Usage()
		t.Logf("got to %s, usage %+v", strings.TrimSpace(last), u)
		if g.OOMKills() == 0 {
			t.Error("no kill for want of memory is counted")
		}
		if u.MemoryPeak > 0 && (u.MemoryPeak > 65<<20 || u.MemoryPeak < 32<<20) {
			t.Errorf("the most that was used is %d bytes", u.MemoryPeak)
		}
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
	}
}

// TestCPULimit: what is to have a fifth of a processor has it, within a tenth of that.
func TestCPULimit(t *testing.T) {
	const share = 0.2
	tr := tree(t, CPU)
	g := group(t, tr, "cpu", Limits{CPUs: share})
	c := start(t, g, "spin", false)
	c.begin()
	// The first periods are not counted: it starts in the middle of one.
	<-time.After(300 * time.Millisecond)
	before, begin := g.Usage(), time.Now()
	<-time.After(4 * time.Second)
	after, took := g.Usage(), time.Since(begin)
	got := (after.CPU - before.CPU).Seconds() / took.Seconds()
	t.Logf("%.3f of a processor, held up for %s", got, after.Throttled-before.Throttled)
	if after.CPU == 0 {
		t.Skip("processor time is not counted here")
	}
	if got > share*1.1 {
		t.Errorf("%.3f of a processor, want at most %.3f", got, share*1.1)
	}
	if err := g.FreeCPU(); err != nil {
		t.Fatal(err)
	}
	<-time.After(300 * time.Millisecond)
	before = g.Usage()
	<-time.After(time.Second)
	if free := g.Usage(); free.Throttled != before.Throttled {
		t.Errorf("freed it is held up for %s more", free.Throttled-before.Throttled)
	}
	if got < share*0.9 && after.Throttled > before.Throttled+time.Second { // and not for want of processors
		t.Errorf("%.3f of a processor, want at least %.3f", got, share*0.9)
	}
}

// TestNeighbours: many that want all they can get, and may have half of the processors together, slow one that is not limited
// by a half and not by two. What else the host does is in both halves of each round.
func TestNeighbours(t *testing.T) {
	const share, rounds = 0.05, 4
	tr := tree(t, CPU)
	free := start(t, group(t, tr, "free", Limits{}), "spin", false)
	var all []*running
	for i := range 10 * runtime.NumCPU() {
		c := start(t, group(t, tr, fmt.Sprint("capped", i), Limits{CPUs: share}), "spin", false)
		c.begin()
		all = append(all, c)
	}
	free.begin()
	signal := func(s syscall.Signal) {
		for _, c := range all {
			if err := c.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(2 * period)
	}
	had := func() time.Duration {
		before := cpuTime(t, free.Process.Pid)
		<-time.After(8 * period)
		return cpuTime(t, free.Process.Pid) - before
	}
	theirs := func() (sum time.Duration) {
		for _, c := range all {
			sum += cpuTime(t, c.Process.Pid)
		}
		return sum
	}
	var alone, beside, used time.Duration
	for range rounds {
		signal(syscall.SIGSTOP)
		alone += had()
		signal(syscall.SIGCONT)
		before := theirs()
		beside += had()
		used += theirs() - before
	}
	ratio := alone.Seconds() / beside.Seconds()
	t.Logf("%d neighbours, %d processors, version %d: alone it had %s, beside them, who had %s, %s: slower by %.2f", len(all), runtime.NumCPU(),
		tr.Version(), alone, used, beside, ratio)
	if ratio > 1.75 {
		t.Errorf("slower by %.2f", ratio)
	}
}

// cpuTime is what a process has had.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	ticks := 0
	for _, n := range strings.Fields(rest)[11:13] {
		v, _ := strconv.Atoi(n)
		ticks += v
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// TestWeights: the place of version 1 weighs what its groups do, at any time: one that is not limited yet must not starve.
func TestWeights(t *testing.T) {
	tr := tree(t, CPU)
	if tr.Version() != 1 {
		t.Skip("in version 2 each group weighs for itself")
	}
	want := func(when string, shares int64) {
		t.Helper()
		if got, err := number(filepath.Join(tr.dirs[CPU], "cpu.shares")); err != nil || got != shares {
			t.Errorf("%s: all together weigh %d (%v), want %d", when, got, err, shares)
		}
	}
	free, err := tr.Make("free", Limits{}, Limits{CPUs: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	want("one that will be limited", 1024)
	half := group(t, tr, "half", Limits{CPUs: 0.5})
	want("and one that is", 1536)
	if err := free.Set(Limits{CPUs: 0.25}); err != nil {
		t.Fatal(err)
	}
	want("limited", 768)
	if err := half.FreeCPU(); err != nil {
		t.Fatal(err)
	}
	want("the other freed", 1280)
	if err := free.Remove(); err != nil {
		t.Fatal(err)
	}
	want("one removed", 1024)
}

func TestProcessLimit(t *testing.T) {
	tr := tree(t, PIDs)
	g := group(t, tr, "pids", Limits{PIDs: 40})
	c := start(t, g, "processes", false)
	c.begin()
	line, err := c.out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	n, _ := strconv.Atoi(strings.TrimSpace(line))
	t.Logf("%d children", n)
	if n == 0 || n >= 40 {
		t.Errorf("%d children with a limit of 40 processes and threads", n)
	}
}

// TestIOLimit: writes that are waited for take as long as the limit says, within a tenth.
func TestIOLimit(t *testing.T) {
	const limit, bytes = 5 << 20, 20 << 20
	tr := tree(t, IO)
	g := group(t, tr, "io", Limits{IOBytes: limit})
	c := start(t, g, "write", false)
	begin := time.Now()
	c.begin()
	if line, err := c.out.ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	took := time.Since(begin)
	rate := bytes / took.Seconds()
	t.Logf("%.1f MiB/s, usage %+v", rate/(1<<20), g.Usage())
	if rate > limit*1.1 {
		t.Errorf("%.1f MiB/s with a limit of %d", rate/(1<<20), limit>>20)
	}
}

func TestFoundAgain(t *testing.T) {
	tr := tree(t, PIDs)
	g := group(t, tr, "one", Limits{PIDs: 30})
	c := start(t, g, "wait", false)
	pid := c.Process.Pid
	again := Open(Config{Name: tr.name, Disk: "/var/tmp"})
	found, err := again.Adopt("one", pid)
	if err != nil || found == nil || found.Usage().PIDs == 0 {
		t.Fatalf("found %+v, %v", found, err)
	}
	if other, err := again.Adopt("another", pid); err != nil || other != nil {
		t.Errorf("of another name: %+v, %v", other, err)
	}
	if other, err := again.Adopt("one", os.Getpid()); err != nil || other != nil {
		t.Errorf("this process: %+v, %v", other, err)
	}
	group(t, tr, "empty", Limits{})
	if left := again.Left(map[string]bool{"one": true}); len(left) == 0 || filepath.Base(left[0]) != "empty" {
		t.Errorf("left are %v", left)
	}
	if err := again.Sweep(map[string]bool{"one": true}); err != nil {
		t.Error(err)
	}
	if left := again.Left(map[string]bool{"one": true}); len(left) != 0 {
		t.Errorf("swept, and left are %v", left)
	}
	if found.Usage().PIDs == 0 {
		t.Error("what was kept is gone")
	}
	c.end()
	for range 2 {
		if err := found.Remove(); err != nil {
			t.Error(err)
		}
	}
}

// TestNone: without a place everything is refused with the reason, and groups are none.
func TestNone(t *testing.T) {
	tr := Open(Config{Name: "forkd-none", Off: true})
	if err := tr.Check(Limits{}); err != nil {
		t.Error(err)
	}
	if err := tr.Check(Limits{CPUs: 1}); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "cpu: it was switched off") {
		t.Errorf("refused with %v", err)
	}
	g, err := tr.Make("x", Limits{MemoryBytes: 1}, Limits{})
	if g != nil || err != nil {
		t.Fatalf("a group %v, %v", g, err)
	}
	e, err := g.Entry()
	if e != nil || err != nil || e.EnterThread() != nil || g.Set(Limits{}) != nil || g.Remove() != nil || g.OOMKills() != 0 || g.Usage() != (Usage{}) {
		t.Errorf("a group that is none does something: %v %v", e, err)
	}
	e.Close()
	if err := tr.Sweep(nil); err != nil {
		t.Error(err)
	}
}
