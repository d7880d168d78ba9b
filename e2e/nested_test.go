package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// A host whose control groups are of version 2: a guest with systemd and QEMU. Its systemd is started once the groups above
// it hand down all controllers.
const (
	hostRecipe = `name: host-with-groups
base: debian:bookworm
packages: [systemd, dbus, libpam-systemd, procps, qemu-system-x86]
machine: {cpus: 2, memory: 1536MiB, disk: 4GiB}
warmup:
  command: [sh, -ec, 'for d in /sys/fs/cgroup /sys/fs/cgroup/user; do echo "+memory +io" >$d/cgroup.subtree_control; done']
`
	hostWithSystemd = `name: host
base: snapshot:host-with-groups
init: systemd
`
	// Emulation within emulation.
	nestedTime = 20 * time.Minute
)

// nestedHome is a home with one snapshot of the smallest machine, as a tar file.
func nestedHome(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	tree, file, archive := filepath.Join(dir, "tree"), filepath.Join(dir, "root.ext4"), filepath.Join(dir, "home.tar")
	if err := os.MkdirAll(filepath.Join(tree, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	command := func(name string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(tree, "bin", "small"), "forkd.dev/forkd/e2e/small")
	command("mke2fs", "-q", "-t", "ext4", "-b", "4096", "-E", "root_owner=0:0", "-d", tree, file, "32M")
	f := alone(t)
	f.run("snapshot", "--rootfs", file, "-t", "small", "--memory", "128MiB")
	f.run("daemon", "stop", "--kill")
	command("tar", "-C", f.home, "-cf", archive, "layers", "images", "snapshots")
	return archive
}

// TestNestedHost: a whole daemon on a host that has control groups of version 2 alone, as the unit that is installed: it forks a
// child in a whole jail, which answers; limits of memory and of processor time are held. The same for a user whom systemd hands
// a part of the groups down to.
func TestNestedHost(t *testing.T) {
	if !testenv.Soak() {
		t.Skip("machines within machines take half an hour; set FORKD_SOAK=1")
	}
	testenv.OncePerRun(t)
	testenv.Need(t, "net", "keyring", "mke2fs")
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("the program of the small machine is built here, and there is no go in PATH")
	}
	f := shared(t)
	archive := nestedHome(t)
	f.run("build", recipeText(t, hostRecipe), "-t", "host-with-groups", "--replace")
	f.run("build", recipeText(t, hostWithSystemd), "-t", "host", "--replace")
	t.Cleanup(func() { f.try("rmi", "host"); f.try("rmi", "host-with-groups") })
	id := f.forkOf("host", 1)[0].ID
	in := func(script string) string {
		t.Helper()
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), nestedTime)
		defer cancel()
		r := runIn(ctx, f.bin, f.home, f.env, nil, "exec", id, "--timeout", nestedTime.String(), "--", "bash", "-c", script)
		t.Logf("%s:\n%s%s", time.Since(begin).Round(time.Second), r.stdout, r.stderr)
		return strings.TrimSpace(r.stdout)
	}
	if got := in("cat /sys/fs/cgroup/cgroup.controllers"); got != "cpu io memory pids" {
		t.Fatalf("its controllers are %q", got)
	}
	f.run("cp", "-r", filepath.Join(installed(t, "/usr/local"), "usr/local")+"/.", id+":/usr/local")
	f.run("cp", archive, id+":/root/home.tar")
	if got := in(`mkdir -p /etc/forkd && echo FORKD_GUEST_PATIENCE_SECONDS=900 >/etc/forkd/forkd.env
		mkdir -m 700 -p /var/lib/forkd && tar -C /var/lib/forkd -xf /root/home.tar
		systemctl daemon-reload && systemctl start forkd.service; systemctl is-active forkd.service`); got != "active" {
		t.Fatalf("the service is %q\n%s", got, in("journalctl --no-pager -u forkd.service"))
	}
	const daemon = "f='forkd --no-autostart'\n"
	if got := in(daemon + "$f doctor"); !strings.Contains(got, "pass  confinement") || !strings.Contains(got, "pass  cgroups        version 2 at ") {
		t.Errorf("it lacks layers or control groups")
	}
	if got := in(daemon + "id=$($f fork small) && $f exec $id --timeout 10m -- /bin/small 2>&1"); got != "a small program" {
		t.Errorf("its child says %q", got)
	}
	checkNestedLimits(t, in, daemon, "/sys/fs/cgroup/system.slice")

	// As a user.
	in(`useradd -m u; mkdir -p /etc/systemd/system/user@.service.d
		printf '[Service]\nDelegate=cpu memory pids io\n' >/etc/systemd/system/user@.service.d/delegate.conf
		systemctl daemon-reload && loginctl enable-linger u
		mkdir -p /home/u/.local/share/forkd && tar -C /home/u/.local/share/forkd -xf /root/home.tar && chown -R u:u /home/u`)
	as := "as() { su u -c \"export XDG_RUNTIME_DIR=/run/user/$(id -u u) DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/$(id -u u)/bus; $*\"; }\n"
	in(as + `as "FORKD_GUEST_PATIENCE_SECONDS=900 systemd-run --user --scope -p Delegate=yes forkd serve" >/root/serve.log 2>&1 &
		for i in $(seq 100); do as forkd --no-autostart ls >/dev/null 2>&1 && break; sleep 1; done; cat /root/serve.log`)
	checkNestedLimits(t, in, as+"f='as forkd --no-autostart'\n", "/sys/fs/cgroup/user.slice")
}

