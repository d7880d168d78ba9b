// Package api holds the wire types of forkd's REST API, its error codes and the paths of its routes. It imports
// nothing of ours: httpapi translates between these types and the host's, package client and the command line use
// them as they are, and `--json` prints them. Field names of the existing forkd's v1 are kept where it has the field.
package api

import (
	"encoding/json"
	"time"
)

// Version of the API in every path.
const Version = "v1"

// Code classifies an error; one table in httpapi maps it to an HTTP status.
type Code string

// Codes.
const (
	CodeInvalid      Code = "invalid"
	CodeNotFound     Code = "not_found"
	CodeDenied       Code = "denied"
	CodeUnauthorized Code = "unauthorized"       // no token, or one that is not good
	CodeThrottled    Code = "throttled"          // too many wrong tokens, or too much at once: see Retry-After
	CodeKeyReused    Code = "key_reused"         // an Idempotency-Key of another request
	CodeMethod       Code = "method_not_allowed" // see Allow
	CodeUnacceptable Code = "unacceptable"
	CodeExists       Code = "exists"
	CodeWrongState   Code = "wrong_state"
	CodeBusy         Code = "busy"
	CodeUnsupported  Code = "unsupported"
	CodeUnavailable  Code = "unavailable"
	CodeBadGateway   Code = "bad_gateway" // a service in a sandbox gives no answer that could be passed on
	CodeExhausted    Code = "exhausted"   // in the guest, or of a kind that is counted
	CodeNoCapacity   Code = "no_capacity" // the host has no room for it now
	CodeIncompatible Code = "incompatible"
	CodeCorrupt      Code = "corrupt"
	CodeTimeout      Code = "timeout"
	CodeInternal     Code = "internal"
)

// Error is the body of every reply that is not a success. It is also the error type package client returns.
type Error struct {
	Text      string `json:"error"` // the same as Message; the existing SDKs read this field
	Code      Code   `json:"code"`
	Message   string `json:"message"`
	Hint      string `json:"hint,omitempty"` // what to try
	RequestID string `json:"request_id,omitempty"`
	Console   string `json:"console,omitempty"` // tail of the guest's console, where it explains the failure

	Status int `json:"-"` // of the reply that had it; for package client's users
}

func (e *Error) Error() string { return e.Message }

// Snapshot is a frozen machine.
type Snapshot struct {
	Tag            string   `json:"tag"`
	ID             string   `json:"id"`     // digest of its manifest
	Status         string   `json:"status"` // "ready"; of a branch before that "writing", or "failed"
	Bootable       bool     `json:"bootable"`
	Pinned         bool     `json:"pinned,omitempty"` // it is not removed until it is unpinned
	CreatedAtUnix  int64    `json:"created_at_unix"`
	Parent         string   `json:"parent,omitempty"` // tag of the snapshot it adds to
	Image          string   `json:"image"`
	Recipe         string   `json:"recipe"`
	Warm           []string `json:"warm"` // what was running when it was frozen
	CPUs           int      `json:"cpus"`
	MemoryBytes    int64    `json:"memory_bytes"`     // of the machine
	MemoryOwnBytes int64    `json:"memory_own_bytes"` // pages this snapshot adds to its parent
	DiskOwnBytes   int64    `json:"disk_own_bytes"`   // blocks it adds to its image or parent
	StoredBytes    int64    `json:"stored_bytes"`     // compressed, on disk, memory and disk
	Hot            bool     `json:"hot"`              // its memory image is ready for the next fork
	Sandboxes      int      `json:"sandboxes"`        // running forks of it
	Step           bool     `json:"step,omitempty"`   // kept for later builds; listed with all=true only
	Egress         *Egress  `json:"egress,omitempty"` // what its children may reach; left out: nothing

	// What else its children have, in the snapshots and the image it stands on.
	MemorySharedBytes int64 `json:"memory_shared_bytes"`
	DiskSharedBytes   int64 `json:"disk_shared_bytes"`

	// Of a branch.
	BranchedFrom string  `json:"branched_from,omitempty"` // id of the sandbox
	Mode         string  `json:"mode,omitempty"`          // live, diff or full: the one that was used
	ModeReason   string  `json:"mode_reason,omitempty"`   // why that one
	PauseMS      float64 `json:"pause_ms,omitempty"`      // the machine stood still
	FrozenMS     float64 `json:"frozen_ms,omitempty"`     // its processes did: from before the pause until they were let run
	SetupMS      float64 `json:"setup_ms,omitempty"`      // preparation before the pause, the source running
	CopyMS       float64 `json:"copy_ms,omitempty"`       // copying memory after it, the source running
	WriteMS      float64 `json:"write_ms,omitempty"`      // comparing, compressing, storing after that
	Progress     float64 `json:"progress,omitempty"`      // of a writing one: 0 to 1
	Error        string  `json:"error,omitempty"`         // of a failed one

	Children []Sandbox `json:"children,omitempty"` // in the reply to a branch that asked for children

	// Of the existing forkd's clients.
	Dir               string  `json:"dir"`                           // of its record, on the daemon's host
	DiffMS            float64 `json:"diff_ms,omitempty"`             // of a diff: its pause
	DiffPhysicalBytes int64   `json:"diff_physical_bytes,omitempty"` // of a diff: memory_own_bytes
	DiffLogicalBytes  int64   `json:"diff_logical_bytes,omitempty"`  // of a diff: memory_bytes
}

