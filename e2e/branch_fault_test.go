package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

// branching are the modes in which faults are tried here.
func branching(t *testing.T, f *forkd, test func(t *testing.T, f *forkd, mode string)) {
	for _, mode := range []string{live, diff} {
		t.Run(mode, func(t *testing.T) {
			if mode != live {
				testenv.OncePerRun(t)
			}
			f := &forkd{t, f.bin, f.home, f.env}
			needMode(t, f, mode)
			test(t, f, mode)
		})
	}
}

// moments are those after the begin of a branch at which something happens to it.
func moments(t *testing.T) []time.Duration {
	n := number(t, "FORKD_TEST_MOMENTS", 4, 40)
	var list []time.Duration
	for i := range n {
		// Evenly, but not always the same.
		list = append(list, (time.Duration(i)*600*time.Millisecond+rand.N(400*time.Millisecond))/time.Duration(n))
	}
	return list
}

// settled waits until a snapshot is not being written any more, and says what became of it ("": there is none).
func (f *forkd) settled(tag string) string {
	f.t.Helper()
	status := ""
	await(f.t, time.Minute, tag+" to settle", func() bool {
		status = f.tags()[tag]
		return status != "writing"
	})
	return status
}

// TestBranchMachineDies: QEMU dies in a branch. There is a snapshot, which is right, or there is none.
func TestBranchMachineDies(t *testing.T) {
	branching(t, shared(t), func(t *testing.T, f *forkd, mode string) {
		for i, moment := range moments(t) {
			tag := fmt.Sprintf("dying-%s-%d", mode, i)
			source := f.one()
			f.fire(source, 48)
			pid := f.sandbox(source).PID
			c := f.start("branch", source, "-t", tag, "--mode", mode)
			pass(t, moment)
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			r := c.wait(t, time.Minute)
			f.awaitFailed(source)
			f.run("kill", source)
			status := f.settled(tag)
			t.Logf("QEMU killed after %s: code %d, %q, then %s", moment, r.code, firstLine(r.stderr), status)
			if r.code == 0 != (status == "ready") || r.code != 0 && !(strings.Contains(r.stderr, source) && named(r.stderr)) {
				t.Errorf("QEMU killed after %s: %+v, but the snapshot is %q", moment, r, status)
			}
			f.checked(tag, status)
		}
		f.clean()
	})
}

// TestBranchMachineSilent: QEMU does not answer in a branch, longer than anybody waits for it in the pause, and then goes on.
// Whoever asked is told, or gets the snapshot late; the source is as it was.
func TestBranchMachineSilent(t *testing.T) {
	if !testenv.Soak() && os.Getenv("FORKD_TEST_SILENT") == "" {
		t.Skip("a minute for each moment: make soak, or set FORKD_TEST_SILENT to how many")
	}
	// The order to stop, and after it the end of the capture, are waited for 20 s each.
	const silence = 45 * time.Second
	branching(t, shared(t), func(t *testing.T, f *forkd, mode string) {
		source := f.one()
		f.fire(source, 48)
		f.branch(source, "--mode", mode) // the next are soon at their pause
		pid := f.sandbox(source).PID
		n := number(t, "FORKD_TEST_SILENT", 6, 6)
		for i := range n {
			tag := fmt.Sprintf("silent-%s-%d", mode, i)
			c := f.start("branch", source, "-t", tag, "--mode", mode)
			moment := time.Duration(i)*200*time.Millisecond/time.Duration(n) + rand.N(30*time.Millisecond)
			pass(t, moment)
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			pass(t, silence)
			if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			f.ask(source, "check", 0)
			r := c.wait(t, 3*time.Minute)
			await(t, time.Minute, "the source to be free", func() bool { return f.try("resume", source).code == 0 })
			status := f.settled(tag)
			t.Logf("QEMU silent after %s: code %d, %q, then %s", moment, r.code, firstLine(r.stderr), status)
			if r.code == 0 != (status == "ready") || r.code != 0 && !strings.Contains(r.stderr, source) {
				t.Errorf("QEMU silent after %s: %+v, but the snapshot is %q", moment, r, status)
			}
			f.checked(tag, status)
			again := f.branch(source, "--mode", mode)
			child := f.forkOf(again.Tag, 1)[0].ID
			f.ask(child, "check", 0)
			f.run("kill", child)
		}
		f.run("kill", source)
		f.clean()
	})
}

// checked has a child of a branch that became ready check itself, and removes whatever came of the branch.
func (f *forkd) checked(tag, status string) {
	f.t.Helper()
	if status == "ready" {
		child := f.forkOf(tag, 1)[0].ID
		f.ask(child, "check", 0)
		f.run("kill", child)
	}
	if status != "" {
		f.run("rmi", tag)
	}
}