// checkNestedLimits forks children that are limited, by the daemon that $f is after the words given: one spins, one takes more memory than
// it may have.
func checkNestedLimits(t *testing.T, in func(string) string, words, below string) {
	t.Helper()
	const group = `g=$(dirname $(find ` + "BELOW" + ` -path '*/forkd-*/*/cpu.max' | xargs grep -l '^30000 '))` + "\n"
	used := in(words + `$f kill --all >/dev/null; id=$($f fork small --cpu-limit 30%); $f exec $id --timeout 15m -d -- /bin/small spin >/dev/null` + "\n" +
		strings.ReplaceAll(group, "BELOW", below) +
		`a=$(grep -h ^usage_usec $g/cpu.stat | cut -d' ' -f2); b=$(date +%s%6N); sleep 20
		c=$(grep -h ^usage_usec $g/cpu.stat | cut -d' ' -f2); d=$(date +%s%6N); echo "share $((1000 * (c - a) / (d - b)))"; grep ^nr_throttled $g/cpu.stat`)
	var share, throttled int
	for line := range strings.Lines(used) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch name {
		case "share":
			share, _ = strconv.Atoi(value)
		case "nr_throttled":
			throttled, _ = strconv.Atoi(value)
		}
	}
	if share > 330 || share < 30 || throttled == 0 {
		t.Errorf("a child with a limit of 30 %% had %d thousandths of a processor, and was held up %d times", share, throttled)
	}
	got := in(words + `$f kill --all >/dev/null; id=$($f fork small --memory-limit 64MiB); $f exec $id --timeout 15m -- /bin/small eat 48 >/dev/null 2>&1
		for i in $(seq 60); do $f inspect $id >/tmp/state; grep -q '"failed"' /tmp/state && break; sleep 1; done; cat /tmp/state`)
	if !strings.Contains(got, `"state": "failed"`) || !strings.Contains(got, `"reason": "memory limit`) {
		t.Errorf("a child that took more memory than its limit is:\n%s", got)
	}
	if left := in(words + "$f kill --all >/dev/null; sleep 2; find " + below + " -path '*/forkd-*/*/cpu.max'"); left != "" {
		t.Errorf("groups are left: %s", left)
	}
}
