package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"forkd.dev/forkd/internal/agent/systemd"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	innerGroup = "init"
	maxInit    = time.Hour
)

// startInit starts the image's own init and waits until it is up.
func (a *Agent) startInit(ctx context.Context, s *wire.Stream, request []byte) error {
	var req wire.InitRequest
	if err := decode(request, &req); err != nil {
		return err
	}
	if req.Init != "systemd" {
		return wire.Errorf(wire.CodeInvalid, "init %q: systemd is the only one that is known", req.Init)
	}
	if a.Phase() != PhaseReady || a.prepared != nil {
		return wire.Errorf(wire.CodePrecondition, "the machine has no root file system yet, or stands still")
	}
	timeout := time.Duration(req.TimeoutMS) * time.Millisecond
	if timeout <= 0 || timeout > maxInit {
		timeout = maxInit
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if a.inner == nil {
		inner, err := a.launchInit(ctx)
		if err != nil {
			return err
		}
		a.inner = inner
		go a.watchInit(inner)
	}
	state, failed, err := a.inner.Wait(ctx)
	if err != nil {
		return err
	}
	return s.SendMessage(wire.InitReply{State: state, Failed: failed})
}

func (a *Agent) launchInit(ctx context.Context) (*systemd.Init, error) {
	groups := a.cfg.Cgroups
	dir := groups.user(innerGroup)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	group, err := os.Open(dir) // stays open as long as it runs
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	inner, err := systemd.Start(ctx, systemd.Config{
		Reaper: a.cfg.Reaper, Group: group, Tools: groups.Hooks, Console: a.cfg.Console,
	})
	if err != nil {
		return nil, errors.Join(err, group.Close())
	}
	return inner, nil
}

// watchInit switches the machine off when its init has ended: nothing of what it started is left then, and nothing can be
// started any more.
func (a *Agent) watchInit(inner *systemd.Init) {
	<-inner.Done()
	if a.ending.Load() {
		return
	}
	fmt.Fprintf(a.cfg.Console, "forkd-agent: %s\n", inner.Ended())
	_ = a.switchOff()
}