// BranchRequest is the body of POST /v1/sandboxes/{id}/branch. All fields are optional.
type BranchRequest struct {
	Tag  string `json:"tag,omitempty" pattern:"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$"` // default: branch-ID-TIME
	Mode string `json:"mode,omitempty" enum:"auto,live,diff,full"`                     // auto (default), live, diff, full
	Wait *bool  `json:"wait,omitempty"`                                                // default true: reply when it is ready; false: when the source runs again

	// Children forked of it in the same call, with what POST /v1/sandboxes takes.
	N          int               `json:"n,omitempty" minimum:"0" maximum:"1000"`
	Labels     map[string]string `json:"labels,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	TTLSeconds float64           `json:"ttl_seconds,omitempty" minimum:"0" maximum:"4611686018"`
	Bounds
	Egress *Egress `json:"egress,omitempty"`

	// Of the existing forkd's clients: the same as mode; measuring is always done; the parent must be the one it is.
	Diff        bool   `json:"diff,omitempty"`
	Live        bool   `json:"live,omitempty"`
	MeasureDiff bool   `json:"measure_diff,omitempty"`
	ParentTag   string `json:"parent_tag,omitempty" pattern:"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$"`
}

// RemoveReply is the reply to DELETE /v1/snapshots/{tag} with cascade=true (remove what stands on it, too) or force=true
// (remove it alone; what stands on it keeps what it needs), status 200. Without either the reply is an empty 204.
type RemoveReply struct {
	Removed []string `json:"removed"` // tags that are gone
}

// CompactRequest is the body of POST /v1/snapshots/{tag}/compact.
type CompactRequest struct {
	To string `json:"to" pattern:"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"` // tag of the new, self-contained snapshot
}

// SnapshotInfo is a snapshot with its provenance.
type SnapshotInfo struct {
	Snapshot
	Engine      map[string]any `json:"engine"` // what a host must match to fork it
	Kernel      string         `json:"kernel"`
	Agent       string         `json:"agent"`
	MemoryLayer string         `json:"memory_layer"`
	DiskLayer   string         `json:"disk_layer"`
	StateBytes  int64          `json:"vmstate_bytes"`
	RecipeText  string         `json:"recipe_text"`
	BootMS      float64        `json:"boot_ms"` // cold boot of the parent to its agent's answer
	WarmMS      float64        `json:"warm_ms"` // warm-up after that
	ChainDepth  int            `json:"chain_depth"`
	Ancestors   []string       `json:"ancestors"` // root first
	Dependents  []string       `json:"dependents"`
	Config      *ImageConfig   `json:"config,omitempty"` // of its image; not known of snapshots made by older versions

	// Of the existing forkd's clients.
	ParentTag           *string `json:"parent_tag"`            // the same as parent
	ParentContentHash   *string `json:"parent_content_hash"`   // its id
	MemoryLogicalBytes  int64   `json:"memory_logical_bytes"`  // memory_bytes
	MemoryPhysicalBytes int64   `json:"memory_physical_bytes"` // memory_own_bytes
}

// ImageConfig is how an image's programs are started: the defaults of every process of a sandbox, and what runs when
// no command is given.
type ImageConfig struct {
	Env        map[string]string `json:"env,omitempty"`
	WorkDir    string            `json:"workdir,omitempty"` // "": the user's home
	User       string            `json:"user,omitempty"`    // "": root
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Ports      []string          `json:"ports,omitempty"` // "8080/tcp": what the image says it listens on
}

// Image is a bootable root file system.
type Image struct {
	ID            string   `json:"id"`
	Name          string   `json:"name"` // of the recipe that made it
	Base          string   `json:"base"`
	Packages      int      `json:"packages"`
	CreatedAtUnix int64    `json:"created_at_unix"`
	DiskBytes     int64    `json:"disk_bytes"`   // as the guest sees it
	OwnBytes      int64    `json:"own_bytes"`    // in use
	StoredBytes   int64    `json:"stored_bytes"` // compressed
	Snapshots     []string `json:"snapshots"`    // tags that need it
}

// Sandbox is a machine forked from a snapshot. In the reply to a fork that allows partial success a child that
// failed has Index, SnapshotTag, Error and no ID.
type Sandbox struct {
	ID             string            `json:"id,omitempty"`
	Index          int               `json:"index"`
	Count          int               `json:"count"`
	SnapshotTag    string            `json:"snapshot_tag"`
	State          string            `json:"state,omitempty"`  // running, paused, suspended, failed
	Reason         string            `json:"reason,omitempty"` // of failed
	CreatedAtUnix  int64             `json:"created_at_unix,omitempty"`
	ExpiresAtUnix  int64             `json:"expires_at_unix,omitempty"`
	PID            int               `json:"pid,omitempty"`
	Hostname       string            `json:"hostname,omitempty"`
	Labels         map[string]string `json:"labels,omitempty"`
	CPUs           int               `json:"cpus,omitempty"`
	MemoryBytes    int64             `json:"memory_bytes,omitempty"`
	MemoryOwnBytes int64             `json:"memory_own_bytes,omitempty"` // private to this child, its VM process included
	Accelerator    string            `json:"accelerator,omitempty"`
	DiskOwnBytes   int64             `json:"disk_own_bytes,omitempty"` // what it wrote to its disk
	// What it has in common with others: pages it maps now, and blocks its snapshot and that one's ancestors hold.
	MemorySharedBytes int64 `json:"memory_shared_bytes,omitempty"`
	DiskSharedBytes   int64 `json:"disk_shared_bytes,omitempty"`

	Bounds
	Egress         *Egress `json:"egress,omitempty"` // what it may reach; left out: nothing
	MemoryLimitMiB *int64  `json:"memory_limit_mib"` // the limit of memory, for the existing forkd's clients

	ReadyMS      float64      `json:"ready_ms,omitempty"`  // request to awake, waiting for siblings included
	WaitedMS     float64      `json:"waited_ms,omitempty"` // of that, for the memory of a snapshot that was still being written
	BranchCount  int          `json:"branch_count"`
	LatestBranch string       `json:"latest_branch,omitempty"` // tag; the parent of its next branch
	Confinement  []string     `json:"confinement,omitempty"`   // layers that are on around its VM process; in the reply to GET
	CloneReport  *CloneReport `json:"clone_report,omitempty"`
	Config       *ImageConfig `json:"config,omitempty"` // of its image; in the reply to GET /v1/sandboxes/{id}
	Error        *Error       `json:"error,omitempty"`

	Workspace string   `json:"workspace,omitempty"` // that it is, if it is one
	Warnings  []string `json:"warnings,omitempty"`  // what of the request was not done as it says; in the reply to a fork

	// Of the existing forkd's clients. A sandbox has no namespace and no address of its own here.
	Netns                *string `json:"netns"`
	GuestAddr            *string `json:"guest_addr"`
	HasBranched          bool    `json:"has_branched"`
	LastBranchMemoryPath *string `json:"last_branch_memory_path"`
}

// CloneReport says what a child has of its own and what it still shares with its siblings.
type CloneReport struct {
	Renewed    []string     `json:"renewed"`
	NotRenewed []NotRenewed `json:"not_renewed"`
	GuestMS    float64      `json:"guest_ms"` // time the guest took for it
}

// NotRenewed names state a clone shares with its siblings because it could not be reached.
type NotRenewed struct {
	What string `json:"what"`
	PID  int    `json:"pid,omitempty"`
	Name string `json:"name"`
	Why  string `json:"why"`
}

// ForkRequest is the body of POST /v1/sandboxes.
type ForkRequest struct {
	SnapshotTag string            `json:"snapshot_tag" pattern:"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"`
	N           *int              `json:"n,omitempty" minimum:"1" maximum:"1000"` // default 1
	Labels      map[string]string `json:"labels,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	TTLSeconds  float64           `json:"ttl_seconds,omitempty" minimum:"0" maximum:"4611686018"` // 0: lives until killed
	CPUs        int               `json:"cpus,omitempty" minimum:"0"`                             // 0: the snapshot's
	MemoryBytes int64             `json:"memory_bytes,omitempty" minimum:"0"`
	Partial     bool              `json:"partial,omitempty"` // report failed children beside good ones
	Bounds
	Egress *Egress `json:"egress,omitempty"` // default: the snapshot's. More than that needs scope admin

	// Accepted and already true here: every child is isolated and can be branched live.
	PerChildNetns bool `json:"per_child_netns,omitempty"`
	LiveFork      bool `json:"live_fork,omitempty"`
	Prewarm       bool `json:"prewarm,omitempty"`
	// Wishes of the existing forkd's clients, some of which always have them. What is not granted is in the reply's warnings: a
	// limit of memory that the machine does not fit into is raised, see Limits for one that is meant.
	MemoryLimitMiB int  `json:"memory_limit_mib,omitempty"`
	Hugepages      bool `json:"hugepages,omitempty"`
}

