package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/lineage"
)

// Checks of the host itself, of its kernel and of what lies in the home.

func cpuCheck() Check {
	c := Check{"cpu", Pass, fmt.Sprintf("%d × %s, %s", runtime.NumCPU(), cpuModel(), runtime.GOARCH), ""}
	if runtime.NumCPU() < 2 {
		c.Status, c.Hint = Warn, "give the host a second core: the guests', the VM processes' and the daemon's work meet on one"
	}
	return c
}

// liveCheck is about capturing machines that run on.
func liveCheck(f *engine.Features) Check {
	setting := "vm.unprivileged_userfaultfd is not there"
	if text, err := os.ReadFile("/proc/sys/vm/unprivileged_userfaultfd"); err == nil {
		setting = "vm.unprivileged_userfaultfd=" + strings.TrimSpace(string(text))
	}
	switch {
	case f == nil:
		return Check{"userfaultfd", Skip, "needs an engine (" + setting + ")", ""}
	case f.Live:
		return Check{"userfaultfd", Pass, "branches can be captured live; " + setting, ""}
	}
	return Check{
		"userfaultfd", Warn, "live: unavailable: " + f.LiveReason + "; " + setting,
		"nothing need be done: mode auto takes diff, whose pause grows with what the sandbox has written",
	}
}

// confinementCheck says which layers are around a VM process that is started now.
func confinementCheck(f *engine.Features) Check {
	if f == nil {
		return Check{"confinement", Skip, "needs an engine", ""}
	}
	c := Check{"confinement", Pass, "layers: " + strings.Join(f.Layers, ", "), ""}
	switch {
	case f.Confined == "":
		c.Status, c.Hint = Warn, "use a kernel (5.13 or newer) with Landlock enabled"
		c.Detail += "; no Landlock: " + f.ConfinedReason
	case f.JailReason != "":
		c.Status, c.Hint = Warn, "let the daemon make namespaces, and do not set FORKD_JAIL=off; docs/security.md says what each layer is for"
		c.Detail += "; no whole jail: " + f.JailReason
	}
	return c
}

// namespacesCheck says which kinds the kernel has, and whether it lets them be made.
func namespacesCheck(f *engine.Features) Check {
	var have, lack []string
	for _, kind := range []string{"user", "mnt", "net", "ipc", "pid", "uts"} {
		if _, err := os.Stat("/proc/self/ns/" + kind); err == nil {
			have = append(have, kind)
		} else {
			lack = append(lack, kind)
		}
	}
	c := Check{"namespaces", Pass, "the kernel has " + strings.Join(have, ", "), ""}
	switch {
	case len(lack) > 0:
		c.Status, c.Detail = Warn, "the kernel lacks "+strings.Join(lack, ", ")
		c.Hint = "use one built with CONFIG_NAMESPACES and all of its kinds"
	case f != nil && f.JailReason != "" && !strings.Contains(f.JailReason, "FORKD_JAIL"):
		c.Status, c.Detail = Warn, c.Detail+", but: "+f.JailReason
		c.Hint = "run the daemon where it may make them: outside of a container, or in one with CAP_SYS_ADMIN; as a user, with " +
			"user namespaces allowed"
	}
	return c
}

// clockCheck is about what guests get their time from: each is set from the host's clock when it awakens.
func clockCheck() Check {
	source := "unknown"
	if text, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource"); err == nil {
		source = strings.TrimSpace(string(text))
	}
	c := Check{"clock", Pass, "source " + source, ""}
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	const unsynchronised = 5 // TIME_ERROR
	switch {
	case err != nil:
		c.Status, c.Detail = Skip, c.Detail+"; the kernel does not say whether it is synchronised: "+err.Error()
	case state == unsynchronised:
		c.Status, c.Detail = Warn, c.Detail+"; the host's clock is not synchronised, and guests are set by it"
		c.Hint = "run a time service: systemd-timesyncd, chrony"
	default:
		c.Detail += ", synchronised"
	}
	if source == "hpet" || source == "acpi_pm" || source == "jiffies" {
		c.Status, c.Detail = Warn, c.Detail+"; each look at it is slow"
		c.Hint = "find out in the kernel's log why it does not trust the time stamp counter"
	}
	if time.Now().Year() < 2024 {
		c.Status, c.Detail, c.Hint = Fail, c.Detail+"; it says "+time.Now().Format(time.DateOnly), "set the clock: signatures of packages are checked by it"
	}
	return c
}

