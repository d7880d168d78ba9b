// Package wire is what the daemon and the guest agent say to each other: frames, method names and messages. Both
// sides import it, nothing else does but package client, whose streams are the same frames passed through. It
// performs no I/O beyond the reader or writer it is given. See docs/guest-protocol.md.
package wire

import "time"

// Version of the protocol. The daemon also serves Version-1; the agent inside an old snapshot never changes.
const Version = 2

// Hello is the agent's answer to a connection preamble.
type Hello struct {
	Version    int      `json:"version"`
	Agent      string   `json:"agent"` // build version
	Features   []string `json:"features"`
	Generation uint64   `json:"generation"` // echo of the preamble's
	BootID     string   `json:"bootId"`     // random per boot of the agent process: same across forks of one snapshot
	Phase      string   `json:"phase"`      // "build" (initramfs, waiting for Pivot) or "ready"

	// The answer to a preamble with Awaken has one of these.
	Awakened *AwakenReport `json:"awakened,omitempty"`
	Refusal  *Error        `json:"refusal,omitempty"`
}

// Methods. Those of process and filesystem have the names, fields and semantics of E2B's envd.
const (
	MethodPing         = "agent.Ping"
	MethodQuiesce      = "agent.Quiesce"
	MethodAwaken       = "agent.Awaken"
	MethodThaw         = "agent.Thaw" // ends a quiesce without awakening
	MethodMetrics      = "agent.Metrics"
	MethodExtract      = "agent.Extract" // tar stream into a directory
	MethodArchive      = "agent.Archive" // tar stream of a path
	MethodPivot        = "agent.Pivot"   // build phase: make the prepared disk the root
	MethodInit         = "agent.Init"    // start the image's own init; feature "init"
	MethodPowerOff     = "agent.PowerOff"
	MethodContextNew   = "context.Create"
	MethodContextEval  = "context.Eval"
	MethodContextStop  = "context.Interrupt"
	MethodContextList  = "context.List"
	MethodContextClose = "context.Remove"
	MethodContextAgain = "context.Restart"

	MethodProcessStart      = "process.Start"
	MethodProcessConnect    = "process.Connect"
	MethodProcessList       = "process.List"
	MethodProcessUpdate     = "process.Update"
	MethodProcessSendInput  = "process.SendInput"
	MethodProcessSendSignal = "process.SendSignal"
	MethodProcessCloseStdin = "process.CloseStdin"
	MethodProcessInput      = "process.StreamInput"

	MethodFileStat    = "filesystem.Stat"
	MethodFileMakeDir = "filesystem.MakeDir"
	MethodFileMove    = "filesystem.Move"
	MethodFileList    = "filesystem.ListDir"
	MethodFileRemove  = "filesystem.Remove"
	MethodFileRead    = "filesystem.Read"  // reply: data frames of the file
	MethodFileWrite   = "filesystem.Write" // request: data frames of the file
	MethodFileCompose = "filesystem.Compose"
	MethodFileTree    = "filesystem.Tree" // reply: data frames of a tar stream

	MethodWatch         = "filesystem.WatchDir" // reply: WatchEvents, until the caller leaves
	MethodWatcherNew    = "filesystem.CreateWatcher"
	MethodWatcherEvents = "filesystem.GetWatcherEvents"
	MethodWatcherRemove = "filesystem.RemoveWatcher"
)

// FeatureThaw in Hello's features says that the agent knows MethodThaw. One that does not must never be quiesced and run on.
const FeatureThaw = "thaw"

// FeatureFiles in Hello's features says that the agent knows metadata, Compose, Tree, watchers, and names that are not UTF-8.
const FeatureFiles = "files"

// Error codes: Connect's.
const (
	CodeInvalid       = "invalid_argument"
	CodeNotFound      = "not_found"
	CodeExists        = "already_exists"
	CodeDenied        = "permission_denied"
	CodeUnknownUser   = "unauthenticated" // envd's code for a user that does not exist
	CodeUnimplemented = "unimplemented"
	CodeExhausted     = "resource_exhausted"
	CodePrecondition  = "failed_precondition"
	CodeDeadline      = "deadline_exceeded"
	CodeUnavailable   = "unavailable"
	CodeInternal      = "internal"
)

// Error is a failed call, as the guest reports it.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Message }

// QuiesceRequest stops user processes. Settle first writes the guest's dirty pages to its disk and reads in what its
// interpreters have mapped: for a parent that will never run again, whose every child would otherwise do both for itself.
// Never for a branch, whose source must not wait for a disk.
//
// Freeze numbers the freezes of a connection, upwards, for Thaw to name one; 0 for a machine that is only ever awakened.
type QuiesceRequest struct {
	Settle bool   `json:"settle,omitempty"`
	Freeze uint64 `json:"freeze,omitempty"`
}

// ThawRequest lets a machine run on that was quiesced, or corrects the clock of one that stood still without. Freeze is
// the number given to Quiesce on this connection; that Quiesce is called off if it has not begun yet. 0 ends a freeze
// that an earlier connection left behind, if the machine was awakened as SandboxID: a copy of it was not. As in Awaken
// the agent asks for the host's clock while the call lasts; UnixNano is a first approximation, so that nothing waits
// for a round trip.
type ThawRequest struct {
	Freeze    uint64 `json:"freeze,omitempty"`
	SandboxID string `json:"sandboxId,omitempty"`
	UnixNano  int64  `json:"unixNano"`
}

