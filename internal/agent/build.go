package agent

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

const (
	imageFile = "/etc/forkd/image.json"
	// endLimit is how long killed processes may take to be gone.
	endLimit = 10 * time.Second
)

// configure reads the image's defaults again: a step of a build has written them.
func (a *Agent) configure(_ context.Context, _ *wire.Stream, _ []byte) error {
	if a.Phase() != PhaseReady {
		return wire.Errorf(wire.CodePrecondition, "the machine is being built and has no root file system yet")
	}
	defaults, err := imageDefaults(imageFile)
	if err != nil {
		return err
	}
	a.cfg.Accounts.SetDefaults(defaults)
	return nil
}

// endStarted kills what a step of a build left running.
func (a *Agent) endStarted(ctx context.Context, s *wire.Stream, request []byte) error {
	var req wire.EndProcessesRequest
	if err := decode(request, &req); err != nil {
		return err
	}
	if a.Phase() != PhaseReady {
		return wire.Errorf(wire.CodePrecondition, "the machine is being built and has no processes yet")
	}
	if req.List {
		pids, err := a.cfg.Cgroups.started()
		if err != nil {
			return err
		}
		return s.SendMessage(wire.EndProcessesReply{PIDs: pids})
	}
	ctx, cancel := context.WithTimeout(ctx, endLimit)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		pids, err := a.cfg.Cgroups.started()
		if err != nil {
			return err
		}
		// What is born between the list and the signals is in the next list.
		victims := slices.DeleteFunc(slices.Clone(pids), func(pid int) bool { return descends(pid, req.Keep) })
		if len(victims) == 0 {
			return s.SendMessage(wire.EndProcessesReply{PIDs: pids})
		}
		for _, pid := range victims {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return wire.Errorf(wire.CodeDeadline, "processes %v do not end within %s", victims, endLimit)
		}
	}
}

// descends reports whether a process is one of these or came from one. Who lost its parent has the agent's as parent, and
// came from nobody.
func descends(pid int, from []int) bool {
	const most = 1000 // deep; numbers may be used again while we look
	for range most {
		if slices.Contains(from, pid) {
			return true
		}
		parent, err := parentOf(pid)
		if err != nil || parent <= 1 {
			return false
		}
		pid = parent
	}
	return false
}

// parentOf reads /proc/PID/stat: "pid (name) state parent …", where a name may hold anything.
func parentOf(pid int) (int, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 2 {
		return 0, errors.New("a line of /proc is cut off")
	}
	return strconv.Atoi(string(f[1]))
}
