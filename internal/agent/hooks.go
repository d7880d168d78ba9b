package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	hookDir   = "etc/forkd/fork.d"
	hookLimit = 5 * time.Second
	maxHooks  = 100
)

// listHooks finds the image's fork hooks, in the order of their names.
func listHooks(root string) []string {
	entries, err := os.ReadDir(filepath.Join(root, hookDir))
	if err != nil {
		return nil // there is none, usually
	}
	var names []string
	for _, e := range entries {
		info, err := os.Stat(filepath.Join(root, hookDir, e.Name()))
		if err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			names = append(names, e.Name())
		}
	}
	return names
}

// runHooks runs the fork hooks while user processes are still frozen, but for contexts. A hook that fails leaves
// something of the image unrenewed, which the report says; it does not fail the fork.
func (a *Agent) runHooks(ctx context.Context, req *wire.AwakenRequest, report *wire.AwakenReport) {
	if len(a.prepared.hooks) == 0 {
		return
	}
	a.prepared.startAgain()
	failed := func(name, why string) {
		report.NotRenewed = append(report.NotRenewed, wire.NotRenewed{What: "fork_hook", Name: "/" + hookDir + "/" + name, Why: why})
	}
	env, err := a.hookEnv(req)
	for i, name := range a.prepared.hooks {
		var why string
		switch {
		case err != nil:
			why = err.Error()
		case i >= maxHooks:
			why = fmt.Sprintf("not run: more than %d hooks", maxHooks)
		default:
			why = a.runHook(ctx, filepath.Join(a.cfg.System.Root, hookDir, name), env)
		}
		if why != "" {
			failed(name, why)
			continue
		}
		report.Renewed = append(report.Renewed, "fork_hook:"+name)
	}
}

func (a *Agent) hookEnv(req *wire.AwakenRequest) ([]string, error) {
	root, err := a.cfg.Accounts.User("0")
	if err != nil {
		return nil, err
	}
	return a.cfg.Accounts.Environ(root, map[string]string{
		"FORKD_SANDBOX_ID": req.SandboxID,
		"FORKD_FORK_INDEX": strconv.Itoa(req.Index),
		"FORKD_FORK_COUNT": strconv.Itoa(req.Count),
	})
}

// runHook returns why the hook failed, or nothing.
func (a *Agent) runHook(ctx context.Context, path string, env []string) string {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return "open /dev/null: " + err.Error()
	}
	defer unix.Close(null)
	sys := &syscall.SysProcAttr{Setsid: true}
	if group, err := a.cfg.Cgroups.Hooks(); err == nil {
		defer group.Close()
		sys.UseCgroupFD, sys.CgroupFD = true, int(group.Fd())
	}
	child, err := a.cfg.Reaper.Start(ctx, &reap.Command{
		Path: path, Args: []string{path}, Env: env, Dir: a.cfg.System.Root, Files: []int{null, null, null}, Sys: sys, Outside: true,
	})
	if err != nil {
		return err.Error()
	}
	limited, cancel := context.WithTimeout(ctx, hookLimit)
	defer cancel()
	select {
	case <-child.Done():
	case <-limited.Done():
		_ = child.SignalGroup(unix.SIGKILL)
		<-child.Done()
		return fmt.Sprintf("killed: it did not end within %v", hookLimit)
	}
	if state := child.State(); !state.Exited() || state.ExitCode() != 0 {
		return state.String()
	}
	return ""
}
