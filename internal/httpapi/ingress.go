package httpapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

// ingressPattern is the route of services in sandboxes, by any method.
const ingressPattern = sandboxPath + "/ports/{port}/{path...}"

const (
	// shownHeader is how a request for a service shows its token, so that Authorization is the service's.
	shownHeader = "X-Forkd-Token"
	// errorHeader tells a failure of ours from one of the service.
	errorHeader = "X-Forkd-Error"
	// maxIngress requests are passed on to a sandbox at once, half of them of people without a token.
	maxIngress = 100
	// maxStrangers requests of people without a token are passed on at once to all sandboxes together.
	maxStrangers = 1000
	// maxAnswerHeader bounds the headers of a service's answer.
	maxAnswerHeader = 256 << 10
)

// ingress is what is under way into sandboxes.
type ingressCount struct {
	mu        sync.Mutex
	open      map[string]int // by sandbox
	strangers int
}

func (c *ingressCount) begin(id string, stranger bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	most := maxIngress
	if stranger {
		most = maxIngress / 2
	}
	if c.open[id] >= most || stranger && c.strangers >= maxStrangers {
		return false
	}
	if c.open == nil {
		c.open = map[string]int{}
	}
	c.open[id]++
	if stranger {
		c.strangers++
	}
	return true
}

func (c *ingressCount) end(id string, stranger bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[id]--; c.open[id] == 0 {
		delete(c.open, id)
	}
	if stranger {
		c.strangers--
	}
}

type ingressKey struct{}

// ingressTo is what a request for a service is about.
type ingressTo struct {
	byHost bool // by the name of the host: the path is the service's own
	public bool // nobody is asked who he is
}

func ingressOf(r *http.Request) *ingressTo {
	to, _ := r.Context().Value(ingressKey{}).(*ingressTo)
	return to
}

// services are those of sandboxes.
type services interface {
	Dial(ctx context.Context, id string, port int) (net.Conn, error)
	IsPublic(id string, port int) bool
}

// hostServices are those of a host's sandboxes.
type hostServices struct{ *host.Host }

func (h hostServices) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	c, err := h.DialPort(ctx, id, port)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (s *Server) of() services {
	if s.services != nil {
		return s.services
	}
	return hostServices{s.Host}
}

// forService marks a request for a service, which shows its token in its own way, and lets everybody in where the port is
// public, whatever they show.
func (s *Server) forService(r *http.Request, op operation, byHost bool) (*http.Request, operation) {
	to := &ingressTo{byHost: byHost}
	port, err := portNumber(r)
	if err == nil && s.of().IsPublic(r.PathValue("id"), port) {
		to.public, op.scope = true, access.None
	}
	return r.WithContext(context.WithValue(r.Context(), ingressKey{}, to)), op
}

// serviceToken is the token that a request for a service shows: by a header of its own, or by what looks like one of ours.
func serviceToken(r *http.Request) (string, bool) {
	if values := r.Header.Values(shownHeader); len(values) > 0 {
		if len(values) > 1 {
			return "", true
		}
		return strings.TrimSpace(values[0]), true
	}
	for _, value := range r.Header.Values("Authorization") {
		if scheme, token, _ := strings.Cut(strings.TrimSpace(value), " "); strings.EqualFold(scheme, "Bearer") && access.IsForm(strings.TrimSpace(token)) {
			return bearer(r)
		}
	}
	return protocolToken(r)
}

// byHost serves requests for PORT-ID.DOMAIN, and leaves all others to native.
func (s *Server) byHost(native http.Handler) http.Handler {
	op := operation{pattern: ingressPattern, scope: access.Use, handle: s.ingress}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, port, ok := s.hostOf(r.Host)
		if !ok {
			native.ServeHTTP(w, r)
			return
		}
		r = r.WithContext(r.Context()) // what is set is this request's
		r.SetPathValue("id", id)
		r.SetPathValue("port", port)
		r, op := s.forService(r, op, true)
		s.serve(w, r, op)
	})
}

// hostOf is the sandbox and port that a name stands for.
func (s *Server) hostOf(name string) (id, port string, ok bool) {
	if h, _, err := net.SplitHostPort(name); err == nil {
		name = h
	}
	label, ok := strings.CutSuffix(strings.ToLower(strings.TrimSuffix(name, ".")), "."+s.Domain)
	if !ok {
		return "", "", false
	}
	port, id, ok = strings.Cut(label, "-")
	return id, port, ok && port != "" && strings.Trim(port, "0123456789") == ""
}

