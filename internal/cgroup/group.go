package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Group is the control group of one child; in version 1 one in each hierarchy. Its methods are safe for concurrent use,
// and do nothing for nil, which is the group of a child on a host without.
type Group struct {
	tree *Tree
	id   string
	dirs map[Controller]string
}

// Entry is the way into a group for a child that is about to be started. The caller closes it.
type Entry struct {
	Dir   *os.File   // of version 2: the kernel starts a child in it
	Tasks []*os.File // of version 1: a thread that writes "0" has its children in it
}

// Close closes it; nil has nothing to close.
func (e *Entry) Close() {
	if e == nil {
		return
	}
	for _, f := range append([]*os.File{e.Dir}, e.Tasks...) {
		if f != nil {
			_ = f.Close()
		}
	}
}

// EnterThread moves the calling thread into the group in version 1, where what it starts is born. Nil moves it nowhere. The
// thread must be one that ends then: it counts as the group's. Only a thread that moves itself is moved at once: for
// another the kernel waits until all processors have passed a quiet state.
func (e *Entry) EnterThread() error {
	if e == nil {
		return nil
	}
	for _, f := range e.Tasks {
		if _, err := unix.Write(int(f.Fd()), []byte("0")); err != nil {
			return fmt.Errorf("enter control group: %w", err)
		}
	}
	return nil
}

// Share is another hold on the directory of version 2, which its caller closes.
func (e *Entry) Share() (*Entry, error) {
	fd, err := unix.FcntlInt(e.Dir.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("share control group: %w", err)
	}
	return &Entry{Dir: os.NewFile(uintptr(fd), e.Dir.Name())}, nil
}

// Enter moves a process into the group in version 2.
func (e *Entry) Enter(pid int) error {
	fd, err := unix.Openat(int(e.Dir.Fd()), "cgroup.procs", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("enter control group: %w", err)
	}
	_, err = unix.Write(fd, []byte(strconv.Itoa(pid)))
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("enter control group: %w", err)
	}
	return nil
}

// each are the group's directories, each once.
func (g *Group) each() []string {
	var dirs []string
	for _, d := range g.dirs {
		if !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
	}
	slices.Sort(dirs)
	return dirs
}

// Entry opens the way in; nil for nil.
func (g *Group) Entry() (*Entry, error) {
	if g == nil {
		return nil, nil
	}
	e := &Entry{}
	for _, dir := range g.each() {
		if g.tree.version == 2 {
			f, err := os.Open(dir)
			if err != nil {
				return nil, fmt.Errorf("open control group: %w", err)
			}
			e.Dir = f
			continue
		}
		// By number and not by os.OpenFile, which would ask the runtime's poller for each.
		fd, err := unix.Open(filepath.Join(dir, "tasks"), unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			e.Close()
			return nil, fmt.Errorf("open control group %s: %w", dir, err)
		}
		e.Tasks = append(e.Tasks, os.NewFile(uintptr(fd), "tasks"))
	}
	return e, nil
}

// Set bounds the group; what is zero stays as it is. What cannot be held here is left out: see Tree.Check.
func (g *Group) Set(l Limits) error {
	if g == nil {
		return nil
	}
	if l.CPUs > 0 && g.dirs[CPU] != "" {
		g.tree.weigh(g.id, weight(l.CPUs, defaultShares, leastShares))
	}
	return g.write(l.settings(g.tree.version, g.tree.device))
}

// FreeCPU takes the limit of processor time off, until Set puts it on again.
func (g *Group) FreeCPU() error {
	if g == nil {
		return nil
	}
	if g.dirs[CPU] != "" {
		g.tree.weigh(g.id, defaultShares)
	}
	return g.write(freeCPU(g.tree.version))
}

func (g *Group) write(settings []setting) error {
	for _, s := range settings {
		dir := g.dirs[s.controller]
		if dir == "" {
			continue
		}
		err := writeFile(filepath.Join(dir, s.file), s.value)
		if s.optional && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("limit %s: %w", s.controller, err)
		}
	}
	return nil
}

// Remove takes the group away, after its processes have ended. It is idempotent.
func (g *Group) Remove() error {
	if g == nil {
		return nil
	}
	var errs []error
	for _, dir := range g.each() {
		errs = append(errs, Remove(dir))
	}
	g.tree.weigh(g.id, 0)
	return errors.Join(errs...)
}

// Usage is what a group has taken so far; zero where it cannot be told.
type Usage struct {
	CPU          time.Duration
	Throttled    time.Duration // it wanted to run and was not let
	MemoryBytes  int64         // with the kernel's cache of files that it read and wrote
	MemoryPeak   int64
	OOMKills     int64
	PIDs         int64
	ReadBytes    int64 // from disks
	WrittenBytes int64
}

// Usage reads it.
func (g *Group) Usage() Usage {
	var u Usage
	if g == nil {
		return u
	}
	if g.tree.version == 2 {
		cpu := g.fields(CPU, "cpu.stat")
		u.CPU, u.Throttled = micro(cpu["usage_usec"]), micro(cpu["throttled_usec"])
		u.MemoryBytes, u.MemoryPeak = g.number(Memory, "memory.current"), g.number(Memory, "memory.peak")
		u.PIDs = g.number(PIDs, "pids.current")
		u.ReadBytes, u.WrittenBytes = sumIO(g.read(IO, "io.stat"))
	} else {
		u.CPU = time.Duration(g.number(usage, "cpuacct.usage"))
		u.Throttled = time.Duration(g.fields(CPU, "cpu.stat")["throttled_time"])
		u.MemoryBytes, u.MemoryPeak = g.number(Memory, "memory.usage_in_bytes"), g.number(Memory, "memory.max_usage_in_bytes")
		u.PIDs = g.number(PIDs, "pids.current")
	}
	u.OOMKills = g.OOMKills()
	return u
}

// OOMKills is how often the kernel has killed a process of the group because it had come to its limit of memory.
func (g *Group) OOMKills() int64 {
	switch {
	case g == nil:
		return 0
	case g.tree.version == 2:
		return g.fields(Memory, "memory.events")["oom_kill"]
	}
	return g.fields(Memory, "memory.oom_control")["oom_kill"]
}

func micro(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

func (g *Group) read(c Controller, file string) string {
	dir := g.dirs[c]
	if dir == "" {
		return ""
	}
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return ""
	}
	return string(b)
}

func (g *Group) number(c Controller, file string) int64 {
	n, _ := strconv.ParseInt(strings.TrimSpace(g.read(c, file)), 10, 64)
	return n
}

func (g *Group) fields(c Controller, file string) map[string]int64 { return fields(g.read(c, file)) }

// fields reads lines of a name and a number.
func fields(text string) map[string]int64 {
	m := map[string]int64{}
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.ParseInt(value, 10, 64)
		if ok && err == nil {
			m[name] = n
		}
	}
	return m
}

// sumIO adds up io.stat: "8:0 rbytes=1 wbytes=2 rios=…", a line for each disk.
func sumIO(text string) (read, written int64) {
	for word := range strings.FieldsSeq(text) {
		name, value, _ := strings.Cut(word, "=")
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			continue
		}
		switch name {
		case "rbytes":
			read += n
		case "wbytes":
			written += n
		}
	}
	return read, written
}
