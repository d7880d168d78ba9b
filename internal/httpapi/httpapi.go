// Package httpapi is the native REST API: it decodes requests strictly, calls package host, encodes replies, and maps
// every error to a status in one table. It holds no state of its own and decides nothing about machines. Package
// daemon serves it; its tests run it over a real host.
package httpapi

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/audit"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/metrics"
	"forkd.dev/forkd/internal/registry"
)

// Server serves the API over a host.
type Server struct {
	Host    *host.Host
	Log     *slog.Logger
	Version api.VersionInfo
	Tokens  *access.Store
	Audit   *audit.Log // nil: nothing is written down
	Metrics *metrics.Metrics
	TCP     Listener        // nil: none can be opened
	Shelf   *registry.Shelf // nil: it is no registry
	// ManageWidens: scope manage is enough to let sandboxes reach more than their snapshots say; else it takes admin.
	ManageWidens bool
	// Domain is below which services of sandboxes are served by name, as PORT-ID.DOMAIN, in lower case; "": they are not.
	Domain string
	// Stall is how long a client may take nothing of an answer; 0: two minutes.
	Stall time.Duration

	passing  ingressCount
	failures access.Failures
	replies  replies
	find     func(sandbox string) (whole string, err error) // in tests; nil: the host knows
	services services                                       // in tests; nil: the host's
}

// Handler is the whole API.
func (s *Server) Handler() http.Handler {
	native := s.router(s.operations())
	if s.Domain == "" {
		return native
	}
	return s.byHost(native)
}

func (s *Server) router(operations []operation) http.Handler {
	mux := http.NewServeMux()
	documents := documents()
	for _, op := range operations {
		if op.pattern == "/" {
			op.handle = otherMethods(mux, op.handle)
		}
		if d := documents[op.pattern]; d != nil {
			op.handle = d.strict(s.keyed(d, op.handle))
		}
		mux.HandleFunc(op.pattern, func(w http.ResponseWriter, r *http.Request) {
			op := op
			if op.pattern == ingressPattern {
				r, op = s.forService(r, op, false)
			}
			s.serve(w, r, op)
		})
	}
	return mux
}

// serve gives every request an id, and every error one shape.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, op operation) {
	id := requestID()
	w.Header().Set("X-Request-Id", id)
	rec := &recorder{ResponseWriter: w}
	start := time.Now()
	r, trail := s.leave(r, op, id, start)
	r, done, err := s.admit(rec, r, op)
	defer done()
	defer func() { s.settle(r, op, trail, rec.status, err, time.Since(start)) }() // also of one that panics
	if err == nil && changes(r) {
		err = s.announce(r, trail)
	}
	if err == nil {
		err = s.because(r, op.handle(rec, r))
	}
	if err != nil && !rec.wrote {
		fail(rec, r, err, id)
	}
	// A client that went away is no fault of ours.
	if err != nil && r.Context().Err() == nil {
		s.Log.Debug("request failed", "request", id, "method", r.Method, "path", r.URL.Path, "error", err)
	}
	s.Log.Debug("request", "request", id, "method", r.Method, "path", r.URL.Path, "ms", time.Since(start).Milliseconds())
}

func noRoute(_ http.ResponseWriter, r *http.Request) error {
	return &api.Error{
		Code: api.CodeNotFound, Message: fmt.Sprintf("no route %s %.200q", r.Method, r.URL.Path),
		Hint: "this daemon serves API " + api.Version,
	}
}

// recorder remembers whether a reply has begun: after that an error can no longer change the status.
type recorder struct {
	http.ResponseWriter
	wrote  bool
	status int
}

func (r *recorder) WriteHeader(status int) {
	// What comes before an answer is none.
	if !r.wrote && (status >= http.StatusOK || status == http.StatusSwitchingProtocols) {
		r.wrote, r.status = true, status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if !r.wrote {
		r.wrote, r.status = true, http.StatusOK
	}
	return r.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController reach hijacking and flushing.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func requestID() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return "req-" + hex.EncodeToString(b[:])
}

// Reply answers with JSON.
func Reply(w http.ResponseWriter, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode reply: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, err = w.Write(append(body, '\n'))
	return err
}

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) error {
	return Reply(w, http.StatusOK, api.Health{OK: true})
}

// version tells where things are to those only who may do anything there.
func (s *Server) version(w http.ResponseWriter, r *http.Request) error {
	v := s.Version
	if s.TCP != nil {
		v.Address, v.Fingerprint = s.TCP.Where()
	}
	if access.FromContext(r.Context()).Scope < access.Admin {
		v = api.VersionInfo{Version: v.Version, API: v.API}
	}
	return Reply(w, http.StatusOK, v)
}

func (s *Server) hostInfo(w http.ResponseWriter, r *http.Request) error {
	return Reply(w, http.StatusOK, s.doctor(r.Context()))
}

func (s *Server) doctor(ctx context.Context) api.HostInfo {
	d := s.Host.Doctor(ctx)
	info := api.HostInfo{
		OK: true, Kernel: d.Kernel, CPUs: d.CPUs, CPUModel: d.CPUModel, MemoryBytes: d.MemoryBytes, UID: d.UID,
		HotBytes: d.HotBytes, HotMaxBytes: d.HotMaxBytes, SandboxesMax: d.SandboxesMax, Engine: asMap(d.Features),
	}
	for _, c := range d.Checks {
		info.Checks = append(info.Checks, api.Check{Name: c.Name, Status: string(c.Status), Detail: c.Detail, Hint: c.Hint})
		if c.Status == host.Fail {
			info.OK = false
		}
	}
	s.addFacts(&info)
	return info
}

// asMap passes a record through as it is stored; nil stays nil.
func asMap(v any) map[string]any {
	var m map[string]any
	if b, err := json.Marshal(v); err == nil {
		_ = json.Unmarshal(b, &m)
	}
	return m
}
