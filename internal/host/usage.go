package host

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/proc"
)

// Usage is what a sandbox costs its host: what its VM processes have taken since it was forked, and hold now.
type Usage struct {
	ID, SnapshotTag string
	State           lineage.State
	Labels          map[string]string
	Time, Created   time.Time
	CPUs            int
	MemoryBytes     int64        // of the machine
	Memory          memory.Usage // of its process; the proportional share only where one sandbox is asked for
	DiskOwn         int64
	Taken           proc.Consumption // over all its machines, where it was suspended
	Network         network.Totals   // over all its networks, likewise
}

// Usage says what one sandbox costs.
func (h *Host) Usage(id string) (Usage, error) {
	s, err := h.find(id)
	if err != nil {
		return Usage{}, err
	}
	u := s.usage(memory.Measure)
	u.Network = h.networkTotals(h.life, s)
	return u, nil
}

// Usages says what sandboxes with all the given labels cost, the oldest first.
func (h *Host) Usages(labels map[string]string) []Usage {
	h.mu.Lock()
	all := slices.Collect(maps.Values(h.sandboxes))
	h.mu.Unlock()
	h.counting.Lock()
	defer h.counting.Unlock()
	networks := h.allTotals(h.life)
	list := make([]Usage, 0, len(all))
	for _, s := range all {
		if hasLabels(s.labels, labels) {
			u := s.usage(memory.Glance)
			now, known := networks[s.id]
			u.Network = h.carried(s, now, known)
			list = append(list, u)
		}
	}
	slices.SortFunc(list, func(a, b Usage) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

func (s *sandbox) usage(measure func(pid int) (memory.Usage, error)) Usage {
	v := s.view()
	u := Usage{
		ID: v.ID, SnapshotTag: v.SnapshotTag, State: v.State, Labels: v.Labels, Time: time.Now(), Created: v.Created, CPUs: v.Format.CPUs,
		MemoryBytes: v.Format.MemoryBytes, DiskOwn: v.DiskOwn, Taken: s.taken(),
	}
	if u.State == lineage.Suspended {
		u.DiskOwn = s.stored()
	}
	if v.PID != 0 {
		if m, err := measure(v.PID); err == nil { // else it ends just now
			u.Memory = m
		}
	}
	return u
}

// stored is what a suspended sandbox takes on disk, its memory included.
func (s *sandbox) stored() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.suspended == nil {
		return 0
	}
	return s.suspended.Machine.Stored
}

// taken is what the sandbox's machines have taken so far. It never gets less: of a machine that is gone it is what was seen
// last.
func (s *sandbox) taken() proc.Consumption {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takenLocked()
}

// takenLocked is taken for who holds mu.
func (s *sandbox) takenLocked() proc.Consumption {
	if s.machine != nil {
		ref := s.machine.Ref()
		if c, err := proc.Consumed(ref.PID, ref.StartTime); err == nil {
			s.seen = c
		}
	}
	return sum(s.spent, s.seen)
}

func sum(a, b proc.Consumption) proc.Consumption {
	return proc.Consumption{CPU: a.CPU + b.CPU, ReadBytes: a.ReadBytes + b.ReadBytes, WrittenBytes: a.WrittenBytes + b.WrittenBytes}
}

// Figures are what there is on this host, for metrics.
type Figures struct {
	Sandboxes     map[lineage.State]int
	SandboxesMax  int
	Snapshots     map[lineage.Status]int // without the steps of builds
	Images        int
	Memory        memory.Usage // of all VM processes, each counted whole
	Hot           int64        // memory of the images that children map, as far as it is in use
	HotReserved   int64
	HotMax        int64
	Available     int64 // memory of the host, without swapping
	DiskSandboxes int64
	DiskSnapshots int64 // stored, steps of builds included
	DiskImages    int64
	DiskFree      int64
	Forking       int // children being made
	Branching     int
	Building      int
	EventsTold    int64
	Network       network.Totals // of all sandboxes since the daemon started, those that have ended among them
	NetworkOpen   int            // flows open now
	NetworkUse    network.PoolUse
}

// Figures counts. It takes some ten microseconds a sandbox and holds up nobody.
func (h *Host) Figures() Figures {
	f := Figures{
		Sandboxes:    map[lineage.State]int{lineage.Running: 0, lineage.Paused: 0, lineage.Suspended: 0, lineage.Failed: 0},
		Snapshots:    map[lineage.Status]int{lineage.Ready: 0, lineage.Writing: 0, lineage.FailedSnap: 0},
		SandboxesMax: h.cfg.MaxSandboxes, HotMax: h.cfg.HotMaxBytes, EventsTold: int64(h.events.Told()),
	}
	h.mu.Lock()
	all := slices.Collect(maps.Values(h.sandboxes))
	for tag, m := range h.snapshots {
		f.DiskSnapshots += m.Stored
		if !lineage.IsStep(tag) {
			f.Snapshots[lineage.Ready]++
		}
	}
	for tag, w := range h.writing {
		if w.status == lineage.Writing {
			f.Branching++
		}
		if !lineage.IsStep(tag) {
			f.Snapshots[w.status]++
		}
	}
	for _, m := range h.images {
		f.Images++
		f.DiskImages += m.StoredBytes
	}
	for _, what := range h.busy {
		if what == buildWhat {
			f.Building++
		}
	}
	f.Forking = h.forking
	h.mu.Unlock()
	f.Hot, f.HotReserved = h.hot.figures()
	f.NetworkOpen, f.Network = h.count(all)
	f.NetworkUse = h.cfg.Networks.State().Use
	for _, s := range all {
		v := s.view()
		f.Sandboxes[v.State]++
		f.DiskSandboxes += v.DiskOwn + s.stored()
		if v.PID == 0 {
			continue
		}
		if m, err := memory.Glance(v.PID); err == nil {
			f.Memory.OwnBytes += m.OwnBytes
			f.Memory.SharedBytes += m.SharedBytes
		}
	}
	var err, diskErr error
	f.Available, err = h.cfg.Available()
	f.DiskFree, diskErr = freeSpace(h.cfg.Home.Root)
	if err := errors.Join(err, diskErr); err != nil {
		h.log.Debug("figures of the host", "error", err)
	}
	return f
}

// figures are how much memory the images have, and how much is set aside for them.
func (c *hotCache) figures() (used, reserved int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.entries {
		reserved += e.bytes
		switch {
		case e.checkpoint == nil:
		case e.checkpoint.Pages != nil: // over memory that is another's
			used += e.checkpoint.Pages.Bytes()
		default:
			used += e.checkpoint.Memory.AllocatedBytes()
		}
	}
	return used, reserved
}
