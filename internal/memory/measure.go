package memory

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Usage is the memory of one process.
type Usage struct {
	OwnBytes          int64 // anonymous: what the process wrote, copies of the image's pages included; swapped pages too
	SharedBytes       int64 // pages of files and of the image, which exist once however many map them
	ProportionalBytes int64 // own plus, of each shared page, the share of this process (Pss)
}

// Measure reads what a process really occupies. Under the same uid, or as root. The error wraps fs.ErrNotExist when
// the process is gone.
func Measure(pid int) (Usage, error) {
	u, err := measure(pid)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return Usage{}, fmt.Errorf("measure memory of process %d: it is gone: %w", pid, fs.ErrNotExist)
	}
	if err != nil {
		return Usage{}, fmt.Errorf("measure memory of process %d: %w", pid, err)
	}
	return u, nil
}

func measure(pid int) (Usage, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return Usage{}, err
	}
	return parseSmapsRollup(b)
}

func parseSmapsRollup(b []byte) (Usage, error) {
	// Not Private_*: a page of the image counts as private there while only one process happens to map it.
	var u Usage
	var rss, anonymous int64
	found := false
	err := eachSize(b, func(name string) *int64 {
		switch name {
		case "Anonymous":
			return &anonymous
		case "Swap":
			return &u.OwnBytes
		case "Rss":
			return &rss
		case "Pss":
			found = true
			return &u.ProportionalBytes
		}
		return nil
	})
	if err != nil {
		return Usage{}, fmt.Errorf("smaps_rollup: %w", err)
	}
	if !found {
		// The kernel answers a process that has no memory left, a zombie, with an empty file.
		return Usage{}, fmt.Errorf("it has no memory any more: %w", fs.ErrNotExist)
	}
	u.OwnBytes += anonymous
	u.SharedBytes = rss - anonymous
	return u, nil
}

// eachSize adds the sizes of one of the kernel's lists, whose lines are "Name: 12 kB", to the sums that sum gives for their
// names, in bytes.
func eachSize(b []byte, sum func(name string) *int64) error {
	for line := range bytes.Lines(b) {
		name, rest, ok := strings.Cut(string(line), ":")
		fields := strings.Fields(rest)
		if !ok || len(fields) != 2 || fields[1] != "kB" {
			continue
		}
		total := sum(name)
		if total == nil {
			continue
		}
		kib, err := strconv.ParseInt(fields[0], 10, 53)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		*total += kib << 10
	}
	return nil
}
