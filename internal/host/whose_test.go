package host

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// inContainer starts a process that is called a VM's in a mount namespace of its own, where dir is another directory, and has a
// machine's below it in which the process works. Where this test is in a chroot the kernel names the files of another mount
// namespace from that one's root.
func inContainer(t *testing.T, dir, machine string) (pid int) {
	t.Helper()
	testenv.Need(t, "root")
	name := filepath.Join(t.TempDir(), "qemu-system-none")
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(sleep)
	if err == nil {
		err = os.WriteFile(name, text, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	script := `mount -t tmpfs none "$1" && mkdir -p "$1/$2" && cd "$1/$2" && exec "$3" 600`
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-ec", script, "sh", dir, machine, name)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	limit := time.After(testenv.Timeout(20 * time.Second))
	for {
		if exe, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "exe")); err == nil && strings.HasSuffix(exe, name) {
			return cmd.Process.Pid
		}
		select {
		case err := <-ended:
			t.Skipf("no mount namespace to be had: %v", err)
		case <-limit:
			t.Fatal("it does not start")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// TestContainersMachines: what works in a directory of the same name that is another one is nobody's here.
func TestContainersMachines(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	ctx := t.Context()
	machine := strings.Repeat("a", 24)

	machines := h.cfg.Home.Machines()
	pid := inContainer(t, machines, machine)
	if cwd, err := os.Readlink(cwdOf(pid)); err != nil || !strings.HasSuffix(cwd, filepath.Join(machines, machine)) {
		t.Fatalf("it works in %q, %v", cwd, err)
	}
	found, err := machinesBelow(machines)
	if err != nil || slices.ContainsFunc(found, func(m *left) bool { return slices.Contains(m.pids, pid) }) {
		t.Errorf("a container's machine is taken for one of this home: %+v, %v", found, err)
	}

	elsewhere := t.TempDir()
	inContainer(t, elsewhere, "home/machines/"+machine)
	if found, err := h.Leftovers(ctx); err != nil || len(found) != 0 {
		t.Errorf("a container's machines are leftovers: %+v, %v", found, err)
	}
}
