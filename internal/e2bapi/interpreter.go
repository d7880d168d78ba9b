package e2bapi

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/httpapi"
)

// interpreter is the routes of the code interpreter.
func (s *Server) interpreter() *http.ServeMux {
	return s.plane(httpapi.Operation{Fail: failPlain, Shown: shownToPort, Known: s.portToken, Sandbox: targetID}, []route{
		{"GET /health", access.None, s.interpreterHealth},
		{"POST /execute", access.Use, s.execute},
		{"GET /contexts", access.Use, s.contexts},
		{"POST /contexts", access.Use, s.createContext},
		{"POST /contexts/{ctx}/restart", access.Use, s.restartContext},
		{"DELETE /contexts/{ctx}", access.Use, s.removeContext},
	})
}

// shownToPort is what opens a sandbox's ports.
func shownToPort(r *http.Request) (string, bool) {
	if token := r.Header.Get(trafficHeader); token != "" {
		return token, true
	}
	return shownToEnvd(r)
}

func (s *Server) portToken(r *http.Request, shown string) (access.Token, bool) {
	return s.sandboxToken(targetOf(r).id, shown, forTraffic, forEnvd)
}

func (s *Server) interpreterHealth(w http.ResponseWriter, r *http.Request) error {
	id := targetOf(r).id
	if v, err := s.Host.Peek(id); err != nil || state(v) != stateRunning {
		return &edgeError{sandbox: id}
	}
	return httpapi.Reply(w, http.StatusOK, "OK")
}

// body decodes a request of the plain routes: unknown fields are of newer clients.
func body(w http.ResponseWriter, r *http.Request, v any) error {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxMessage))
	if err != nil {
		return invalid("read the request: %v", err)
	}
	if len(text) == 0 {
		return nil
	}
	return decodeMessage(text, v)
}

// contextInfo is a context as E2B describes it.
type contextInfo struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
}

func describeContext(c wire.ContextInfo) contextInfo {
	if c.Language == "shell" {
		c.Language = "bash"
	}
	return contextInfo{c.ID, c.Language, c.Cwd}
}

func (s *Server) contexts(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	infos, err := call.Contexts(r.Context(), conn)
	if err != nil {
		return err
	}
	list := []contextInfo{}
	for _, c := range infos {
		list = append(list, describeContext(c))
	}
	return httpapi.Reply(w, http.StatusOK, list)
}

func (s *Server) createContext(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Language string `json:"language"`
		Cwd      string `json:"cwd"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	if req.Language == "" {
		req.Language = "python"
	}
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	info, err := call.CreateContext(r.Context(), conn, wire.ContextConfig{
		ID: hex.EncodeToString(id[:]), Language: wire.Language(req.Language), Cwd: req.Cwd,
	})
	if err != nil {
		return err
	}
	return httpapi.Reply(w, http.StatusOK, describeContext(*info))
}

// known is the language of a context. One that is not there is refused: the guest would make it.
func known(ctx context.Context, conn *guest.Conn, id string) (language string, err error) {
	list, err := call.Contexts(ctx, conn)
	if err != nil {
		return "", err
	}
	if i := slices.IndexFunc(list, func(c wire.ContextInfo) bool { return c.ID == id }); i >= 0 {
		return list[i].Language, nil
	}
	return "", &api.Error{Code: api.CodeNotFound, Message: "Context " + id + " not found"}
}

func (s *Server) restartContext(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	if _, err := call.RestartContext(r.Context(), conn, wire.ContextRequest{ID: r.PathValue("ctx")}); err != nil {
		return err
	}
	return empty(w, http.StatusNoContent)
}

func (s *Server) removeContext(w http.ResponseWriter, r *http.Request) error {
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	if err := call.RemoveContext(r.Context(), conn, wire.ContextRequest{ID: r.PathValue("ctx")}); err != nil {
		return err
	}
	return empty(w, http.StatusNoContent)
}

// interruptTimeout bounds the end of code that nobody waits for any more.
const interruptTimeout = 5 * time.Second

// isPromise says whether code has given a promise of a value and not a value.
func isPromise(language string, v *wire.Result) bool {
	return (language == "javascript" || language == "typescript") && v.Main && strings.HasPrefix(v.Text, "Promise {")
}

// execute runs code and sends what it gives as lines of JSON, as it comes.
func (s *Server) execute(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Code     string            `json:"code"`
		Context  string            `json:"context_id"`
		Language string            `json:"language"`
		Env      map[string]string `json:"env_vars"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	if err := s.API.NoteCall(r, wire.MethodContextEval); err != nil {
		return err
	}
	if req.Context == "" && req.Language == "" {
		req.Language = "python"
	}
	if req.Language != "" {
		req.Language = wire.Language(req.Language)
	}
	conn, err := s.guest(r.Context(), r)
	if err != nil {
		return err
	}
	language := req.Language
	if req.Context != "" {
		if language, err = known(r.Context(), conn, req.Context); err != nil {
			return err
		}
	}
	if language == "python" {
		req.Code = notebook(req.Code)
	}
	ask := wire.EvalRequest{Context: req.Context, Language: req.Language, Code: req.Code, Env: req.Env}
	out := &lines{w: w}
	stop := out.beginSoon()
	defer stop()
	stdout, stderr := out.text("stdout"), out.text("stderr")
	promised := false
	evaluation := call.Evaluation{
		Output: call.Output{Stdout: stdout, Stderr: stderr},
		Show: func(v *wire.Result) error {
			if promised = isPromise(language, v); promised {
				return nil
			}
			if err := errors.Join(stdout.Flush(), stderr.Flush()); err != nil {
				return err
			}
			return out.send(resultEvent{"result", *v})
		},
	}
	res, err := call.Evaluate(r.Context(), conn, ask, evaluation)
	if err == nil && promised { // on E2B what code gives is awaited
		ask.Code = "await _"
		res, err = call.Evaluate(r.Context(), conn, ask, evaluation)
	}
	if r.Context().Err() != nil {
		// Nobody waits for the result; the next evaluation should not have to.
		stop, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), interruptTimeout)
		defer cancel()
		return errors.Join(context.Cause(r.Context()), call.InterruptContext(stop, conn, wire.ContextRequest{ID: ask.Context, Language: ask.Language}))
	}
	stop()
	if err != nil && !out.begun {
		return err
	}
	if err := errors.Join(stdout.Flush(), stderr.Flush()); err != nil {
		return err
	}
	return out.finish(res, err)
}

