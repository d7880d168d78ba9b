package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

const (
	interruptTimeout = 5 * time.Second
	// maxResults bounds the results of a JSON reply, in bytes; more is a matter for streams.
	maxResults = 64 << 20
)

func (s *Server) contexts(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.Host.Guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	infos, err := call.Contexts(r.Context(), conn)
	if err != nil {
		return fmt.Errorf("list contexts: %w", err)
	}
	list := make([]api.Context, 0, len(infos))
	for i := range infos {
		list = append(list, api.Context(infos[i]))
	}
	return Reply(w, http.StatusOK, list)
}

func (s *Server) createContext(w http.ResponseWriter, r *http.Request) error {
	var req api.ContextRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	conn, err := s.Host.Guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	info, err := call.CreateContext(r.Context(), conn, wire.ContextConfig(req))
	if err != nil {
		return fmt.Errorf("create a context: %w", err)
	}
	return Reply(w, http.StatusCreated, api.Context(*info))
}

func (s *Server) restartContext(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.Host.Guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	info, err := call.RestartContext(r.Context(), conn, wire.ContextRequest{ID: r.PathValue("ctx")})
	if err != nil {
		return fmt.Errorf("restart a context: %w", err)
	}
	return Reply(w, http.StatusOK, api.Context(*info))
}

func (s *Server) interruptContext(w http.ResponseWriter, r *http.Request) error {
	return s.onContext(w, r, "interrupt", call.InterruptContext)
}

func (s *Server) removeContext(w http.ResponseWriter, r *http.Request) error {
	return s.onContext(w, r, "remove", call.RemoveContext)
}

