package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/quick"
)

// Cgroups is the tree of user processes, <root>/user: one group for processes, one for each context. The agent is
// outside of it, as is the group for the programs it runs on its own behalf. Freezing is done group by group, because a
// frozen parent would hold the contexts, which have to run before everything else in a fork.
type Cgroups struct {
	root string

	mu       sync.Mutex
	contexts map[string][]string // groups of each context id, the oldest first
	serial   int

	most       int // processes and threads of all users' groups; zero: no limit
	procSerial int
	lent       []*ProcessGroup // those in which there may be processes
	idle       []*ProcessGroup // those that wait for one
}

const (
	userGroup = "user"
	procGroup = "proc"
	hookGroup = "hooks"
	ctxPrefix = "ctx-"
	ctxSerial = "~" // does not occur in an id
)

// NewCgroups makes the groups below root, the mount point of cgroup2.
func NewCgroups(root string) (*Cgroups, error) {
	c := &Cgroups{root: root}
	for _, dir := range []string{c.user(""), c.user(procGroup), filepath.Join(root, hookGroup)} {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("make cgroup: %w", err)
		}
	}
	if err := c.limit("/proc/sys/kernel/threads-max"); err != nil {
		return nil, err
	}
	if g, err := c.Process(); err == nil { // so that a fork need not make one for its first process
		g.Release()
	}
	return c, nil
}

// kernelTasks is how many tasks of the machine's are not user processes': the kernel's, the agent's threads, hooks.
const kernelTasks = 160

// limit sees to it that user processes cannot take the last of the kernel's tasks: the agent could start nothing any
// more, not even a thread of its own. Each group gets a part, so that beside a program that starts processes without end
// others can be started, to end it. Processor time is shared by group for the same reason: by task, as without groups, a
// new process beside a thousand busy ones gets a thousandth, and takes minutes to begin.
func (c *Cgroups) limit(threadsMax string) error {
	for _, controller := range []string{"+cpu", "+pids"} {
		for _, dir := range []string{c.root, c.user(""), c.user(procGroup)} {
			err := write(dir, "cgroup.subtree_control", controller)
			if err != nil && controller == "+pids" {
				return nil // A kernel without: nothing is limited.
			}
		}
	}
	b, err := os.ReadFile(threadsMax)
	if err != nil {
		return fmt.Errorf("limit processes: %w", err)
	}
	most, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return fmt.Errorf("limit processes: %w", err)
	}
	c.most = max(most, 2*kernelTasks) - kernelTasks
	return write(c.user(""), "pids.max", strconv.Itoa(c.most))
}

// leastShare is how many tasks a group may have however few are left.
const leastShare = 16

// share is how many tasks a group may have that begins now: a third of all, and never more than half of what is left, so
// that several programs that start processes without end leave room too. Zero: no limit.
func (c *Cgroups) share() int {
	if c.most == 0 {
		return 0
	}
	third := c.most / 3
	fd, err := unix.Open(c.user("")+"/pids.current", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return third
	}
	defer unix.Close(fd)
	var buf [32]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return third
	}
	now, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	if err != nil {
		return third
	}
	return max(leastShare, min(third, (c.most-now)/2))
}

// bound limits a group.
func bound(dir string, share int) error {
	if share == 0 {
		return nil
	}
	return write(dir, "pids.max", strconv.Itoa(share))
}

func (c *Cgroups) user(group string) string { return filepath.Join(c.root, userGroup, group) }

// Hooks opens the group of the agent's own children.
func (c *Cgroups) Hooks() (*os.File, error) { return os.Open(filepath.Join(c.root, hookGroup)) }

// Context makes and opens a group for a context. The caller has checked the id. A context may begin before the end of
// an earlier one of that id was cleaned up: each has a group of its own, so that cleaning up hits the right one.
func (c *Cgroups) Context(id string) (*os.File, error) {
	c.mu.Lock()
	name := ctxPrefix + id
	if len(c.contexts[id]) > 0 {
		c.serial++
		name += ctxSerial + strconv.Itoa(c.serial)
	}
	if c.contexts == nil {
		c.contexts = map[string][]string{}
	}
	c.contexts[id] = append(c.contexts[id], name)
	c.mu.Unlock()
	if err := os.Mkdir(c.user(name), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make cgroup of context %s: %w", id, err)
	}
	if err := bound(c.user(name), c.share()); err != nil {
		return nil, err
	}
	return os.Open(c.user(name))
}

// RemoveContext kills what is left of the oldest context of an id and removes its group.
func (c *Cgroups) RemoveContext(ctx context.Context, id string) error {
	c.mu.Lock()
	names := c.contexts[id]
	if len(names) > 0 {
		c.contexts[id] = names[1:]
	}
	c.mu.Unlock()
	if len(names) == 0 {
		return nil
	}
	dir := c.user(names[0])
	if err := write(dir, "cgroup.kill", "1"); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := waitEvent(limited, dir, "populated 0"); err != nil {
		return fmt.Errorf("end context %s: %w", id, err)
	}
	return unix.Rmdir(dir)
}

// Rehearse freezes and thaws a group in which nothing runs: what the kernel and the agent do for it has been translated
// then, in an emulated machine that does it for the first time.
func (c *Cgroups) Rehearse(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, freezeLimit)
	defer cancel()
	dir := filepath.Join(c.root, hookGroup)
	if write(dir, "cgroup.freeze", "1") == nil {
		_ = waitEvent(limited, dir, "frozen 1")
		_ = write(dir, "cgroup.freeze", "0")
	}
}

