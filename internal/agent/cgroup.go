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
	"time"

	"golang.org/x/sys/unix"
)

// Cgroups is the tree of user processes, <root>/user: one group for processes, one for each context. The agent is
// outside of it, as is the group for the programs it runs on its own behalf. Freezing is done group by group, because a
// frozen parent would hold the contexts, which have to run before everything else in a fork.
type Cgroups struct {
	root string
}

const (
	userGroup = "user"
	procGroup = "proc"
	hookGroup = "hooks"
	ctxPrefix = "ctx-"
)

// NewCgroups makes the groups below root, the mount point of cgroup2.
func NewCgroups(root string) (*Cgroups, error) {
	c := &Cgroups{root: root}
	for _, dir := range []string{c.user(""), c.user(procGroup), filepath.Join(root, hookGroup)} {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("make cgroup: %w", err)
		}
	}
	return c, nil
}

func (c *Cgroups) user(group string) string { return filepath.Join(c.root, userGroup, group) }

// Processes opens the group of processes.
func (c *Cgroups) Processes() (*os.File, error) { return os.Open(c.user(procGroup)) }

// Hooks opens the group of the agent's own children.
func (c *Cgroups) Hooks() (*os.File, error) { return os.Open(filepath.Join(c.root, hookGroup)) }

// Context opens the group of a context, made when missing. The caller has checked the id.
func (c *Cgroups) Context(id string) (*os.File, error) {
	dir := c.user(ctxPrefix + id)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make cgroup of context %s: %w", id, err)
	}
	return os.Open(dir)
}

// RemoveContext kills what is left of a context's group and removes it.
func (c *Cgroups) RemoveContext(id string) error {
	dir := c.user(ctxPrefix + id)
	if err := write(dir, "cgroup.kill", "1"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) //nolint:forbidigo // clean-up
	defer cancel()
	if err := waitEvent(ctx, dir, "populated 0"); err != nil {
		return fmt.Errorf("end context %s: %w", id, err)
	}
	return unix.Rmdir(dir)
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

// Freeze stops all groups and returns when the kernel says that every process has stopped, or thaws them again.
func (c *Cgroups) Freeze(ctx context.Context) (*Frozen, error) {
	names, err := c.groups()
	if err != nil {
		return nil, err
	}
	f := &Frozen{}
	for _, name := range names {
		fd, err := unix.Open(c.user(name)+"/cgroup.freeze", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			continue // a context that is going away
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open cgroup.freeze of %s: %w", name, err), f.Thaw())
		}
		f.groups = append(f.groups, frozenGroup{name, fd})
	}
	if err := f.Refreeze(); err != nil {
		return nil, errors.Join(err, f.Thaw())
	}
	for _, g := range f.groups {
		if err := waitEvent(ctx, c.user(g.name), "frozen 1"); err != nil {
			return nil, errors.Join(fmt.Errorf("freeze processes of %s: %w", g.name, err), f.Thaw())
		}
	}
	return f, nil
}

// Frozen is a set of frozen groups, with open descriptors so that thawing takes little.
type Frozen struct{ groups []frozenGroup }

type frozenGroup struct {
	name string
	fd   int
}

func (g frozenGroup) set(value string) error {
	if _, err := unix.Pwrite(g.fd, []byte(value), 0); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("write %s to cgroup.freeze of %s: %w", value, g.name, err)
	}
	return nil
}

// Thaw lets all groups run and ends the set.
func (f *Frozen) Thaw() error {
	var errs []error
	for _, g := range f.groups {
		errs = append(errs, g.set("0"), unix.Close(g.fd))
	}
	f.groups = nil
	return errors.Join(errs...)
}

// ThawContext lets one context run.
func (f *Frozen) ThawContext(id string) error {
	for _, g := range f.groups {
		if g.name == ctxPrefix+id {
			return g.set("0")
		}
	}
	return fmt.Errorf("context %s has no cgroup", id)
}

// Refreeze stops the groups again, without waiting.
func (f *Frozen) Refreeze() error {
	var errs []error
	for _, g := range f.groups {
		errs = append(errs, g.set("1"))
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
		b, err := os.ReadFile(filepath.Join(c.user(name), "cgroup.procs"))
		if err != nil {
			return nil, fmt.Errorf("list processes: %w", err)
		}
		for line := range strings.Lines(string(b)) {
			if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
	}
	return pids, nil
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
