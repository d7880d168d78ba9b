package host

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/memory"
)

// CheckStatus is the verdict of one check.
type CheckStatus string

// Verdicts. A warning is something that works worse than it could; a failure stops builds or forks; what is skipped has
// nothing to be checked yet, or needs what another check misses.
const (
	Pass CheckStatus = "pass"
	Warn CheckStatus = "warn"
	Fail CheckStatus = "fail"
	Skip CheckStatus = "skip"
)

// Check is one line of the doctor's report.
type Check struct {
	Name   string
	Status CheckStatus
	Detail string
	Hint   string
}

// Report is what the host offers.
type Report struct {
	Checks       []Check
	Features     *engine.Features // nil when the engine cannot be used
	Kernel       string
	CPUs         int
	CPUModel     string
	MemoryBytes  int64
	UID          int
	HotBytes     int64
	HotMaxBytes  int64
	SandboxesMax int
}

// Doctor checks everything a build or fork will need. It changes nothing.
func (h *Host) Doctor(ctx context.Context) Report {
	r := Report{
		Kernel: kernelRelease(), CPUs: runtime.NumCPU(), CPUModel: cpuModel(), MemoryBytes: totalMemory(), UID: os.Getuid(),
		HotMaxBytes: h.cfg.HotMaxBytes, SandboxesMax: h.cfg.MaxSandboxes,
	}
	h.hot.mu.Lock()
	r.HotBytes = h.hot.bytes()
	h.hot.mu.Unlock()
	f, err := h.Features(ctx)
	r.Features = f
	r.Checks = slices.Concat(
		[]Check{cpuCheck()}, engineChecks(f, err),
		[]Check{
			capabilitiesCheck(f), confinementCheck(f), namespacesCheck(f), liveCheck(f), h.cgroupCheck(), h.networkCheck(), clockCheck(),
			memfdCheck(), h.memoryCheck(), storeCheck(h.cfg.Home.Root, h.cfg.Home.Temp()), h.diskCheck(), runtimeCheck(h.cfg.Home.Runtime),
			toolCheck(), h.agentCheck(), filesCheck(), cacheCheck(h.cfg.Home.Cache()), h.imagesCheck(), h.daemonCheck(), h.leftoversCheck(ctx),
		},
	)
	return r
}

func engineChecks(f *engine.Features, err error) []Check {
	if err != nil {
		remedy := "install it: apt-get install qemu-system-x86 (amd64) or qemu-system-arm (arm64)"
		if strings.Contains(err.Error(), "FORKD_JAIL") {
			remedy = "let the daemon make namespaces, or start it with FORKD_JAIL=auto for what layers there are"
		}
		return []Check{{"engine", Fail, err.Error(), remedy}}
	}
	detail := fmt.Sprintf("%s %s at %s, machine %s, CPU %s", f.Format.Engine, f.Format.Version, f.Binary, f.Format.Machine, f.Format.CPUModel)
	switch {
	case len(f.Without) > 0:
		detail += fmt.Sprintf("; started without %d libraries that no machine needs", len(f.Without))
	case f.LibrariesReason != "":
		detail += "; " + f.LibrariesReason
	}
	checks := []Check{{"engine", Pass, detail, ""}}
	reason := cmp.Or(f.AcceleratorReason, "not usable")
	if f.KVMUsable {
		checks = append(checks, Check{"kvm", Pass, reason, ""})
	} else {
		checks = append(checks, Check{
			"kvm", Warn, reason,
			"everything works under software emulation, about ten times slower in the guest; use a host with hardware " +
				"virtualization, and access to /dev/kvm (group kvm), for speed",
		})
	}
	return checks
}

func memfdCheck() Check {
	s, err := memory.NewScratch(1 << 20)
	if err != nil {
		return Check{"memfd", Fail, err.Error(), "use Linux 5.1 or newer"}
	}
	img, err := s.Seal()
	if err != nil {
		_ = s.Close()
		return Check{"memfd", Fail, err.Error(), "use Linux 5.1 or newer"}
	}
	_ = img.Close()
	return Check{"memfd", Pass, "memory images can be sealed", ""}
}

func (h *Host) memoryCheck() Check {
	available, err := h.cfg.Available()
	if err != nil {
		return Check{"memory", Fail, err.Error(), "mount /proc"}
	}
	c := Check{"memory", Pass, fmt.Sprintf("%s available of %s", mib(available), mib(totalMemory())), ""}
	if available < 1<<30 {
		c.Status, c.Hint = Warn, "free some: the default parent needs 512 MiB and each child about 32 MiB"
	}
	return c
}

func (h *Host) diskCheck() Check {
	free, err := freeSpace(h.cfg.Home.Root)
	if err != nil {
		return Check{"disk", Fail, err.Error(), "give another directory with --home"}
	}
	c := Check{"disk", Pass, fmt.Sprintf("%s free at %s", mib(free), h.cfg.Home.Root), ""}
	switch {
	case free < 1<<30:
		c.Status, c.Hint = Fail, "free some space, or give another directory with --home"
	case free < 4<<30:
		c.Status, c.Hint = Warn, "building an image needs about 2 GiB"
	}
	return c
}

func freeSpace(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("look at the disk of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

func toolCheck() Check {
	for _, dir := range []string{"", "/usr/sbin/", "/sbin/"} {
		if path, err := exec.LookPath(dir + "mke2fs"); err == nil {
			return Check{"mke2fs", Pass, path, ""}
		}
	}
	return Check{"mke2fs", Fail, "mke2fs is missing; builds need it to make file systems", "install it: apt-get install e2fsprogs"}
}

func (h *Host) agentCheck() Check {
	if len(h.cfg.Agent) == 0 {
		return Check{"agent", Fail, "this forkd was built without the guest agent; it can neither build nor fork", "build with: make build"}
	}
	return Check{"agent", Pass, fmt.Sprintf("%d KiB embedded", len(h.cfg.Agent)>>10), ""}
}

func filesCheck() Check {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return Check{"open files", Warn, err.Error(), ""}
	}
	const perSandbox = 8
	c := Check{"open files", Pass, fmt.Sprintf("limit %d", lim.Cur), ""}
	if lim.Cur < 100*perSandbox {
		c.Status, c.Hint = Warn, "raise it (ulimit -n 65536): a sandbox takes about 8"
	}
	return c
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
}

func cpuModel() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