// ExecRequest is the body of POST /v1/sandboxes/{id}/exec. With "Accept: application/x-ndjson" or "text/event-stream" the
// reply is a stream of ExecEvent while the command runs, else one ExecResponse.
type ExecRequest struct {
	Args        []string          `json:"args" minItems:"1"`
	TimeoutSecs float64           `json:"timeout_secs,omitempty" minimum:"0" maximum:"604800"` // default 30
	Env         map[string]string `json:"env,omitempty"`
	Cwd         string            `json:"cwd,omitempty"`
	User        string            `json:"user,omitempty"`
	Stdin       string            `json:"stdin,omitempty"`
	Tag         string            `json:"tag,omitempty"`    // a name for the process
	Base64      bool              `json:"base64,omitempty"` // a stream's output as data, for what is not text
}

// ExecResponse is its reply.
type ExecResponse struct {
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
	ExitCode int    `json:"exit_code"`
	Error    string `json:"error,omitempty"` // e.g. a time-out
	TimedOut bool   `json:"timed_out,omitempty"`
}

// EvalRequest is the body of POST /v1/sandboxes/{id}/eval. With "Accept: application/x-ndjson" or "text/event-stream" the
// reply is a stream of EvalEvent while the code runs, else one EvalResponse.
type EvalRequest struct {
	Code        string            `json:"code"`
	Context     string            `json:"context,omitempty"`  // default: the language's own
	Language    string            `json:"language,omitempty"` // "python", "shell", "javascript", "typescript", or a driver of the image
	Env         map[string]string `json:"env,omitempty"`      // for this evaluation
	TimeoutSecs float64           `json:"timeout_secs,omitempty" minimum:"0" maximum:"604800"`
}

