package httpapi

import (
	"net/http"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/access"
)

// handler serves a request; its error becomes the reply unless one has begun.
type handler = func(w http.ResponseWriter, r *http.Request) error

// operation is one route of the API: what serves it, who may use it, and what is said of it.
type operation struct {
	pattern string // method and path, as http.ServeMux has them
	scope   access.Scope
	summary string
	handle  handler
}

// path is the pattern without the method, which one for any method has none of, and without the mark of its end.
func (op operation) path() string {
	pattern := strings.TrimSuffix(op.pattern, "{$}")
	if _, path, ok := strings.Cut(pattern, " "); ok {
		return path
	}
	return pattern
}

// operations is the whole API, once: the routes, the check of who may use them, the names in the audit log and the
// metrics, and the OpenAPI document are made of it.
func (s *Server) operations() []operation {
	return slices.Concat(s.hostOperations(), s.snapshotOperations(), s.sandboxOperations(), s.guestOperations(), s.files().operations(),
		s.tokenOperations(), s.workspaceOperations(), s.egressOperations(), s.portOperations(), s.listenOperations(),
		s.packOperations(), s.registryOperations(), s.gcOperations())
}

func (s *Server) hostOperations() []operation {
	return []operation{
		{"GET /healthz", access.None, "Say that the daemon answers", s.healthz},
		{"GET /version", access.Read, "The daemon's version", s.version},
		{"GET /metrics", access.Read, "What the daemon counts, for Prometheus", s.prometheus},
		{"GET /v1/usage", access.Read, "What every sandbox costs its host", s.usages},
		{"GET /v1/events", access.Read, "What happens, as it happens", s.listen},
		{"GET /v1/host", access.Read, "What the host offers, check by check", s.hostInfo},
		{"GET /v1/leftovers", access.Admin, "What crashes and failures have left", s.leftovers},
		{"DELETE /v1/leftovers", access.Admin, "Remove what crashes and failures have left", s.cleanup},
		{"GET /openapi.json", access.None, "This document", s.openAPI},
		{"GET /docs/{file...}", access.None, "This document as a page", s.docs},
		{"/", access.None, "", noRoute},
	}
}

func (s *Server) snapshotOperations() []operation {
	return []operation{
		{"POST /v1/builds", access.Manage, "Build a recipe into a snapshot", s.build},
		{"GET /v1/images", access.Read, "List images", s.images},
		{"DELETE /v1/images/{id}", access.Manage, "Remove an image", s.removeImage},
		{"GET /v1/snapshots", access.Read, "List snapshots", s.snapshots},
		{"POST /v1/snapshots", access.Admin, "Make a snapshot of a root file system", s.createSnapshot},
		{"GET /v1/snapshots/{tag}", access.Read, "A snapshot with its provenance", s.snapshotInfo},
		{"GET /v1/snapshots/{tag}/info", access.Read, "A snapshot with its provenance", s.snapshotInfo},
		{"POST /v1/snapshots/{tag}/compact", access.Manage, "Make a self-contained snapshot of one that stands on others", s.compact},
		{"DELETE /v1/snapshots/{tag}", access.Manage, "Remove a snapshot", s.removeSnapshot},
		{"GET /v1/tree", access.Read, "Snapshots and sandboxes as a family tree", s.tree},
	}
}

func (s *Server) sandboxOperations() []operation {
	const one = " /v1/sandboxes/{id}"
	return []operation{
		{"POST /v1/sandboxes", access.Manage, "Fork sandboxes from a snapshot", s.fork},
		{"GET /v1/sandboxes", access.Read, "List sandboxes", s.sandboxes},
		{"GET" + one, access.Read, "A sandbox", s.sandbox},
		{"DELETE" + one, access.Manage, "End a sandbox", s.kill},
		{"POST" + one + "/branch", access.Manage, "Capture a running sandbox as a snapshot", s.branch},
		{"POST" + one + "/pause", access.Manage, "Stop its CPUs", s.change(s.Host.Pause)},
		{"POST" + one + "/resume", access.Manage, "Let it run on", s.change(s.Host.Resume)},
		{"POST" + one + "/suspend", access.Manage, "Store it and free its memory", s.change(s.Host.Suspend)},
		{"POST" + one + "/wake", access.Manage, "Let a suspended sandbox run on", s.change(s.Host.Wake)},
		{"PUT" + one + "/ttl", access.Manage, "Give it another time to live", s.setTTL},
	}
}

func (s *Server) guestOperations() []operation {
	const one = " /v1/sandboxes/{id}"
	return []operation{
		{"POST" + one + "/exec", access.Use, "Run a command", s.exec},
		{"GET" + one + "/exec", access.Use, "Run a command over a WebSocket, with input and perhaps a terminal", s.execSocket},
		{"POST" + one + "/eval", access.Use, "Evaluate code in a context", s.eval},
		{"GET" + one + "/contexts", access.Use, "List contexts", s.contexts},
		{"POST" + one + "/contexts", access.Use, "Start a context", s.createContext},
		{"DELETE" + one + "/contexts/{ctx}", access.Use, "End a context", s.removeContext},
		{"POST" + one + "/contexts/{ctx}/restart", access.Use, "Restart a context", s.restartContext},
		{"POST" + one + "/contexts/{ctx}/interrupt", access.Use, "Interrupt what a context evaluates", s.interruptContext},
		{"POST" + one + "/ping", access.Use, "Ask the guest whether it answers", s.ping},
		{"GET" + one + "/metrics", access.Read, "What the guest uses", s.metrics},
		{"GET" + one + "/usage", access.Read, "What a sandbox costs its host", s.usage},
		{"GET" + one + "/logs", access.Use, "The guest's console", s.logs},
		{"GET" + one + "/processes", access.Use, "List the guest's processes", s.processes},
		{"POST" + one + "/processes/{process}/signal", access.Use, "Signal a process", s.signal},
		{"POST" + one + "/call", access.Use, "Speak the guest's protocol", s.call},
	}
}
