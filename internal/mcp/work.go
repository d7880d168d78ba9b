package mcp

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/api"
)

type execIn struct {
	SandboxID   string            `json:"sandbox_id"`
	Args        []string          `json:"args,omitempty" jsonschema:"program and arguments; or give command"`
	Command     string            `json:"command,omitempty" jsonschema:"a line for /bin/sh, in the place of args"`
	TimeoutSecs float64           `json:"timeout_secs,omitempty" jsonschema:"it is killed after that; 30 if not given"`
	Cwd         string            `json:"cwd,omitempty"`
	Env         map[string]string `json:"env,omitempty"`
	User        string            `json:"user,omitempty" jsonschema:"the image's user if not given"`
	Stdin       string            `json:"stdin,omitempty"`
}

// execOut has the fields of the existing forkd's, and how to read on.
type execOut struct {
	Stdout      string `json:"stdout"`
	Stderr      string `json:"stderr"`
	ExitCode    int    `json:"exit_code"`
	Error       string `json:"error,omitempty"`
	TimedOut    bool   `json:"timed_out,omitempty"`
	StdoutBytes int64  `json:"stdout_bytes,omitempty"` // where it is longer than what is shown
	StdoutTail  string `json:"stdout_tail,omitempty"`
	StderrBytes int64  `json:"stderr_bytes,omitempty"`
	StderrTail  string `json:"stderr_tail,omitempty"`
	OutputID    string `json:"output_id,omitempty"`
	Note        string `json:"note,omitempty"`
}

type startIn struct {
	execIn
	Tag string `json:"tag,omitempty" jsonschema:"a name for it, which signal_process takes"`
}

type evalIn struct {
	SandboxID   string            `json:"sandbox_id"`
	Code        string            `json:"code"`
	Language    string            `json:"language,omitempty" jsonschema:"python (default), shell, javascript, typescript"`
	Context     string            `json:"context,omitempty" jsonschema:"an interpreter of list_contexts; made if it is not there"`
	TimeoutSecs float64           `json:"timeout_secs,omitempty" jsonschema:"the code is interrupted after that; never if not given"`
	Env         map[string]string `json:"env,omitempty"`
}

// evalOut has the fields of the existing forkd's, and more.
type evalOut struct {
	Result    *string  `json:"result"`
	Error     *string  `json:"error"`
	Traceback string   `json:"traceback,omitempty"`
	ExitCode  int      `json:"exit_code"`
	Results   []shown  `json:"results,omitempty"`
	Omitted   []string `json:"omitted,omitempty"`
	outText
}

// shown is something that the code displayed.
type shown struct {
	Text     string          `json:"text,omitempty"`
	Markdown string          `json:"markdown,omitempty"`
	JSON     json.RawMessage `json:"json,omitempty"`
	Formats  []string        `json:"formats,omitempty"` // others that it has
}

// outText is what was printed, as an answer shows it.
type outText struct {
	Stdout      string `json:"stdout"`
	Stderr      string `json:"stderr"`
	StdoutBytes int64  `json:"stdout_bytes,omitempty"`
	StdoutTail  string `json:"stdout_tail,omitempty"`
	StderrBytes int64  `json:"stderr_bytes,omitempty"`
	StderrTail  string `json:"stderr_tail,omitempty"`
	OutputID    string `json:"output_id,omitempty"`
	Note        string `json:"note,omitempty"`
}

type contextIn struct {
	SandboxID string `json:"sandbox_id"`
	Context   string `json:"context" jsonschema:"of list_contexts"`
}

type processesIn struct {
	SandboxID string `json:"sandbox_id"`
	Ended     bool   `json:"ended,omitempty" jsonschema:"with those that have ended and can still be asked for"`
}

type signalIn struct {
	SandboxID string `json:"sandbox_id"`
	Process   string `json:"process" jsonschema:"pid or tag"`
	Signal    string `json:"signal,omitempty" jsonschema:"TERM if not given"`
	Tree      bool   `json:"tree,omitempty" jsonschema:"to all that came from it as well"`
}

