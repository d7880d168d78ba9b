package wire

// PTY asks for a terminal. It, ProcessConfig and the rest mirror envd's process.proto, with its lowerCamelCase names.
type PTY struct {
	Size PTYSize `json:"size"`
}

// PTYSize is in characters.
type PTYSize struct {
	Cols uint32 `json:"cols"`
	Rows uint32 `json:"rows"`
}

// ProcessConfig is what to run.
type ProcessConfig struct {
	Cmd  string            `json:"cmd"`
	Args []string          `json:"args,omitempty"`
	Envs map[string]string `json:"envs,omitempty"`
	Cwd  *string           `json:"cwd,omitempty"`
}

// ProcessSelector names a process by pid or tag.
type ProcessSelector struct {
	PID uint32 `json:"pid,omitempty"`
	Tag string `json:"tag,omitempty"`
}

// StartRequest starts a process. Replies: a ProcessEvent message with Start, then data frames, then one with End.
// While the stream is open its data frames from the caller are the process's standard input (stdin or pty).
type StartRequest struct {
	Process   ProcessConfig `json:"process"`
	PTY       *PTY          `json:"pty,omitempty"`
	Tag       *string       `json:"tag,omitempty"`
	Stdin     *bool         `json:"stdin,omitempty"` // default true
	User      string        `json:"user,omitempty"`  // default: the image's
	TimeoutMS int64         `json:"timeoutMs,omitempty"`
}

// ConnectRequest attaches to a running process, or to one that ended less than 30 s ago.
type ConnectRequest struct {
	Process ProcessSelector `json:"process"`
}

// ProcessEvent is a message of a Start or Connect stream; output travels in data frames instead.
type ProcessEvent struct {
	Start *ProcessStart `json:"start,omitempty"`
	End   *ProcessEnd   `json:"end,omitempty"`
}

// ProcessStart is always the first message.
type ProcessStart struct {
	PID uint32 `json:"pid"`
}

// ProcessEnd is the last. Status is the text of Go's os.ProcessState; ExitCode is -1 when a signal ended it, and
// then Signal has its number.
type ProcessEnd struct {
	ExitCode int    `json:"exitCode"`
	Exited   bool   `json:"exited"`
	Status   string `json:"status"`
	Error    string `json:"error,omitempty"`
	Signal   int    `json:"signal,omitempty"`
}

// ProcessInfo is a row of List.
type ProcessInfo struct {
	Config ProcessConfig `json:"config"`
	PID    uint32        `json:"pid"`
	Tag    *string       `json:"tag,omitempty"`
}

// ProcessList is the reply of List.
type ProcessList struct {
	Processes []ProcessInfo `json:"processes"`
}

// UpdateRequest resizes a pty.
type UpdateRequest struct {
	Process ProcessSelector `json:"process"`
	PTY     *PTY            `json:"pty,omitempty"`
}

// SendInputRequest writes to a process of another stream; exactly one of the two.
type SendInputRequest struct {
	Process ProcessSelector `json:"process"`
	Stdin   []byte          `json:"stdin,omitempty"`
	PTY     []byte          `json:"pty,omitempty"`
}

// SendSignalRequest sends a signal by number (envd's names map to 9 and 15; ours takes any). Group sends it to the whole
// process group, as a terminal does on ctrl-c; 9 always goes to all of it.
type SendSignalRequest struct {
	Process ProcessSelector `json:"process"`
	Signal  int             `json:"signal"`
	Group   bool            `json:"group,omitempty"`
}

// CloseStdinRequest closes standard input.
type CloseStdinRequest struct {
	Process ProcessSelector `json:"process"`
}
