package main

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

// TestMonitor: the thread that is given a lower priority is the one that only sleeps and looks, which no goroutine ever runs on.
func TestMonitor(t *testing.T) {
	all := tasks()
	if len(all) == 0 {
		t.Fatal("no thread is the monitor")
	}
	id := all[0]
	name := fmt.Sprintf("/proc/self/task/%d/syscall", id)
	want := fmt.Sprintf("%d ", unix.SYS_NANOSLEEP)
	deadline := time.Now().Add(testenv.Timeout(10 * time.Second))
	for time.Now().Before(deadline) {
		if unix.Gettid() == id {
			t.Fatal("this goroutine runs on it")
		}
		call, err := os.ReadFile(name)
		if err != nil {
			t.Skipf("the kernel does not tell which call a thread is in: %v", err)
		}
		if strings.HasPrefix(string(call), want) {
			return
		}
	}
	t.Error("it never sleeps for a moment, as the monitor does while others run")
}

// TestLevel: threads that have the monitor's priority get the usual one, the monitor keeps its own, and nothing is done
// while there are no more threads than last time.
func TestLevel(t *testing.T) {
	if unix.Geteuid() != 0 {
		t.Skip("only root raises a priority")
	}
	all := lowerMonitor()
	if all.monitor == 0 {
		t.Fatal("no thread is the monitor")
	}
	t.Cleanup(func() { _ = unix.Setpriority(unix.PRIO_PROCESS, all.monitor, 0) })
	priority := func(id int) int {
		p, err := unix.Getpriority(unix.PRIO_PROCESS, id)
		if err != nil {
			t.Fatal(err)
		}
		return 20 - p // as the system call has it
	}
	id, end := make(chan int), make(chan struct{})
	defer close(end)
	low := os.Getpid()
	for low == os.Getpid() { // the first thread was not made by another
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			_ = unix.Setpriority(unix.PRIO_PROCESS, 0, monitorNice)
			id <- unix.Gettid()
			<-end
		}()
		low = <-id
	}
	all.level()
	if got := []int{priority(low), priority(all.monitor)}; !slices.Equal(got, []int{0, monitorNice}) {
		t.Errorf("the thread and the monitor have priorities %d", got)
	}
	made, _ := runtime.ThreadCreateProfile(nil)
	all.seen.Store(int64(made))
	_ = unix.Setpriority(unix.PRIO_PROCESS, low, monitorNice)
	all.level()
	if got := priority(low); got != monitorNice {
		t.Errorf("the same threads were looked at again: %d", got)
	}
}