// ingress passes a request on to a service in a sandbox.
func (s *Server) ingress(w http.ResponseWriter, r *http.Request) error {
	err := s.passOn(w, r)
	if err != nil {
		w.Header().Set(errorHeader, string(toAPI(err).Code))
	}
	return err
}

func (s *Server) passOn(w http.ResponseWriter, r *http.Request) error {
	if r.Method == http.MethodTrace {
		w.Header().Set("Allow", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
		return &api.Error{Code: api.CodeMethod, Message: "TRACE is not passed on: it would show a request's tokens"}
	}
	port, err := portNumber(r)
	if err != nil {
		return err
	}
	id, err := s.findSandbox(r.PathValue("id"))
	if err != nil {
		return err
	}
	to := ingressOf(r)
	if to == nil {
		to = &ingressTo{}
	}
	if !s.passing.begin(id, to.public) {
		w.Header().Set("Retry-After", "1")
		return &api.Error{Code: api.CodeThrottled, Message: "too many requests for services of sandbox " + id + " are under way; try again"}
	}
	defer s.passing.end(id, to.public)
	if r.Method == http.MethodConnect {
		return fmt.Errorf("%w: CONNECT is for proxies; forkd port-forward carries anything", host.ErrInvalid)
	}
	_ = http.NewResponseController(w).EnableFullDuplex() // a service may answer before it has read everything; HTTP/2 does so anyway
	var failed error
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { rewrite(p, to, id, port) },
		Transport:     s.transport(r),
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
		ErrorHandler:  func(_ http.ResponseWriter, _ *http.Request, err error) { failed = err },
		ModifyResponse: func(resp *http.Response) error {
			w.Header().Del("X-Request-Id") // the service's own, if it has any
			confine(resp, to, id, port)
			return nil
		},
	}
	proxy.ServeHTTP(w, r)
	if failed == nil || r.Context().Err() != nil {
		return context.Cause(r.Context())
	}
	return serviceError(failed, id, port)
}

// serviceError says whose fault it was.
func serviceError(err error, id string, port int) error {
	if _, ours := errors.AsType[*api.Error](err); ours {
		return err
	}
	e := toAPI(err)
	if e.Code != api.CodeInternal {
		return err
	}
	return &api.Error{
		Code: api.CodeBadGateway, Message: fmt.Sprintf("port %d of sandbox %s: the service gives no answer of HTTP: %.300s", port, id, err),
		Hint: fmt.Sprintf("what speaks something else is reached by: forkd port-forward %s %d", id, port),
	}
}

// transport connects to the service for each request: a connection that is kept would be one into a machine that may be
// suspended, and end with it. gRPC is spoken over HTTP/2 alone.
func (s *Server) transport(r *http.Request) http.RoundTripper {
	t := &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxAnswerHeader,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			id, text, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			port, err := strconv.Atoi(text)
			if err != nil {
				return nil, err
			}
			// The request's own context says how long the sandbox is in use.
			return s.dialService(ctx, r.Context(), id, port)
		},
	}
	if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
		t.Protocols = new(http.Protocols)
		t.Protocols.SetUnencryptedHTTP2(true)
	}
	return t
}

func (s *Server) dialService(ctx, use context.Context, id string, port int) (net.Conn, error) {
	use, cancel := context.WithCancelCause(use)
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	c, err := s.of().Dial(use, id, port)
	stop() // The attempt's context ends with the attempt.
	if err != nil {
		cancel(nil)
		return nil, err
	}
	return &usedConn{Conn: c, done: func() { cancel(nil) }}, nil
}

// usedConn ends the use of its sandbox when it is closed.
type usedConn struct {
	net.Conn
	done func()
}

func (c *usedConn) Close() error {
	defer c.done()
	return c.Conn.Close()
}

