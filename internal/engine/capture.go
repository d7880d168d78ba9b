package engine

import (
	"context"
	"errors"
	"os"
	"time"

	"forkd.dev/forkd/internal/memory"
)

// ErrLiveUnavailable is wrapped where this host or VM program cannot capture live; the message says why.
var ErrLiveUnavailable = errors.New("live capture unavailable")

// CaptureMode is how the memory of a running machine is taken.
type CaptureMode string

// Modes.
const (
	// CaptureDiff copies the pages that are the machine's own while it stands still: the pause grows with them.
	CaptureDiff CaptureMode = "diff"
	// CaptureLive write-protects memory and copies while the machine runs: the pause does not grow with what was written.
	CaptureLive CaptureMode = "live"
)

// Capturer is implemented by machines made by Restore that can be captured while they run on (Features.Capture).
type Capturer interface {
	// Capture takes memory, devices and disk of one instant. Everything slow is done before the pause, with the machine
	// running; then spec.Quiesce is called; then the machine is stopped, captured and run again. It returns with the
	// machine running as before, whatever happened: on error nothing has changed, except that the disk may have moved to
	// spec.DiskTop already (DiskMoved tells). ctx bounds the call and, once the machine is paused, never leaves it so.
	Capture(ctx context.Context, spec *CaptureSpec) (*Capture, error)
}

// CaptureSpec says what to take; plain data.
type CaptureSpec struct {
	Mode CaptureMode
	// DiskTop is the path of an empty qcow2 over the machine's present top, in the same directory. The machine writes
	// there from the instant of the capture on; its former top does not change any more.
	DiskTop string
	// Quiesce is called once, when all is prepared, immediately before the pause. An error ends the capture, with nothing
	// changed. Undoing what it did is the caller's, after Capture has returned.
	Quiesce func(context.Context) error
	// Progress is told how many bytes of memory have been copied; may be nil, is called from another goroutine.
	Progress func(done, total int64)
}

// Capture is a capture whose instant is over: the machine runs again and its memory may still be being copied.
type Capture struct {
	Mode  CaptureMode
	Pause time.Duration // from the order to stop until the CPUs ran again
	Setup time.Duration // what was prepared before, with the machine running
	// Finish waits until all memory of the instant is at hand. It is called exactly once; ctx bounds it, and an end of ctx
	// cancels the copy and leaves the machine running well.
	Finish func(ctx context.Context) (*Captured, error)
}

// Captured is the machine as it was at the instant. The caller owns its memory; exactly one of Image and Pages is set.
type Captured struct {
	Format Format
	State  []byte
	Image  *memory.Image // live: all of the memory
	Pages  *memory.Pages // diff: the machine's own pages, over the image it was restored from
	Copied time.Duration // how long the copy took after the machine ran again
	// Downtime is how much of the pause the engine's own program needed, by its own clock, where it says so; 0: it does not.
	Downtime time.Duration
}

// DiskMoved reports whether a failed Capture has moved the disk to its new top, which is then in use.
func DiskMoved(err error) bool {
	var moved *DiskMovedError
	return errors.As(err, &moved)
}

// DiskMovedError wraps what failed after the disk had been switched.
type DiskMovedError struct{ Err error }

func (e *DiskMovedError) Error() string { return e.Err.Error() }
func (e *DiskMovedError) Unwrap() error { return e.Err }

// Confined is implemented by machines that know what keeps their VM process from the rest of the host.
type Confined interface {
	// Layers are the layers of confinement that are on: as the kernel shows them, where it does. Nil once it has ended.
	Layers() []string
	// LiveReason says why this machine, other than Features say of a new one, cannot be captured live, or "".
	LiveReason(ctx context.Context) (string, error)
}

// Pauser is implemented by machines whose CPUs can be halted and let run again (Features.Pause). Both directions are
// idempotent. A halted machine keeps its memory and its connections; its clocks stand still.
type Pauser interface {
	SetPaused(ctx context.Context, paused bool) error
}

// Committer is implemented by machines that can shorten the chain of their disk while they run (Features.Commit).
type Committer interface {
	// CommitDisk moves the content of the files from just above base up to top, all below the present top, into base, and
	// takes them out of the chain. base must be a file only this machine uses. Afterwards their files can be removed.
	CommitDisk(ctx context.Context, top, base string) error
}

// Adopter is implemented by engines that can take over a machine of an earlier daemon (Features.Adopt); their machines
// are Detachers.
type Adopter interface {
	// Adopt returns the running machine that a names. A capture that was in progress is cleared first, so that the guest
	// answers. The error wraps ErrDead if the process is not there any more. After an error the process is as it was, or
	// dead: the caller buries it.
	Adopt(ctx context.Context, a *Adoption) (Adopted, error)
}

// Adoption names a machine to adopt; plain data.
type Adoption struct {
	Spec   *Spec  // what it was started from
	Ref    Ref    // its process
	Format Format // its checkpoint's
	Paused bool   // whether its CPUs are to stand still when Adopt returns; else they run
}

// Adopted is an adopted machine.
type Adopted struct {
	Machine Machine
	// Disks are the files of its disk as it is now, top first: a capture that its daemon did not live to see the end of may
	// have moved it to a new top.
	Disks []string
	// Memory is the sealed image the process says it was restored from, owned by the caller: its ID tells whether that is
	// so. Nil if there is none.
	Memory *memory.Image
	// Peer is what Spec.Peer was, owned by the caller. Nil if there was none, or this daemon may not have it.
	Peer *os.File
}

// Detacher is implemented by machines that can be given up without being ended.
type Detacher interface {
	// Detach frees what this daemon holds of the machine, which runs on, for another to adopt. Done is closed and Err is
	// nil afterwards; every other call fails, and Close does nothing.
	Detach() error
}

// Teller is a Machine whose console can be followed.
type Teller interface {
	// ConsoleFrom is what the guest printed since a position (0: its start), as far as it is kept, the position that
	// follows, and what is closed when there is more.
	ConsoleFrom(at int64) (text []byte, next int64, more <-chan struct{})
}
