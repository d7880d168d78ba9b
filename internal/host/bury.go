package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/proc"
)

// bury ends what an earlier daemon left: every process whose working directory is below this home's machines, however
// short it lived, then the directories themselves. The kernel is asked and not a record: a daemon killed between
// starting a process and writing it down would have left one nobody knows.
func (h *Host) bury(ctx context.Context) error {
	pids, err := processesBelow(h.cfg.Home.Machines())
	if err != nil {
		return fmt.Errorf("look for machines of an earlier daemon: %w", err)
	}
	for _, pid := range pids {
		start, err := proc.StartTime(pid)
		if err != nil {
			continue // gone meanwhile
		}
		if err := proc.Bury(ctx, pid, start); err != nil {
			return fmt.Errorf("end machine of an earlier daemon (pid %d): %w", pid, err)
		}
		h.log.Info("buried a machine of an earlier daemon", "pid", pid)
	}
	for _, dir := range []string{h.cfg.Home.Machines(), h.cfg.Home.Hot(), h.cfg.Home.Temp()} {
		if err := empty(dir); err != nil {
			return fmt.Errorf("clean up after an earlier daemon: %w", err)
		}
	}
	return nil
}

func processesBelow(dir string) ([]int, error) {
	resolved, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// Other users' processes cannot be read, and are none of ours. A directory removed meanwhile reads with a suffix.
		cwd, err := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		if err == nil && strings.HasPrefix(cwd, resolved+"/") {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}
