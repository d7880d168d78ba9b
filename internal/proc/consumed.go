package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Consumption is what a process has taken since it started.
type Consumption struct {
	CPU time.Duration // of all its threads, for itself and in the kernel; where it runs a guest, the guest's as well
	// Bytes that came from storage, and that will go there. What the page cache had already is not counted.
	ReadBytes, WrittenBytes int64
}

// userHZ is what the kernel counts the time of processes in for programs, whatever its own clock.
const userHZ = 100

// Consumed reads what a process has taken; the start time must be its (0: whoever has that number). The error is ErrGone when
// there is no such process. What was read and written can be hidden even from its owner: it is 0 then.
func Consumed(pid int, startedAt uint64) (Consumption, error) {
	var c Consumption
	dir := "/proc/" + strconv.Itoa(pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err == nil {
		var start uint64
		if start, err = parseStartTime(string(stat)); err == nil && startedAt != 0 && start != startedAt {
			err = ErrGone
		}
	}
	if err == nil {
		c.CPU, err = parseCPU(string(stat))
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		err = ErrGone
	}
	if err != nil {
		return c, fmt.Errorf("what process %d has taken: %w", pid, err)
	}
	if io, err := os.ReadFile(dir + "/io"); err == nil {
		c.ReadBytes, c.WrittenBytes = parseIO(io)
	}
	return c, nil
}

func parseCPU(stat string) (time.Duration, error) {
	i := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[i+1:])
	if i < 0 || len(fields) < 13 {
		return 0, fmt.Errorf("unreadable process status %q", stat)
	}
	var ticks uint64
	for _, f := range fields[11:13] { // its own time, the kernel's for it
		n, err := strconv.ParseUint(f, 10, 38)
		if err != nil {
			return 0, fmt.Errorf("unreadable process status %q", stat)
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / userHZ), nil
}

func parseIO(text []byte) (read, written int64) {
	var canceled int64
	for line := range bytes.Lines(text) {
		name, value, _ := strings.Cut(string(line), ":")
		n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		if err != nil {
			continue
		}
		switch name {
		case "read_bytes":
			read = n
		case "write_bytes":
			written = n
		case "cancelled_write_bytes": // of files removed before they got there
			canceled = n
		}
	}
	return max(read, 0), max(written-canceled, 0)
}
