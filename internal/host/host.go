// Package host is the core of forkd: it owns snapshots, images and running sandboxes of one home directory, and does
// every verb on them, one file a verb. It locks, admits, times out and cleans up; engines, memory, disks and guests
// do the work below it and do not know it. Its users are the edges (httpapi, daemon). Its faults are tested with a
// fake engine, its promises on real VMs.
package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"forkd.dev/forkd/internal/cgroup"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/store"
)

// Config is what a Host is made of; plain data and parts already built.
type Config struct {
	Home   layout.Home
	Engine engine.Engine
	Agent  []byte // the guest agent's program for the guest's architecture; empty: builds are refused
	Log    *slog.Logger
	// Version of this forkd, for those who ask what made something.
	Version string

	MaxSandboxes  int     // at once, but for suspended ones; 0: 1000
	MaxForks      int     // of one call; 0: 1000
	MemoryReserve int64   // of the host's memory that sandboxes do not get; 0: 256 MiB
	DiskReserve   int64   // of the store's disk that new ones do not get; 0: 2 % of it, at most 1 GiB
	HotMaxBytes   int64   // memory images kept ready; 0: half of the host's memory
	Keep          Keeping // what stays of the snapshots that are made
	StepMaxBytes  int64   // steps of builds kept that no snapshot stands on; 0: 16 GiB
	Parallel      int     // children restored at once; 0: one a CPU

	// Patience is how long a guest may take to confirm that it has awakened; 0: 30 s.
	Patience time.Duration

	// Groups are the control groups that VM processes are put into; nil: none.
	Groups *cgroup.Tree
	// Networks are those of the sandboxes; nil: they have none, and what they may reach is only written down.
	Networks Networks
	// Changed is told the tags whenever they change. May be nil.
	Changed func(tags []string)
	// Took is told how long what the host does has taken, at its end. May be nil.
	Took func(what Timed, mode string, how Outcome, took time.Duration)
	// Available is the host's memory that can be had without swapping, in bytes. Nil: /proc/meminfo.
	Available func() (int64, error)
	// Disk is the free space and the size of the file system of a path. Nil: as the kernel says.
	Disk func(path string) (free, size int64, err error)
}

// Limits of requests.
const (
	MaxForkN       = 1000
	maxLabels      = 64
	maxEnv         = 256
	maxValue       = 32 << 10
	maxTTL         = 366 * 24 * time.Hour
	awakenTimeout  = 30 * time.Second // generous: a loaded host under software emulation answers late, a dead guest never
	cleanupTimeout = 30 * time.Second
)

// Host is safe for concurrent use.
type Host struct {
	cfg    Config
	log    *slog.Logger
	events *events.Bus
	began  time.Time
	layers *layer.Store
	store  *store.Store
	hot    *hotCache
	wait   sync.WaitGroup  // watchers, builds, branches being written
	life   context.Context //nolint:containedctx // Ends after the last of those, which outlive the request that began them.
	die    context.CancelFunc

	audience audience // of ports
	pins     pinBook

	// counting is held from asking for the counters of networks until they are noted, so that none is noted after a newer one.
	counting   sync.Mutex
	carriedSum network.Totals // by the networks of all sandboxes

	probeMu  sync.Mutex
	features *engine.Features

	tidying sync.Mutex // held while the policy is applied
	owning  sync.Mutex // held while a snapshot is given chunks of its own

	mu        sync.Mutex
	snapshots map[string]store.Snapshot // by tag
	writing   map[string]*writing       // by tag: branches that are not ready, or failed
	images    map[string]store.Image    // by id
	sandboxes map[string]*sandbox       // by id
	forking   int                       // children admitted but not yet in sandboxes
	promised  int64                     // bytes of memory admitted but maybe not yet taken
	busy      map[string]string         // tags a build or removal holds, and what for
	forks     map[string]int            // by tag: forks in progress, whose children are not in sandboxes yet
	parents   map[*branch]string        // tags that branches and suspends in progress will stand on
	stepUse   map[string]time.Time      // when a snapshot or a step of a build was last used, by tag
	turns     map[string]chan struct{}  // by key: what a build makes that others wait for, closed when it is done
	spaces    map[string]store.Workspace
	closed    bool
}

