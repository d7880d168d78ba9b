package qemu

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// rescue clears the write protection that a background snapshot left on a VM process's memory, and wakes who waits for
// it. On QEMU 7.2 a snapshot that failed or was cancelled leaves it in place with nobody to serve the faults: the guest
// hangs at its next write, and QEMU with it. It works on QEMU's own userfaultfd, taken from the process; it is
// idempotent, and does nothing where nothing is protected or the process is gone. A snapshot still in progress fails
// by it.
func rescue(pid int) error {
	err := rescueProcess(pid)
	if err == nil || errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("clear write protection of process %d: %w", pid, err)
}

func rescueProcess(pid int) error {
	fds, err := userfaultfds(pid)
	if err != nil || len(fds) == 0 {
		return err
	}
	ranges, err := protectedRanges(pid)
	if err != nil {
		return err
	}
	return withUserfaultfds(pid, fds, func(uffd int) error { return release(uffd, ranges) })
}

// withUserfaultfds hands use each of a process's userfaultfds, taken out of it.
func withUserfaultfds(pid int, fds []int, use func(uffd int) error) error {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(pidfd) }()
	for _, fd := range fds {
		uffd, err := unix.PidfdGetfd(pidfd, fd, 0)
		if errors.Is(err, unix.EBADF) { // QEMU has closed it meanwhile.
			continue
		}
		if err != nil {
			return fmt.Errorf("take its userfaultfd: %w", err)
		}
		err = use(uffd)
		_ = unix.Close(uffd)
		if err != nil {
			return err
		}
	}
	return nil
}

// uffdTries is how often a request is repeated that the kernel refuses while the process's mappings are changing. That
// takes microseconds, but a process that wants to can make it last.
const uffdTries = 10_000

func insistOn(request func() unix.Errno) error {
	errno := unix.EAGAIN
	for n := 0; n < uffdTries && (errno == unix.EAGAIN || errno == unix.EINTR); n++ {
		errno = request()
	}
	if errno == 0 {
		return nil
	}
	return errno
}

// userfaultfds are the numbers of a process's userfaultfd descriptors.
func userfaultfds(pid int) ([]int, error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var fds []int
	for _, e := range entries {
		target, err := os.Readlink(dir + "/" + e.Name())
		if err != nil || target != "anon_inode:[userfaultfd]" {
			continue
		}
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			return nil, err
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// addresses is a range of a process's address space.
type addresses struct{ start, length uint64 }

// protectedRanges are the mappings that are registered for write protection.
func protectedRanges(pid int) ([]addresses, error) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/smaps")
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var (
		found []addresses
		at    addresses
	)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := lines.Text()
		if flags, ok := strings.CutPrefix(line, "VmFlags:"); ok {
			for flag := range strings.FieldsSeq(flags) {
				if flag == "uw" {
					found = append(found, at)
				}
			}
			continue
		}
		if r, ok := parseRange(line); ok {
			at = r
		}
	}
	return found, lines.Err()
}

// parseRange reads the first line of a mapping in smaps: "7f00-7f10 rw-p …".
func parseRange(line string) (addresses, bool) {
	word, _, ok := strings.Cut(line, " ")
	from, to, dash := strings.Cut(word, "-")
	if !ok || !dash {
		return addresses{}, false
	}
	start, err1 := strconv.ParseUint(from, 16, 64)
	end, err2 := strconv.ParseUint(to, 16, 64)
	if err1 != nil || err2 != nil || end <= start {
		return addresses{}, false
	}
	return addresses{start, end - start}, true
}