func (s *Server) onContext(
	w http.ResponseWriter, r *http.Request, what string, do func(ctx context.Context, o call.Opener, which wire.ContextRequest) error,
) error {
	conn, err := s.Host.Guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	if err := do(r.Context(), conn, wire.ContextRequest{ID: r.PathValue("ctx")}); err != nil {
		return fmt.Errorf("%s a context: %w", what, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) eval(w http.ResponseWriter, r *http.Request) error {
	var req api.EvalRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	timeout, err := millis("timeout_secs", req.TimeoutSecs, 0)
	if err != nil {
		return err
	}
	conn, err := s.Host.Guest(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	ask := wire.EvalRequest{Context: req.Context, Language: req.Language, Code: req.Code, Env: req.Env, TimeoutMS: timeout}
	run := func(out call.Evaluation) (*wire.EvalResult, error) { //nolint:contextcheck // It takes the request's.
		res, err := call.Evaluate(r.Context(), conn, ask, out)
		if r.Context().Err() == nil {
			return res, err
		}
		// Nobody waits for the result; the next evaluation should not have to.
		stop, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), interruptTimeout)
		defer cancel()
		return nil, errors.Join(context.Cause(r.Context()), call.InterruptContext(stop, conn, wire.ContextRequest{ID: ask.Context, Language: ask.Language}))
	}
	if events := wantsEvents(r); events != "" {
		return streamEval(w, events, func(e call.Evaluation) (*wire.EvalResult, error) {
			res, err := run(e)
			return res, s.because(r, err)
		})
	}
	var results []api.Result
	size, omitted := 0, 0
	stdout, stderr := capture{}, capture{}
	res, err := run(call.Evaluation{
		Output: call.Output{Stdout: &stdout, Stderr: &stderr},
		Show: func(v *wire.Result) error {
			if size += v.Size(); size > maxResults {
				omitted++
				return nil
			}
			results = append(results, result(v))
			return nil
		},
	})
	if err != nil {
		return fmt.Errorf("eval: %w", err)
	}
	out := api.EvalResponse{
		Result: res.Text, Stdout: stdout.text(), Stderr: stderr.text(), MS: res.MS, Results: results, ResultsOmitted: omitted,
		ExecutionCount: res.ExecutionCount,
	}
	if res.ExitCode != nil {
		out.ExitCode = *res.ExitCode
	}
	if e := res.Error; e != nil {
		text := strings.TrimSuffix(e.Name+": "+e.Value, ": ")
		out.Error, out.ErrorName, out.ErrorValue, out.Traceback = &text, e.Name, e.Value, e.Traceback
		out.ExitCode = max(1, out.ExitCode)
	}
	return Reply(w, http.StatusOK, out)
}

func result(r *wire.Result) api.Result {
	out := api.Result{
		Text: r.Text, HTML: r.HTML, Markdown: r.Markdown, SVG: r.SVG, PNG: r.PNG, JPEG: r.JPEG, PDF: r.PDF, LaTeX: r.LaTeX, JSON: r.JSON,
		JavaScript: r.JavaScript, Data: r.Data, Chart: r.Chart, Extra: r.Extra, Main: r.Main,
	}
	for _, o := range r.Omitted {
		out.Omitted = append(out.Omitted, api.Omitted(o))
	}
	return out
}

const (
	eventStream = "text/event-stream"
	jsonLines   = "application/x-ndjson"
)

// wantsEvents is how a client wants an evaluation streamed, or empty.
func wantsEvents(r *http.Request) string {
	for part := range strings.SplitSeq(r.Header.Get("Accept"), ",") {
		kind, _, _ := strings.Cut(part, ";")
		switch kind = strings.ToLower(strings.TrimSpace(kind)); kind {
		case eventStream, jsonLines:
			return kind
		}
	}
	return ""
}

// streamEval sends events as they come. Errors before the first are answered as such.
func streamEval(w http.ResponseWriter, kind string, run func(call.Evaluation) (*wire.EvalResult, error)) error {
	e := &events{w: w, kind: kind}
	stdout, stderr := e.text("stdout"), e.text("stderr")
	res, err := run(call.Evaluation{
		Output: call.Output{Stdout: stdout, Stderr: stderr},
		Show: func(v *wire.Result) error {
			if err := errors.Join(stdout.Flush(), stderr.Flush()); err != nil {
				return err
			}
			r := result(v)
			return e.send(&api.EvalEvent{Type: "result", Text: r.Text, Result: &r})
		},
	})
	if err != nil && !e.begun {
		return fmt.Errorf("eval: %w", err)
	}
	if err := errors.Join(stdout.Flush(), stderr.Flush()); err != nil {
		return err
	}
	if err != nil {
		return errors.Join(err, e.send(&api.EvalEvent{Type: "unexpected_end_of_execution", Text: err.Error()}))
	}
	end := &api.EvalEvent{Type: "end_of_execution", MS: res.MS, ExitCode: res.ExitCode}
	if f := res.Error; f != nil {
		if err := e.send(&api.EvalEvent{Type: "error", Name: f.Name, Value: f.Value, Traceback: f.Traceback}); err != nil {
			return err
		}
		if f.Name == wire.ErrorKilled {
			end.Type = "unexpected_end_of_execution"
		}
	}
	if err := e.send(&api.EvalEvent{Type: "number_of_executions", ExecutionCount: res.ExecutionCount}); err != nil {
		return err
	}
	return e.send(end)
}

// events is a reply of one JSON object a line, or of server-sent events.
type events struct {
	w     http.ResponseWriter
	kind  string
	begun bool
}

func (e *events) send(event *api.EvalEvent) error { return e.write("", event.Type, event) }

// write sends one event. A reader of server-sent events that comes back names the id of the last it has got.
func (e *events) write(id, kind string, event any) error {
	text, err := json.Marshal(event)
	if err != nil {
		return fmt.Errorf("encode an event: %w", err)
	}
	if err := e.begin(); err != nil {
		return err
	}
	if e.kind == eventStream {
		head := "event: " + kind + "\ndata: "
		if id != "" {
			head = "id: " + id + "\n" + head
		}
		text = append(append([]byte(head), text...), '\n')
	}
	if _, err := e.w.Write(append(text, '\n')); err != nil {
		return err
	}
	return e.flush()
}

// text makes events of what is printed.
func (e *events) text(kind string) *call.Text {
	return &call.Text{Pass: func(text string) error {
		return e.send(&api.EvalEvent{Type: kind, Text: text, Timestamp: time.Now().UnixNano()})
	}}
}
