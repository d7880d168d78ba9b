package httpapi

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
)

// Operation is a route of another protocol on the daemon's listener. It is served as this API's own are: who may use it, how often
// a wrong token may be shown, what is written down and counted are decided in the same place.
type Operation struct {
	// Name is the method and the path with names for what differs, as the audit log and the metrics have them.
	Name   string
	Scope  access.Scope
	Handle func(w http.ResponseWriter, r *http.Request) error
	// Fail replies with an error, in the protocol's shape.
	Fail func(w http.ResponseWriter, err error, requestID string)

	// Shown is what a request shows as a token, and whether it shows any.
	Shown func(r *http.Request) (string, bool)
	// Known finds whose a token is that the store does not have; may be nil.
	Known func(r *http.Request, shown string) (access.Token, bool)
	// Sandbox is the whole id of the sandbox that a request is about, or "".
	Sandbox func(r *http.Request) string
}

type foreignKey struct{}

// Serve is the route's handler.
func (s *Server) Serve(foreign Operation) http.Handler {
	op := operation{pattern: foreign.Name, scope: foreign.Scope, handle: foreign.Handle}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.serve(w, r.WithContext(context.WithValue(r.Context(), foreignKey{}, &foreign)), op)
	})
}

// Service serves requests for services in sandboxes as this API does, under another protocol's tokens; where says which sandbox
// and port. Headers that only the protocol is to see are withheld from the service.
func (s *Server) Service(foreign Operation, where func(r *http.Request) (id string, port int), withheld []string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, port := where(r)
		r = r.WithContext(context.WithValue(r.Context(), foreignKey{}, &foreign))
		r.SetPathValue("id", id)
		r.SetPathValue("port", strconv.Itoa(port))
		op := operation{pattern: ingressPattern, scope: access.Use, handle: func(w http.ResponseWriter, r *http.Request) error {
			for _, name := range withheld {
				r.Header.Del(name)
			}
			foreign.withhold(r)
			return s.ingress(w, r)
		}}
		r, op = s.forService(r, op, true)
		s.serve(w, r, op)
	})
}

// withhold takes a token of the protocol's out of Authorization: it has no form by which one of this API's is known.
func (f *Operation) withhold(r *http.Request) {
	if f.Known == nil {
		return
	}
	for _, value := range r.Header.Values("Authorization") {
		scheme, token, _ := strings.Cut(strings.TrimSpace(value), " ")
		if !strings.EqualFold(scheme, "Bearer") {
			continue
		}
		if _, ok := f.Known(r, strings.TrimSpace(token)); ok {
			r.Header.Del("Authorization")
			return
		}
	}
}

// foreignOf is the other protocol's operation that a request is for; nil: it is for this API.
func foreignOf(r *http.Request) *Operation {
	f, _ := r.Context().Value(foreignKey{}).(*Operation)
	return f
}

// MayWiden says whether who asks may let a sandbox reach more than its snapshot may.
func (s *Server) MayWiden(r *http.Request) bool { return s.mayWiden(r) }

// Once serves requests with an Idempotency-Key as this API's own routes do.
func (s *Server) Once(h func(w http.ResponseWriter, r *http.Request) error) func(http.ResponseWriter, *http.Request) error {
	return s.once(h)
}

// ToAPI is an error as this API tells it.
func ToAPI(err error) *api.Error { return toAPI(err) }

// Status is the HTTP status that goes with a code.
func Status(code api.Code) int { return status(code) }

// NoteCreated notes in the audit log what a request has made.
func NoteCreated(r *http.Request, kind string, ids ...string) { noteCreated(r, kind, ids...) }

// NoteTouched notes what a request is about and its route does not name.
func NoteTouched(r *http.Request, kind string, ids ...string) { noteTouched(r, kind, ids...) }

// NoteCall notes a call of the guest's protocol that is about to be made, with the command that it runs; an error says that it
// must not be made, because it cannot be written down.
func (s *Server) NoteCall(r *http.Request, call string, argv ...string) error {
	return s.noteCommand(r, call, argv)
}

// FileGuest is what files are read from and written to.
type FileGuest = fileGuest

// Download sends a file of a guest, as GET …/files does.
func (s *Server) Download(w http.ResponseWriter, r *http.Request, g FileGuest, req wire.ReadRequest) error {
	return (&remoteFile{ctx: r.Context(), guest: g, req: req}).send(w, r)
}

// Upload writes a request's body into a guest, as POST …/files does. After an error the caller replies, and then calls Drain.
func (s *Server) Upload(r *http.Request, find func(context.Context) (FileGuest, error), base wire.WriteRequest) ([]api.File, error) {
	base.Metadata = metadataOf(r.Header)
	return receiveFiles(r, find, base)
}

// Drain takes the rest of a refused upload for a while, after reply has been called: whoever is still sending reads no reply
// when the connection is closed in the middle of that.
func Drain(w http.ResponseWriter, r *http.Request, reply func()) {
	c := http.NewResponseController(w)
	_ = c.EnableFullDuplex()
	reply()
	_ = c.Flush()
	_ = c.SetReadDeadline(time.Now().Add(refusalPatience))
	_, _ = io.Copy(io.Discard, r.Body)
}

var _ FileGuest = (*guest.Conn)(nil)

// shownBy is what a request shows as a token, and whether it shows any.
func shownBy(r *http.Request) (string, bool) {
	if f := foreignOf(r); f != nil {
		return f.Shown(r)
	}
	if ingressOf(r) != nil {
		return serviceToken(r)
	}
	if isRegistry(r) {
		return basicToken(r)
	}
	return bearer(r)
}

// whose finds whose token was shown.
func (s *Server) whose(r *http.Request, shown string) (access.Token, <-chan struct{}, error) {
	if f := foreignOf(r); f != nil && f.Known != nil {
		if t, ok := f.Known(r, shown); ok {
			return t, nil, nil
		}
	}
	return s.Tokens.Check(shown)
}

// fail replies with an error.
func fail(w http.ResponseWriter, r *http.Request, err error, id string) {
	if f := foreignOf(r); f != nil {
		f.Fail(w, err, id)
		return
	}
	writeError(w, err, id)
}

// noToken tells who showed none what to show.
func noToken(r *http.Request) *api.Error {
	e := &api.Error{
		Code: api.CodeUnauthorized, Message: "this needs a token",
		Hint: "send Authorization: Bearer TOKEN; for the command line: FORKD_TOKEN; an administrator makes one: forkd token create",
	}
	if foreignOf(r) != nil {
		e.Hint = "what E2B's clients need is printed by: forkd env e2b"
	}
	return e
}
