package httpapi

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/audit"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/metrics"
)

// trail is what is written down of one request, besides what the request itself says. Handlers find it in its context.
type trail struct {
	mu    sync.Mutex // an answer may be under way in several goroutines
	entry audit.Entry

	argv    audit.Argv
	audited bool
	counted func(status int, took time.Duration)
}

type trailKey struct{}

// trailOf is the trail of a request; one that nobody reads, outside of serve.
func trailOf(r *http.Request) *trail {
	if t, ok := r.Context().Value(trailKey{}).(*trail); ok {
		return t
	}
	return &trail{argv: audit.None}
}

// noteCreated notes what a request has made.
func noteCreated(r *http.Request, kind string, ids ...string) {
	t := trailOf(r)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.entry.Created.Add(kind, ids...)
}

// noteTouched notes what a request is about and its route does not name.
func noteTouched(r *http.Request, kind string, ids ...string) {
	t := trailOf(r)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.entry.Touched.Add(kind, ids...)
}

// noteForked notes the children of a fork, those that live.
func noteForked(r *http.Request, list ...api.Sandbox) {
	for _, s := range list {
		if s.ID != "" {
			noteCreated(r, "sandbox", s.ID)
		}
	}
}

// noteArgv notes a command that is about to be run; an error says that it must not be, because it cannot be written down.
func (s *Server) noteArgv(r *http.Request, argv ...string) error {
	return s.noteCommand(r, "", argv)
}

// noteCall is the same for a call of the guest's protocol.
func (s *Server) noteCall(r *http.Request, method string, body []byte) error {
	var argv []string
	var file struct {
		Path string `json:"path"`
	}
	var start wire.StartRequest
	// What cannot be read the guest refuses.
	switch {
	case method == wire.MethodProcessStart && json.Unmarshal(body, &start) == nil:
		argv = append([]string{start.Process.Cmd}, start.Process.Args...)
	case json.Unmarshal(body, &file) == nil && file.Path != "":
		noteTouched(r, "file", file.Path[:min(len(file.Path), maxNamed)])
	}
	return s.noteCommand(r, method, argv)
}

func (s *Server) noteCommand(r *http.Request, call string, argv []string) error {
	t := trailOf(r)
	shown, cut := t.argv.Of(argv)
	t.mu.Lock()
	t.entry.Call = call
	t.entry.Argv, t.entry.ArgvCut = shown, cut
	t.mu.Unlock()
	if err := s.announce(r, t); err != nil || len(argv) == 0 || s.Host == nil {
		return err
	}
	id := r.PathValue("id")
	if f := foreignOf(r); f != nil && id == "" {
		id = f.Sandbox(r)
	}
	s.Host.NoteCommand(id, shown, cut)
	return nil
}

// leave begins the trail of a request.
func (s *Server) leave(r *http.Request, op operation, id string, start time.Time) (*http.Request, *trail) {
	t := &trail{argv: audit.None, audited: op.audited(), counted: func(int, time.Duration) {}}
	method, route, ok := strings.Cut(op.pattern, " ")
	if !ok { // whatever no route is for, by any method
		method, route = "any", op.pattern
	}
	if s.Metrics != nil {
		t.counted = s.Metrics.Begin(method, route)
	}
	r = r.WithContext(context.WithValue(r.Context(), trailKey{}, t))
	if s.Audit == nil {
		return r, t
	}
	t.argv = s.Audit.Argv()
	t.entry = audit.Entry{Time: start.UTC(), RequestID: id, Remote: "unix", Method: r.Method, Route: route}
	if from := remote(r); from.IsValid() {
		t.entry.Remote = from.String()
	}
	for kind, name := range namedObjects(route) {
		value := r.PathValue(name)
		if kind == "sandbox" {
			value = s.Host.SandboxID(value)
		}
		if value != "" {
			t.entry.Touched.Add(kind, value[:min(len(value), maxNamed)])
		}
	}
	if f := foreignOf(r); f != nil && len(namedObjects(route)) == 0 {
		if id := f.Sandbox(r); id != "" {
			t.entry.Touched.Add("sandbox", id)
		}
	}
	if strings.Contains(route, "/files") {
		if path := r.URL.Query().Get("path"); path != "" {
			t.entry.Touched.Add("file", path[:min(len(path), maxNamed)])
		}
	}
	return r, t
}

