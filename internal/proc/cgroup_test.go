package proc

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/cgroup"
	"forkd.dev/forkd/internal/testenv"
)

// hierarchies are directories of this test's own in what this host has mounted of control groups.
func hierarchies(t *testing.T) (second string, first []string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	inside := func(controller string) string {
		for line := range strings.Lines(string(own)) {
			f := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(f) == 3 && f[1] == controller {
				return f[2]
			}
		}
		return "/"
	}
	for line := range strings.Lines(string(mounts)) {
		before, after, _ := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) < 5 || len(right) < 3 || left[3] != "/" {
			continue
		}
		dir := ""
		switch {
		case right[0] == "cgroup2" && second == "":
			dir = filepath.Join(left[4], inside(""), fmt.Sprintf("forkd-proc-test-%d", os.Getpid()))
			second = dir
		case right[0] == "cgroup" && (strings.HasSuffix(right[2], ",pids") || strings.HasSuffix(right[2], ",memory")):
			controller := right[2][strings.LastIndexByte(right[2], ',')+1:]
			dir = filepath.Join(left[4], inside(controller), fmt.Sprintf("forkd-proc-test-%d", os.Getpid()))
			first = append(first, dir)
		default:
			continue
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			testenv.Missing(t, "cgroups", err.Error())
		}
		t.Cleanup(func() {
			if err := cgroup.Remove(dir); err != nil {
				t.Error(err)
			}
		})
	}
	if second == "" && len(first) == 0 {
		testenv.Missing(t, "cgroups", "none are mounted")
	}
	return second, first
}

// TestCgroups: a child is in its groups, of either version, when it is there, however it is confined, and the daemon is not.
func TestCgroups(t *testing.T) {
	second, first := hierarchies(t)
	for name, refuse := range map[string]bool{"plain": false, "with calls refused": true} {
		t.Run(name, func(t *testing.T) {
			e := &cgroup.Entry{}
			defer e.Close()
			var err error
			if second != "" {
				if e.Dir, err = os.Open(second); err != nil {
					t.Fatal(err)
				}
			}
			for _, dir := range first {
				fd, err := unix.Open(filepath.Join(dir, "tasks"), unix.O_WRONLY|unix.O_CLOEXEC, 0)
				if err != nil {
					t.Fatal(err)
				}
				e.Tasks = append(e.Tasks, os.NewFile(uintptr(fd), "tasks"))
			}
			cmd := command("wait")
			cmd.Cgroup, cmd.RefuseCalls, cmd.Confine = e, refuse, &Confine{}
			begin := time.Now()
			p := start1(t, cmd)
			started := time.Since(begin)
			if err := p.Joined(); err != nil {
				t.Fatal(err)
			}
			t.Logf("started in %s, in its groups after %s", started, time.Since(begin))
			for _, dir := range append(first, second) {
				if dir == "" {
					continue
				}
				aloneIn(t, dir, p.PID())
			}
			if err := p.Kill(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestCgroupIsGone: a child that cannot be put into its group is not there.
func TestCgroupIsGone(t *testing.T) {
	second, _ := hierarchies(t)
	if second == "" {
		testenv.Missing(t, "cgroup-2", "it is not mounted")
	}
	gone := second + "-gone"
	if err := os.Mkdir(gone, 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(gone)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(gone); err != nil {
		t.Fatal(err)
	}
	for _, refuse := range []bool{false, true} {
		cmd := command("wait")
		cmd.Path, err = os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Cgroup, cmd.RefuseCalls = &cgroup.Entry{Dir: dir}, refuse
		p, err := Start(t.Context(), cmd)
		if err == nil {
			err = p.Joined()
			select {
			case <-p.Done():
			default:
				t.Errorf("process %d runs outside of its group", p.PID())
				_ = p.Kill()
			}
			p.Release()
		}
		if err == nil {
			t.Error("a group that is gone was joined")
		}
	}
	_ = dir.Close()
}

// aloneIn waits until a process is the only one in a group: the thread that started it has entered the group as well, and is
// listed until the kernel has done away with it, a moment after it ended.
func aloneIn(t *testing.T, dir string, pid int) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(testenv.Timeout(5 * time.Second))
	for {
		text, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			t.Fatal(err)
		}
		got := strings.Fields(string(text))
		if len(got) == 1 && got[0] == strconv.Itoa(pid) {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Errorf("in %s are %v, want %d alone", dir, got, pid)
			return
		}
	}
}
