// Package engine defines what runs a machine: the Engine that boots and restores, the Machine it hands back, and the
// Checkpoint that carries a frozen one. Definitions only; implementations live below (qemu). Package host is the
// user; the contract is written as tests in enginetest, which every implementation runs.
package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"forkd.dev/forkd/internal/cgroup"
	"forkd.dev/forkd/internal/memory"
)

// Errors an engine may wrap.
var (
	// ErrUnavailable: this host lacks what the engine needs; the message names it.
	ErrUnavailable = errors.New("engine unavailable")
	// ErrIncompatible: a checkpoint of another engine, machine, accelerator, CPU or clock.
	ErrIncompatible = errors.New("incompatible checkpoint")
	// ErrDead: the machine ended; the message says why.
	ErrDead = errors.New("machine is dead")
)

// Engine runs machines. All methods are safe for concurrent use.
type Engine interface {
	// Name is the engine's word in records and manifests: "qemu".
	Name() string
	// Probe says what this host offers. It starts no machine that outlives the call. The error wraps ErrUnavailable
	// and names what is missing.
	Probe(ctx context.Context) (*Features, error)
	// Boot starts a machine from spec.Boot and returns when its CPUs run. ctx bounds the call, not the machine.
	Boot(ctx context.Context, spec *Spec) (Machine, error)
	// Restore starts a machine from a checkpoint and returns when its CPUs run. It never modifies from, whose memory
	// is mapped copy-on-write, and may be called many times at once.
	Restore(ctx context.Context, spec *Spec, from *Checkpoint) (Machine, error)
	// Bury ends a machine that an earlier daemon left running and frees what it held outside its directory. A machine
	// already gone is no error.
	Bury(ctx context.Context, ref Ref) error
}

// Machine is one VM process. All methods are safe for concurrent use.
type Machine interface {
	// Ref is what a later daemon needs to find the process again.
	Ref() Ref
	// DialGuest connects to the control channel. One connection at a time: a new one supersedes the last.
	DialGuest(ctx context.Context) (net.Conn, error)
	// Freeze stops a machine started by Boot for good and turns its memory into an immutable image, without copying.
	// The machine is ended whatever is returned; on success the caller owns the checkpoint's memory.
	Freeze(ctx context.Context) (*Checkpoint, error)
	// Console is the newest part (at most 64 KiB) of what the guest printed, and of the VM process's own complaints.
	Console() []byte
	// Done is closed when the machine has ended; then Err says why, nil after Close or Freeze.
	Done() <-chan struct{}
	Err() error
	// Close kills the machine and frees everything but its directory. It is idempotent and waits.
	Close() error
}

// Spec describes a machine to start; plain data.
type Spec struct {
	ID          string // sandbox or build id, for process titles and logs
	Dir         string // private 0700 directory, exists, owned by the caller, also removed by it
	CPUs        int
	MemoryBytes int64
	Disk        Disk
	Boot        *Boot // nil for Restore
	// Link is the machine's end of its network: a connected unix socket of type SOCK_SEQPACKET that carries one Ethernet frame a
	// message. The caller closes it. Nil: a link with nobody at its other end.
	Link *os.File
	// Peer is the other end of Link. The machine's process only keeps it: should all others who have it die, the machine's next
	// daemon finds it there (Adopted.Peer). The caller closes it. Nil: nobody finds it.
	Peer *os.File
	// Cgroup is the control group that the VM process is started in; nil: the daemon's. The caller closes it.
	Cgroup *cgroup.Entry
}

// Disk is the machine's one block device (/dev/vda).
type Disk struct {
	Path   string // writable by the machine, as are other files in the same directory that it may be switched to
	Format string // "raw" or "qcow2"
	// Backing are the read-only files below a qcow2 file, the nearest first and the last one raw. The VM process must be
	// able to read but never write them.
	Backing []string
}

// Boot is what a cold start needs.
type Boot struct {
	Kernel  string // path: an uncompressed vmlinux with a PVH note, or a bzImage
	Initrd  string
	Cmdline string // the caller's part; the engine prepends what its machine type needs
}

// Ref finds a VM process of an earlier daemon. StartTime (clock ticks after boot, /proc/PID/stat field 22) guards
// against a reused PID.
type Ref struct {
	Engine    string `json:"engine"`
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"`
	Dir       string `json:"dir"`
	Layers    string `json:"layers,omitempty"` // of confinement, separated by commas, that it was started with
}