// named reports whether a message names the death of the machine.
func named(message string) bool {
	for _, word := range []string{"signal 9", "the process is gone", "is failed", "ended meanwhile"} {
		if strings.Contains(message, word) {
			return true
		}
	}
	return false
}

func firstLine(s string) string {
	first, _, _ := strings.Cut(s, "\n")
	return first
}

// TestBranchClientGone: whoever asked for a branch goes away. The source runs on; the snapshot is right, or there is none.
func TestBranchClientGone(t *testing.T) {
	branching(t, shared(t), func(t *testing.T, f *forkd, mode string) {
		source := f.one()
		f.fire(source, 48)
		for i, moment := range moments(t) {
			tag := fmt.Sprintf("gone-%s-%d", mode, i)
			c := f.start("branch", source, "-t", tag, "--mode", mode)
			pass(t, moment)
			_ = c.cmd.Process.Kill()
			<-c.done
			asked := time.Now()
			f.ask(source, "report", 0)
			if took := time.Since(asked); took > testenv.Timeout(time.Second) {
				t.Errorf("the source answered after %s", took)
			}
			await(t, time.Minute, "the source to be free", func() bool {
				r := f.try("resume", source)
				return r.code == 0
			})
			status := f.settled(tag)
			t.Logf("client gone after %s: %q", moment, status)
			f.checked(tag, status)
		}
		s := f.branch(source, "--mode", mode)
		f.ask(f.forkOf(s.Tag, 1)[0].ID, "check", 0)
		f.ask(source, "check", 0)
	})
}

// TestBranchSourceKilled: the source is ended in a branch of it.
func TestBranchSourceKilled(t *testing.T) {
	branching(t, shared(t), func(t *testing.T, f *forkd, mode string) {
		for i, moment := range moments(t) {
			tag := fmt.Sprintf("ended-%s-%d", mode, i)
			source := f.one()
			f.fire(source, 48)
			c := f.start("branch", source, "-t", tag, "--mode", mode)
			pass(t, moment)
			f.run("kill", source)
			r := c.wait(t, time.Minute)
			status := f.settled(tag)
			t.Logf("source killed after %s: code %d, %q, then %s", moment, r.code, firstLine(r.stderr), status)
			if r.code == 0 != (status == "ready") {
				t.Errorf("source killed after %s: %+v, but the snapshot is %q", moment, r, status)
			}
			f.checked(tag, status)
		}
		f.clean()
	})
}

// TestBranchDaemonKilled: the daemon dies in a branch, under fire. The source answers a moment after the next one is
// there, what was being written is failed and can be removed, and everything can be done again.
func TestBranchDaemonKilled(t *testing.T) {
	f := copied(t)
	branching(t, f, func(t *testing.T, f *forkd, mode string) {
		source := f.one()
		f.fire(source, 48)
		before := storedBytes(t, f.home)
		for i, moment := range moments(t) {
			tag := fmt.Sprintf("orphan-%s-%d", mode, i)
			c := f.start("branch", source, "-t", tag, "--mode", mode)
			if i == 0 { // certainly while it is written
				c.wait(t, time.Minute)
				c = f.start("branch", source, "-t", tag+"-now", "--mode", mode, "--no-wait")
				c.wait(t, time.Minute)
				moment = 0
			}
			pass(t, moment)
			f.killDaemon()
			c.wait(t, time.Minute)
			f.run("daemon", "start")
			up := time.Now()
			f.run("exec", source, "--", "true")
			answered := time.Since(up)
			f.ask(source, "check", 0)
			status := f.tags()
			t.Logf("daemon killed after %s: answered after %s; %v", moment, answered, status)
			if answered > testenv.Timeout(time.Second) {
				t.Errorf("daemon killed after %s: the source answered after %s", moment, answered)
			}
			if status[tag] == "writing" || status[tag+"-now"] == "writing" {
				t.Errorf("somebody still writes: %v", status)
			}
			for _, tag := range []string{tag + "-now", tag} {
				switch status[tag] {
				case "failed":
					if r := f.try("fork", tag); r.code != 1 || !strings.Contains(r.stderr, "failed") || !strings.Contains(r.stderr, "try:") {
						t.Errorf("fork of a failed one: %+v", r)
					}
				case "ready":
					child := f.forkOf(tag, 1)[0].ID
					f.ask(child, "check", 0)
					f.run("kill", child)
				}
				if status[tag] != "" {
					f.run("rmi", tag)
				}
			}
		}
		s := f.branch(source, "-t", "after-"+mode, "--mode", mode)
		child := f.forkOf(s.Tag, 1)[0].ID
		f.ask(child, "check", 0)
		f.run("kill", child, source)
		f.remove(s.Tag)
		f.clean()
		if after := storedBytes(t, f.home); after > before+1<<20 {
			t.Errorf("the layers took %.1f MiB before and %.1f after", mib(before), mib(after))
		}
	})
}