// rewrite makes the request for the service of the client's. Nothing of a token's form gets into a guest in a header or
// the query; no token is read from the path.
func rewrite(p *httputil.ProxyRequest, to *ingressTo, id string, port int) {
	out := p.Out
	inside := fmt.Sprintf("localhost:%d", port)
	out.URL.Scheme, out.URL.Host = "http", net.JoinHostPort(id, strconv.Itoa(port))
	if to.byHost {
		out.Host = p.In.Host
	} else {
		out.Host = inside
		escaped := insidePath(p.In.URL.EscapedPath())
		out.URL.RawPath = escaped
		if path, err := url.PathUnescape(escaped); err == nil {
			out.URL.Path = path
		}
		out.Header.Set("X-Forwarded-Prefix", prefixOf(id, port))
	}
	out.URL.RawQuery = p.In.URL.RawQuery
	if plain, err := url.QueryUnescape(out.URL.RawQuery); err != nil || access.Shows(plain) {
		out.URL.RawQuery = withoutTokens(p.In.URL.Query())
	}
	if remote(p.In).IsValid() {
		p.SetXForwarded()
	} else { // the unix socket
		out.Header.Set("X-Forwarded-Host", p.In.Host)
		out.Header.Set("X-Forwarded-Proto", "http")
	}
	withhold(out.Header)
	if out.Header.Get("User-Agent") == "" {
		out.Header["User-Agent"] = nil
	}
}

// insidePath is the path below the route's prefix.
func insidePath(escaped string) string {
	rest := escaped
	for range strings.Count(ingressPattern, "/") - 1 {
		_, rest, _ = strings.Cut(strings.TrimPrefix(rest, "/"), "/")
	}
	return "/" + rest
}

func prefixOf(id string, port int) string { return fmt.Sprintf("/v1/sandboxes/%s/ports/%d", id, port) }

// withoutTokens is a query without those. What is left of one that cannot be read is what can.
func withoutTokens(q url.Values) string {
	for name, values := range q {
		if access.Shows(name) || slices.ContainsFunc(values, access.Shows) {
			q.Del(name)
		}
	}
	if text := q.Encode(); !access.Shows(text) {
		return text
	}
	return ""
}

// withhold takes tokens out of headers.
func withhold(h http.Header) {
	h.Del(shownHeader)
	if protocols := h.Values("Sec-Websocket-Protocol"); len(protocols) > 0 {
		var kept []string
		for part := range strings.SplitSeq(strings.Join(protocols, ","), ",") {
			if part = strings.TrimSpace(part); part != "" && !strings.HasPrefix(part, tokenProtocol) {
				kept = append(kept, part)
			}
		}
		h.Del("Sec-Websocket-Protocol")
		if len(kept) > 0 {
			h.Set("Sec-Websocket-Protocol", strings.Join(kept, ", "))
		}
	}
	for name, values := range h {
		if slices.ContainsFunc(values, access.Shows) {
			delete(h, name) // Del would look for the name as it is usually written
		}
	}
}

// confine keeps a service's answer to the service. What is served below a path has the daemon's own origin: pages of it get
// one of nobody's, cookies are for their path alone, and what speaks for the whole origin is left out.
func confine(resp *http.Response, to *ingressTo, id string, port int) {
	h := resp.Header
	h.Del(errorHeader)
	prefix := prefixOf(id, port)
	if to.byHost {
		prefix = ""
	} else {
		h.Add("Content-Security-Policy", "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts")
		for _, name := range []string{
			"Service-Worker-Allowed", "Clear-Site-Data", "Strict-Transport-Security", "Alt-Svc", "Public-Key-Pins", "Nel", "Report-To",
		} {
			h.Del(name)
		}
		if location := h.Get("Location"); location != "" {
			h.Set("Location", outside(location, prefix, port))
		}
	}
	cookies := resp.Cookies()
	h.Del("Set-Cookie") // also those that cannot be read here: a browser may
	for _, c := range cookies {
		c.Domain, c.Raw = "", ""
		if prefix != "" {
			c.Path = prefix + "/" + strings.TrimPrefix(c.Path, "/")
		}
		if v := c.String(); v != "" {
			h.Add("Set-Cookie", v)
		}
	}
}

// outside is where a service sends a client that it knows by another address.
func outside(location, prefix string, port int) string {
	u, err := url.Parse(location)
	if err != nil {
		return location
	}
	own := u.Host == "" || u.Host == fmt.Sprintf("localhost:%d", port) || u.Host == fmt.Sprintf("127.0.0.1:%d", port)
	if !own || !strings.HasPrefix(u.Path, "/") {
		return location // elsewhere, or relative
	}
	u.Scheme, u.Host = "", ""
	return prefix + u.String()
}
