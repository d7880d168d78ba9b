package wire

// ContextConfig creates a context.
type ContextConfig struct {
	ID       string            `json:"id,omitempty"` // default "default"
	Language string            `json:"language"`     // "python"; later "shell", "javascript"
	Cwd      string            `json:"cwd,omitempty"`
	User     string            `json:"user,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
}

// ContextInfo describes a context.
type ContextInfo struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
	PID      int    `json:"pid"`
	Alive    bool   `json:"alive"`
	Evals    int    `json:"evals"`
}

// ContextRequest is Interrupt and Remove.
type ContextRequest struct {
	ID string `json:"id,omitempty"` // default "default"
}

// ContextList is the reply of List.
type ContextList struct {
	Contexts []ContextInfo `json:"contexts"`
}

// EvalRequest runs code in a context, made with the image's defaults when there is none of that id. Replies: stdout
// and stderr data frames while it runs, then one EvalResult message.
type EvalRequest struct {
	Context   string            `json:"context,omitempty"` // default "default"
	Language  string            `json:"language,omitempty"`
	Code      string            `json:"code"`
	TimeoutMS int64             `json:"timeoutMs,omitempty"` // 0: none
	Env       map[string]string `json:"env,omitempty"`
}

// EvalResult ends an evaluation.
type EvalResult struct {
	Text           *string    `json:"text,omitempty"` // repr of the trailing expression; nil for none or None
	Error          *EvalError `json:"error,omitempty"`
	ExecutionCount int        `json:"executionCount"`
	MS             float64    `json:"ms"`
}

// EvalError is an exception of user code, or the end of its context ("ContextKilled", "Timeout").
type EvalError struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}