// TestBranchFullStore: there is no room for what a branch adds. The source runs on, the reason is said, nothing is left.
func TestBranchFullStore(t *testing.T) {
	testenv.Need(t, "root", "agent")
	shared(t)
	f := aloneOn(t, "1g")
	dir := filepath.Dir(f.home)
	for _, sub := range []string{"layers", "images", "snapshots"} {
		if err := os.CopyFS(filepath.Join(f.home, sub), os.DirFS(filepath.Join(suite.home, sub))); err != nil {
			t.Fatal(err)
		}
	}
	branching(t, f, func(t *testing.T, f *forkd, mode string) {
		source := f.one() // which makes the image hot, and that takes room, too
		f.fire(source, 48)
		f.run("exec", source, "--", "sync") // Its disk is in the same place.
		if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT, fmt.Sprintf("size=%d", inUse(t, dir)+24<<20)); err != nil {
			t.Fatal(err)
		}
		before := storedBytes(t, f.home)
		r := f.try("branch", source, "-t", "full", "--mode", mode)
		if r.code != 1 || !strings.Contains(r.stderr, "no space left") || !strings.Contains(r.stderr, "try:") || !strings.Contains(r.stderr, source) {
			t.Errorf("branch on a full disk: %+v", r)
		}
		if status := f.settled("full"); status == "ready" {
			t.Errorf("the snapshot is %s", status)
		} else if status != "" {
			f.run("rmi", "full")
		}
		f.ask(source, "check", 0)
		await(t, 20*time.Second, "what it wrote to be collected", func() bool { return storedBytes(t, f.home) <= before })
		if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT, "size=1g"); err != nil {
			t.Fatal(err)
		}
		s := f.branch(source, "-t", "not-full", "--mode", mode)
		f.ask(f.forkOf(s.Tag, 1)[0].ID, "check", 0)
	})
}

// inUse is what is taken of a file system.
func inUse(t *testing.T, dir string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize
}

// TestBranchFullMemory: from some moment of a branch on there is no more memory for the copy of the machine's. Files in memory
// cannot be given a size of their own, so it is the daemon's files that may not grow. The source runs on, the reason is
// said, and nothing is left.
func TestBranchFullMemory(t *testing.T) {
	f := copied(t)
	branching(t, f, func(t *testing.T, f *forkd, mode string) {
		list := moments(t)
		if !testenv.Soak() {
			if mode == diff {
				t.Skip("much the same as a full store: make soak")
			}
			list = list[:2]
		}
		source := f.one()
		f.fire(source, 48)
		before := storedBytes(t, f.home)
		room := uint64(4 << 20)
		if mode == diff {
			room = 64 << 10 // Its copy is in no file; what is written of it is, in pieces.
		}
		for i, moment := range list {
			tag := fmt.Sprintf("cramped-%s-%d", mode, i)
			if i == 0 { // certainly when it begins
				f.cramp(room)
			}
			c := f.start("branch", source, "-t", tag, "--mode", mode)
			pass(t, moment)
			f.cramp(room)
			r := c.wait(t, time.Minute)
			status := f.settled(tag)
			f.cramp(unix.RLIM_INFINITY)
			f.ask(source, "check", 0)
			t.Logf("no room after %s: code %d, %q, then %s", moment, r.code, firstLine(r.stderr), status)
			if r.code == 0 != (status == "ready") || i == 0 && r.code == 0 {
				t.Errorf("no room after %s: %+v, but the snapshot is %q", moment, r, status)
			}
			if r.code != 0 && !(strings.Contains(r.stderr, source) && strings.Contains(r.stderr, "file too large") && !strings.Contains(r.stderr, "deadline")) {
				t.Errorf("no room after %s: %s", moment, r.stderr)
			}
			f.checked(tag, status)
		}
		s := f.branch(source, "-t", "roomy-"+mode, "--mode", mode)
		child := f.forkOf(s.Tag, 1)[0].ID
		f.ask(child, "check", 0)
		f.run("kill", child, source)
		f.remove(s.Tag)
		f.clean()
		if after := storedBytes(t, f.home); after > before+1<<20 {
			t.Errorf("the layers took %.1f MiB before and %.1f after", mib(before), mib(after))
		}
	})
}

// cramp bounds the size that files may get which the daemon writes.
func (f *forkd) cramp(size uint64) {
	f.t.Helper()
	if err := unix.Prlimit(f.status().PID, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: size, Max: unix.RLIM_INFINITY}, nil); err != nil {
		f.t.Fatal(err)
	}
}
