package main

import (
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// monitorNice is the priority of the runtime's monitor thread: low enough not to interrupt who works, and with a CPU that
// somebody else keeps busy its turn still comes within a tick or two.
const monitorNice = 10

// threads are those of this program, of which one is the monitor.
type threads struct {
	monitor int
	seen    atomic.Int64 // how many the runtime had made when level last looked
}

// lowerMonitor gives the runtime's monitor thread a lower priority. While anything runs it looks after it every 20 µs, which is
// two switches of tasks and a timer each time: of an exec, a sixth of its time under emulation.
func lowerMonitor() *threads {
	t := &threads{}
	ids := tasks()
	if len(ids) == 0 {
		return t // there is no telling
	}
	t.monitor = ids[0] // started before any other
	_ = unix.Setpriority(unix.PRIO_PROCESS, t.monitor, monitorNice)
	return t
}

// level gives all threads but the monitor the usual priority again. The monitor makes a thread itself when a system call
// takes long and nobody is there to go on with the rest, and that one is of the monitor's priority and so is whatever it
// starts. Threads are made seldom, and nothing is done unless there are more of them.
func (t *threads) level() {
	made, _ := runtime.ThreadCreateProfile(nil)
	if t.monitor == 0 || t.seen.Swap(int64(made)) == int64(made) {
		return
	}
	for _, id := range tasks() {
		if id != t.monitor {
			_ = unix.Setpriority(unix.PRIO_PROCESS, id, 0) // it may have ended
		}
	}
}

// tasks are the threads of this program but the first, the oldest first; none when the kernel does not tell.
func tasks() []int {
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return nil
	}
	var ids []int
	for _, e := range entries {
		if id, err := strconv.Atoi(e.Name()); err == nil && id != os.Getpid() {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}