// EvalResponse is its reply.
type EvalResponse struct {
	Result         *string  `json:"result"` // what a prompt would print
	Error          *string  `json:"error"`  // "Name: value"
	ErrorName      string   `json:"error_name,omitempty"`
	ErrorValue     string   `json:"error_value,omitempty"`
	Traceback      string   `json:"traceback,omitempty"`
	Stdout         string   `json:"stdout"`
	Stderr         string   `json:"stderr"`
	Results        []Result `json:"results,omitempty"`         // what the code displayed, and what its last expression is worth
	ResultsOmitted int      `json:"results_omitted,omitempty"` // more than a reply holds
	ExecutionCount int      `json:"execution_count,omitempty"`
	ExitCode       int      `json:"exit_code"`
	MS             float64  `json:"ms"` // inside the guest
}

// Result is a value in every representation that it has; binary ones in base64. Names and meanings are those of E2B's
// code interpreter.
type Result struct {
	Text       string                     `json:"text,omitempty"`
	HTML       string                     `json:"html,omitempty"`
	Markdown   string                     `json:"markdown,omitempty"`
	SVG        string                     `json:"svg,omitempty"`
	PNG        string                     `json:"png,omitempty"`
	JPEG       string                     `json:"jpeg,omitempty"`
	PDF        string                     `json:"pdf,omitempty"`
	LaTeX      string                     `json:"latex,omitempty"`
	JSON       json.RawMessage            `json:"json,omitempty"`
	JavaScript string                     `json:"javascript,omitempty"`
	Data       json.RawMessage            `json:"data,omitempty"`  // a table: column, values
	Chart      json.RawMessage            `json:"chart,omitempty"` // what a figure plots
	Extra      map[string]json.RawMessage `json:"extra,omitempty"` // other MIME types
	Main       bool                       `json:"is_main_result"`
	Omitted    []Omitted                  `json:"omitted,omitempty"` // representations that were too large
}

