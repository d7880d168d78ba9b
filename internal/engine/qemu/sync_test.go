package qemu_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/testenv"
)

// TestNothingSyncs watches QEMU's system calls through captures of a guest that has just written its disk: a sync, in
// the pause or out of it, would make the guest wait for the host's medium.
func TestNothingSyncs(t *testing.T) {
	e := newEngine(t)
	if _, err := exec.LookPath("strace"); err != nil {
		testenv.Missing(t, "strace", "install the package strace")
	}
	features, err := e.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	kit := enginetest.NewKit(t)
	base := frozen(t, e, kit, captureCase{memory: 128, used: 1})
	defer base.Memory.Close()
	spec := kit.Spec(t, 1)
	spec.Boot = nil
	s := enginetest.NewSource(t, e, spec, base)
	g := enginetest.Talk(t, s.M)
	s.Capture(t, engine.CaptureDiff) // Its disk is a qcow2 now, like the product's.
	log := filepath.Join(t.TempDir(), "calls")
	stop := watchCalls(t, s.M.Ref().PID, log)
	modes := []engine.CaptureMode{engine.CaptureDiff}
	if features.Live {
		modes = append(modes, engine.CaptureLive)
	}
	for i, mode := range modes {
		for j := range 16 {
			g.Do(fmt.Sprintf("write %d written-before-%s", (16*i+j)<<14, mode))
		}
		s.Capture(t, mode)
	}
	g.Do("write 4096 written-after")
	stop()
	calls, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(calls), "pwrite") {
		t.Errorf("the watch saw no write to the disk, so it sees nothing:\n%.2000s", calls)
	}
	for line := range strings.Lines(string(calls)) {
		if strings.Contains(line, "sync") {
			t.Errorf("QEMU synced: %s", line)
		}
	}
}

// watchCalls writes the calls of all threads of a process to a file, until stop is called.
func watchCalls(t *testing.T, pid int, log string) (stop func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "strace", "-f", "-p", strconv.Itoa(pid), "-o", log,
		"-e", "trace=fsync,fdatasync,sync_file_range,syncfs,sync,msync,io_uring_enter,pwrite64,pwritev,pwritev2")
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(said)
	if !lines.Scan() || !strings.Contains(lines.Text(), "attached") {
		t.Skipf("strace cannot watch processes here: %s", lines.Text())
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for lines.Scan() {
		}
	}()
	return func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		<-drained
		_ = cmd.Wait() // It ends with the signal's status.
	}
}