// fileSystems names those that mean something here.
var fileSystems = map[int64]string{
	unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.TMPFS_MAGIC: "tmpfs",
	unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.NFS_SUPER_MAGIC: "nfs", unix.F2FS_SUPER_MAGIC: "f2fs", unix.FUSE_SUPER_MAGIC: "fuse",
	0x2fc12fc1: "zfs", 0xca451a4e: "bcachefs",
}

func fileSystem(dir string) (string, unix.Statfs_t, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "", st, fmt.Errorf("look at the file system of %s: %w", dir, err)
	}
	name, ok := fileSystems[st.Type]
	if !ok {
		name = fmt.Sprintf("type %#x", st.Type)
	}
	return name, st, nil
}

// storeCheck is about the file system below the home.
func storeCheck(home, scratch string) Check {
	name, _, err := fileSystem(home)
	if err != nil {
		return Check{"store", Fail, err.Error(), "give another directory with --home"}
	}
	c := Check{"store", Pass, name + " at " + home, ""}
	switch name {
	case "tmpfs":
		c.Status, c.Hint = Warn, "give a directory on a disk with --home: snapshots here take the host's memory and end with its next start"
		return c
	case "nfs", "fuse":
		c.Status, c.Hint = Warn, "give a directory on a local disk with --home: forkd relies on locks, durable renames and sparse files"
		return c
	}
	shares, err := sharesBlocks(scratch)
	switch {
	case err != nil:
		c.Status, c.Detail, c.Hint = Fail, c.Detail+": "+err.Error(), "make it writable, or give another directory with --home"
	case shares:
		c.Detail += ", copies of files share their blocks"
	default:
		c.Status, c.Detail = Warn, c.Detail+", no reflinks: a branch copies its source's disk files"
		c.Hint = "nothing need be done; on xfs (reflink=1) or btrfs such a copy takes neither time nor space"
	}
	return c
}

// sharesBlocks tries whether a file system can copy a file by reference.
func sharesBlocks(dir string) (ok bool, err error) {
	from, err := os.CreateTemp(dir, "doctor-")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, from.Close(), os.Remove(from.Name())) }()
	if _, err := from.Write(make([]byte, 64<<10)); err != nil {
		return false, err
	}
	to, err := os.CreateTemp(dir, "doctor-")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, to.Close(), os.Remove(to.Name())) }()
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil, nil
}

// runtimeCheck is about where the sockets are.
func runtimeCheck(dir string) Check {
	name, st, err := fileSystem(dir)
	if err != nil {
		return Check{"runtime", Fail, err.Error(), "make the directory, or set XDG_RUNTIME_DIR"}
	}
	free := int64(st.Bavail) * st.Bsize
	c := Check{"runtime", Pass, fmt.Sprintf("%s at %s, %s free; guest memory is in files of the kernel's own, not in /dev/shm", name, dir, mib(free)), ""}
	if free < 1<<20 || st.Files > 0 && st.Ffree < 100 {
		c.Status, c.Hint = Warn, "free some space there, or mount it larger (mount -o remount,size=…): sockets need room for their names"
	}
	return c
}

