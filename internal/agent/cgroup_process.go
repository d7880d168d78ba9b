package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	procPrefix = "p"
	// maxIdleGroups is how many groups without processes are kept: making one takes longer than starting a process.
	maxIdleGroups = 4
)

// ProcessGroup is the cgroup of one process and of all it starts, below the group of processes, with which it is frozen
// and thawed. It is used again for another process when nothing is left in it.
type ProcessGroup struct {
	cgroups *Cgroups
	name    string
	fd      int // of its directory
	events  int // of its cgroup.events

	share    int  // of the machine's tasks, as last written
	released bool // guarded by the mutex of all
}

// Process lends a group for a process.
func (c *Cgroups) Process() (*ProcessGroup, error) {
	share := c.share()
	c.mu.Lock()
	if n := len(c.idle); n > 0 {
		g := c.idle[n-1]
		c.idle = c.idle[:n-1]
		g.released = false
		c.lent = append(c.lent, g)
		c.mu.Unlock()
		if err := g.bound(share); err != nil {
			g.Release()
			return nil, fmt.Errorf("limit cgroup %s: %w", g.name, err)
		}
		return g, nil
	}
	c.procSerial++
	name := procPrefix + strconv.Itoa(c.procSerial)
	c.mu.Unlock()
	dir := filepath.Join(c.user(procGroup), name)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	g := &ProcessGroup{cgroups: c, name: name, fd: -1, events: -1}
	err := g.bound(share)
	if err == nil {
		g.fd, err = unix.Open(dir, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err == nil {
		g.events, err = unix.Open(dir+"/cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		g.remove()
		return nil, fmt.Errorf("open cgroup %s: %w", name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lent = append(c.lent, g)
	return g, nil
}

// started are the processes that were started here, and all they started.
func (c *Cgroups) started() ([]int, error) {
	c.mu.Lock()
	lent := slices.Clone(c.lent)
	c.mu.Unlock()
	b, err := os.ReadFile(filepath.Join(c.user(procGroup), "cgroup.procs"))
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	pids := append([]int{}, pidsOf(b)...)
	for _, g := range lent {
		b, err := os.ReadFile(filepath.Join(c.user(procGroup), g.name, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) {
			continue // given back meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("list processes: %w", err)
		}
		pids = append(pids, pidsOf(b)...)
	}
	return pids, nil
}

// bound limits how many tasks there may be in it.
func (g *ProcessGroup) bound(share int) error {
	if share == g.share {
		return nil
	}
	if err := bound(filepath.Join(g.cgroups.user(procGroup), g.name), share); err != nil {
		return err
	}
	g.share = share
	return nil
}

// FD is the directory, for starting a process in it.
func (g *ProcessGroup) FD() int { return g.fd }

// Empty says that no process is in it, not even one that has ended and was not collected.
func (g *ProcessGroup) Empty() bool {
	var buf [256]byte
	n, err := unix.Pread(g.events, buf[:], 0)
	return err == nil && strings.Contains(string(buf[:n]), "populated 0")
}

// Signal sends a signal to every process in it. The kernel knows them all for SIGKILL; for others those are found that
// are started meanwhile, within reason.
func (g *ProcessGroup) Signal(sig syscall.Signal) error {
	dir := filepath.Join(g.cgroups.user(procGroup), g.name)
	if sig == unix.SIGKILL {
		return write(dir, "cgroup.kill", "1")
	}
	told := map[int]bool{}
	for range 10 {
		b, err := os.ReadFile(dir + "/cgroup.procs")
		if err != nil {
			return fmt.Errorf("list processes: %w", err)
		}
		more := false
		for _, pid := range pidsOf(b) {
			if told[pid] {
				continue
			}
			told[pid], more = true, true
			if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
		if !more {
			break
		}
	}
	if len(told) == 0 {
		return os.ErrProcessDone
	}
	return nil
}

// Release gives it back. What is still in it goes on, and it is looked at again when others are given back.
func (g *ProcessGroup) Release() {
	c := g.cgroups
	c.mu.Lock()
	g.released = true
	var spare []*ProcessGroup
	c.lent = slices.DeleteFunc(c.lent, func(g *ProcessGroup) bool {
		switch {
		case !g.released || !g.Empty():
			return false
		case len(c.idle) < maxIdleGroups:
			c.idle = append(c.idle, g)
		default:
			spare = append(spare, g)
		}
		return true
	})
	c.mu.Unlock()
	for _, g := range spare {
		g.remove()
	}
}

func (g *ProcessGroup) remove() {
	for _, fd := range []int{g.fd, g.events} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	_ = unix.Rmdir(filepath.Join(g.cgroups.user(procGroup), g.name))
}

func pidsOf(list []byte) []int {
	var pids []int
	for line := range strings.Lines(string(list)) {
		if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}