// Omitted is a representation that was too large.
type Omitted struct {
	Format string `json:"format"`
	Bytes  int64  `json:"bytes"`
	Limit  int64  `json:"limit"`
}

// EvalEvent is one of a streamed evaluation, in the order in which the code produces them. Type is "stdout", "stderr"
// (Text, Timestamp), "result" (Result), "error" (Name, Value, Traceback), "number_of_executions" (ExecutionCount), and at
// the end "end_of_execution" (MS, ExitCode), or "unexpected_end_of_execution" when the context is gone or the call failed.
type EvalEvent struct {
	Type           string  `json:"type"`
	Text           string  `json:"text,omitempty"`
	Timestamp      int64   `json:"timestamp,omitempty"` // nanoseconds since 1970
	Name           string  `json:"name,omitempty"`
	Value          string  `json:"value,omitempty"`
	Traceback      string  `json:"traceback,omitempty"`
	ExecutionCount int     `json:"execution_count,omitempty"`
	ExitCode       *int    `json:"exit_code,omitempty"`
	MS             float64 `json:"ms,omitempty"`
	*Result
}

// ContextRequest is the body of POST /v1/sandboxes/{id}/contexts.
type ContextRequest struct {
	ID       string            `json:"id,omitempty"`
	Language string            `json:"language,omitempty"`
	Cwd      string            `json:"cwd,omitempty"`
	User     string            `json:"user,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
}

// Context is a stateful interpreter of a sandbox.
type Context struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Version  string `json:"version,omitempty"`
	Cwd      string `json:"cwd"`
	User     string `json:"user,omitempty"`
	PID      int    `json:"pid"`
	Alive    bool   `json:"alive"`
	Busy     bool   `json:"busy,omitempty"`
	Ended    string `json:"ended,omitempty"` // how, when it is not alive
	Evals    int    `json:"evals"`
}

// BuildEvent is one line of the reply to POST /v1/builds (newline-delimited JSON): progress lines, then one with
// Snapshot or Error.
type BuildEvent struct {
	Time     time.Time `json:"time"`
	Step     string    `json:"step,omitempty"`    // short noun: "packages", "boot", …
	Message  string    `json:"message,omitempty"` // progress text
	Cached   bool      `json:"cached,omitempty"`  // the step was a cache hit
	Title    string    `json:"title,omitempty"`   // of a step "step" that is over, or was there: its instruction
	Seconds  float64   `json:"seconds,omitempty"` // that it took
	Snapshot *Snapshot `json:"snapshot,omitempty"`
	Error    *Error    `json:"error,omitempty"`
}

// Build is what a build made, with its steps.
type Build struct {
	Snapshot
	Steps []BuildStep `json:"steps,omitempty"` // of a Dockerfile, or of a recipe's commands
}

// BuildStep is a step of a build.
type BuildStep struct {
	Title   string  `json:"title"`
	Cached  bool    `json:"cached"`
	Seconds float64 `json:"seconds"`
}

// Check is one line of doctor.
type Check struct {
	Name   string `json:"name"`
	Status string `json:"status"` // pass, warn, fail, skip
	Detail string `json:"detail"`
	Hint   string `json:"hint,omitempty"`
}

// HostInfo is what doctor and every benchmark say about the host.
type HostInfo struct {
	OK           bool           `json:"ok"`
	Checks       []Check        `json:"checks"`
	Engine       map[string]any `json:"engine,omitempty"`
	Kernel       string         `json:"kernel"`
	CPUs         int            `json:"cpus"`
	CPUModel     string         `json:"cpu_model"`
	MemoryBytes  int64          `json:"memory_bytes"`
	UID          int            `json:"uid"`
	HotBytes     int64          `json:"hot_bytes"`
	HotMaxBytes  int64          `json:"hot_max_bytes"`
	SandboxesMax int            `json:"sandboxes_max"`

	// Of the daemon, at the time of asking: they decide what a measurement is worth.
	StoreFilesystem   string    `json:"store_filesystem"`   // below its home, e.g. ext4
	RuntimeFilesystem string    `json:"runtime_filesystem"` // below its sockets
	LoadAverage       []float64 `json:"load_average"`       // over 1, 5 and 15 minutes
}

// VersionInfo is the reply of GET /version.
type VersionInfo struct {
	Version string `json:"version"`
	API     string `json:"api"`
	PID     int    `json:"pid"`
	Home    string `json:"home"`
	Socket  string `json:"socket"`

	// Over TCP, if the daemon serves that: where, and the pin of its key if it made its certificate itself.
	Address     string `json:"address,omitempty"`
	Fingerprint string `json:"fingerprint,omitempty"`
}

// TreeNode is a snapshot or sandbox in the family tree.
type TreeNode struct {
	Kind     string `json:"kind"` // image, snapshot, sandbox
	Name     string `json:"name"`
	State    string `json:"state,omitempty"`
	OwnBytes int64  `json:"own_bytes"` // stored (image, snapshot), or of the VM process (sandbox)

	MemoryOwnBytes    int64 `json:"memory_own_bytes"`
	MemorySharedBytes int64 `json:"memory_shared_bytes"`
	DiskOwnBytes      int64 `json:"disk_own_bytes"`
	DiskSharedBytes   int64 `json:"disk_shared_bytes"`

	Children []TreeNode `json:"children,omitempty"`
}
