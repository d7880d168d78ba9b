package wire

import "encoding/json"

// ContextConfig creates a context, and says what one that is started again becomes.
type ContextConfig struct {
	ID       string            `json:"id,omitempty"` // default "default" for Python, else the language's name
	Language string            `json:"language"`     // "python", "shell", "javascript", "typescript", or a driver's name
	Cwd      string            `json:"cwd,omitempty"`
	User     string            `json:"user,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
}

// ContextInfo describes a context.
type ContextInfo struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Version  string `json:"version,omitempty"` // of the interpreter
	Cwd      string `json:"cwd"`               // where it was started
	User     string `json:"user,omitempty"`
	PID      int    `json:"pid"`
	Alive    bool   `json:"alive"`
	Busy     bool   `json:"busy,omitempty"`
	Ended    string `json:"ended,omitempty"` // how, when it is not alive
	Evals    int    `json:"evals"`
}

// ContextRequest is Interrupt, Restart and Remove.
type ContextRequest struct {
	ID       string `json:"id,omitempty"`       // default: as in EvalRequest
	Language string `json:"language,omitempty"` // for that
}

// ContextList is the reply of List.
type ContextList struct {
	Contexts []ContextInfo `json:"contexts"`
}

// EvalRequest runs code in a context, made with the image's defaults when there is none of that id. Replies, in the order
// in which the code produced them: stdout and stderr data frames and EvalEvent messages while it runs, then one
// EvalResult message.
//
// The context that is meant when none is named: "default" if it is of the language, else the one that has the language's
// name; without a language "default", or the only one there is.
type EvalRequest struct {
	Context   string            `json:"context,omitempty"`
	Language  string            `json:"language,omitempty"` // default: the context's, or "python"
	Code      string            `json:"code"`
	TimeoutMS int64             `json:"timeoutMs,omitempty"` // 0: none
	Env       map[string]string `json:"env,omitempty"`       // for this evaluation
	Compiled  bool              `json:"compiled,omitempty"`  // what was TypeScript has been made JavaScript
}

// Language is the name of a context's language, by any of the names it has. Others are names of drivers.
func Language(name string) string {
	switch name {
	case "", "python", "python3", "py":
		return "python"
	case "shell", "bash", "sh":
		return "shell"
	case "javascript", "js", "node":
		return "javascript"
	case "typescript", "ts":
		return "typescript"
	}
	return name
}

// DefaultContext is the context in which code of a language runs when none is named.
func DefaultContext(language string) string {
	if language = Language(language); language != "python" {
		return language
	}
	return "default"
}

// NeedsJavaScript is the message of the refusal (CodePrecondition) of TypeScript that a guest cannot compile itself: the
// caller does and sends it again as Compiled.
const NeedsJavaScript = "the guest has no compiler for TypeScript: send it compiled"

// EvalEvent is a message of an evaluation in progress. An EvalResult has no "result", which tells the two apart.
type EvalEvent struct {
	Result *Result `json:"result,omitempty"`
}

// Result is something that code showed: a value in every representation it has. Binary ones are in base64. The names
// are those of E2B's code interpreter.
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
	Data       json.RawMessage            `json:"data,omitempty"`  // a table: column → values
	Chart      json.RawMessage            `json:"chart,omitempty"` // what a figure plots
	Extra      map[string]json.RawMessage `json:"extra,omitempty"` // other MIME types
	Main       bool                       `json:"is_main_result"`  // the value of the trailing expression
	Omitted    []Omitted                  `json:"omitted,omitempty"`
}

// Omitted names a representation that was too large to be sent.
type Omitted struct {
	Format string `json:"format"`
	Bytes  int64  `json:"bytes"`
	Limit  int64  `json:"limit"`
}

// EvalResult ends an evaluation.
type EvalResult struct {
	Text           *string    `json:"text,omitempty"` // of the trailing expression, as a prompt prints it; nil for none or None
	Error          *EvalError `json:"error,omitempty"`
	ExecutionCount int        `json:"executionCount"`
	MS             float64    `json:"ms"`
	ExitCode       *int       `json:"exitCode,omitempty"` // of a shell's code
}

// EvalError is an exception of user code, or the end of its context ("ContextKilled", "Timeout").
type EvalError struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}

// Names of errors that do not come from an interpreter.
const (
	ErrorKilled     = "ContextKilled" // the interpreter is gone
	ErrorTimeout    = "Timeout"
	ErrorExitStatus = "ExitStatus" // the exit code of a shell's code, when it is not 0
	ErrorInterrupt  = "KeyboardInterrupt"
)

// texts are the representations of a result that are text, by the names they have in JSON.
func (r *Result) texts() [9]struct {
	name string
	text *string
} {
	return [9]struct {
		name string
		text *string
	}{
		{"text", &r.Text},
		{"html", &r.HTML},
		{"markdown", &r.Markdown},
		{"svg", &r.SVG},
		{"png", &r.PNG},
		{"jpeg", &r.JPEG},
		{"pdf", &r.PDF},
		{"latex", &r.LaTeX},
		{"javascript", &r.JavaScript},
	}
}

func (r *Result) structured() [3]struct {
	name string
	json *json.RawMessage
} {
	return [3]struct {
		name string
		json *json.RawMessage
	}{{"json", &r.JSON}, {"data", &r.Data}, {"chart", &r.Chart}}
}

// Formats names the representations that a result has, in the order of its fields.
func (r *Result) Formats() []string {
	var names []string
	for _, f := range r.texts() {
		if f.text != nil && *f.text != "" {
			names = append(names, f.name)
		}
	}
	for _, f := range r.structured() {
		if len(*f.json) > 0 {
			names = append(names, f.name)
		}
	}
	return names
}

// Size is about how many bytes a result takes on the wire.
func (r *Result) Size() int {
	total := 256 + 64*(len(r.Omitted)+len(r.Extra))
	for _, f := range r.texts() {
		if f.text != nil {
			total += quotedSize(*f.text)
		}
	}
	for _, f := range r.structured() {
		total += len(*f.json)
	}
	for k, v := range r.Extra {
		total += len(k) + len(v)
	}
	return total
}

// Largest is the representation that takes most, how much that is, and how to drop it. Size 0: there is none.
func (r *Result) Largest() (name string, size int, drop func()) {
	for _, f := range r.texts() {
		if f.text != nil {
			if n := quotedSize(*f.text); n > size && *f.text != "" {
				name, size, drop = f.name, n, func() { *f.text = "" }
			}
		}
	}
	for _, f := range r.structured() {
		if len(*f.json) > size {
			name, size, drop = f.name, len(*f.json), func() { *f.json = nil }
		}
	}
	for k, v := range r.Extra {
		if len(v) > size {
			name, size, drop = k, len(v), func() { delete(r.Extra, k) }
		}
	}
	return name, size, drop
}

// quotedSize is how long a text is as appendString writes it.
func quotedSize(s string) int {
	n := len(s) + 2
	for i := range len(s) {
		switch c := s[i]; {
		case c < ' ':
			n += 5
		case c == '"' || c == '\\':
			n++
		}
	}
	return n
}

func (e *EvalEvent) appendJSON(b []byte) []byte {
	if e.Result == nil {
		return append(b, "{}"...)
	}
	b = append(b, `{"result":`...)
	b = e.Result.appendJSON(b)
	return append(b, '}')
}

// appendJSON is here because encoding/json makes six bytes of each <, which HTML is full of.
func (r *Result) appendJSON(b []byte) []byte {
	b = append(b, `{"is_main_result":`...)
	if r.Main {
		b = append(b, "true"...)
	} else {
		b = append(b, "false"...)
	}
	for _, f := range r.texts() {
		if f.text != nil && *f.text != "" {
			b = append(append(append(b, `,"`...), f.name...), `":`...)
			b = appendString(b, *f.text)
		}
	}
	for _, f := range r.structured() {
		if len(*f.json) > 0 {
			b = append(append(append(b, `,"`...), f.name...), `":`...)
			b = append(b, *f.json...)
		}
	}
	if len(r.Extra) > 0 {
		b = append(b, `,"extra":{`...)
		first := true
		for k, v := range r.Extra {
			if !first {
				b = append(b, ',')
			}
			first = false
			b = append(append(appendString(b, k), ':'), v...)
		}
		b = append(b, '}')
	}
	if len(r.Omitted) > 0 {
		text, err := json.Marshal(r.Omitted)
		if err == nil {
			b = append(append(b, `,"omitted":`...), text...)
		}
	}
	return append(b, '}')
}
