package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/proc"
)

// Leftover is something of ours that nobody needs any more, or that nobody can use.
type Leftover struct {
	Kind    string // "process", "machine directory", "temporary file", "failed sandbox", "failed snapshot", "stale workspace", …
	Name    string
	Detail  string // what is known of it
	Bytes   int64  // that it takes on disk
	Hint    string // what to do about one that is not removed
	Kept    bool   // it is only shown: removing it would lose what somebody may want back
	Removed bool
	Err     error // why it could not be

	remove func(ctx context.Context) error
}

const (
	// youngMachine is how old a machine without a sandbox has to be: younger ones may be on their way into the table.
	youngMachine = 10 * time.Minute
	// youngTemp is the same of a file on its way to its place.
	youngTemp = 24 * time.Hour
)

// Leftovers lists what earlier daemons, crashes and failures have left. What a machine or a file is made for at this moment is
// not in it.
func (h *Host) Leftovers(ctx context.Context) ([]Leftover, error) {
	var all []Leftover
	for _, find := range []func(context.Context) ([]Leftover, error){
		h.strayMachines, h.strayGroups, h.strandedProcesses, h.oldTemp, h.failedThings, h.damagedRecords, h.oldAdverts,
	} {
		found, err := find(ctx)
		if err != nil {
			return nil, fmt.Errorf("look for leftovers: %w", err)
		}
		all = append(all, found...)
	}
	return all, nil
}

// Cleanup removes what Leftovers lists, but for what is kept, and says of each what became of it.
func (h *Host) Cleanup(ctx context.Context) ([]Leftover, error) {
	all, err := h.Leftovers(ctx)
	if err != nil {
		return nil, err
	}
	for i := range all {
		l := &all[i]
		if l.Kept {
			continue
		}
		l.Err = l.remove(ctx)
		l.Removed = l.Err == nil
		if l.Err == nil {
			h.log.Info("removed a leftover", "kind", l.Kind, "name", l.Name)
		}
	}
	return all, nil
}

// strayMachines are directories of machines, and the processes that work there, that no sandbox and no build has.
func (h *Host) strayMachines(context.Context) ([]Leftover, error) {
	found, err := machinesBelow(h.cfg.Home.Machines())
	if err != nil {
		return nil, err
	}
	known, building := h.knownMachines()
	if building { // Its machines are in no table.
		return nil, nil
	}
	var all []Leftover
	for _, m := range found {
		info, err := os.Lstat(m.dir)
		if known[m.dir] || err == nil && time.Since(info.ModTime()) < youngMachine {
			continue
		}
		for _, pid := range m.pids {
			all = append(all, process(pid, "it works in "+m.dir+", which is no sandbox's"))
		}
		if err != nil {
			continue
		}
		all = append(all, Leftover{
			Kind: "machine directory", Name: filepath.Base(m.dir), Detail: "no sandbox has it", Bytes: diskUsage(m.dir),
			remove: func(context.Context) error { return os.RemoveAll(m.dir) },
		})
	}
	return all, nil
}

func (h *Host) knownMachines() (dirs map[string]bool, building bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	dirs = map[string]bool{}
	for _, s := range h.sandboxes {
		s.mu.Lock()
		dirs[s.dir] = true
		s.mu.Unlock()
	}
	for _, what := range h.busy {
		building = building || strings.HasPrefix(what, buildWhat)
	}
	return dirs, building
}

func process(pid int, detail string) Leftover {
	end := func(context.Context) error { return nil } // gone meanwhile
	if start, err := proc.StartTime(pid); err == nil {
		end = func(ctx context.Context) error { return proc.Bury(ctx, pid, start) }
	}
	return Leftover{Kind: "process", Name: strconv.Itoa(pid), Detail: detail, remove: end}
}

// machineDirName is how machineDir names them. A process in a jail works in a directory of that name which is its own, and stays.
var machineDirName = regexp.MustCompile(`/machines/[0-9a-f]{24}(/disk)?( \(deleted\))?$`)

// strandedProcesses are VM processes of this user whose home was removed under them: no daemon will ever find them.
func (h *Host) strandedProcesses(context.Context) ([]Leftover, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var all []Leftover
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		cwd, err := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		if err != nil || !machineDirName.MatchString(cwd) { // Those of other users cannot be read.
			continue
		}
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		root := cwd[:strings.LastIndex(cwd, "/machines/")]
		if _, gone := os.Lstat(root); err != nil || !strings.HasPrefix(filepath.Base(exe), "qemu-") || !errors.Is(gone, fs.ErrNotExist) || !removedUnder(pid, cwd) {
			continue
		}
		all = append(all, process(pid, "a VM process whose home "+root+" was removed"))
	}
	return all, nil
}

