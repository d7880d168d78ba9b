// Package oom finds out whether the kernel killed a process for want of memory. It asks the kernel's log, and only when a
// process has been killed: accounting for memory by group would say it as well, but every page of every fork would pay
// for it. It protects nothing: the agent is the machine's first process, which the kernel never chooses. Only the agent's
// services import it.
package oom

import (
	"errors"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Victim is a process that the kernel killed.
type Victim struct {
	PID  int
	Name string
}

// String says what happened, for an error's text.
func (v Victim) String() string {
	return "killed: out of memory (the kernel ended " + v.Name + ", process " + strconv.Itoa(v.PID) +
		", because the sandbox had no memory left)"
}

// maxRecords bounds how much of the log is read: it is a ring that programs can write to all the time.
const maxRecords = 20_000

// Killed returns the process with this number if the kernel killed it since then for want of memory.
func Killed(pid int, since time.Time) (Victim, bool) {
	return find("/dev/kmsg", time.Since(since), func(v Victim) bool { return v.PID == pid })
}

// Any returns the latest process that the kernel killed since then for want of memory: for a shell that ended because
// what it had started was killed.
func Any(since time.Time) (Victim, bool) {
	return find("/dev/kmsg", time.Since(since), func(Victim) bool { return true })
}

// find reads the log, in which times are those of the clock that a machine's uptime is of.
func find(log string, ago time.Duration, wanted func(Victim) bool) (found Victim, ok bool) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return Victim{}, false
	}
	// The log's clock is read a little before or after.
	oldest := time.Duration(now.Nano()) - ago - time.Second
	fd, err := unix.Open(log, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return Victim{}, false
	}
	defer unix.Close(fd)
	buf := make([]byte, 8<<10) // the largest record
	for range maxRecords {
		n, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EINTR) { // overwritten before it was read
			continue
		}
		if err != nil || n == 0 {
			break
		}
		if v, at, is := parse(string(buf[:n])); is && at >= oldest && wanted(v) {
			found, ok = v, true
		}
	}
	return found, ok
}

// parse reads a record: "priority,sequence,microseconds,flags;text". The kernel's own have the facility 0, which nobody
// else can give theirs.
func parse(record string) (v Victim, at time.Duration, ok bool) {
	head, text, found := strings.Cut(record, ";")
	fields := strings.SplitN(head, ",", 4)
	if !found || len(fields) < 3 {
		return v, 0, false
	}
	priority, err1 := strconv.Atoi(fields[0])
	micros, err2 := strconv.ParseInt(fields[2], 10, 64)
	if err1 != nil || err2 != nil || priority>>3 != 0 {
		return v, 0, false
	}
	// "Out of memory: Killed process 123 (name) total-vm:…", of a group "Memory cgroup out of memory: …".
	const mark = "ut of memory: Killed process "
	_, rest, found := strings.Cut(text, mark)
	if !found {
		return v, 0, false
	}
	number, rest, _ := strings.Cut(rest, " ")
	v.PID, err1 = strconv.Atoi(number)
	name, _, closed := strings.Cut(strings.TrimPrefix(rest, "("), ") total-vm")
	if err1 != nil || !closed {
		return v, 0, false
	}
	v.Name = name
	return v, time.Duration(micros) * time.Microsecond, true
}
