package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/proc"
)

// takeOver goes on with what an earlier daemon left: it adopts the machines that were sandboxes and ends everything
// else, every process whose working directory is below this home's machines, however short it lived; then it removes
// the files that nothing stands on. The kernel is asked for the processes and not a record: a daemon killed between
// starting one and writing it down would have left one nobody knows.
func (h *Host) takeOver(ctx context.Context) error {
	found, err := machinesBelow(h.cfg.Home.Machines())
	if err != nil {
		return fmt.Errorf("look for machines of an earlier daemon: %w", err)
	}
	adopted := h.adoptAll(ctx, found)
	if ctx.Err() != nil { // Nothing was ended because this daemon had no time for it.
		for _, a := range adopted {
			a.giveUp()
		}
		return context.Cause(ctx)
	}
	for _, m := range found {
		if err := h.bury(ctx, m); err != nil {
			return err
		}
	}
	if err := h.adoptLinks(ctx, adopted); err != nil {
		return fmt.Errorf("go on with the networks of an earlier daemon: %w", err)
	}
	h.enterAdopted(adopted) //nolint:contextcheck // What it starts lives as long as the host.
	h.sweepGroups()
	if err := h.removeLeft(adopted); err != nil {
		return fmt.Errorf("clean up after an earlier daemon: %w", err)
	}
	return nil
}

// left is a machine's directory as an earlier daemon left it.
type left struct {
	dir     string
	pids    []int // whose working directory it is
	record  *machineRecord
	adopted int   // the process that was adopted; 0: none
	reason  error // why it was not
}

// bury ends the processes of a machine that were not adopted, and removes what is left of a dead one.
func (h *Host) bury(ctx context.Context, m *left) error {
	for _, pid := range m.pids {
		if pid == m.adopted {
			continue
		}
		start, err := proc.StartTime(pid)
		if err != nil {
			continue // gone meanwhile
		}
		if err := proc.Bury(ctx, pid, start); err != nil {
			return fmt.Errorf("end machine of an earlier daemon (pid %d): %w", pid, err)
		}
		h.log.Warn("buried a machine of an earlier daemon", "pid", pid, "sandbox", m.id(), "reason", m.reason)
	}
	if m.adopted != 0 {
		return nil
	}
	if len(m.pids) == 0 && m.record != nil {
		h.log.Warn("a sandbox died while no daemon ran", "sandbox", m.id())
	}
	h.tellBuried(m)
	if err := os.RemoveAll(m.dir); err != nil {
		return fmt.Errorf("clean up after an earlier daemon: %w", err)
	}
	return nil
}

func (m *left) id() string {
	if m.record == nil {
		return ""
	}
	return m.record.ID
}

// machinesBelow lists the directories in dir and the processes that work in each.
func machinesBelow(dir string) ([]*left, error) {
	resolved, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var all []*left
	for _, e := range entries {
		all = append(all, &left{dir: filepath.Join(dir, e.Name())})
	}
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range procs {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// Other users' processes cannot be read, and are none of ours. A directory removed meanwhile reads with a suffix.
		cwd, err := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		name, ok := strings.CutPrefix(cwd, resolved+"/")
		if !ok { // In a jail the path is what it was named by, links and all.
			name, ok = strings.CutPrefix(cwd, dir+"/")
		}
		if err != nil || !ok || !worksBelow(pid, dir, name) {
			continue
		}
		path := filepath.Join(dir, name)
		i := slices.IndexFunc(all, func(m *left) bool { return m.dir == path })
		if i < 0 {
			i = len(all)
			all = append(all, &left{dir: path})
		}
		all[i].pids = append(all[i].pids, pid)
	}
	return all, nil
}

// removeLeft removes files that no adopted machine stands on.
func (h *Host) removeLeft(adopted []*adoption) error {
	kept := map[string]bool{}
	for _, a := range adopted {
		for _, img := range a.record.Images {
			for _, f := range img.Disks {
				kept[f] = true
			}
		}
	}
	if err := empty(h.cfg.Home.Hot(), kept); err != nil {
		return err
	}
	return empty(h.cfg.Home.Temp(), nil)
}

// empty removes everything in a directory but what is to be kept.
func empty(dir string, kept map[string]bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if kept[path] {
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	return nil
}