// Open reads what is on disk and buries what an earlier daemon left running. It starts nothing. The caller holds the
// home's lock: two hosts of one home would bury each other's machines.
func Open(ctx context.Context, cfg Config) (*Host, error) {
	cfg = withDefaults(cfg)
	if err := cfg.Home.Make(); err != nil {
		return nil, err
	}
	layers, err := layer.Open(cfg.Home.Layers())
	if err != nil {
		return nil, fmt.Errorf("open layers: %w", err)
	}
	h := &Host{
		cfg: cfg, log: cfg.Log, events: newBus(), began: time.Now(), layers: layers, store: store.New(cfg.Home),
		snapshots: map[string]store.Snapshot{}, images: map[string]store.Image{}, sandboxes: map[string]*sandbox{},
		busy: map[string]string{}, writing: map[string]*writing{}, parents: map[*branch]string{}, forks: map[string]int{}, stepUse: map[string]time.Time{},
		turns: map[string]chan struct{}{}, spaces: map[string]store.Workspace{},
	}
	h.events.Emit(events.Event{Type: events.DaemonStarted})
	h.life, h.die = context.WithCancel(context.WithoutCancel(ctx))
	h.hot = newHotCache(h)
	if err := h.load(); err != nil {
		return nil, err
	}
	if err := h.takeOver(ctx); err != nil {
		return nil, err
	}
	if err := h.loadWorkspaces(ctx); err != nil {
		return nil, err
	}
	h.collect(ctx)
	return h, nil
}

func withDefaults(cfg Config) Config {
	if cfg.MaxSandboxes == 0 {
		cfg.MaxSandboxes = 1000
	}
	if cfg.Groups == nil {
		cfg.Groups = cgroup.Open(cgroup.Config{Off: true})
	}
	if cfg.MaxForks == 0 {
		cfg.MaxForks = MaxForkN
	}
	if cfg.MemoryReserve == 0 {
		cfg.MemoryReserve = memoryReserve
	}
	if cfg.Disk == nil {
		cfg.Disk = diskSpace
	}
	if cfg.Available == nil {
		cfg.Available = availableMemory
	}
	if cfg.HotMaxBytes == 0 {
		cfg.HotMaxBytes = totalMemory() / 2
	}
	if cfg.Parallel == 0 {
		cfg.Parallel = parallelism()
	}
	if cfg.Patience == 0 {
		cfg.Patience = awakenTimeout
	}
	if cfg.Took == nil {
		cfg.Took = func(Timed, string, Outcome, time.Duration) {}
	}
	if cfg.Networks == nil {
		cfg.Networks = noNetworks{}
	}
	if cfg.Changed == nil {
		cfg.Changed = func([]string) {}
	}
	return cfg
}

// load reads the records. Damaged ones are named in the log and left alone.
func (h *Host) load() error {
	snapshots, bad, err := h.store.Snapshots()
	if err != nil {
		return err
	}
	images, badImages, err := h.store.Images()
	if err != nil {
		return err
	}
	for _, err := range append(bad, badImages...) {
		h.log.Warn("record left alone", "error", err)
	}
	for _, m := range images {
		h.images[m.ID] = m
	}
	for _, m := range snapshots {
		h.snapshots[m.Tag] = m
	}
	if err := h.loadSuspended(); err != nil {
		return err
	}
	if err := h.loadUnfinished(); err != nil {
		return err
	}
	h.loadSteps()
	return nil
}

// Features probes the engine, once: the result of a conclusive probe does not change while the daemon lives.
func (h *Host) Features(ctx context.Context) (*engine.Features, error) {
	h.probeMu.Lock()
	defer h.probeMu.Unlock()
	if h.features != nil {
		return h.features, nil
	}
	f, err := h.cfg.Engine.Probe(ctx)
	if err != nil {
		return nil, fmt.Errorf("probe engine %s: %w", h.cfg.Engine.Name(), err)
	}
	h.features = f
	return f, nil
}

// Close ends every sandbox and waits for all of the host's goroutines.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	h.closed = true
	var all []*sandbox
	for id, s := range h.sandboxes {
		all = append(all, s)
		delete(h.sandboxes, id)
	}
	h.mu.Unlock()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, s := range all {
		wg.Go(func() {
			errs[i] = h.end(s)
			h.tell(events.SandboxEnded, s, "the daemon was told to stop and to end its sandboxes")
		})
	}
	wg.Wait()
	h.wait.Wait()
	h.die()
	h.hot.close()
	h.cfg.Groups.Close()
	return errors.Join(errors.Join(errs...), h.cfg.Networks.Leave(context.WithoutCancel(ctx)), context.Cause(ctx))
}

// TempDir makes a directory for a request's files; the caller removes it, and a daemon that died has its removed.
func (h *Host) TempDir(prefix string) (string, error) {
	dir, err := os.MkdirTemp(h.cfg.Home.Temp(), prefix)
	if err != nil {
		return "", fmt.Errorf("make temporary directory: %w", err)
	}
	return dir, nil
}
