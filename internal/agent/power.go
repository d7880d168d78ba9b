package agent

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// powerGrace is what processes get between SIGTERM and SIGKILL.
const powerGrace = 2 * time.Second

// powerOff answers, then ends every process, brings the disk into order and switches off.
func (a *Agent) powerOff(ctx context.Context, s *wire.Stream, _ []byte) error {
	if err := s.End(); err != nil {
		return err
	}
	a.ending.Store(true)
	// The caller is content with the answer and may hang up.
	a.endProcesses(context.WithoutCancel(ctx))
	return a.switchOff()
}

func (a *Agent) endProcesses(ctx context.Context) {
	if a.Phase() != PhaseReady {
		return
	}
	pids, err := a.cfg.Cgroups.PIDs()
	if err != nil || len(pids) == 0 {
		return
	}
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGTERM) // ended meanwhile
	}
	_ = a.thaw()
	limited, cancel := context.WithTimeout(ctx, powerGrace)
	defer cancel()
	if a.cfg.Cgroups.Empty(limited) == nil {
		return
	}
	_ = a.cfg.Cgroups.Kill()
	last, cancelLast := context.WithTimeout(ctx, powerGrace)
	defer cancelLast()
	_ = a.cfg.Cgroups.Empty(last)
}

// switchOff makes the disk consistent as far as it can: a remount that fails must not keep the machine on.
func (a *Agent) switchOff() error {
	unix.Sync()
	if err := unix.Mount("", a.cfg.System.Root, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		fmt.Fprintf(a.cfg.Console, "forkd-agent: remount / read-only: %v\n", err)
	}
	return a.cfg.System.PowerOff()
}
