package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"forkd.dev/forkd/internal/cgroup"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/image"
)

// Limits bound what a sandbox takes of the host: its VM process, with the guest in it. Zero bounds nothing.
type Limits = cgroup.Limits

const (
	// ownOverhead is what a VM process takes besides its guest's memory, at most: the cache of translated code, and itself.
	ownOverhead = 128 << 20
	// leastMemory is what a VM process takes before its guest has done anything.
	leastMemory = 64 << 20
	// leastPIDs is what a VM process may need: a thread for each CPU, and up to 64 for its disk.
	leastPIDs = 128
	// usualPIDs bound each VM process, for whom nobody has asked for a limit: far more than it starts.
	usualPIDs   = 1024
	leastIO     = 64 << 10
	leastIORate = 10
	mostCPUs    = 1024
)

// overhead is what the VM process of a machine takes besides the machine's memory: page tables grow with that.
func overhead(machineBytes int64) int64 { return ownOverhead + machineBytes/64 }

func checkLimits(l Limits) error {
	switch {
	case l.MemoryBytes != 0 && l.MemoryBytes < leastMemory:
		return invalid("memory limit of %d bytes: the VM process alone needs %s", l.MemoryBytes, mib(leastMemory))
	case l.CPUs != 0 && !(l.CPUs >= cgroup.MinCPUs && l.CPUs <= mostCPUs): // NaN is neither
		return invalid("cpu limit of %g CPUs; allowed is %g to %d", l.CPUs, cgroup.MinCPUs, mostCPUs)
	case l.PIDs != 0 && l.PIDs < leastPIDs:
		return invalid("limit of %d processes: the VM process may need up to %d threads; the guest's own processes do not count here",
			l.PIDs, leastPIDs)
	case l.IOBytes != 0 && l.IOBytes < leastIO:
		return invalid("io limit of %d bytes a second: the least is %d", l.IOBytes, leastIO)
	case l.IORequests != 0 && l.IORequests < leastIORate:
		return invalid("io limit of %d requests a second: the least is %d", l.IORequests, leastIORate)
	}
	return nil
}

// recipeLimits are what a recipe says of what is forked of its snapshot.
func recipeLimits(r *image.Recipe) Limits {
	l := r.Limits
	return Limits{MemoryBytes: l.MemoryBytes, CPUs: l.CPUs, PIDs: l.PIDs, IOBytes: l.IOBytes, IORequests: l.IORequests}
}

// over are limits where those that were asked for come before a snapshot's own.
func over(asked, usual Limits) Limits {
	if asked.MemoryBytes == 0 {
		asked.MemoryBytes = usual.MemoryBytes
	}
	if asked.CPUs == 0 {
		asked.CPUs = usual.CPUs
	}
	if asked.PIDs == 0 {
		asked.PIDs = usual.PIDs
	}
	if asked.IOBytes == 0 {
		asked.IOBytes = usual.IOBytes
	}
	if asked.IORequests == 0 {
		asked.IORequests = usual.IORequests
	}
	return asked
}

// bounds decides on the limits of the children of a fork, and says what is not as it was asked for. The existing
// clients' wish for memory is one that a machine may not even fit into, and comes without being asked for: it is made
// larger, and not insisted on. What was asked for in so many words is refused where it cannot be.
func (h *Host) bounds(spec *ForkSpec, usual Limits, machineBytes int64, f *engine.Features) (warnings []string, err error) {
	l := over(spec.Limits, usual)
	if spec.MemoryWish > 0 && l.MemoryBytes == 0 {
		why := h.cfg.Groups.Missing(cgroup.Memory)
		least := machineBytes + overhead(machineBytes)
		switch {
		case why != "":
			warnings = append(warnings, fmt.Sprintf("memory_limit_mib: %d is not held: %s; the guest is bounded by its machine's %s",
				spec.MemoryWish>>20, why, mib(machineBytes)))
		case spec.MemoryWish < least:
			warnings = append(warnings, fmt.Sprintf("memory_limit_mib: %d raised to %d: the machine has %s, and its VM process needs some",
				spec.MemoryWish>>20, least>>20, mib(machineBytes)))
			l.MemoryBytes = least
		default:
			l.MemoryBytes = spec.MemoryWish
		}
	}
	if l.CPUs >= float64(runtime.NumCPU()) && spec.Limits.CPUs == 0 {
		l.CPUs = 0 // of a recipe, for larger hosts
	}
	inGroups := l
	if f.Throttle { // held by the VM process; a group is a second wall, where there is one
		inGroups.IOBytes, inGroups.IORequests = 0, 0
	}
	if err := h.cfg.Groups.Check(inGroups); err != nil {
		return nil, hint(fmt.Errorf("%w: %w", ErrUnsupported, err), "see what this host can with: forkd doctor; or fork without that limit")
	}
	spec.Limits = l
	return warnings, nil
}

// group makes the control group that a sandbox's machine will be in. Time and disk are left free until it is awake: its
// start is the host's work.
func (h *Host) group(s *sandbox) (*cgroup.Entry, error) {
	born := Limits{MemoryBytes: s.limits.MemoryBytes, PIDs: s.limits.PIDs}
	if born.PIDs == 0 {
		born.PIDs = usualPIDs
	}
	var err error
	if s.cgroup, err = h.cfg.Groups.Make(filepath.Base(s.dir), born, s.limits); err != nil {
		return nil, err
	}
	return s.cgroup.Entry()
}

