package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

// TestMonitor: the thread that is given a lower priority is the one that only sleeps and looks, which no goroutine ever runs on.
func TestMonitor(t *testing.T) {
	id := monitor()
	if id == 0 {
		t.Fatal("no thread is the monitor")
	}
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
