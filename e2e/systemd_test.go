package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

const systemdRecipe = `name: systemd
base: debian:bookworm
packages: [systemd]
init: systemd
machine: {cpus: 1, memory: 512MiB, disk: 4GiB}
files:
  - path: /etc/systemd/system/tick.service
    content: |
      [Unit]
      StartLimitIntervalSec=0
      [Service]
      Type=oneshot
      ExecStart=/bin/sh -c 'echo tick >>/run/ticks'
  - path: /etc/systemd/system/tick.timer
    content: |
      [Timer]
      OnActiveSec=1
      OnUnitActiveSec=1
      AccuracySec=100ms
  - path: /etc/systemd/system/hello.service
    content: |
      [Service]
      ExecStart=/bin/sh -c 'echo hello from a unit; exec sleep 1000'
warmup:
  command: [systemctl, start, tick.timer]
`

// TestSystemd: an image's systemd runs in the snapshot and goes on in every child.
func TestSystemd(t *testing.T) {
	testenv.OncePerRun(t)
	testenv.Need(t, "net", "keyring")
	f := shared(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "recipe.yaml"), []byte(systemdRecipe), 0o600); err != nil {
		t.Fatal(err)
	}
	f.run("build", dir, "-t", "systemd", "--replace")
	t.Cleanup(func() { f.try("rmi", "systemd") })
	children := f.forkOf("systemd", 2)
	machineIDs := map[string]bool{}
	for _, c := range children {
		in := func(command string) string {
			t.Helper()
			return strings.TrimSuffix(f.run("exec", c.ID, "--", "sh", "-c", command), "\n")
		}
		if got := in("systemctl is-system-running --wait || true"); got != "running" {
			t.Errorf("the system is %q\n%s", got, in("systemctl --failed --no-pager --plain"))
		}
		if got := in("cat /proc/1/comm"); got != "systemd" {
			t.Errorf("process 1 is %q", got)
		}
		if got := in("hostname"); got != c.ID {
			t.Errorf("its name is %q, not %s", got, c.ID)
		}
		in("systemctl start hello.service")
		if got := in("systemctl is-active hello.service"); got != "active" {
			t.Errorf("the unit is %q", got)
		}
		await(t, 20*time.Second, "the journal to have the unit's line", func() bool {
			return strings.Contains(in("journalctl --no-pager -u hello.service"), "hello from a unit")
		})
		id := in("cat /etc/machine-id")
		if machineIDs[id] || len(id) != 32 {
			t.Errorf("machine id %q, others are %v", id, machineIDs)
		}
		machineIDs[id] = true
		if got := in("ls -d /run/log/journal/" + id + " /var/log/journal/" + id + " 2>/dev/null | wc -l"); got != "1" {
			t.Errorf("%s journals of this machine's id", got)
		}
		ticks := in("wc -l </run/ticks")
		await(t, 20*time.Second, "the timer to go on", func() bool { return in("wc -l </run/ticks") != ticks })
	}

	checkService(t, f, children[1].ID)

	// It is frozen with the rest, and its clock is right again.
	first := children[0].ID
	f.run("pause", first)
	f.run("resume", first)
	if got := strings.TrimSpace(f.run("exec", first, "--", "systemctl", "is-active", "hello.service")); got != "active" {
		t.Errorf("after a pause the unit is %q", got)
	}
	// Switching off inside ends the sandbox, with a reason.
	f.try("exec", first, "--", "systemctl", "poweroff", "--force")
	await(t, 30*time.Second, "the sandbox to end", func() bool { return f.sandbox(first).State == "failed" })
	if got := f.run("logs", first); !strings.Contains(got, "switched off from inside") {
		t.Errorf("its console does not say why: %s", got)
	}
}
