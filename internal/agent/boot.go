package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/agent/network"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	portName   = "forkd.control"
	disk       = "/dev/vda"
	newRoot    = "/newroot"
	moduleDir  = "/forkd/modules"
	bootIDFile = "/run/forkd/boot_id"
	// deviceLimit is how long a device may take to appear after its driver was loaded.
	deviceLimit = 30 * time.Second
)

type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.fstype, m.target, err)
	}
	return nil
}

// Boot brings PID 1 in an initramfs to the point where the control channel is open: kernel file systems, drivers,
// and in the run phase the disk as root. It returns the phase and the channel.
func Boot(ctx context.Context, console io.Writer) (phase string, port *Port, err error) {
	for _, m := range []mount{
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
		{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	} {
		if err := m.do(); err != nil && !errors.Is(err, unix.EBUSY) {
			return "", nil, err
		}
	}
	loadModules(console)
	phase = PhaseReady
	if cmdline, err := os.ReadFile("/proc/cmdline"); err == nil && hasWord(string(cmdline), "forkd.phase=build") {
		phase = PhaseBuild
	}
	if err := waitFor(ctx, disk, func() bool { _, err := os.Stat(disk); return err == nil }); err != nil {
		return "", nil, err
	}
	if err := mountRoot(); err != nil {
		return "", nil, err
	}
	if phase == PhaseReady {
		if err := switchRoot(); err != nil {
			return "", nil, err
		}
	}
	port, err = openPort(ctx)
	return phase, port, err
}

// mountRoot mounts the disk. Without noauto_da_alloc a renamed or truncated file is written to the disk at once, on the
// way of an awakening. Some seconds after a file system was mounted, the kernel prepares its block groups in the
// background; a parent is frozen before that, and every child would do it anew.
func mountRoot() error {
	m := mount{disk, newRoot, "ext4", unix.MS_NOATIME, "noauto_da_alloc,noinit_itable,no_prefetch_block_bitmaps"}
	err := m.do()
	if errors.Is(err, unix.EINVAL) { // Linux before 5.13, which knows no such option and does not prepare as much.
		m.data = "noauto_da_alloc,noinit_itable"
		err = m.do()
	}
	return err
}

func hasWord(line, word string) bool {
	return slices.Contains(strings.Fields(line), word)
}

// loadModules loads the drivers in the order of modules.order. A driver that is missing or refused is told on the
// console: the device that does not appear then fails the boot, or nobody needs it.
func loadModules(console io.Writer) {
	order, err := os.ReadFile(filepath.Join(moduleDir, "..", "modules.order"))
	if errors.Is(err, fs.ErrNotExist) {
		order, err = os.ReadFile(filepath.Join(moduleDir, "modules.order"))
	}
	if err != nil {
		fmt.Fprintf(console, "forkd-agent: list of kernel modules: %v\n", err)
		return
	}
	for name := range strings.FieldsSeq(string(order)) {
		if err := loadModule(filepath.Join(moduleDir, filepath.Base(name))); err != nil {
			fmt.Fprintf(console, "forkd-agent: load kernel module %s: %v\n", name, err)
		}
	}
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// waitFor polls for something that appears a moment after its driver was loaded.
func waitFor(ctx context.Context, what string, there func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, deviceLimit)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !there() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; is its driver in the initramfs and the device in the machine?", what, context.Cause(ctx))
		}
	}
	return nil
}

// switchRoot makes the file system at /newroot the root of everything, and frees what the initramfs holds besides the
// agent, which stays where it is.
func switchRoot() error {
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		if err := os.MkdirAll(newRoot+dir, 0o755); err != nil {
			return fmt.Errorf("make mount point: %w", err)
		}
		if err := unix.Mount(dir, newRoot+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s to the new root: %w", dir, err)
		}
	}
	if err := os.RemoveAll(filepath.Dir(moduleDir)); err != nil {
		return fmt.Errorf("empty the initramfs: %w", err)
	}
	if err := unix.Chdir(newRoot); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the new root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	return unix.Chdir("/")
}

// SetUp makes the root file system a place in which programs run, and returns the tree of user processes.
func SetUp(accounts *account.Table) (*Cgroups, error) {
	for _, m := range []mount{
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666"},
		{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"mqueue", "/dev/mqueue", "mqueue", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	} {
		if err := m.do(); err != nil && m.fstype != "mqueue" { // which a kernel need not have
			return nil, err
		}
	}
	for _, dir := range []string{"/tmp", "/var/tmp", "/run/lock"} {
		if err := openToAll(dir); err != nil {
			return nil, fmt.Errorf("set up root: %w", err)
		}
	}
	for name, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, name); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("set up /dev: %w", err)
		}
	}
	if err := mountBootID(); err != nil {
		return nil, err
	}
	if err := setUpHost(); err != nil {
		return nil, err
	}
	defaults, err := imageDefaults(imageFile)
	if err != nil {
		return nil, err
	}
	accounts.SetDefaults(defaults)
	return NewCgroups("/sys/fs/cgroup")
}

// openToAll makes a directory in which everybody may write. One that the image has stays as it is, unless it could not be
// used.
func openToAll(dir string) error {
	info, err := os.Stat(dir)
	if err == nil && info.IsDir() && dir == "/var/tmp" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return unix.Chmod(dir, 0o1777)
}

