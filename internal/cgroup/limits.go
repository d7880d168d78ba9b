package cgroup

import (
	"fmt"
	"math"
	"strconv"
	"time"
)

// Controller is one of the kernel's kinds of limits.
type Controller string

// Controllers.
const (
	Memory Controller = "memory"
	CPU    Controller = "cpu"
	IO     Controller = "io"
	PIDs   Controller = "pids"

	usage Controller = "cpuacct" // of version 1 alone, which measures what CPU limits in a hierarchy of its own
)

// Limits bound a group; zero bounds nothing.
type Limits struct {
	MemoryBytes int64   `json:"memory_bytes,omitempty"`
	CPUs        float64 `json:"cpus,omitempty"`        // processors' worth of time: 0.05 is a twentieth of one
	PIDs        int64   `json:"pids,omitempty"`        // processes and threads
	IOBytes     int64   `json:"io_bytes,omitempty"`    // a second, of reading and of writing each
	IORequests  int64   `json:"io_requests,omitempty"` // a second, of reading and of writing each
}

// period is over which processor time is shared out: the kernel's default.
const period = 100 * time.Millisecond

// minQuota is the least processor time a period that the kernel takes.
const minQuota = time.Millisecond

// MinCPUs is the least that CPUs can be.
const MinCPUs = float64(minQuota) / float64(period)

// Weights of groups whose processes want more than there is: the kernel's default, in version 2 and in version 1.
const (
	defaultWeight = 100
	defaultShares = 1024
)

// weight is a group's part of a processor that others want as well: as much less as its limit is less than a processor.
// All groups' time begins at once, in each period; with the weight of one that is not limited, twenty that may have a
// twentieth each would together have the processors for half of every period, and one that is not limited would stand
// still.
func weight(cpus float64, usual, least int64) int64 {
	return min(max(int64(math.Round(cpus*float64(usual))), least), usual)
}

// quota is the time of a period that so many CPUs stand for, in microseconds.
func quota(cpus float64) int64 {
	return max(int64(math.Round(cpus*float64(period.Microseconds()))), minQuota.Microseconds())
}

// setting is a line to write into a file of a group.
type setting struct {
	controller Controller
	file       string
	value      string
	optional   bool // the kernel may lack the file
}

// settings are what a group of a hierarchy of that version needs for limits. device is the disk's number, "8:0".
func (l Limits) settings(version int, device string) []setting {
	if version == 1 {
		return l.settings1()
	}
	var all []setting
	if l.MemoryBytes > 0 {
		all = append(
			all,
			// Nothing is moved out to swap to stay below the limit: it would only end later, and slow down others' disks.
			setting{Memory, "memory.swap.max", "0", true},
			setting{Memory, "memory.oom.group", "1", true},
			setting{Memory, "memory.max", strconv.FormatInt(l.MemoryBytes, 10), false},
		)
	}
	if l.CPUs > 0 {
		all = append(
			all,
			setting{CPU, "cpu.max", fmt.Sprintf("%d %d", quota(l.CPUs), period.Microseconds()), false},
			setting{CPU, "cpu.weight", strconv.FormatInt(weight(l.CPUs, defaultWeight, 1), 10), true},
		)
	}
	if l.PIDs > 0 {
		all = append(all, setting{PIDs, "pids.max", strconv.FormatInt(l.PIDs, 10), false})
	}
	if device != "" && (l.IOBytes > 0 || l.IORequests > 0) {
		all = append(all, setting{IO, "io.max", fmt.Sprintf("%s rbps=%s wbps=%[2]s riops=%s wiops=%[3]s", device, orMax(l.IOBytes),
			orMax(l.IORequests)), false})
	}
	return all
}

func orMax(n int64) string {
	if n <= 0 {
		return "max"
	}
	return strconv.FormatInt(n, 10)
}

// settings1 has nothing for IO: version 1 holds up direct reads and writes only, and not what the kernel writes later on
// a process's behalf.
func (l Limits) settings1() []setting {
	var all []setting
	if l.MemoryBytes > 0 {
		n := strconv.FormatInt(l.MemoryBytes, 10)
		// The second is the sum with swap, and may not be less than the first at any time.
		all = append(all, setting{Memory, "memory.limit_in_bytes", n, false}, setting{Memory, "memory.memsw.limit_in_bytes", n, true})
	}
	if l.CPUs > 0 {
		all = append(
			all,
			setting{CPU, "cpu.cfs_period_us", strconv.FormatInt(period.Microseconds(), 10), false},
			setting{CPU, "cpu.cfs_quota_us", strconv.FormatInt(quota(l.CPUs), 10), false},
			setting{CPU, "cpu.shares", strconv.FormatInt(weight(l.CPUs, defaultShares, leastShares), 10), true},
		)
	}
	if l.PIDs > 0 {
		all = append(all, setting{PIDs, "pids.max", strconv.FormatInt(l.PIDs, 10), false})
	}
	return all
}

// freeCPU are the settings that take a limit of processor time off.
func freeCPU(version int) []setting {
	if version == 1 {
		return []setting{{CPU, "cpu.cfs_quota_us", "-1", false}, {CPU, "cpu.shares", strconv.Itoa(defaultShares), true}}
	}
	return []setting{{CPU, "cpu.max", "max", false}, {CPU, "cpu.weight", strconv.Itoa(defaultWeight), true}}
}

// controllers are those that limits need.
func (l Limits) controllers() []Controller {
	var all []Controller
	for _, c := range []struct {
		is  bool
		has Controller
	}{{l.MemoryBytes > 0, Memory}, {l.CPUs > 0, CPU}, {l.PIDs > 0, PIDs}, {l.IOBytes > 0 || l.IORequests > 0, IO}} {
		if c.is {
			all = append(all, c.has)
		}
	}
	return all
}
