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
	OwnBytes          int64 // pages only this process maps: what ending it would free
	SharedBytes       int64 // pages others map too, such as the image all siblings stand on
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
	var u Usage
	found := false
	for line := range bytes.Lines(b) {
		name, rest, ok := strings.Cut(string(line), ":")
		fields := strings.Fields(rest)
		if !ok || len(fields) != 2 || fields[1] != "kB" {
			continue
		}
		var sum *int64
		switch name {
		case "Private_Clean", "Private_Dirty":
			sum = &u.OwnBytes
		case "Shared_Clean", "Shared_Dirty":
			sum = &u.SharedBytes
		case "Pss":
			sum, found = &u.ProportionalBytes, true
		default:
			continue
		}
		kib, err := strconv.ParseInt(fields[0], 10, 53)
		if err != nil {
			return Usage{}, fmt.Errorf("smaps_rollup: %s: %w", name, err)
		}
		*sum += kib << 10
	}
	if !found {
		// The kernel answers a process that has no memory left, a zombie, with an empty file.
		return Usage{}, fmt.Errorf("it has no memory any more: %w", fs.ErrNotExist)
	}
	return u, nil
}
