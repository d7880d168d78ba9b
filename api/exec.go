package api

// ExecEvent is one of a streamed command: of POST /v1/sandboxes/{id}/exec with "Accept: application/x-ndjson" or
// "text/event-stream", and, apart from output, of its WebSocket. Type is "start" (PID, TTY), "stdout" or "stderr" (Text, or Data
// if base64 was asked for; Timestamp), "lost" (Bytes of output that are missing here), and at the end "exit" (ExitCode, Signal,
// Status, TimedOut, Error), or "error" (Code, Text) when the call failed and the command perhaps goes on. Over a WebSocket
// "refused" (Code, Text) answers a message that could not be obeyed.
type ExecEvent struct {
	Type      string `json:"type" enum:"start,stdout,stderr,lost,exit,error,refused"`
	PID       uint32 `json:"pid,omitempty"`
	TTY       bool   `json:"tty,omitempty"`
	Text      string `json:"text,omitempty"`
	Data      []byte `json:"data,omitempty"`
	Timestamp int64  `json:"timestamp,omitempty"` // nanoseconds since 1970
	Bytes     int64  `json:"bytes,omitempty"`
	ExitCode  *int   `json:"exit_code,omitempty"` // as a shell reports it: 128 and the signal's number if that ended it
	Signal    int    `json:"signal,omitempty"`
	Status    string `json:"status,omitempty"` // "exit status 1", "signal: killed"
	TimedOut  bool   `json:"timed_out,omitempty"`
	Error     string `json:"error,omitempty"`
	Code      Code   `json:"code,omitempty"`
}

// TTY is a terminal's size, in characters, and kind.
type TTY struct {
	Cols uint32 `json:"cols,omitempty"` // default 80
	Rows uint32 `json:"rows,omitempty"` // default 24
	Term string `json:"term,omitempty"` // becomes TERM if the guest knows it
}

// ExecStart is the first message over the WebSocket of GET /v1/sandboxes/{id}/exec, as text. It starts a command, or,
// with Attach, comes to one that runs.
type ExecStart struct {
	Args        []string          `json:"args,omitempty"`
	Shell       bool              `json:"shell,omitempty"` // in the place of args: the user's login shell
	Env         map[string]string `json:"env,omitempty"`
	Cwd         string            `json:"cwd,omitempty"`
	User        string            `json:"user,omitempty"`
	Tag         string            `json:"tag,omitempty"`
	TimeoutSecs float64           `json:"timeout_secs,omitempty"`  // default: none
	TTY         *TTY              `json:"tty,omitempty"`           // a terminal
	Stdin       bool              `json:"stdin,omitempty"`         // input will come; a terminal has it anyway
	KillOnClose bool              `json:"kill_on_close,omitempty"` // else it goes on when the WebSocket ends

	Attach  string `json:"attach,omitempty"`  // pid or tag
	Replay  bool   `json:"replay,omitempty"`  // begin with all output that is kept, not with what nobody was sent
	Observe bool   `json:"observe,omitempty"` // look on from beside, without input
}

// ExecControl is every later message from the client as text: "resize" (Cols, Rows), "signal" (Signal, Group), "stdin" (Text),
// "eof", which closes standard input. Input goes faster as a binary message: a byte 0, and the input. Output comes as binary
// messages: a byte 1 (standard output, and all of a terminal's) or 2 (standard error), and the output.
type ExecControl struct {
	Type   string `json:"type" enum:"resize,signal,stdin,eof"`
	Cols   uint32 `json:"cols,omitempty"`
	Rows   uint32 `json:"rows,omitempty"`
	Signal string `json:"signal,omitempty"`
	Group  bool   `json:"group,omitempty"`
	Text   string `json:"text,omitempty"`
}
