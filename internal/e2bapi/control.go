package e2bapi

import (
	"net/http"
	"time"

	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/httpapi"
	"forkd.dev/forkd/internal/lineage"
)

// control is the routes of E2B's API, of all versions that its clients ask for.
func (s *Server) control() *http.ServeMux {
	const v2, one, one2 = "/v2/sandboxes", "/sandboxes/{id}", "/v2/sandboxes/{id}"
	routes := []route{
		{"GET /health", access.None, func(w http.ResponseWriter, _ *http.Request) error { return empty(w, http.StatusNoContent) }},
		{"POST " + v2, access.Manage, s.API.Once(s.create(timeoutV2))},
		{"POST /sandboxes", access.Manage, s.API.Once(s.create(timeoutV1))},
		{"GET " + v2, access.Read, s.list},
		{"GET /sandboxes", access.Read, s.list},
		{"GET /sandboxes/metrics", access.Read, s.manyMetrics},
		{"GET " + one, access.Read, s.info},
		{"DELETE " + one, access.Manage, s.kill},
		{"POST " + one2 + "/connect", access.Manage, s.connect(timeoutV2)},
		{"POST " + one + "/connect", access.Manage, s.connect(timeoutV2)},
		{"POST " + one + "/resume", access.Manage, s.resume},
		{"POST " + one + "/timeout", access.Manage, s.setTimeout},
		{"POST " + one + "/refreshes", access.Manage, s.refresh},
		{"POST " + one + "/pause", access.Manage, s.pause},
		{"POST " + one + "/fork", access.Manage, s.fork(timeoutV1)},
		{"POST " + one2 + "/fork", access.Manage, s.fork(timeoutV2)},
		{"POST " + one + "/snapshots", access.Manage, s.snapshot},
		{"GET /snapshots", access.Read, s.snapshots},
		{"GET " + one + "/metrics", access.Read, s.metrics},
		{"GET " + one + "/logs", access.Use, s.logs},
		{"GET " + one2 + "/logs", access.Use, s.logsV2},
		{"PUT " + one + "/network", access.Manage, s.setNetwork},
		{"GET /templates", access.Read, s.templates},
		{"GET /v2/templates", access.Read, s.templates},
		{"GET /templates/{template}/{of}", access.Read, s.templateOf},
		{"GET /templates/{template}", access.Read, s.template},
		{"DELETE /templates/{template}", access.Manage, s.removeTemplate},
		{"PATCH /templates/{template}", access.Manage, s.changeTemplate},
		{"PATCH /v2/templates/{template}", access.Manage, s.changeTemplate},
	}
	routes = append(append(routes, s.buildRoutes()...), s.missing()...)
	mux := s.plane(httpapi.Operation{Fail: failPlain, Shown: shownKey, Sandbox: s.namedSandbox}, routes)
	mux.Handle("PUT /templates/files/{hash}", s.uploads())
	return mux
}

// Times to live of sandboxes whose clients say nothing, by version of the route.
const (
	timeoutV1 = 15 * time.Second
	timeoutV2 = 300 * time.Second
)

// namedSandbox is the sandbox in a request's path, by its whole id.
func (s *Server) namedSandbox(r *http.Request) string {
	if id := r.PathValue("id"); s.exists(id) {
		return id
	}
	return ""
}

// Missing routes are of things that there are none of here.
func (s *Server) missing() (routes []route) {
	for prefix, what := range map[string]string{
		"/volumes": "volumes", "/secrets": "secrets", "/teams": "teams", "/api-keys": "API keys (forkd token makes them)", "/nodes": "nodes",
	} {
		for _, path := range []string{prefix, prefix + "/{rest...}"} {
			routes = append(routes, route{path, access.Read, func(http.ResponseWriter, *http.Request) error {
				return unsupported("this daemon has no %s", what)
			}})
		}
	}
	for _, path := range []string{"POST /templates/tags", "DELETE /templates/tags"} {
		routes = append(routes, route{path, access.Read, noTags})
	}
	return routes
}

// States as E2B names them.
const (
	stateRunning = "running"
	statePaused  = "paused"
	stateGone    = "" // its machine died: to E2B's clients it is not there
)

func state(v host.View) string {
	switch v.State {
	case lineage.Running:
		return stateRunning
	case lineage.Paused, lineage.Suspended:
		return statePaused
	case lineage.Failed:
		return stateGone
	}
	return stateGone
}