// wall is how much more than the guest may read and write its VM process may: it reads tables of its disk, too.
const wall = 1.25

// bound limits a sandbox that is awake.
func (s *sandbox) bound(ctx context.Context) error {
	l := s.limits
	if l.IOBytes > 0 || l.IORequests > 0 {
		t, ok := s.machine.(engine.Throttler)
		if !ok {
			return fmt.Errorf("%w: its machine's disk cannot be throttled", ErrUnsupported)
		}
		if err := t.Throttle(ctx, l.IOBytes, l.IORequests); err != nil {
			return err
		}
	}
	return s.cgroup.Set(Limits{
		CPUs: l.CPUs, IOBytes: int64(float64(l.IOBytes) * wall), IORequests: int64(float64(l.IORequests) * wall),
	})
}

// hurry lets a sandbox have all the processor time there is until the host is done with what cannot wait: a machine whose
// time is used up stands still for the rest of a tenth of a second, in the middle of a pause that it is to notice least, and
// its agent may not get to freeze its processes in time.
func (h *Host) hurry(s *sandbox) (done func()) {
	s.mu.Lock()
	g, share := s.cgroup, s.limits.CPUs
	s.mu.Unlock()
	if share == 0 {
		return func() {}
	}
	set := func(err error) {
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // It died meanwhile.
			h.log.Warn("limit the processor time of a sandbox", "sandbox", s.id, "error", err)
		}
	}
	set(g.FreeCPU())
	return func() { set(g.Set(Limits{CPUs: share})) }
}

// ErrMemoryLimit is wrapped by the reason of a machine that the kernel ended at its limit of memory.
var ErrMemoryLimit = errors.New("memory limit")

// limitReached is why a machine died, if it was for its limit of memory.
func limitReached(g *cgroup.Group, l Limits) error {
	if g.OOMKills() == 0 {
		return nil
	}
	return fmt.Errorf("%w: with its VM process it came to its limit of %s, and the kernel ended it", ErrMemoryLimit, mib(l.MemoryBytes))
}

// adoptGroup finds the control group of an adopted machine.
func (h *Host) adoptGroup(s *sandbox, pid int) {
	g, err := h.cfg.Groups.Adopt(filepath.Base(s.dir), pid)
	if err != nil {
		h.log.Warn("find the control group of an adopted sandbox", "sandbox", s.id, "error", err)
	}
	s.cgroup = g
	if err := g.Set(Limits{CPUs: s.limits.CPUs}); err != nil { // The daemon before may have ended in a hurry.
		h.log.Warn("limit the processor time of an adopted sandbox", "sandbox", s.id, "error", err)
	}
}

// sweepGroups removes control groups that no machine is in any more.
func (h *Host) sweepGroups() {
	keep := map[string]bool{}
	h.mu.Lock()
	for _, s := range h.sandboxes {
		if s.dir != "" {
			keep[filepath.Base(s.dir)] = true
		}
	}
	h.mu.Unlock()
	if err := h.cfg.Groups.Sweep(keep); err != nil {
		h.log.Warn("remove control groups of an earlier daemon", "error", err)
	}
}

// orLimit is an error of a start, or that its limit of memory is too small for one.
func (s *sandbox) orLimit(err error) error {
	if limit := limitReached(s.cgroup, s.limits); limit != nil {
		return hint(fmt.Errorf("%w: %w before it was awake", ErrExhausted, limit), "give it more with --memory-limit")
	}
	return err
}

// cgroupCheck says which limits can be held here. The disk's is held by the VM process.
func (h *Host) cgroupCheck() Check {
	t := h.cfg.Groups
	var missing []string
	for _, c := range []cgroup.Controller{cgroup.Memory, cgroup.CPU, cgroup.PIDs} {
		if why := t.Missing(c); why != "" {
			missing = append(missing, fmt.Sprintf("no limit of %s: %s", c, why))
		}
	}
	const remedy = "run the daemon as root, or where a part of the tree is delegated to it: systemd-run --user --scope -p Delegate=yes forkd serve"
	switch {
	case t.Version() == 0:
		return Check{"cgroups", Warn, "no limits of memory, cpu and processes: " + t.Missing(cgroup.Memory), remedy}
	case len(missing) > 0:
		return Check{"cgroups", Warn, fmt.Sprintf("version %d at %s; %s", t.Version(), t.Place(), strings.Join(missing, "; ")), remedy}
	}
	return Check{"cgroups", Pass, fmt.Sprintf("version %d at %s: memory, cpu, processes", t.Version(), t.Place()), ""}
}

// strayGroups are control groups whose machine's directory is gone: one that is being made has it already.
func (h *Host) strayGroups(context.Context) ([]Leftover, error) {
	var all []Leftover
	for _, dir := range h.cfg.Groups.Left(nil) {
		if _, err := os.Lstat(filepath.Join(h.cfg.Home.Machines(), filepath.Base(dir))); err == nil {
			continue
		}
		all = append(all, Leftover{
			Kind: "control group", Name: dir, Detail: "of a machine that is gone",
			remove: func(context.Context) error { return cgroup.Remove(dir) },
		})
	}
	return all, nil
}
