package qemu

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"weak"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/proc"
)

// Name is the engine's name in records.
const Name = "qemu"

// Accelerators a user may ask for.
const (
	Auto = "auto" // KVM where it was measured to work, else TCG
	TCG  = "tcg"  // software emulation
	KVM  = "kvm"  // or an error: never a silent fall-back
)

// Config is how to make an Engine; the zero value is useful.
type Config struct {
	Accelerator string // Auto (also ""), TCG or KVM
	Binary      string // path of qemu-system-…; empty: found in PATH and the usual places
	Jail        string // JailAuto (also ""), JailOn or JailOff
	JailIDs     IDs    // users of jails; none: a range nobody else has
	// Libraries is a directory for what stands in for the libraries of QEMU's that no machine needs, so that it starts
	// sooner; empty: it is started with all of them.
	Libraries string
	// UserNetwork: machines are behind QEMU's own user networking instead of their links, and reach whatever this host reaches.
	// It is there to be compared with.
	UserNetwork bool
}

// Engine runs machines in QEMU. It is safe for concurrent use.
type Engine struct {
	cfg Config

	idMu sync.Mutex      // not mu, which is held while the host is probed
	ids  map[uint32]bool // of jails that are being made

	mu     sync.Mutex
	habits map[uint64]weak.Pointer[habits] // by the inode of the memory image
	found  *host                           // what the last conclusive probe found; inconclusive ones are not kept
}

// New returns an engine and starts nothing.
func New(cfg Config) (*Engine, error) {
	switch cfg.Accelerator {
	case "":
		cfg.Accelerator = Auto
	case Auto, TCG, KVM:
	default:
		return nil, fmt.Errorf("accelerator %q: it must be %s, %s or %s", cfg.Accelerator, Auto, TCG, KVM)
	}
	switch cfg.Jail {
	case "":
		cfg.Jail = JailAuto
	case JailAuto, JailOn, JailOff:
	default:
		return nil, fmt.Errorf("jail %q: it must be %s, %s or %s", cfg.Jail, JailAuto, JailOn, JailOff)
	}
	cfg.JailIDs = cfg.JailIDs.OrDefault()
	return &Engine{cfg: cfg, ids: map[uint32]bool{}, habits: map[uint64]weak.Pointer[habits]{}}, nil
}

// Name implements engine.Engine.
func (e *Engine) Name() string { return Name }

// Probe implements engine.Engine.
func (e *Engine) Probe(ctx context.Context) (*engine.Features, error) {
	h, err := e.host(ctx)
	if err != nil {
		return nil, err
	}
	f := &engine.Features{
		Binary: h.binary, Format: h.format(), AcceleratorReason: h.acceleratorReason, KVMUsable: h.kvm.Usable,
		Adopt: true, Throttle: true, Capture: true, Pause: true, Commit: true,
		LibrariesReason: h.slimReason,
		Snapshots:       h.live.lacks == "", LiveReason: h.live.reason(h.jailer), JailReason: h.jailReason,
	}
	f.Live = f.LiveReason == ""
	if h.slim != nil {
		f.Without = h.slim.Names
	}
	confined, how := proc.ConfinementAvailable()
	if confined {
		f.Confined = "landlock"
	} else {
		f.ConfinedReason = how
	}
	f.Layers = promised(h.jailer)
	if confined {
		f.Layers = append(f.Layers, proc.LayerLandlock)
	}
	slices.Sort(f.Layers)
	return f, nil
}

// Bury implements engine.Engine.
func (e *Engine) Bury(ctx context.Context, ref engine.Ref) error {
	if ref.Engine != Name {
		return fmt.Errorf("bury machine of engine %q: this engine is %s", ref.Engine, Name)
	}
	return proc.Bury(ctx, ref.PID, ref.StartTime)
}

// host is what was found of this host, once.
func (e *Engine) host(ctx context.Context) (*host, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.found != nil {
		return e.found, nil
	}
	h, err := e.probe(ctx, runtime.GOARCH)
	if err != nil {
		return nil, err
	}
	e.found = h
	return h, nil
}
