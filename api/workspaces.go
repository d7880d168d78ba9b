package api

// WorkspaceRequest is the body of POST /v1/workspaces.
type WorkspaceRequest struct {
	Name        string            `json:"name" pattern:"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"`
	SnapshotTag string            `json:"snapshot_tag" pattern:"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"`
	Labels      map[string]string `json:"labels,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	Bounds
	Egress *Egress `json:"egress,omitempty"`

	// As in ForkRequest.
	PerChildNetns  bool `json:"per_child_netns,omitempty"`
	MemoryLimitMiB int  `json:"memory_limit_mib,omitempty"`
}

// SuspendWorkspaceRequest is the body of POST /v1/workspaces/{name}/suspend. It may be absent.
type SuspendWorkspaceRequest struct {
	Diff bool `json:"diff,omitempty"` // of the existing forkd's clients: only what has changed is stored anyway
}

// Workspace is a sandbox with a name that outlives it: suspended when nobody works in it, resumed as the same machine.
// Wherever a route takes a sandbox's id it takes the name of a workspace as well.
type Workspace struct {
	ID                string  `json:"id"`
	Name              string  `json:"name"`
	SourceSnapshotTag string  `json:"source_snapshot_tag"`
	Status            string  `json:"status"` // running, suspended, or stale: its sandbox was ended, or died
	Reason            string  `json:"reason,omitempty"`
	LiveSandboxID     *string `json:"live_sandbox_id"` // of a running one
	SandboxID         string  `json:"sandbox_id"`      // whatever its status; it keeps it
	CreatedAtUnix     int64   `json:"created_at_unix"`
	LastActiveUnix    int64   `json:"last_active_unix"` // made, suspended or resumed

	Warnings []string `json:"warnings,omitempty"` // what of the request was not done as it says; in the reply to its creation
}