func (s *server) workTools(m *mcp.Server) {
	tool(s, m, "exec_command", "Run a command in a sandbox and wait for its end. Give args (program and arguments) or command (a shell line). "+
		"Of long output the beginning and the end are shown, and read_output reads the rest.", destroys, exec)
	tool(s, m, "start_process", "Start a command in a sandbox's background: a server, a watcher. It goes on without you; redirect its output to a "+
		"file to read it later. list_processes and signal_process know it by pid or tag.", destroys, startProcess)
	tool(s, m, "eval_code", "Evaluate code in an interpreter of the sandbox that keeps variables and imports between calls. The answer has what "+
		"was printed, the value of the last expression as result, errors with traceback, and plots as pictures.", destroys, eval)
	tool(s, m, "list_contexts", "List a sandbox's interpreters.", reads, func(ctx context.Context, c *call, in sandboxIn) (any, error) {
		return c.Contexts(ctx, in.SandboxID)
	})
	tool(s, m, "restart_context", "Restart an interpreter: variables are gone, it takes code again.", destroys,
		func(ctx context.Context, c *call, in contextIn) (any, error) {
			return c.RestartContext(ctx, in.SandboxID, in.Context)
		})
	tool(s, m, "list_processes", "List what was started in a sandbox.", reads, func(ctx context.Context, c *call, in processesIn) (any, error) {
		return c.Processes(ctx, in.SandboxID, in.Ended)
	})
	tool(s, m, "signal_process", "Send a signal to a process of a sandbox.", destroys, func(ctx context.Context, c *call, in signalIn) (any, error) {
		err := c.Signal(ctx, in.SandboxID, in.Process, api.SignalRequest{Signal: in.Signal, Tree: in.Tree})
		return map[string]bool{"signalled": true}, err
	})
	s.readOutput(m)
}

func (in *execIn) request() (api.ExecRequest, error) {
	req := api.ExecRequest{Args: in.Args, TimeoutSecs: in.TimeoutSecs, Cwd: in.Cwd, Env: in.Env, User: in.User, Stdin: in.Stdin}
	switch {
	case len(in.Args) > 0 && in.Command != "":
		return req, &api.Error{Code: api.CodeInvalid, Message: "args and command are both given; give one of them"}
	case in.Command != "":
		req.Args = []string{"/bin/sh", "-c", in.Command}
	case len(in.Args) == 0:
		return req, &api.Error{Code: api.CodeInvalid, Status: 400, Message: "nothing to run: give args, or command"}
	}
	return req, nil
}

// killTimeout bounds the clean-up after a call that was cancelled.
const killTimeout = 10 * time.Second

func exec(ctx context.Context, c *call, in execIn) (any, error) {
	req, err := in.request()
	if err != nil {
		return nil, err
	}
	var out execOut
	var pid uint32
	said := newPrinted()
	ticks := pace{every: time.Second}
	err = c.ExecStream(ctx, in.SandboxID, req, func(e api.ExecEvent) error {
		switch e.Type {
		case "start":
			pid = e.PID
		case "stdout", "stderr":
			said.add(e.Type, e.Text)
			if ticks.due() {
				c.progress(ctx, ticks.seconds(), 0, "%s", lastLine(e.Text))
			}
		case "exit":
			out.ExitCode, out.Error, out.TimedOut = *e.ExitCode, e.Error, e.TimedOut
		}
		return nil
	})
	if ctx.Err() != nil && pid != 0 { // Nobody waits for it any more.
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
		defer cancel()
		return nil, errors.Join(context.Cause(ctx), c.Signal(stop, in.SandboxID, strconv.FormatUint(uint64(pid), 10), api.SignalRequest{Signal: "KILL", Tree: true}))
	}
	if err != nil {
		return nil, err
	}
	t := said.show(c.kept, "")
	out.Stdout, out.Stderr, out.OutputID, out.Note = t.Stdout, t.Stderr, t.OutputID, t.Note
	out.StdoutBytes, out.StdoutTail, out.StderrBytes, out.StderrTail = t.StdoutBytes, t.StdoutTail, t.StderrBytes, t.StderrTail
	return out, nil
}

var errStarted = errors.New("started")

// longest is the longest time limit there is, in seconds.
const longest = 7 * 24 * 3600

func startProcess(ctx context.Context, c *call, in startIn) (any, error) {
	req, err := in.request()
	if err != nil {
		return nil, err
	}
	if req.Tag = in.Tag; req.TimeoutSecs == 0 {
		req.TimeoutSecs = longest
	}
	var pid uint32
	err = c.ExecStream(ctx, in.SandboxID, req, func(e api.ExecEvent) error {
		pid = e.PID
		return errStarted
	})
	if !errors.Is(err, errStarted) {
		return nil, err
	}
	return api.Process{PID: pid, Tag: in.Tag, Command: req.Args[0], Args: req.Args[1:], Running: true}, nil
}

const (
	maxPictures = 8
	maxPicture  = 2 << 20 // in base64
)