// resultEvent is a result with its type.
type resultEvent struct {
	Type string `json:"type"`
	wire.Result
}

// lines is a reply of one JSON object a line.
type lines struct {
	w http.ResponseWriter

	mu    sync.Mutex
	begun bool
}

// patience is how long a reply may take to begin: clients bound the wait for that apart from the code's own time.
const patience = time.Second

// beginSoon begins the reply if there is nothing to say for a while, until it is stopped.
func (l *lines) beginSoon() (stop func()) {
	ended := make(chan struct{})
	timer := time.AfterFunc(patience, func() {
		defer close(ended)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.begin()
		_ = http.NewResponseController(l.w).Flush() // a client that is gone is noticed elsewhere
	})
	return sync.OnceFunc(func() {
		if !timer.Stop() {
			<-ended
		}
	})
}

// begin is called with mu held.
func (l *lines) begin() {
	if l.begun {
		return
	}
	l.begun = true
	l.w.Header().Set("Content-Type", "application/x-ndjson")
	l.w.Header().Set("Cache-Control", "no-store")
	l.w.WriteHeader(http.StatusOK)
}

func (l *lines) send(event any) error {
	text, err := json.Marshal(event)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begin()
	if _, err := l.w.Write(append(text, '\n')); err != nil {
		return err
	}
	return http.NewResponseController(l.w).Flush()
}

func (l *lines) text(kind string) *call.Text {
	return &call.Text{Pass: func(text string) error {
		return l.send(map[string]any{"type": kind, "text": text, "timestamp": time.Now().UnixNano()})
	}}
}

// finish says how an evaluation has ended.
func (l *lines) finish(res *wire.EvalResult, err error) error {
	if err != nil {
		e := httpapi.ToAPI(err)
		told := l.send(map[string]any{"type": "error", "name": string(e.Code), "value": words(e), "traceback": ""})
		return errors.Join(err, told, l.send(map[string]any{"type": "unexpected_end_of_execution"}))
	}
	last := "end_of_execution"
	if f := res.Error; f != nil {
		if err := l.send(map[string]any{"type": "error", "name": f.Name, "value": f.Value, "traceback": f.Traceback}); err != nil {
			return err
		}
		if f.Name == wire.ErrorKilled {
			last = "unexpected_end_of_execution"
		}
	}
	if err := l.send(map[string]any{"type": "number_of_executions", "execution_count": res.ExecutionCount}); err != nil {
		return err
	}
	return l.send(map[string]any{"type": last})
}
