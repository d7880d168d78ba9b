package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
)

// admit says who a request comes from, in the context of the one it returns, and refuses who may not do what it asks. The
// context ends with the token, so that what lasts long ends as well. done is to be called when the request has been served.
func (s *Server) admit(w http.ResponseWriter, r *http.Request, op operation) (admitted *http.Request, done func(), err error) {
	if op.scope == access.None {
		return r, func() {}, nil
	}
	who := access.FromContext(r.Context()) // of the connection: the owner on the unix socket, else nobody
	if who.Stranger() {
		return r, func() {}, &api.Error{
			Code: api.CodeDenied, Message: "this socket answers the daemon's own user and root only, and you are " + who.Name,
			Hint: "over TCP a token opens it: forkd serve --bind, forkd token create",
		}
	}
	done = func() {}
	if shown, ok := shownBy(r); ok || who.Scope == access.None {
		token, gone, err := s.checkToken(w, r, shown, ok)
		if err != nil {
			return r, done, err
		}
		who = token.Principal()
		var ctx context.Context
		ctx, done = withToken(r.Context(), token, gone)
		r = r.WithContext(ctx)
	}
	r = r.WithContext(access.With(r.Context(), who))
	if !who.May(op.scope, s.sandboxOf(r, op, who)) {
		return r, done, refused(who, op)
	}
	return r, done, nil
}

// sandboxOf is the sandbox that a request is about, or "". It is asked for where it matters: of a token that opens one
// alone. The request then has its whole id, so that what it names cannot be another one a moment later.
func (s *Server) sandboxOf(r *http.Request, op operation, who access.Principal) string {
	if who.Sandbox == "" || op.pattern == "GET /version" { // what a client asks first, whatever its token opens
		return who.Sandbox
	}
	if f := foreignOf(r); f != nil {
		return f.Sandbox(r)
	}
	if path := op.path(); path != sandboxPath && !strings.HasPrefix(path, sandboxPath+"/") {
		return ""
	}
	whole, err := s.findSandbox(r.PathValue("id"))
	if err != nil {
		return ""
	}
	r.SetPathValue("id", whole)
	return whole
}

const sandboxPath = "/v1/sandboxes/{id}"

// manyAllowed refuses to make other sandboxes with a token that opens one alone.
func manyAllowed(r *http.Request) error {
	if who := access.FromContext(r.Context()); who.Sandbox != "" {
		return &api.Error{
			Code: api.CodeDenied, Message: fmt.Sprintf("the token %s opens sandbox %s alone, and its children would be others", who.TokenID, who.Sandbox),
			Hint: "branch it without n",
		}
	}
	return nil
}

// hostFiles refuses to have a file of the host opened by its name for who does not administer it.
func hostFiles(r *http.Request, parameter string) error {
	if who := access.FromContext(r.Context()); who.Scope < access.Admin {
		return &api.Error{
			Code: api.CodeDenied, Hint: "forkd token create --scope admin",
			Message: fmt.Sprintf("%s names a file of the daemon's host, which needs scope admin, and the token %s has %s", parameter, who.TokenID, who.Scope),
		}
	}
	return nil
}

func refused(who access.Principal, op operation) error {
	e := &api.Error{Code: api.CodeDenied}
	if who.Scope < op.scope {
		e.Message = fmt.Sprintf("this needs scope %s, and the token %s has %s", op.scope, who.TokenID, who.Scope)
		e.Hint = "forkd token create --scope " + op.scope.String()
		return e
	}
	e.Message = fmt.Sprintf("the token %s opens sandbox %s and nothing else", who.TokenID, who.Sandbox)
	return e
}

// bearer is the token that a request shows, and whether it shows any.
func bearer(r *http.Request) (string, bool) {
	values := r.Header.Values("Authorization")
	if len(values) == 0 {
		return protocolToken(r)
	}
	scheme, token, _ := strings.Cut(strings.TrimSpace(values[0]), " ")
	if !strings.EqualFold(scheme, "Bearer") || len(values) > 1 {
		return "", true
	}
	return strings.TrimSpace(token), true
}

// tokenProtocol is how a page in a browser shows its token when it opens a WebSocket: it can name protocols, and send no
// header of its own. In the address, which ends up in logs, none is taken.
const tokenProtocol = "forkd.token."

func protocolToken(r *http.Request) (string, bool) {
	if !headerHas(r, "Upgrade", "websocket") {
		return "", false
	}
	for part := range strings.SplitSeq(strings.Join(r.Header.Values("Sec-WebSocket-Protocol"), ","), ",") {
		if token, ok := strings.CutPrefix(strings.TrimSpace(part), tokenProtocol); ok {
			return token, true
		}
	}
	return "", false
}

// checkToken finds whose token it is. It says nothing about what was shown, which may be a secret mistyped.
func (s *Server) checkToken(w http.ResponseWriter, r *http.Request, shown string, guess bool) (access.Token, <-chan struct{}, error) {
	fail := func(err error) (access.Token, <-chan struct{}, error) { return access.Token{}, nil, err }
	now := time.Now()
	from := remote(r)
	token, gone, err := s.whose(r, shown)
	if err == nil && token.Sandbox != "" && s.sandboxGone(token.Sandbox) {
		err = errSandboxGone
	}
	id := token.ID
	if err != nil {
		id = ""
	}
	if err != nil {
		w.Header().Set("Connection", "close") // strangers hold no connections
	}
	if wait := s.failures.Refused(from, id, now); wait > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(wait.Seconds())))
		return fail(&api.Error{
			Code: api.CodeThrottled, Message: fmt.Sprintf("too many wrong tokens from %s; wait %s", from, wait),
		})
	}
	if err != nil {
		w.Header().Set("WWW-Authenticate", challenge(r))
		if !guess { // nothing was shown
			return fail(noToken(r))
		}
		s.failures.Failed(from, now)
		return fail(unauthorized(err))
	}
	s.failures.Succeeded(from, id, now)
	return token, gone, nil
}

var errSandboxGone = errors.New("the token's sandbox is gone")

func unauthorized(err error) error {
	return &api.Error{
		Code: api.CodeUnauthorized, Message: err.Error(), Hint: "an administrator makes another: forkd token create",
	}
}

// withToken is a context that ends with a token.
func withToken(parent context.Context, t access.Token, gone <-chan struct{}) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	stop := func() {}
	if !t.Expires.IsZero() {
		timer := time.AfterFunc(time.Until(t.Expires), func() { cancel(access.ErrExpired) })
		stop = func() { timer.Stop() }
	}
	ended := make(chan struct{})
	go func() {
		select {
		case <-gone:
			cancel(access.ErrUnknown)
		case <-ended:
		}
	}()
	return ctx, func() {
		stop()
		close(ended)
		cancel(nil)
	}
}

func remote(r *http.Request) netip.Addr {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{} // the unix socket
	}
	return ap.Addr().Unmap()
}