func eval(ctx context.Context, c *call, in evalIn) (any, error) {
	out := evalOut{}
	var pictures []mcp.Content
	said := newPrinted()
	ticks := pace{every: time.Second}
	traceback := ""
	req := api.EvalRequest{Code: in.Code, Language: in.Language, Context: in.Context, TimeoutSecs: in.TimeoutSecs, Env: in.Env}
	err := c.EvalStream(ctx, in.SandboxID, req, func(e *api.EvalEvent) error {
		switch e.Type {
		case "stdout", "stderr":
			said.add(e.Type, e.Text)
			if ticks.due() {
				c.progress(ctx, ticks.seconds(), 0, "%s", lastLine(e.Text))
			}
		case "result":
			if e.Result == nil {
				e.Result = &api.Result{}
			}
			if e.Main {
				out.Result = &e.Text
			}
			picture, left := pictureOf(e.Result, len(pictures))
			if picture != nil {
				pictures = append(pictures, picture)
			}
			if left != "" {
				out.Omitted = append(out.Omitted, left)
			}
			out.Results = append(out.Results, show(e))
		case "error":
			text := strings.TrimSuffix(e.Name+": "+e.Value, ": ")
			out.Error, traceback, out.ExitCode = &text, e.Traceback, 1
		case "end_of_execution":
			if e.ExitCode != nil && *e.ExitCode != 0 {
				out.ExitCode = *e.ExitCode
			}
		case "unexpected_end_of_execution":
			if out.Error == nil {
				text := "the execution broke off: " + e.Text
				out.Error, out.ExitCode = &text, 1
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(out.Results) == 1 && out.Result != nil && len(out.Results[0].Formats) == 0 && out.Results[0].Markdown == "" && out.Results[0].JSON == nil {
		out.Results = nil // The result says it all.
	}
	out.Traceback = part(traceback, 0, shownHead)
	out.outText = said.show(c.kept, traceback)
	return pictured{answer: out, pictures: pictures}, nil
}

// pictureOf is a result as a picture, or why it is left out.
func pictureOf(r *api.Result, have int) (mcp.Content, string) {
	text, kind := r.PNG, "image/png"
	if text == "" {
		text, kind = r.JPEG, "image/jpeg"
	}
	switch {
	case text == "":
		return nil, ""
	case have >= maxPictures:
		return nil, fmt.Sprintf("a picture: an answer has %d at most", maxPictures)
	case len(text) > maxPicture:
		return nil, fmt.Sprintf("a picture of %d bytes; save it to a file instead", len(text))
	}
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, "a picture that is not base64"
	}
	return &mcp.ImageContent{Data: data, MIMEType: kind}, ""
}

func show(e *api.EvalEvent) shown {
	r := e.Result
	out := shown{Text: part(e.Text, 0, shownHead), Markdown: part(r.Markdown, 0, shownHead)}
	if len(r.JSON) <= shownHead {
		out.JSON = r.JSON
	}
	for _, f := range []struct {
		name string
		has  bool
	}{
		{"html", r.HTML != ""},
		{"svg", r.SVG != ""},
		{"png", r.PNG != ""},
		{"jpeg", r.JPEG != ""},
		{"pdf", r.PDF != ""},
		{"latex", r.LaTeX != ""},
		{"javascript", r.JavaScript != ""},
		{"data", r.Data != nil},
		{"chart", r.Chart != nil},
	} {
		if f.has {
			out.Formats = append(out.Formats, f.name)
		}
	}
	return out
}

// printed is what a program prints on both streams.
type printed struct{ stdout, stderr captured }

func newPrinted() *printed { return &printed{} }

func (p *printed) add(stream, text string) {
	if stream == "stderr" {
		p.stderr.add(text)
		return
	}
	p.stdout.add(text)
}

// show is what fits into an answer; the rest is kept.
func (p *printed) show(kept *outputs, traceback string) outText {
	out := outText{Stdout: p.stdout.text.String(), Stderr: p.stderr.text.String()}
	parts := map[string]string{}
	for _, s := range []struct {
		name  string
		text  *string
		tail  *string
		bytes *int64
		lost  int64
	}{
		{"stdout", &out.Stdout, &out.StdoutTail, &out.StdoutBytes, p.stdout.lost},
		{"stderr", &out.Stderr, &out.StderrTail, &out.StderrBytes, p.stderr.lost},
	} {
		if len(*s.text) <= shownHead+shownTail {
			continue
		}
		parts[s.name], *s.bytes = *s.text, int64(len(*s.text))+s.lost
		*s.text, *s.tail = ends(*s.text)
	}
	if len(traceback) > shownHead {
		parts["traceback"] = traceback
	}
	if len(parts) == 0 {
		return out
	}
	out.OutputID = kept.keep(parts)
	out.Note = fmt.Sprintf("output is long: its beginning and end are here; read_output with output_id %q reads the rest", out.OutputID)
	if p.stdout.lost+p.stderr.lost > 0 {
		out.Note += fmt.Sprintf(" (of each stream the first %d MiB are kept)", maxKept>>20)
	}
	return out
}

// pace lets something happen now and then.
type pace struct {
	every       time.Duration
	began, last time.Time
}

func (p *pace) due() bool {
	now := time.Now()
	if p.began.IsZero() {
		p.began = now
	}
	if now.Sub(p.last) < p.every {
		return false
	}
	p.last = now
	return true
}

func (p *pace) seconds() float64 { return time.Since(p.began).Seconds() }

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return part(lines[len(lines)-1], 0, 200)
}
