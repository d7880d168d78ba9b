package api

// Process is a row of GET /v1/sandboxes/{id}/processes: what was started in a sandbox from outside. With ?ended=true
// those are listed too that have ended and can still be asked for.
type Process struct {
	PID      uint32            `json:"pid"`
	Tag      string            `json:"tag,omitempty"`
	Command  string            `json:"command"`
	Args     []string          `json:"args,omitempty"`
	Env      map[string]string `json:"env,omitempty"` // of the request that started it
	Cwd      string            `json:"cwd,omitempty"` // likewise
	User     string            `json:"user,omitempty"`
	TTY      bool              `json:"tty,omitempty"`
	AgeMS    int64             `json:"age_ms"` // since its start, in the guest's own time
	Attached int               `json:"attached"`
	Output   int64             `json:"output_bytes"` // that it has printed
	Running  bool              `json:"running"`

	// Of one that has ended.
	ExitCode *int   `json:"exit_code,omitempty"` // as a shell reports it: 128 and the signal's number if that ended it
	Signal   int    `json:"signal,omitempty"`
	Status   string `json:"status,omitempty"` // "exit status 1", "signal: killed"
	TimedOut bool   `json:"timed_out,omitempty"`
}

// SignalRequest is the body of POST /v1/sandboxes/{id}/processes/{pid or tag}/signal.
type SignalRequest struct {
	Signal string `json:"signal,omitempty"` // name or number; default TERM
	Group  bool   `json:"group,omitempty"`  // to the whole process group; KILL always is
	Tree   bool   `json:"tree,omitempty"`   // to all descendants, those in sessions of their own too, also after its end
}