// groups are the names below user.
func (c *Cgroups) groups() ([]string, error) {
	entries, err := os.ReadDir(c.user(""))
	if err != nil {
		return nil, fmt.Errorf("list cgroups: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Open prepares to freeze all groups: what can be done beforehand must not make the frozen time longer. No group may
// come into being between this and Freeze (Reaper.Pause).
func (c *Cgroups) Open() (*Frozen, error) {
	names, err := c.groups()
	if err != nil {
		return nil, err
	}
	f := &Frozen{}
	for _, name := range names {
		g := frozenGroup{name: name, fd: -1, events: -1}
		g.fd, err = unix.Open(c.user(name)+"/cgroup.freeze", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			g.events, err = unix.Open(c.user(name)+"/cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
		if errors.Is(err, unix.ENOENT) {
			g.close() // a context that is going away
			continue
		}
		if err != nil {
			g.close()
			f.Close()
			return nil, fmt.Errorf("open cgroup of %s: %w", name, err)
		}
		f.groups = append(f.groups, g)
	}
	return f, nil
}

// Frozen is a set of groups, with open descriptors so that freezing and thawing take little.
type Frozen struct{ groups []frozenGroup }

type frozenGroup struct {
	name       string
	fd, events int
	thawed     bool
}

func (g *frozenGroup) close() {
	for _, fd := range []int{g.fd, g.events} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// Freeze stops all groups and returns when the kernel says that every process has stopped, or thaws them again.
func (f *Frozen) Freeze(ctx context.Context) error {
	if err := f.Refreeze(); err != nil {
		return errors.Join(err, f.Thaw())
	}
	for _, g := range f.groups {
		err := awaitEvent(ctx, g.events, "frozen 1")
		if errors.Is(err, unix.ENODEV) {
			continue // removed meanwhile
		}
		if err != nil {
			return errors.Join(fmt.Errorf("freeze processes of %s: %w", g.name, err), f.Thaw())
		}
	}
	return nil
}

func (g *frozenGroup) set(value string) error {
	if _, err := quick.Pwrite(g.fd, []byte(value), 0); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("write %s to cgroup.freeze of %s: %w", value, g.name, err)
	}
	g.thawed = value == "0"
	return nil
}

// Thaw lets all groups run. It can be called again.
func (f *Frozen) Thaw() error {
	var errs []error
	for i := range f.groups {
		if g := &f.groups[i]; !g.thawed {
			if err := g.set("0"); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// Close ends the set; whatever is frozen stays so.
func (f *Frozen) Close() {
	for i := range f.groups {
		f.groups[i].close()
	}
	f.groups = nil
}

// ThawContext lets one context run.
func (f *Frozen) ThawContext(id string) error {
	found := false
	for i := range f.groups {
		g := &f.groups[i]
		if name, _, _ := strings.Cut(g.name, ctxSerial); name != ctxPrefix+id {
			continue
		}
		found = true
		if err := g.set("0"); err != nil {
			return err
		}
	}
	if !found {
		return fmt.Errorf("context %s has no cgroup", id)
	}
	return nil
}

// Refreeze stops the groups again, without waiting.
func (f *Frozen) Refreeze() error {
	var errs []error
	for i := range f.groups {
		errs = append(errs, f.groups[i].set("1"))
	}
	return errors.Join(errs...)
}

// PIDs are all user processes.
func (c *Cgroups) PIDs() ([]int, error) {
	names, err := c.groups()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range names {
		if name == procGroup {
			started, err := c.started()
			if err != nil {
				return nil, err
			}
			pids = append(pids, started...)
			continue
		}
		if name == innerGroup {
			pids = append(pids, below(c.user(name))...)
			continue
		}
		b, err := os.ReadFile(filepath.Join(c.user(name), "cgroup.procs"))
		if err != nil {
			return nil, fmt.Errorf("list processes: %w", err)
		}
		pids = append(pids, pidsOf(b)...)
	}
	return pids, nil
}

// below are the processes of a group and of those below it, which come and go.
func below(dir string) []int {
	var pids []int
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil //nolint:nilerr // It is gone.
		}
		if b, err := os.ReadFile(filepath.Join(path, "cgroup.procs")); err == nil {
			pids = append(pids, pidsOf(b)...)
		}
		return nil
	})
	return pids
}

// Kill ends every user process, wherever it hides.
func (c *Cgroups) Kill() error { return write(c.user(""), "cgroup.kill", "1") }

// Empty returns when no user process is left.
func (c *Cgroups) Empty(ctx context.Context) error { return waitEvent(ctx, c.user(""), "populated 0") }

func write(dir, file, value string) error {
	fd, err := unix.Open(dir+"/"+file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", file, err)
	}
	_, err = unix.Write(fd, []byte(value))
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("write %s to %s: %w", value, file, err)
	}
	return nil
}

// waitEvent returns when a line is in the group's cgroup.events, whose changes the kernel announces by POLLPRI.
func waitEvent(ctx context.Context, dir, line string) error {
	fd, err := unix.Open(dir+"/cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open cgroup.events: %w", err)
	}
	defer unix.Close(fd)
	return awaitEvent(ctx, fd, line)
}

// awaitEvent is waitEvent on an open cgroup.events.
func awaitEvent(ctx context.Context, fd int, line string) error {
	var buf [256]byte
	for {
		n, err := unix.Pread(fd, buf[:], 0)
		if err != nil {
			return fmt.Errorf("read cgroup.events: %w", err)
		}
		for l := range strings.Lines(string(buf[:n])) {
			if strings.TrimSpace(l) == line {
				return nil
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		// Reading armed the announcement, so none is missed; the limit is for ctx.
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}
		if _, err := unix.Poll(p, 5); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for cgroup.events: %w", err)
		}
	}
}
