// Package systemd runs an image's systemd for those that want it. The agent stays the machine's first process; systemd is
// the first of a pid namespace, with a mount namespace for its /proc, a read-only /sys (by which it knows that it has no
// devices to manage) and its cgroups, and a cgroup of its own below those of user processes, with which it is frozen and
// thawed. Everything that is started for users afterwards is started in there, so that systemctl, journalctl and ps find
// what they expect. The package starts nothing unless it is asked to, and decides nothing about services. Only the agent
// imports it; it is tested in VMs.
package systemd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// StageName is the first argument of the program that becomes systemd.
	StageName = "forkd-systemd"
	// pollInterval is how often it is asked whether it is up; a guest under emulation should spend its time on that.
	pollInterval = 500 * time.Millisecond
	// askTimeout bounds one question.
	askTimeout = 20 * time.Second
	maxAnswer  = 64 << 10
)

// Config is what it depends on.
type Config struct {
	Reaper *reap.Reaper
	// Group is the directory of its cgroup, opened.
	Group *os.File
	// Tools opens a cgroup for the questions that it is asked, outside of its own.
	Tools   func() (*os.File, error)
	Console io.Writer
}

// Init is a systemd that was started.
type Init struct {
	cfg   Config
	child *reap.Child
}

// programs are where systemd is.
func programs() []string { return []string{"/usr/lib/systemd/systemd", "/lib/systemd/systemd"} }

func program() (string, error) {
	for _, path := range programs() {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", wire.Errorf(wire.CodePrecondition, "the image has no systemd (%s): add its package to the recipe, or leave init away",
		strings.Join(programs(), ", "))
}

// Start starts it and makes the reaper start everything else inside. It does not wait until it is up.
func Start(ctx context.Context, cfg Config) (*Init, error) {
	if _, err := program(); err != nil {
		return nil, err
	}
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/null: %w", err)
	}
	defer unix.Close(null)
	child, err := cfg.Reaper.Start(ctx, &reap.Command{
		Path: "/proc/self/exe", Args: []string{StageName}, Dir: "/", Outside: true, Files: []int{null, 2, 2},
		Env: []string{"container=forkd", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Sys: &syscall.SysProcAttr{
			Setsid: true, Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, UseCgroupFD: true, CgroupFD: int(cfg.Group.Fd()),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("start systemd: %w", err)
	}
	inside, err := enter(child.PID())
	if err != nil {
		return nil, errors.Join(err, child.Signal(unix.SIGKILL))
	}
	cfg.Reaper.StartInside(inside)
	return &Init{cfg: cfg, child: child}, nil
}

// Done is closed when it has ended, which ends everything in it.
func (i *Init) Done() <-chan struct{} { return i.child.Done() }

// Ended says why it has, in words. The kernel tells who asks for the machine to be switched off or started again by a
// signal, inside a namespace.
func (i *Init) Ended() string {
	switch state := i.child.State(); {
	case state.Signal() == unix.SIGINT:
		return "the machine was switched off from inside"
	case state.Signal() == unix.SIGHUP:
		return "the machine was to start again, which a sandbox does not"
	default:
		return "systemd ended: " + state.String()
	}
}

// Wait returns when it says that it is up, with its word for that: running, or degraded and the units that failed.
func (i *Init) Wait(ctx context.Context) (state string, failed []string, err error) {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	last := ""
	for {
		select {
		case <-tick.C:
		case <-i.child.Done():
			return "", nil, wire.Errorf(wire.CodePrecondition, "systemd did not come up: %s", i.Ended())
		case <-ctx.Done():
			return "", nil, wire.Errorf(wire.CodeDeadline, "systemd is not up: it says %q", last)
		}
		answer, err := i.ask(ctx, "is-system-running")
		if err != nil {
			continue // it listens to nobody yet
		}
		switch last = strings.TrimSpace(answer); last {
		case "running":
			return last, nil, nil
		case "degraded":
			list, err := i.ask(ctx, "list-units", "--failed", "--no-legend", "--plain", "--no-pager")
			if err != nil {
				return last, nil, err
			}
			for line := range strings.Lines(list) {
				if f := strings.Fields(line); len(f) > 0 {
					failed = append(failed, f[0])
				}
			}
			return last, failed, nil
		}
	}
}

// ask runs systemctl. Its exit code says what its output says as well.
func (i *Init) ask(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	path := "/usr/bin/systemctl"
	if _, err := os.Stat(path); err != nil {
		path = "/bin/systemctl"
	}
	r, w, err := os.Pipe()
	if err != nil {
		return "", fmt.Errorf("ask systemd: %w", err)
	}
	defer r.Close()
	group, err := i.cfg.Tools()
	if err != nil {
		return "", errors.Join(err, w.Close())
	}
	defer group.Close()
	null, err := os.Open("/dev/null")
	if err != nil {
		return "", errors.Join(err, w.Close())
	}
	defer null.Close()
	child, err := i.cfg.Reaper.Start(ctx, &reap.Command{
		Path: path, Args: append([]string{path}, args...), Dir: "/",
		Env:   []string{"PATH=/usr/bin:/bin", "LC_ALL=C", "SYSTEMD_PAGER="},
		Files: []int{int(null.Fd()), int(w.Fd()), int(null.Fd())},
		Sys:   &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(group.Fd())},
	})
	_ = w.Close()
	if err != nil {
		return "", fmt.Errorf("ask systemd: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = child.SignalGroup(unix.SIGKILL) })
	defer stop()
	var out bytes.Buffer
	_, err = io.Copy(&out, io.LimitReader(r, maxAnswer))
	<-child.Done()
	if err != nil {
		return "", fmt.Errorf("ask systemd: %w", err)
	}
	if out.Len() == 0 && child.State().ExitCode() != 0 {
		return "", fmt.Errorf("ask systemd: %s", child.State())
	}
	return out.String(), nil
}

// Renamed tells the journal that the machine has other ids: it keeps its files in a directory of the machine's id, and
// reads the id once. Systemd starts it again at once. Nobody waits for that.
func (i *Init) Renamed() {
	const journal = "system.slice/systemd-journald.service/cgroup.procs"
	b, err := os.ReadFile(filepath.Join(i.cfg.Group.Name(), journal))
	if err != nil {
		return
	}
	for line := range strings.Lines(string(b)) {
		if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 1 {
			_ = unix.Kill(pid, unix.SIGTERM)
		}
	}
}