// Features is what Probe found.
type Features struct {
	Binary            string `json:"binary"`             // path of the VM program
	Format            Format `json:"format"`             // what a checkpoint made now would carry (without sizes)
	AcceleratorReason string `json:"accelerator_reason"` // why this accelerator: "measured: …"
	KVMUsable         bool   `json:"kvm_usable"`
	Confined          string `json:"confined"` // "landlock" or "" with the reason in ConfinedReason
	ConfinedReason    string `json:"confined_reason,omitempty"`
	// Layers are those of confinement that a machine started now gets; what more a jail would give it lacks for JailReason.
	Layers     []string `json:"layers"`
	JailReason string   `json:"jail_reason,omitempty"`

	// Without names libraries that the VM program is linked with and started without, because no machine needs them; none for
	// LibrariesReason, or because that is not asked for.
	Without         []string `json:"without_libraries,omitempty"`
	LibrariesReason string   `json:"libraries_reason,omitempty"`

	Snapshots bool `json:"background_snapshots"` // the VM program was built with what live captures need

	// Powers beyond Machine and Engine; a test holds them against the interfaces.
	Capture    bool   `json:"capture"` // Capturer, in mode diff
	Live       bool   `json:"live"`    // … and in mode live, with the real kind of mapping tried
	LiveReason string `json:"live_reason,omitempty"`
	Pause      bool   `json:"pause"`    // Pauser
	Commit     bool   `json:"commit"`   // Committer
	Adopt      bool   `json:"adopt"`    // Adopter
	Throttle   bool   `json:"throttle"` // Throttler
}

// Format is everything a checkpoint depends on. Two formats must agree in all fields for a restore.
type Format struct {
	Engine      string `json:"engine"`       // "qemu"
	Version     string `json:"version"`      // of the VM program, e.g. "7.2.22"; an older one cannot load a newer one's
	Arch        string `json:"arch"`         // GOARCH of the guest
	Accelerator string `json:"accelerator"`  // "tcg" or "kvm"
	Machine     string `json:"machine"`      // versioned machine type
	CPUModel    string `json:"cpu_model"`    // exact model and features
	TSCHz       int64  `json:"tsc_hz"`       // the host's time stamp counter, 0 where the guest's clocks do not hang on it
	CPUs        int    `json:"cpus"`         // 0 in Features
	MemoryBytes int64  `json:"memory_bytes"` // 0 in Features
}

// Checkpoint is the engine's part of a snapshot.
type Checkpoint struct {
	Format Format
	State  []byte // devices and CPUs, without RAM
	Memory *memory.Image
	Pages  *memory.Pages // written over Memory before the CPUs run; nil: none
}

// tscTolerance is the largest relative difference of clock frequency a restore accepts: measuring the same counter
// twice differs by a few parts per million, two CPU models by far more than this.
const tscTolerance = 0.0005

// Compatible says whether a checkpoint of format f runs where host is what Probe found. The error wraps
// ErrIncompatible, names each difference and what to do.
func (f Format) Compatible(host Format) error {
	var diffs []string
	differ := func(what, have, here string) {
		if have != here {
			diffs = append(diffs, fmt.Sprintf("%s: snapshot has %q, this host %q", what, have, here))
		}
	}
	differ("engine", f.Engine, host.Engine)
	differ("architecture", f.Arch, host.Arch)
	differ("accelerator", f.Accelerator, host.Accelerator)
	differ("machine type", f.Machine, host.Machine)
	differ("CPU model", f.CPUModel, host.CPUModel)
	if olderMajor(host.Version, f.Version) {
		diffs = append(diffs, fmt.Sprintf("version: snapshot was made by %s, this host has the older %s", f.Version, host.Version))
	}
	if f.TSCHz != 0 && host.TSCHz != 0 {
		if d := float64(f.TSCHz-host.TSCHz) / float64(host.TSCHz); d > tscTolerance || d < -tscTolerance {
			diffs = append(diffs, fmt.Sprintf("clock frequency: snapshot has %d Hz, this host %d Hz", f.TSCHz, host.TSCHz))
		}
	}
	if len(diffs) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s; build the snapshot again from its recipe on this host", ErrIncompatible, strings.Join(diffs, "; "))
}

// olderMajor reports whether version a ("10.0.13") is of an older major.minor than b.
func olderMajor(a, b string) bool {
	var a1, a2, b1, b2 int
	if n, _ := fmt.Sscanf(a, "%d.%d", &a1, &a2); n < 2 {
		return false
	}
	if n, _ := fmt.Sscanf(b, "%d.%d", &b1, &b2); n < 2 {
		return false
	}
	return a1 < b1 || a1 == b1 && a2 < b2
}
