package wire

// PTY asks for a terminal. It, ProcessConfig and the rest mirror envd's process.proto, with its lowerCamelCase names.
// Term is the kind of terminal at the caller's end: it becomes TERM if the guest knows it and TERM is not set otherwise.
type PTY struct {
	Size PTYSize `json:"size"`
	Term string  `json:"term,omitempty"`
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
//
// Detach ends the call after the start message: nobody is attached then, so what the process prints is kept for who comes.
//
// Shell asks for the user's login shell, interactive on a terminal; Process's command is then what an agent runs that
// does not know how to find one.
type StartRequest struct {
	Process   ProcessConfig `json:"process"`
	Shell     bool          `json:"shell,omitempty"`
	Detach    bool          `json:"detach,omitempty"`
	PTY       *PTY          `json:"pty,omitempty"`
	Tag       *string       `json:"tag,omitempty"`
	Stdin     *bool         `json:"stdin,omitempty"` // default true
	User      string        `json:"user,omitempty"`  // default: the image's
	TimeoutMS int64         `json:"timeoutMs,omitempty"`
}

// ConnectRequest attaches to a running process, or to one that has ended and is still known. The output begins with what
// nobody was sent so far, as much of it as was kept; with Replay, with all that was kept.
//
// Observe looks on from beside: the process is not held back by the caller, who is told what was lost if it is too slow,
// and others are sent what it was sent; its input goes nowhere. NoWait ends the call when all that was kept has been
// sent, without an End if the process runs.
type ConnectRequest struct {
	Process ProcessSelector `json:"process"`
	Replay  bool            `json:"replay,omitempty"`
	Observe bool            `json:"observe,omitempty"`
	NoWait  bool            `json:"noWait,omitempty"`
}

// ProcessEvent is a message of a Start or Connect stream; output travels in data frames instead.
type ProcessEvent struct {
	Start *ProcessStart `json:"start,omitempty"`
	Lost  int64         `json:"lost,omitempty"` // so many bytes of output are missing here
	End   *ProcessEnd   `json:"end,omitempty"`
}

// ProcessStart is always the first message.
type ProcessStart struct {
	PID uint32 `json:"pid"`
	PTY bool   `json:"pty,omitempty"` // it has a terminal
}

// ProcessEnd is the last. Status is the text of Go's os.ProcessState; ExitCode is -1 when a signal ended it, and
// then Signal has its number. TimedOut says that it was killed by its time limit.
type ProcessEnd struct {
	ExitCode int    `json:"exitCode"`
	Exited   bool   `json:"exited"`
	Status   string `json:"status"`
	Error    string `json:"error,omitempty"`
	Signal   int    `json:"signal,omitempty"`
	TimedOut bool   `json:"timedOut,omitempty"`
}

// ListRequest asks for the running processes, with Ended also for those that have ended and are still known.
type ListRequest struct {
	Ended bool `json:"ended,omitempty"`
}

// ProcessInfo is a row of List. What follows Tag is beyond envd's.
type ProcessInfo struct {
	Config  ProcessConfig `json:"config"`
	PID     uint32        `json:"pid"`
	Tag     *string       `json:"tag,omitempty"`
	User    string        `json:"user,omitempty"`
	PTY     bool          `json:"pty,omitempty"`
	AgeMS   int64         `json:"ageMs,omitempty"`   // since it was started, by the guest's monotonic clock
	Readers int           `json:"readers,omitempty"` // how many are attached
	Output  int64         `json:"output,omitempty"`  // bytes it has printed
	End     *ProcessEnd   `json:"end,omitempty"`
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

// StreamInputRequest opens a stream whose data frames (stdin or pty) are written to a process in their order, with
// back-pressure; its half-close ends the call, not the process's input.
type StreamInputRequest struct {
	Process ProcessSelector `json:"process"`
}

// SendSignalRequest sends a signal by number (envd's names map to 9 and 15; ours takes any). Group sends it to the whole
// process group, as a terminal does on ctrl-c; 9 always goes to all of it. Tree sends it to every descendant, those in
// sessions of their own too, also of a process that has ended and is still known.
type SendSignalRequest struct {
	Process ProcessSelector `json:"process"`
	Signal  int             `json:"signal"`
	Group   bool            `json:"group,omitempty"`
	Tree    bool            `json:"tree,omitempty"`
}

// SendSignalReply says that Tree was understood.
type SendSignalReply struct {
	Tree bool `json:"tree,omitempty"`
}

// CloseStdinRequest closes standard input.
type CloseStdinRequest struct {
	Process ProcessSelector `json:"process"`
}
