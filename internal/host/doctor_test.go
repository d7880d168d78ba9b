package host

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/testenv"
)

// TestDoctorSaysWhatToDo: every check is there, and says what to do unless all is well.
func TestDoctorSaysWhatToDo(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	report := h.Doctor(t.Context())
	var names []string
	for _, c := range report.Checks {
		names = append(names, c.Name)
		checkIsWhole(t, c)
	}
	for _, want := range []string{
		"cpu", "engine", "kvm", "capabilities", "confinement", "namespaces", "userfaultfd", "cgroups", "network", "clock", "memfd", "memory", "store", "disk",
		"runtime", "mke2fs", "agent", "open files", "kernels", "images", "daemon", "leftovers",
	} {
		if n := len(slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name != want })); n != 1 {
			t.Errorf("%d checks of %s", n, want)
		}
	}
}

func checkIsWhole(t *testing.T, c Check) {
	t.Helper()
	if !slices.Contains([]CheckStatus{Pass, Warn, Fail, Skip}, c.Status) || c.Detail == "" {
		t.Errorf("%s says nothing: %+v", c.Name, c)
	}
	if (c.Status == Warn || c.Status == Fail) != (c.Hint != "") {
		t.Errorf("%s is %s: %s; and the remedy is %q", c.Name, c.Status, c.Detail, c.Hint)
	}
}

func TestDoctorSeesFaults(t *testing.T) {
	h := fakeHost(t, newFakeEngine(), nil)
	empty := t.TempDir()
	write := func(path string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	broken := t.TempDir()
	if err := os.MkdirAll(filepath.Join(broken, "kernels", "0123456789abcdef"), 0o700); err != nil {
		t.Fatal(err)
	}
	full := t.TempDir()
	write(filepath.Join(full, "kernels", "0123456789abcdef", "vmlinux"))
	whole := &engine.Features{Confined: "landlock", Layers: []string{"landlock"}, Live: true, Snapshots: true}
	for name, c := range map[string]struct {
		check  Check
		status CheckStatus
		says   string
	}{
		"no home":                {storeCheck("/nowhere", "/nowhere"), Fail, "/nowhere"},
		"home in memory":         {storeCheck("/dev/shm", "/dev/shm"), Warn, "tmpfs"},
		"home that is read-only": {storeCheck(empty, "/proc"), Fail, "/proc"},
		"no runtime directory":   {runtimeCheck("/nowhere"), Fail, "/nowhere"},
		"no kernels yet":         {cacheCheck(empty), Skip, "first build"},
		"an empty kernel":        {cacheCheck(broken), Warn, "0123456789ab"},
		"kernels":                {cacheCheck(full), Pass, "1 fetched"},
		"whole confinement":      {confinementCheck(whole), Pass, "landlock"},
		"no landlock":            {confinementCheck(&engine.Features{ConfinedReason: "it is off"}), Warn, "it is off"},
		"no jail":                {confinementCheck(&engine.Features{Confined: "landlock", JailReason: "no mounts"}), Warn, "no mounts"},
		"namespaces refused":     {namespacesCheck(&engine.Features{JailReason: "no mounts"}), Warn, "no mounts"},
		"jails switched off":     {namespacesCheck(&engine.Features{JailReason: "FORKD_JAIL=off"}), Pass, "user"},
		"live":                   {liveCheck(whole), Pass, "live"},
		"no live":                {liveCheck(&engine.Features{LiveReason: "jail"}), Warn, "live: unavailable: jail"},
		"no background snapshot": {capabilitiesCheck(&engine.Features{}), Warn, "no live captures"},
		"no engine":              {capabilitiesCheck(nil), Skip, "engine"},
	} {
		t.Run(name, func(t *testing.T) {
			checkIsWhole(t, c.check)
			if c.check.Status != c.status || !strings.Contains(c.check.Detail, c.says) {
				t.Errorf("%+v, want %s and %q", c.check, c.status, c.says)
			}
		})
	}

	stray := filepath.Join(h.cfg.Home.Machines(), "0123456789abcdef01234567")
	if err := os.Mkdir(stray, 0o700); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(stray, old, old); err != nil {
		t.Fatal(err)
	}
	c := h.leftoversCheck(t.Context())
	checkIsWhole(t, c)
	if c.Status != Warn || !strings.Contains(c.Detail, "0123456789abcdef01234567") {
		t.Errorf("with a stray machine: %+v", c)
	}
	if err := os.Remove(stray); err != nil {
		t.Fatal(err)
	}
}

// TestMachinesOfALinkedHome: a process in a jail is found by the path that its machine was named by.
func TestMachinesOfALinkedHome(t *testing.T) {
	testenv.Need(t, "root")
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "real"), 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink("real", link); err != nil {
		t.Fatal(err)
	}
	disks := layout.MachineDisks(filepath.Join(link, "m"))
	if err := os.MkdirAll(disks, 0o700); err != nil {
		t.Fatal(err)
	}
	jailer, err := proc.NewJailer([]string{"/usr", "/lib", "/lib64"})
	if err != nil {
		testenv.Missing(t, "jail", err.Error())
	}
	defer jailer.Close()
	jail := &proc.Jail{Jailer: jailer, ID: 3_100_000_000 + uint32(os.Getpid())}
	cmd := &proc.Command{
		Path: "/usr/bin/sleep", Args: []string{"1000"}, Dir: filepath.Join(link, "m"), Jail: jail,
		Confine: &proc.Confine{ReadOnly: []string{"/usr", "/lib", "/lib64"}, ReadWrite: []string{disks}},
	}
	p, err := proc.Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	defer func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
	}()
	found, err := machinesBelow(link)
	if err != nil || len(found) != 1 || found[0].dir != filepath.Join(link, "m") || !slices.Equal(found[0].pids, []int{p.PID()}) {
		t.Errorf("%+v, %v", found[0], err)
	}
	m := filepath.Join(link, "m")
	if removedUnder(p.PID(), m) {
		t.Error("its directory is taken for removed")
	}
	if err := os.RemoveAll(m); err != nil {
		t.Fatal(err)
	}
	if !removedUnder(p.PID(), m) {
		t.Error("its directory is not seen to be removed")
	}
}