// cacheCheck says what builds need not fetch again.
func cacheCheck(cache string) Check {
	kernels, err := os.ReadDir(filepath.Join(cache, "kernels"))
	if errors.Is(err, os.ErrNotExist) || err == nil && len(kernels) == 0 {
		return Check{"kernels", Skip, "none fetched yet; the first build does it", ""}
	}
	if err != nil {
		return Check{"kernels", Warn, err.Error(), "remove " + cache + ": builds fetch again what they need"}
	}
	for _, k := range kernels {
		files, err := os.ReadDir(filepath.Join(cache, "kernels", k.Name()))
		if err != nil || len(files) == 0 {
			return Check{
				"kernels", Warn, fmt.Sprintf("the one with digest %.12s is empty or cannot be read", k.Name()),
				"remove " + filepath.Join(cache, "kernels", k.Name()) + ": the next build fetches it again",
			}
		}
	}
	return Check{"kernels", Pass, fmt.Sprintf("%d fetched; all downloads take %s", len(kernels), mib(diskUsage(cache))), ""}
}

// imagesCheck says whether what is in the table is on disk, too.
func (h *Host) imagesCheck() Check {
	h.mu.Lock()
	snapshots, images := len(h.snapshots), len(h.images)
	var lost []string
	for tag, s := range h.snapshots {
		if _, ok := h.images[s.Image]; !ok {
			lost = append(lost, tag)
		}
	}
	h.mu.Unlock()
	slices.Sort(lost)
	switch {
	case len(lost) > 0:
		return Check{"images", Warn, "the image is missing below " + strings.Join(lost, ", "), "build them again, or remove them with: forkd rmi"}
	case snapshots+images == 0:
		return Check{"images", Skip, "none yet; make one with: forkd quickstart", ""}
	}
	return Check{"images", Pass, fmt.Sprintf("%d images, %d snapshots, layers of %s", images, snapshots, mib(diskUsage(h.cfg.Home.Layers()))), ""}
}

// daemonCheck is about the process that answers.
func (h *Host) daemonCheck() Check {
	h.mu.Lock()
	running := 0
	for _, s := range h.sandboxes {
		s.mu.Lock()
		if s.state == lineage.Running || s.state == lineage.Paused {
			running++
		}
		s.mu.Unlock()
	}
	h.mu.Unlock()
	c := Check{"daemon", Pass, fmt.Sprintf("process %d, since %s, %d of at most %d sandboxes run", os.Getpid(),
		h.began.Format(time.DateTime), running, h.cfg.MaxSandboxes), ""}
	// Linux says so when the program's file was replaced or removed.
	if exe, err := os.Readlink("/proc/self/exe"); err == nil && strings.HasSuffix(exe, " (deleted)") {
		c.Status, c.Detail = Warn, c.Detail+"; its program has been replaced since"
		c.Hint = "forkd daemon stop: the next command starts the new one, which takes over the sandboxes"
	}
	return c
}

// leftoversCheck counts what cleanup would remove.
func (h *Host) leftoversCheck(ctx context.Context) Check {
	all, err := h.Leftovers(ctx)
	if err != nil {
		return Check{"leftovers", Warn, err.Error(), "make the home readable to the daemon"}
	}
	all = slices.DeleteFunc(all, func(l Leftover) bool { return l.Kept })
	if len(all) == 0 {
		return Check{"leftovers", Pass, "none", ""}
	}
	return Check{
		"leftovers", Warn, fmt.Sprintf("%d, the first a %s: %s, %s", len(all), all[0].Kind, all[0].Name, all[0].Detail),
		"look at them with: forkd cleanup, and remove them with: forkd cleanup --yes",
	}
}

// capabilitiesCheck is about what a distribution may have left out of the VM program.
func capabilitiesCheck(f *engine.Features) Check {
	switch {
	case f == nil:
		return Check{"capabilities", Skip, "needs an engine", ""}
	case !f.Snapshots:
		return Check{
			"capabilities", Warn, "built without background snapshots: no live captures", "install the distribution's package of " + f.Format.Engine,
		}
	}
	return Check{"capabilities", Pass, "background snapshots and a filter of system calls are built in", ""}
}
