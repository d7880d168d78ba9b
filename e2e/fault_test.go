package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

func (f *forkd) sandbox(id string) api.Sandbox {
	f.t.Helper()
	var s api.Sandbox
	f.json(&s, "inspect", id)
	return s
}

// awaitFailed waits until the sandbox is failed and returns why.
func (f *forkd) awaitFailed(id string) string {
	f.t.Helper()
	reason := ""
	await(f.t, 10*time.Second, "the sandbox to fail", func() bool {
		s := f.sandbox(id)
		reason = s.Reason
		return s.State == "failed"
	})
	return reason
}

func TestKilledMachine(t *testing.T) {
	f := shared(t)
	id := f.one()
	pid := f.sandbox(id).PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if reason := f.awaitFailed(id); !strings.Contains(reason, "signal 9") {
		t.Errorf("the reason is %q", reason)
	}
	if r := f.try("exec", id, "--", "true"); r.code != 125 || !strings.Contains(r.stderr, "failed") {
		t.Errorf("exec in a dead sandbox: %+v", r)
	}
	f.run("kill", id)
	if pids := machinesOf(f.home); slices.Contains(pids, pid) {
		t.Errorf("process %d is still there", pid)
	}
}

// TestKernelPanic: the guest's agent is PID 1; its death or the kernel's ends the machine, and the console says why.
func TestKernelPanic(t *testing.T) {
	f := shared(t)
	id := f.one()
	f.try("exec", id, "--", "sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger")
	f.awaitFailed(id)
	if out := f.run("logs", id); !strings.Contains(out, "anic") {
		t.Errorf("the console does not show the panic:\n%s", out)
	}
}

// TestPowerOffInside: a guest that ends itself is reported, not mourned as a hang.
func TestPowerOffInside(t *testing.T) {
	f := shared(t)
	id := f.one()
	f.try("exec", id, "--", "sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo o > /proc/sysrq-trigger")
	if reason := f.awaitFailed(id); !strings.Contains(reason, "powered off") {
		t.Errorf("the reason is %q", reason)
	}
}

// TestDamagedLayers: a flipped or cut chunk, map, state or manifest is refused by digest, by every fork that would
// read it, and never crashes the daemon.
func TestDamagedLayers(t *testing.T) {
	for _, kind := range []string{"chunks", "maps"} {
		for _, how := range []string{"flip", "cut"} {
			t.Run(kind+" "+how, func(t *testing.T) {
				f := copied(t)
				damageAll(t, filepath.Join(f.home, "layers", kind), how)
				r := f.try("fork", parentTag)
				if r.code != 1 || !strings.Contains(r.stderr, "damaged") || !strings.Contains(r.stderr, "try:") {
					t.Errorf("fork of a damaged snapshot: %+v", r)
				}
				if out := f.run("ls", "-q"); out != "" {
					t.Errorf("sandboxes are left: %q", out)
				}
			})
		}
	}
	t.Run("device state", func(t *testing.T) {
		f := copied(t)
		damage(t, filepath.Join(f.home, "snapshots", parentTag, "state"), "flip")
		if r := f.try("fork", parentTag); r.code != 1 || !strings.Contains(r.stderr, "corrupt") {
			t.Errorf("fork of a damaged state: %+v", r)
		}
	})
	t.Run("manifest", func(t *testing.T) {
		f := copied(t)
		damage(t, filepath.Join(f.home, "snapshots", parentTag, "manifest.json"), "cut")
		if r := f.try("fork", parentTag); r.code != 1 || !strings.Contains(r.stderr, "not found") {
			t.Errorf("fork of a damaged manifest: %+v", r)
		}
	})
}

func damageAll(t *testing.T, dir, how string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			damage(t, path, how)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func damage(t *testing.T, path, how string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b = append([]byte(nil), b...)
	if how == "cut" {
		b = b[:len(b)/2]
	} else {
		b[len(b)/2] ^= 1
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestNoRoomForTheMemoryImage(t *testing.T) {
	f := copied(t, "FORKD_HOT_MAX_BYTES="+strconv.Itoa(64<<20))
	r := f.try("fork", parentTag)
	if r.code != 1 || !strings.Contains(r.stderr, "not enough resources") || !strings.Contains(r.stderr, "FORKD_HOT_MAX_BYTES") {
		t.Errorf("fork without room: %+v", r)
	}
}

func TestTooManySandboxes(t *testing.T) {
	f := copied(t, "FORKD_MAX_SANDBOXES=2")
	r := f.try("fork", parentTag, "-n", "3")
	if r.code != 1 || !strings.Contains(r.stderr, "the most is 2") {
		t.Errorf("fork beyond the most: %+v", r)
	}
	if out := f.run("ls", "-q"); out != "" {
		t.Errorf("something was created: %q", out)
	}
}

// TestOtherHost: a snapshot of another engine, machine or CPU is refused with what differs.
func TestOtherHost(t *testing.T) {
	f := copied(t)
	path := filepath.Join(f.home, "snapshots", parentTag, "manifest.json")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	changed := strings.Replace(string(b), `"accelerator": "`, `"accelerator": "other-`, 1)
	if changed == string(b) {
		t.Fatal("the manifest names no accelerator")
	}
	if err := os.WriteFile(path, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	r := f.try("fork", parentTag)
	if r.code != 1 || !strings.Contains(r.stderr, "accelerator") || !strings.Contains(r.stderr, "build") {
		t.Errorf("fork of another host's snapshot: %+v", r)
	}
}

// TestFullDisk needs a file system of its own, which only root can mount.
func TestFullDisk(t *testing.T) {
	testenv.Need(t, "root", "net", "keyring", "agent")
	shared(t)
	f := aloneOn(t, "300m")
	if err := os.CopyFS(filepath.Join(f.home, "cache"), os.DirFS(filepath.Join(suite.home, "cache"))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.try("daemon", "stop", "--kill") })
	r := f.try("build", parentTag, "-t", "full")
	if r.code != 1 || !strings.Contains(r.stderr, "no space left") {
		t.Errorf("build on a full disk: code %d\n%s", r.code, r.stderr)
	}
	if out := f.run("snapshots"); strings.Contains(out, "full") {
		t.Errorf("a snapshot is left: %s", out)
	}
	if left := leftovers(f.home); len(left) != 1 || left[0] != "forkd.sock" { // the daemon still runs
		t.Errorf("left behind: %v", left)
	}
}
