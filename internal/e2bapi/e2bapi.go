// Package e2bapi is E2B's wire protocol, for E2B's own unmodified clients: control plane, envd (the daemon in their guests, in
// Connect's JSON) and code interpreter, on the daemon's listener beside the native API. It translates and keeps no state but
// builds in progress: host does what is asked, the guest's agent has envd's semantics already, and package httpapi decides who
// may ask, as it does for its own routes. Package daemon puts it in front of that.
package e2bapi

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/httpapi"
)

// Ports that stand for what answers them here, whatever listens in the guest.
const (
	envdPort        = 49983
	interpreterPort = 49999
)

// envdVersion is the version of envd whose behaviour a client finds; they leave out what older ones cannot do.
const envdVersion = "0.6.13"

// Config is what a Server is made of.
type Config struct {
	Host   *host.Host
	API    *httpapi.Server // its access, audit log and metrics hold here as well
	Seed   *access.Seed
	Domain string // that sandboxes are reached at as PORT-ID.DOMAIN; "": none
	Egress string // preset of what sandboxes may reach whose clients say nothing
	Log    *slog.Logger

	Life    context.Context //nolint:containedctx // Builds outlive the requests that begin them, and end with it.
	Uploads string          // directory for the files of builds
}

// Server serves the protocol.
type Server struct {
	Config

	builds  builds
	written written
}

// New makes a server.
func New(c Config) *Server { return &Server{Config: c} }

// Handler serves E2B's routes, and leaves all others to native.
func (s *Server) Handler(native http.Handler) http.Handler {
	control := s.control()
	planes := map[int]*http.ServeMux{envdPort: s.envd(), interpreterPort: s.interpreter()}
	services := s.services()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if to, ok := s.target(r); ok {
			s.toSandbox(w, r, to, planes[to.port], func(w http.ResponseWriter, r *http.Request) {
				if to.byHost && !showsOurs(r) {
					native.ServeHTTP(w, r)
					return
				}
				services.ServeHTTP(w, r)
			})
			return
		}
		if _, pattern := control.Handler(r); pattern != "" {
			control.ServeHTTP(w, r)
			return
		}
		native.ServeHTTP(w, r)
	})
}

// target is the sandbox and port that a request is for.
type target struct {
	id     string // as the client named it
	port   int
	byHost bool // by the name that the client connected to
}

type targetKey struct{}

func targetOf(r *http.Request) target {
	t, _ := r.Context().Value(targetKey{}).(target)
	return t
}

// target finds them in the name of the host, PORT-ID.anything, or in the headers. A signed URL may have neither: it is of the
// sandbox that it is signed for.
func (s *Server) target(r *http.Request) (target, bool) {
	if t, ok := hostTarget(r.Host); ok {
		return t, true
	}
	if id := r.Header.Get("E2b-Sandbox-Id"); id != "" {
		port, err := strconv.Atoi(r.Header.Get("E2b-Sandbox-Port"))
		if err != nil {
			port = envdPort
		}
		return target{id: id, port: port}, true
	}
	if r.URL.Path == "/files" && r.URL.Query().Get("signature") != "" {
		return target{id: s.signedFor(r), port: envdPort}, true
	}
	return target{}, false
}

func hostTarget(name string) (target, bool) {
	if h, _, err := net.SplitHostPort(name); err == nil {
		name = h
	}
	label, _, more := strings.Cut(name, ".")
	digits, id, ok := strings.Cut(label, "-")
	port, err := strconv.ParseUint(digits, 10, 16)
	if !more || !ok || err != nil || !strings.HasPrefix(id, "sb") {
		return target{}, false
	}
	return target{id: id, port: int(port), byHost: true}, true
}

// toSandbox serves a request for a sandbox. One that is not there, or stands still, is no reason to ask who wants to know:
// clients take 502 for "not running".
func (s *Server) toSandbox(w http.ResponseWriter, r *http.Request, to target, plane *http.ServeMux, service http.HandlerFunc) {
	if !s.exists(to.id) {
		writeEdge(w, &edgeError{sandbox: to.id})
		return
	}
	r = r.WithContext(context.WithValue(r.Context(), targetKey{}, to))
	if plane == nil {
		service(w, r) // whatever listens in the guest
		return
	}
	if _, pattern := plane.Handler(r); pattern == "" {
		replyJSON(w, http.StatusNotFound, plainError{Code: http.StatusNotFound, Message: "no such route in envd: " + r.Method + " " + r.URL.Path})
		return
	}
	plane.ServeHTTP(w, r)
}

// showsOurs reports whether a request shows a token that only E2B's clients do.
func showsOurs(r *http.Request) bool {
	return r.Header.Get(trafficHeader) != "" || r.Header.Get("X-Access-Token") != ""
}

const trafficHeader = "E2B-Traffic-Access-Token"

// services are what listens in guests. The sandbox's tokens open them, and are not theirs to know.
func (s *Server) services() http.Handler {
	return s.API.Service(httpapi.Operation{
		Shown: shownToPort, Known: s.portToken, Sandbox: targetID,
		Fail: func(w http.ResponseWriter, err error, id string) {
			if t := httpapi.ToAPI(err); t.Code == api.CodeBadGateway {
				err = &api.Error{Code: t.Code, Message: "The sandbox is running but port is not open: " + t.Message, Hint: t.Hint}
			}
			failPlain(w, err, id)
		},
	}, func(r *http.Request) (string, int) { return targetOf(r).id, targetOf(r).port },
		[]string{trafficHeader, "X-Access-Token", "X-API-KEY", "E2b-Sandbox-Id", "E2b-Sandbox-Port"})
}

// exists reports whether a sandbox has exactly that id.
func (s *Server) exists(id string) bool {
	whole, err := s.Host.FindSandbox(id)
	return err == nil && whole == id
}

// handler serves a request; its error becomes the reply unless one has begun.
type handler = func(w http.ResponseWriter, r *http.Request) error

// route is one of a plane's.
type route struct {
	pattern string
	scope   access.Scope
	handle  handler
}

// plane is a set of routes that agree on who may ask, and how it is told what went wrong.
func (s *Server) plane(of httpapi.Operation, routes []route) *http.ServeMux {
	mux := http.NewServeMux()
	for _, x := range routes {
		op := of
		op.Name, op.Scope, op.Handle = x.pattern, x.scope, x.handle
		mux.Handle(x.pattern, s.API.Serve(op))
	}
	return mux
}