// ThawReport is the reply. Times are the guest's own: its clocks stand still while the machine does.
type ThawReport struct {
	Thawed   bool    `json:"thawed"`   // false: nothing was frozen
	FrozenMS float64 `json:"frozenMs"` // from the order to freeze to the thaw
	StepMS   float64 `json:"stepMs"`   // by how much the wall clock was put forward
}

// AwakenRequest gives a fresh child its identity. Everything random in it was drawn by the host for this child alone.
// While the call lasts the agent asks for the host's clock: a data frame without content, answered by one with a time
// (AppendClock). What the request itself could say would be tens of milliseconds old when it is read.
type AwakenRequest struct {
	SandboxID   string            `json:"sandboxId"`
	SnapshotTag string            `json:"snapshotTag"`
	Index       int               `json:"index"` // 0-based
	Count       int               `json:"count"`
	Hostname    string            `json:"hostname"`
	MachineID   string            `json:"machineId"` // 32 hex digits
	BootID      string            `json:"bootId"`    // UUID text
	Entropy     []byte            `json:"entropy"`   // >= 64 bytes
	Env         map[string]string `json:"env,omitempty"`
	// Sever ends all connections that leave the machine, before any process of a user runs again; feature "network". A
	// copy of a machine that never talked to anybody has none.
	Sever bool `json:"sever,omitempty"`
}

// AwakenReport is the agent's confirmation: sent only when everything in Renewed has really been done and before any
// user process ran. An error instead means the child must be killed.
type AwakenReport struct {
	Renewed    []string     `json:"renewed"` // e.g. kernel_entropy, wall_clock, hostname, context:default:random
	NotRenewed []NotRenewed `json:"notRenewed,omitempty"`
	Severed    int          `json:"severed,omitempty"` // connections
	MS         float64      `json:"ms"`                // inside the guest, request to report
}

// NotRenewed names state a clone shares with its siblings because the agent could not reach it.
type NotRenewed struct {
	What string `json:"what"` // "process", "generator", "ssh_host_key", "fork_hook", …
	PID  int    `json:"pid,omitempty"`
	Name string `json:"name"` // command line or object
	Why  string `json:"why"`
}

// Metrics is a sample of the guest's own accounting.
type Metrics struct {
	Time          time.Time `json:"time"`
	UptimeSeconds float64   `json:"uptimeSeconds"`
	CPUs          int       `json:"cpus"`
	// CPUSeconds is what all CPUs have worked since the machine was booted, CPUPercent their work since the sample before
	// (of whoever asked for it), of all of them together: 100 is everything.
	CPUSeconds   float64    `json:"cpuSeconds"`
	CPUPercent   float64    `json:"cpuPercent"`
	Load         [3]float64 `json:"load"`
	MemTotal     int64      `json:"memTotalBytes"`
	MemAvailable int64      `json:"memAvailableBytes"`
	MemUsed      int64      `json:"memUsedBytes"`   // by programs and the kernel; what is cached is not in it
	MemCached    int64      `json:"memCachedBytes"` // given up when memory is needed
	SwapTotal    int64      `json:"swapTotalBytes"`
	DiskTotal    int64      `json:"diskTotalBytes"`
	DiskUsed     int64      `json:"diskUsedBytes"`
	DiskFree     int64      `json:"diskFreeBytes"` // for who is not root
	Processes    int        `json:"processes"`     // the users' and the agent
	Threads      int        `json:"threads"`
	OOMKills     int64      `json:"oomKills"` // processes that the kernel killed for want of memory
	Clocksource  string     `json:"clocksource"`
}

// ExtractRequest precedes a tar stream.
type ExtractRequest struct {
	Path string `json:"path"`           // directory, made when missing
	User string `json:"user,omitempty"` // extract as this user; empty: keep the archive's owners (root)
	// DefaultUser, without User, is the image's. Feature files.
	DefaultUser bool `json:"defaultUser,omitempty"`
	// KeepDirs leaves mode and owner of directories that are there already. Feature "steps".
	KeepDirs bool `json:"keepDirs,omitempty"`
}

// ArchiveRequest asks for a tar stream of a file or directory (names relative to its parent).
type ArchiveRequest struct {
	Path string `json:"path"`
}

// FeatureInit in Hello's features says that the agent knows MethodInit.
const FeatureInit = "init"

// InitRequest starts the image's own init, if it does not run, and waits until it is up. Everything started for users
// afterwards is started inside it.
type InitRequest struct {
	Init      string `json:"init"` // "systemd"
	TimeoutMS int64  `json:"timeoutMs"`
}

// InitReply is when it is up.
type InitReply struct {
	State  string   `json:"state"`            // "running" or "degraded"
	Failed []string `json:"failed,omitempty"` // units
}

// PivotRequest ends the build phase: the file system mounted at /newroot becomes the root.
type PivotRequest struct{}