func (h *Host) oldTemp(context.Context) ([]Leftover, error) {
	entries, err := os.ReadDir(h.cfg.Home.Temp())
	if err != nil {
		return nil, err
	}
	var all []Leftover
	for _, e := range entries {
		path := filepath.Join(h.cfg.Home.Temp(), e.Name())
		info, err := e.Info()
		if err != nil || time.Since(info.ModTime()) < youngTemp {
			continue
		}
		all = append(all, Leftover{
			Kind: "temporary file", Name: e.Name(), Detail: "unchanged since " + info.ModTime().Format(time.RFC3339), Bytes: diskUsage(path),
			remove: func(context.Context) error { return os.RemoveAll(path) },
		})
	}
	return all, nil
}

// failedThings are kept so that their reasons can be read, until somebody has.
func (h *Host) failedThings(context.Context) ([]Leftover, error) {
	var all []Leftover
	for _, s := range h.Sandboxes(nil) {
		if s.State == lineage.Failed {
			all = append(all, Leftover{
				Kind: "failed sandbox", Name: s.ID, Detail: s.Reason,
				remove: func(ctx context.Context) error { return missingIsGone(h.Kill(ctx, s.ID)) },
			})
		}
	}
	for _, v := range h.Snapshots() {
		if v.Status == lineage.FailedSnap {
			all = append(all, Leftover{
				Kind: "failed snapshot", Name: v.Tag, Detail: v.Reason,
				remove: func(ctx context.Context) error {
					_, err := h.RemoveSnapshot(ctx, v.Tag, RemoveOptions{})
					return missingIsGone(err)
				},
			})
		}
	}
	for _, w := range h.Workspaces() {
		if w.Status == WorkspaceStale {
			all = append(all, Leftover{
				Kind: "stale workspace", Name: w.Name, Detail: w.Reason,
				remove: func(ctx context.Context) error { return missingIsGone(h.RemoveWorkspace(ctx, w.Name)) },
			})
		}
	}
	return all, nil
}

// missingIsGone: somebody else was faster.
func missingIsGone(err error) error {
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// damagedRecords cannot be used, but may be of a newer forkd, or be mended.
func (h *Host) damagedRecords(context.Context) ([]Leftover, error) {
	var all []Leftover
	add := func(dir string, bad []error, err error) error {
		for _, e := range bad {
			all = append(all, Leftover{
				Kind: "damaged record", Name: dir, Detail: e.Error(), Kept: true,
				Hint: "put it back from a copy, use the forkd that wrote it, or remove it below " + dir + " by hand",
			})
		}
		return err
	}
	_, bad, err := h.store.Snapshots()
	errs := []error{add(h.cfg.Home.Snapshots(), bad, err)}
	_, bad, err = h.store.Images()
	errs = append(errs, add(h.cfg.Home.Images(), bad, err))
	_, bad, err = h.store.SuspendedSandboxes()
	errs = append(errs, add(h.cfg.Home.Suspended(), bad, err))
	_, bad, err = h.store.Workspaces()
	errs = append(errs, add(h.cfg.Home.Workspaces(), bad, err))
	return all, errors.Join(errs...)
}

// oldAdverts are of daemons that are gone.
func (h *Host) oldAdverts(context.Context) ([]Leftover, error) {
	var all []Leftover
	for _, path := range layout.DeadAdverts(filepath.Dir(h.cfg.Home.Advert())) {
		all = append(all, Leftover{
			Kind: "advertisement", Name: path, Detail: "its daemon is gone",
			remove: func(context.Context) error {
				if slices.Contains(layout.DeadAdverts(filepath.Dir(path)), path) {
					return os.Remove(path)
				}
				return nil
			},
		})
	}
	return all, nil
}

// diskUsage is what a tree takes on disk, as far as it can be read.
func diskUsage(path string) int64 {
	var files []string
	_ = filepath.WalkDir(path, func(p string, _ fs.DirEntry, err error) error {
		if err == nil {
			files = append(files, p)
		}
		return nil
	})
	return allocated(files)
}
