package systemd

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

const bootIDFile = "/run/forkd/boot_id"

// masked are units that have nothing to do in a sandbox: consoles that nobody sits at, file systems its kernel need not
// have, tidying that would run in every fork.
func masked() []string {
	return []string{
		"console-getty.service", "getty.target", "getty@.service", "serial-getty@.service", "container-getty@.service",
		"autovt@.service", "tmp.mount", "dev-hugepages.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount",
		"sys-kernel-config.mount", "sys-fs-fuse-connections.mount", "proc-sys-fs-binfmt_misc.automount",
		"proc-sys-fs-binfmt_misc.mount", "systemd-networkd-wait-online.service", "NetworkManager-wait-online.service",
		"systemd-remount-fs.service", "systemd-modules-load.service", "systemd-random-seed.service", "systemd-timesyncd.service",
		"systemd-firstboot.service", "systemd-machine-id-commit.service", "systemd-pstore.service", "ldconfig.service",
		"apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
		"fstrim.timer", "man-db.timer", "logrotate.timer",
	}
}

// Stage is the program between the agent and systemd: the first process of the new namespaces. It makes them what systemd
// expects and becomes it, or returns why it could not.
func Stage() error {
	runtime.LockOSThread() // a namespace is a thread's, and the one that executes systemd must have it
	// Now, in the cgroup that is to be its root.
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("make a cgroup namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// The kernel mounts no file system over itself.
	if err := unix.Unmount("/sys/fs/cgroup", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount /sys/fs/cgroup: %w", err)
	}
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
	}{
		{"proc", "/proc", "proc", quiet},
		{bootIDFile, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND},
		{"", "/sys", "", unix.MS_REMOUNT | unix.MS_BIND | quiet | unix.MS_RDONLY},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", quiet},
	} {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	const units = "/run/systemd/system"
	if err := os.MkdirAll(units, 0o755); err != nil {
		return err
	}
	for _, unit := range masked() {
		if err := os.Symlink("/dev/null", units+"/"+unit); err != nil && !os.IsExist(err) {
			return err
		}
	}
	// The journal is in memory: a child makes one of its own, which would be eight megabytes on disk, synchronously.
	if err := os.MkdirAll("/run/systemd/journald.conf.d", 0o755); err != nil {
		return err
	}
	const journal = "[Journal]\nStorage=volatile\nRuntimeMaxUse=32M\nRuntimeMaxFileSize=2M\n"
	if err := os.WriteFile("/run/systemd/journald.conf.d/10-forkd.conf", []byte(journal), 0o644); err != nil {
		return err
	}
	if err := leaveNetworkAlone("/run"); err != nil {
		return err
	}
	path, err := program()
	if err != nil {
		return err
	}
	return fmt.Errorf("execute %s: %w", path, syscall.Exec(path, []string{path, "--system", "--show-status=false"}, os.Environ()))
}

// leaveNetworkAlone tells those that manage networks that the interface is set up already. An image's own rules would take
// its addresses away, and wait for others that nobody gives. The names come before those that images use.
func leaveNetworkAlone(run string) error {
	for dir, file := range map[string][2]string{
		"systemd/network":       {"00-forkd.network", "[Match]\nName=eth0\n[Link]\nUnmanaged=yes\n"},
		"NetworkManager/conf.d": {"00-forkd.conf", "[keyfile]\nunmanaged-devices=interface-name:eth0\n"},
	} {
		if err := os.MkdirAll(filepath.Join(run, dir), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(run, dir, file[0]), []byte(file[1]), 0o644); err != nil {
			return err
		}
	}
	return nil
}
