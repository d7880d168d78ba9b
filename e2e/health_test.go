package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// TestGuestIsAPlaceForPrograms: what programs take for granted of a machine is there, in a fork.
func TestGuestIsAPlaceForPrograms(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	for command, want := range map[string]string{
		"cat /proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"cat /proc/sys/net/ipv4/ping_group_range":           "0\t2147483647",
		"ulimit -c":                               "0",
		"ulimit -Sn":                              "1024",
		"ulimit -Hn":                              "524288",
		"stat -c %a /tmp /var/tmp /dev/shm":       "1777\n1777\n1777",
		"stat -f -c %T /dev/shm /dev/pts":         "tmpfs\ndevpts",
		"stat -f -c %T /run":                      "tmpfs",
		"readlink /dev/fd /dev/stdin /dev/stdout": "/proc/self/fd\n/proc/self/fd/0\n/proc/self/fd/1",
		"echo through | cat /dev/stdin":           "through",
		"grep -c localhost /etc/hosts":            "2",
		"test -s /etc/resolv.conf && echo yes":    "yes",
		"hostname -f":                             id,
		"cat /etc/hostname":                       id,
		"cat /sys/class/net/lo/operstate":         "unknown", // what the kernel says of loopback that is up
		"echo $LANG $TZ":                          "C.UTF-8",
		"date +%Z":                                "UTC",
		"wc -l </proc/swaps":                      "1",
		"cat /proc/sys/vm/max_map_count":          "262144",
		"test -w /dev/null && test -e /dev/mqueue && test -r /dev/urandom && echo yes": "yes",
	} {
		if got := strings.TrimSuffix(f.run("exec", id, "--", "sh", "-c", command), "\n"); got != want {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
	// A name that nobody knows is refused at once: there is nobody to ask.
	start := time.Now()
	got := f.run("exec", id, "--", "python3", "-c", `
import socket, time
t = time.monotonic()
try:
    socket.getaddrinfo("no.such.example", 80)
except socket.gaierror as e:
    print("refused", time.monotonic() - t < 5)
socket.create_server(("127.0.0.1", 80)).close()
print(socket.getfqdn())`)
	if want := "refused True\n" + id + "\n"; got != want {
		t.Errorf("names: %q, want %q (%s)", got, want, time.Since(start))
	}
}

// TestOutOfMemory: who is killed for want of memory is said to have been, and the machine goes on.
func TestOutOfMemory(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	const hog = "b = []\nwhile True: b.append(b'x' * (4 << 20))"
	for name, command := range map[string][]string{
		"itself":        {"python3", "-c", hog},
		"under a shell": {"sh", "-c", "python3 -c \"$0\"; exit $?", hog},
	} {
		r := f.try(append([]string{"exec", id, "--"}, command...)...)
		if r.code != 137 || !strings.Contains(r.stderr, "killed: out of memory") || !strings.Contains(r.stderr, "python3") {
			t.Errorf("%s: exit code %d, %s", name, r.code, r.stderr)
		}
	}
	if r := f.try("exec", id, "--", "sh", "-c", "kill -9 $$"); r.code != 137 || strings.Contains(r.stderr, "memory") {
		t.Errorf("killed by itself: exit code %d, %s", r.code, r.stderr)
	}
	if r := f.try("eval", id, hog); r.code == 0 || !strings.Contains(r.stderr, "out of memory") {
		t.Errorf("a context: exit code %d, %s", r.code, r.stderr)
	}
	if got := f.run("exec", id, "--", "echo", "alive"); got != "alive\n" {
		t.Errorf("afterwards: %q", got)
	}
	if m := f.metrics(id); m.OOMKills < 3 {
		t.Errorf("%d kills are counted, want 3", m.OOMKills)
	}
}

// TestForkBomb: beside programs that start programs without end others can be started, and end them.
func TestForkBomb(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	const group = "g=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup); "
	limits := strings.Fields(f.run("exec", id, "--", "sh", "-c", group+"cat $g/pids.max /sys/fs/cgroup/user/pids.max /proc/sys/kernel/threads-max"))
	var n [3]int
	for i := range n {
		var err error
		if n[i], err = strconv.Atoi(limits[i]); err != nil {
			t.Fatalf("limits %v: %v", limits, err)
		}
	}
	if n[0] < 100 || 2*n[0] >= n[1] || n[1] > n[2]-100 {
		t.Errorf("a program may have %d tasks, all together %d, the kernel has %d", n[0], n[1], n[2])
	}
	// A lower limit, because starting thousands takes minutes under emulation.
	f.run("exec", id, "-d", "--", "sh", "-c", group+"echo 150 >$g/pids.max; while :; do sleep 1000 & done")
	await(t, 120*time.Second, "the bomb to have gone off", func() bool { return f.metrics(id).Processes > 140 })
	for range 3 {
		if got := f.run("exec", id, "--", "echo", "room"); got != "room\n" {
			t.Errorf("beside it: %q", got)
		}
	}
	f.run("exec", id, "--", "sh", "-c",
		"for p in /sys/fs/cgroup/user/proc/p*/; do [ $(cat $p/pids.current) -lt 20 ] || echo 1 >$p/cgroup.kill; done")
	await(t, 30*time.Second, "it to end", func() bool { return f.metrics(id).Processes < 50 })

	// Nor do those take the time of others that do not sleep: by processes, what is started has a hundredth of it.
	start := func() time.Duration {
		least := time.Hour
		for range 3 {
			begin := time.Now()
			f.run("exec", id, "--", "true")
			least = min(least, time.Since(begin))
		}
		return least
	}
	alone := start()
	f.run("exec", id, "-d", "--", "sh", "-c", "for i in $(seq 100); do while :; do :; done & done; wait")
	await(t, 60*time.Second, "them to run", func() bool { return f.metrics(id).Processes > 100 })
	if beside := start(); beside > time.Second+8*alone {
		t.Errorf("a program takes %s to run beside a hundred busy ones, %s alone", beside, alone)
	} else {
		t.Logf("a program takes %s to run beside a hundred busy ones, %s alone", beside, alone)
	}
}

// TestFullGuestDisk: a write for which there is no room is an error that says so, and leaves nothing half.
func TestFullGuestDisk(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	r := f.try("exec", id, "--", "sh", "-c", "fallocate -l 1T /full || dd if=/dev/zero of=/full bs=64M count=1 oflag=append conv=notrunc; fallocate -l $(($(stat -f -c '%f*%S' /) - 8388608)) /full")
	if !strings.Contains(r.stderr, "No space left on device") && r.code != 0 {
		t.Errorf("a program: exit code %d, %s", r.code, r.stderr)
	}
	big := strings.Repeat("x", 32<<20)
	w := f.tryIn(strings.NewReader(big), "exec", id, "-i", "--", "sh", "-c", "cat >/more")
	if w.code == 0 || !strings.Contains(w.stderr, "No space left on device") {
		t.Errorf("a program: exit code %d, %s", w.code, w.stderr)
	}
	local := filepath.Join(t.TempDir(), "half")
	if err := os.WriteFile(local, []byte(big), 0o600); err != nil {
		t.Fatal(err)
	}
	before := f.run("exec", id, "--", "ls", "-A", "/")
	if r := f.try("cp", local, id+":/half"); r.code == 0 || !strings.Contains(r.stderr, "no space left on device") {
		t.Errorf("an upload: exit code %d, %s", r.code, r.stderr)
	}
	if after := f.run("exec", id, "--", "ls", "-A", "/"); after != before {
		t.Errorf("an upload leaves something:\n%s, before it\n%s", after, before)
	}
	if got := f.run("exec", id, "--", "sh", "-c", "rm -f /full /more; echo ok >/fine; cat /fine"); got != "ok\n" {
		t.Errorf("afterwards: %q", got)
	}
}

// TestMetrics: what a sandbox uses follows what it does.
func TestMetrics(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	idle := f.metrics(id)
	if idle.CPUs < 1 || idle.MemoryTotalBytes < 128<<20 || idle.MemoryUsedBytes <= 0 || idle.MemoryUsedBytes >= idle.MemoryTotalBytes ||
		idle.MemoryCachedBytes <= 0 || idle.SwapTotalBytes != 0 || idle.DiskTotalBytes < 1<<30 || idle.DiskUsedBytes <= 0 ||
		idle.DiskFreeBytes <= 0 || idle.Processes < 2 || idle.UptimeSeconds <= 0 || idle.CPUSeconds <= 0 || idle.OOMKills != 0 {
		t.Errorf("idle: %+v", idle)
	}
	f.run("exec", id, "-d", "--", "sh", "-c", "while :; do :; done")
	f.run("exec", id, "-d", "--", "python3", "-c", "b = b'x' * (100 << 20); import time; time.sleep(600)")
	f.run("exec", id, "--", "sh", "-c", "dd if=/dev/zero of=/big bs=1M count=20 2>/dev/null; sync")
	await(t, 30*time.Second, "the sandbox to be seen at work", func() bool {
		busy := f.metrics(id)
		return busy.CPUPercent > 50 && busy.MemoryUsedBytes > idle.MemoryUsedBytes+80<<20 && busy.DiskUsedBytes > idle.DiskUsedBytes+15<<20 &&
			busy.Processes >= idle.Processes+2
	})
	if got := f.run("stats", id); !strings.Contains(got, id) || !strings.Contains(got, "% of "+strconv.Itoa(idle.CPUs)) {
		t.Errorf("stats: %s", got)
	}
}

// metrics are a sandbox's, watched for half a second.
func (f *forkd) metrics(id string) api.Metrics {
	f.t.Helper()
	var list map[string]api.Metrics
	f.json(&list, "stats", id)
	m, ok := list[id]
	if !ok {
		f.t.Fatalf("stats of %s are not in %v", id, list)
	}
	return m
}

// TestClockAfterPause: the wall clock is right again as soon as programs run.
func TestClockAfterPause(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	f.run("pause", id)
	pass(t, 3*time.Second)
	f.run("resume", id)
	before := time.Now()
	got, err := strconv.ParseFloat(strings.TrimSpace(f.run("exec", id, "--", "date", "+%s.%N")), 64)
	if err != nil {
		t.Fatal(err)
	}
	if off := got - float64(before.UnixNano())/1e9; off < -0.2 || off > time.Since(before).Seconds()+0.2 {
		t.Errorf("the clock is off by %.3f s", off)
	}
}