// mountBootID puts a file of ours over the kernel's boot id, which a fork cannot change.
func mountBootID() error {
	const kernel = "/proc/sys/kernel/random/boot_id"
	id, err := os.ReadFile(kernel)
	if err != nil {
		return fmt.Errorf("read boot id: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(bootIDFile), 0o755); err != nil {
		return fmt.Errorf("make /run/forkd: %w", err)
	}
	if err := os.WriteFile(bootIDFile, id, 0o444); err != nil {
		return fmt.Errorf("write boot id: %w", err)
	}
	if err := unix.Mount(bootIDFile, kernel, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount boot id: %w", err)
	}
	return nil
}

// setUpHost is names, network and limits.
func setUpHost() error {
	if name, err := os.ReadFile("/etc/hostname"); err == nil {
		if n := strings.TrimSpace(string(name)); validHostname(n) {
			_ = unix.Sethostname([]byte(n)) // awaken sets the one that counts
		}
	}
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		return fmt.Errorf("make /etc: %w", err)
	}
	// Images made of containers have an empty one in the place that a container's engine fills.
	if info, err := os.Lstat("/etc/hosts"); err != nil || info.Mode().IsRegular() && info.Size() == 0 {
		if err := os.WriteFile("/etc/hosts", []byte(defaultHosts), 0o644); err != nil {
			return fmt.Errorf("write /etc/hosts: %w", err)
		}
	}
	if err := setResolver("/etc/resolv.conf"); err != nil {
		return err
	}
	if err := loopbackUp(); err != nil {
		return err
	}
	if err := network.SetUp(); err != nil {
		return err
	}
	unix.Umask(0o022)
	// Nobody would find a core file, and it would be in every copy.
	if err := syscall.Setrlimit(unix.RLIMIT_CORE, &syscall.Rlimit{Cur: 0, Max: unix.RLIM_INFINITY}); err != nil {
		return fmt.Errorf("switch core files off: %w", err)
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) // no keyboard anyway
	// No writing back by the clock: it jumps in a fork, every dirty page is found to be too old at once, and a disk that
	// does not outlive the machine's memory gains nothing by it.
	// Nor any other housekeeping that is due as soon as a fork runs, and for which its small memory has no use. Where one
	// cannot be set it costs time only.
	for name, value := range map[string]string{
		"/proc/sys/vm/dirty_writeback_centisecs":                    "0",
		"/proc/sys/vm/compaction_proactiveness":                     "0",
		"/proc/sys/vm/stat_interval":                                "3600",
		"/sys/block/" + filepath.Base(disk) + "/queue/wbt_lat_usec": "0",
		// As in containers: whoever is root in a machine of its own need not be to ping or to listen on port 80.
		"/proc/sys/net/ipv4/ping_group_range":           "0\t2147483647",
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"/proc/sys/vm/max_map_count":                    "262144",
	} {
		_ = os.WriteFile(name, []byte(value), 0)
	}
	return nil
}

// setResolver names the only name server that there is, whatever an image brings: another could not be reached, and a link to
// a file that some service would write leads nowhere while that does not run. Systemd's resolver, if the image has one,
// takes the file as its configuration when it is no link of its own.
func setResolver(path string) error {
	info, err := os.Lstat(path)
	if err == nil && info.Mode().IsRegular() {
		if old, err := os.ReadFile(path); err == nil && string(old) == network.Resolver {
			return nil
		}
	}
	if err == nil && !info.IsDir() {
		err = os.Remove(path)
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = os.WriteFile(path, []byte(network.Resolver), 0o644)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	return nil
}

// imageDefaults reads what the image's builder left for its processes, if anything.
func imageDefaults(path string) (account.Defaults, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return account.Defaults{Env: withLocale("/", nil)}, nil
	}
	if err != nil {
		return account.Defaults{}, fmt.Errorf("read image defaults: %w", err)
	}
	var image struct {
		Env     map[string]string `json:"env"`
		Workdir string            `json:"workdir"`
		User    string            `json:"user"`
	}
	if err := decode(b, &image); err != nil {
		return account.Defaults{}, fmt.Errorf("read %s: %w", path, err)
	}
	return account.Defaults{User: image.User, Workdir: image.Workdir, Env: withLocale("/", image.Env)}, nil
}

// withLocale adds a locale in which text is UTF-8, if the image has it and says nothing else. Programs take bytes beyond
// ASCII for errors without one.
func withLocale(root string, env map[string]string) map[string]string {
	for _, name := range []string{"LANG", "LC_ALL", "LC_CTYPE"} {
		if _, set := env[name]; set {
			return env
		}
	}
	for _, dir := range []string{"usr/lib/locale/C.utf8", "usr/lib/locale/C.UTF-8"} {
		if info, err := os.Stat(filepath.Join(root, dir)); err == nil && info.IsDir() {
			env = maps.Clone(env)
			if env == nil {
				env = map[string]string{}
			}
			env["LANG"] = "C.UTF-8"
			return env
		}
	}
	return env
}

// pivot ends the build phase.
func (a *Agent) pivot(_ context.Context, _ *wire.Stream, _ []byte) error {
	if a.Phase() != PhaseBuild {
		return wire.Errorf(wire.CodePrecondition, "the machine has its root file system already")
	}
	if err := switchRoot(); err != nil {
		return err
	}
	cgroups, err := SetUp(a.cfg.Accounts)
	if err != nil {
		return err
	}
	a.cfg.Cgroups.root = cgroups.root
	a.setPhase(PhaseReady)
	return nil
}
