package testenv

import (
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { Main(m.Run) }

// TestLeaks makes one leak of each kind, sees it reported, ends it, and sees nothing reported.
func TestLeaks(t *testing.T) {
	for _, test := range []struct {
		kind string
		leak func(t *testing.T, dir string) (end func())
	}{
		{"process", leakProcess},
		{"descriptor", leakDescriptor},
		{"goroutine", leakGoroutine},
		{"mapping", leakMapping},
		{"file", leakFile},
	} {
		t.Run(test.kind, func(t *testing.T) {
			dir := t.TempDir()
			before := look(dir, []string{dir})
			end := test.leak(t, dir)
			leaks := settle(before, dir, []string{dir}, 100*time.Millisecond)
			end()
			if !strings.Contains(strings.Join(leaks, "\n"), test.kind+" (1)") {
				t.Errorf("leaked a %s, reported: %q", test.kind, leaks)
			}
			if leaks := settle(before, dir, []string{dir}, Timeout(5*time.Second)); len(leaks) > 0 {
				t.Errorf("ended the %s, still reported: %q", test.kind, leaks)
			}
		})
	}
}

// leakProcess leaves a grandchild, which is no child of ours any more: what a killed daemon leaves.
func leakProcess(t *testing.T, dir string) func() {
	command := exec.CommandContext(t.Context(), "sh", "-c", `sleep 600 </dev/null >/dev/null 2>&1 & echo $! >pid`)
	command.Dir = dir
	if err := command.Run(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "pid")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Error(err)
		}
	}
}

func leakDescriptor(t *testing.T, _ string) func() {
	file, err := os.Open("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	return func() { _ = file.Close() }
}

func leakGoroutine(_ *testing.T, _ string) func() {
	stop := make(chan struct{})
	go func() { <-stop }()
	return func() { close(stop) }
}

func leakMapping(t *testing.T, _ string) func() {
	fd, err := unix.MemfdCreate("leak", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	data, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Munmap(data); err != nil {
			t.Error(err)
		}
	}
}

func leakFile(t *testing.T, dir string) func() {
	path := filepath.Join(dir, "left")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return func() { _ = os.Remove(path) }
}

// TestGoItselfIsNoLeak: what Go starts at first use stays, and is nobody's fault.
func TestGoItselfIsNoLeak(t *testing.T) {
	dir := t.TempDir()
	before := look(dir, []string{dir})
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGUSR2)
	signal.Stop(signals)
	_ = netip.MustParseAddr("fe80::1%zone")
	collected := make(chan struct{})
	runtime.AddCleanup(&struct{ large [64]byte }{}, func(done chan struct{}) { close(done) }, collected)
	if leaks := settle(before, dir, []string{dir}, Timeout(5*time.Second)); len(leaks) > 0 {
		t.Errorf("reported: %q", leaks)
	}
	<-collected
}

func TestMainInAHelperProcess(t *testing.T) {
	// The run's variable is set in this very process: a copy of this binary must not check again.
	if os.Getenv(envRun) == "" || os.Getenv("TMPDIR") != os.Getenv(envRun) {
		t.Fatalf("%s=%q TMPDIR=%q", envRun, os.Getenv(envRun), os.Getenv("TMPDIR"))
	}
}