// maxNamed bounds a name that need not be anybody's.
const maxNamed = 1024

// namedObjects are the objects that a route has in its path: kind → parameter. Not tokens: somebody might show one instead
// of its id.
func namedObjects(route string) map[string]string {
	of := map[string]string{
		"sandboxes": "sandbox", "snapshots": "snapshot", "images": "image", "contexts": "context", "processes": "process",
		"workspaces": "workspace",
	}
	named := map[string]string{}
	parts := strings.Split(route, "/")
	for i, part := range parts {
		if i > 0 && strings.HasPrefix(part, "{") && of[parts[i-1]] != "" {
			named[of[parts[i-1]]] = strings.Trim(part, "{}.")
		}
	}
	return named
}

// written is the entry of a request that has been admitted, or refused.
func (t *trail) written(r *http.Request) audit.Entry {
	who := access.FromContext(r.Context())
	t.mu.Lock()
	defer t.mu.Unlock()
	t.entry.Principal, t.entry.Token = who.Name, who.TokenID
	if who.Name == "" {
		shown, _ := shownBy(r)
		t.entry.Principal, t.entry.Token = "nobody", access.ShownID(shown)
	}
	return t.entry
}

// changes reports whether a request may change something. Those that begin as reading and do not stay so, such as commands
// over a WebSocket, are announced when it is known what they do.
func changes(r *http.Request) bool { return r.Method != http.MethodGet && r.Method != http.MethodHead }

// announce writes down what is about to be done, if it must not be done otherwise.
func (s *Server) announce(r *http.Request, t *trail) error {
	if s.Audit == nil || !s.Audit.Required() || !t.audited {
		return nil
	}
	entry := t.written(r)
	entry.Phase = audit.Begin
	if err := s.Audit.Write(entry); err != nil {
		s.Log.Error("the audit log cannot be written, so what changes anything is refused", "request", entry.RequestID, "error", err)
		return &api.Error{
			Code: api.CodeUnavailable, Message: "the audit log is required and cannot be written: nothing is changed",
			Hint: "ask the administrator, who finds why in the daemon's log",
		}
	}
	return nil
}

// timeExec counts what ran in a sandbox.
func (s *Server) timeExec(op operation, t *trail, status int, took time.Duration) {
	if s.Metrics == nil {
		return
	}
	t.mu.Lock()
	call := t.entry.Call
	t.mu.Unlock()
	mode := ""
	switch _, what, _ := strings.Cut(op.pattern, sandboxPath); {
	case call == wire.MethodProcessStart:
		mode = "stream"
	case what == "/eval" || call == wire.MethodContextEval:
		mode = "eval"
	case what == "/exec" && strings.HasPrefix(op.pattern, http.MethodGet):
		mode = "stream"
	case what == "/exec":
		mode = "exec"
	default:
		return
	}
	result := metrics.OK
	switch {
	case status == 0:
		result = metrics.Canceled
	case status >= http.StatusInternalServerError:
		result = metrics.Failed
	case status >= http.StatusBadRequest:
		result = metrics.Refused
	}
	s.Metrics.Took(metrics.Exec, mode, result, took)
}

// audited reports whether requests of an operation are written down: not what anybody may ask without a token.
func (op operation) audited() bool { return op.scope != access.None }

// routine reports whether an operation is asked for all the time and says nothing worth keeping, unless it is refused.
func (op operation) routine() bool {
	return op.pattern == "GET /version" || op.pattern == "GET /metrics"
}

// settle counts a request that has ended, and writes down how.
func (s *Server) settle(r *http.Request, op operation, t *trail, status int, err error, took time.Duration) {
	t.counted(status, took)
	s.timeExec(op, t, status, took)
	if s.Audit == nil || !op.audited() || op.routine() && status < http.StatusBadRequest {
		return
	}
	entry := t.written(r)
	entry.Status, entry.DurationMS = status, float64(took.Microseconds())/1000
	if err != nil {
		entry.Code = string(toAPI(err).Code)
	}
	if err := s.Audit.Write(entry); err != nil {
		s.Log.Error("a request is missing in the audit log", "request", entry.RequestID, "error", err)
	}
}
