package host

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/mountinfo"
)

// deletedSuffix is how the kernel names a directory that was removed under a process, where it reads its link.
const deletedSuffix = " (deleted)"

// worksBelow reports whether a process whose working directory reads as dir/name works in that one. Another container's
// may read the same, for another home of the same name; and a process in a jail works in a directory of its own, below which
// it has its machine's disks.
func worksBelow(pid int, dir, name string) bool {
	here, there := filepath.Join(dir, name), cwdOf(pid)
	if sameFile(here, there) || sameFile(layout.MachineDisks(here), layout.MachineDisks(there)) {
		return true
	}
	if _, err := os.Lstat(here); err == nil {
		return false
	}
	return removedUnder(pid, here)
}

func cwdOf(pid int) string { return fmt.Sprintf("/proc/%d/cwd", pid) }

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// removedUnder reports whether the machine's directory that a process works in, which reads as path, was removed. That there
// is none of that name here does not say so: there may be one where the process sees files.
func removedUnder(pid int, path string) bool {
	if strings.HasSuffix(path, deletedSuffix) {
		return sameFile(fmt.Sprintf("/proc/%d/ns/mnt", pid), "/proc/self/ns/mnt")
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return false
	}
	for _, m := range mountinfo.Parse(string(text)) { // a jail's disks are a mount of ours
		if strings.HasSuffix(m.At, layout.MachineDisks(path)) {
			source, gone := strings.CutSuffix(m.Root, "//deleted")
			return gone && filepath.Base(filepath.Dir(source)) == filepath.Base(path)
		}
	}
	return false
}
