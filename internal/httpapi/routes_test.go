package httpapi

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/layout"
)

var errLive = engine.ErrLiveUnavailable

// noEngine starts nothing: what these tests ask for is refused before.
type noEngine struct{ engine.Engine }

func (noEngine) Name() string { return "none" }

func (noEngine) Probe(context.Context) (*engine.Features, error) { return nil, engine.ErrUnavailable }

// testServer is the API over a host without snapshots.
func testServer(t *testing.T) http.Handler {
	t.Helper()
	return asOwner(newServer(t).Handler())
}

func newServer(t *testing.T) *Server {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	h, err := host.Open(t.Context(), host.Config{
		Home: layout.Home{Root: filepath.Join(t.TempDir(), "home"), Runtime: t.TempDir()}, Engine: noEngine{}, Log: log,
		HotMaxBytes: 1 << 20, Available: func() (int64, error) { return 1 << 30, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	tokens, err := access.Open(filepath.Join(t.TempDir(), "tokens.json"))
	if err != nil {
		t.Fatal(err)
	}
	return &Server{Host: h, Log: log, Tokens: tokens}
}

// asOwner serves as on the unix socket.
func asOwner(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(access.With(r.Context(), access.Owner())))
	})
}

func TestRefusals(t *testing.T) {
	handler := testServer(t)
	for _, tt := range []struct {
		request, body string
		status        int
		code          api.Code
		says          string
	}{
		{"POST /v1/sandboxes/sbaa/branch", "", 404, api.CodeNotFound, "sbaa"},
		{"POST /v1/sandboxes/sbaa/pause", "", 404, api.CodeNotFound, "sbaa"},
		{"POST /v1/sandboxes/sbaa/resume", "", 404, api.CodeNotFound, "sbaa"},
		{"POST /v1/sandboxes/sbaa/suspend", "{}", 404, api.CodeNotFound, "sbaa"},
		{"POST /v1/sandboxes/sbaa/wake", "", 404, api.CodeNotFound, "sbaa"},
		{"POST /v1/snapshots/t/compact", `{"to":"u"}`, 404, api.CodeNotFound, "t"},
		{"POST /v1/sandboxes/sbaa/branch", `{"mode":"fast"}`, 400, api.CodeInvalid, "live, diff or full"},
		{"POST /v1/sandboxes/sbaa/branch", `{"mode":"live","live":true}`, 400, api.CodeInvalid, "mode alone"},
		{"POST /v1/sandboxes/sbaa/branch", `{"mod":"live"}`, 400, api.CodeInvalid, "mod"},
		{"POST /v1/sandboxes/sbaa/branch", `{"tag":"a/b"}`, 400, api.CodeInvalid, "tag"},
		{"POST /v1/sandboxes/sbaa/branch", `{"ttl_seconds":5}`, 400, api.CodeInvalid, "n is 0"},
		{"POST /v1/sandboxes/sbaa/pause", `{"x":1}`, 400, api.CodeInvalid, "x"},
		{"POST /v1/snapshots/t/compact", "", 400, api.CodeInvalid, "to"},
		{"POST /v1/snapshots", `{"tag":"t","kernel":"/k"}`, 400, api.CodeInvalid, "rootfs is missing"},
		{"POST /v1/snapshots", `{"tag":"t","rootfs":""}`, 400, api.CodeInvalid, "rootfs is empty"},
		{"POST /v1/snapshots", `{"tag":"a/b","rootfs":"/r"}`, 400, api.CodeInvalid, "a/b"},
		{"POST /v1/snapshots", `{"tag":"t","rootfs":"/r","tap":"forkd-tap0"}`, 501, api.CodeUnsupported, "tap"},
		{"POST /v1/snapshots", `{"tag":"t","rootfs":"/r","boot_wait_secs":61}`, 400, api.CodeInvalid, "the most is 60"},
		{"POST /v1/snapshots", `{"tag":"t","rootfs":"r"}`, 400, api.CodeInvalid, "absolute path"},
		{"POST /v1/snapshots", `{"tag":"t","rootfs":"/no/such/file"}`, 400, api.CodeInvalid, "no such file"},
		{"POST /v1/snapshots", `{"tag":"t","rootfs":"/dev/null"}`, 400, api.CodeInvalid, "no regular file"},
		{"GET /v1/snapshots/t", "", 404, api.CodeNotFound, "t"},
		{"GET /v1/snapshots/t?wait=5", "", 404, api.CodeNotFound, "t"},
		{"GET /v1/snapshots/t?wait=x", "", 400, api.CodeInvalid, "seconds"},
		{"GET /v1/snapshots/t/info", "", 404, api.CodeNotFound, "t"},
		{"DELETE /v1/snapshots/t", "", 404, api.CodeNotFound, "t"},
		{"DELETE /v1/snapshots/t?cascade=true", "", 404, api.CodeNotFound, "t"},
		{"DELETE /v1/snapshots/t?cascade=true&force=true", "", 400, api.CodeInvalid, "one of them"},
		{"GET /v1/sandboxes/sbaa/processes", "", 404, api.CodeNotFound, "sbaa"},
		{"GET /v1/sandboxes/sbaa/processes?ended=maybe", "", 400, api.CodeInvalid, "true or false"},
		{"POST /v1/sandboxes/sbaa/processes/web/signal", "", 404, api.CodeNotFound, "sbaa"},
		{"POST /v1/sandboxes/sbaa/processes/web/signal", `{"signal":"NOPE"}`, 400, api.CodeInvalid, "NOPE"},
		{"POST /v1/sandboxes/sbaa/processes/00/signal", `{}`, 404, api.CodeNotFound, "process 0"},
		{"GET /v1/sandboxes/sbaa/logs?follow=true", "", 404, api.CodeNotFound, "sbaa"},
		{"GET /v1/sandboxes/sbaa/logs?follow=maybe", "", 400, api.CodeInvalid, "true or false"},
		{"DELETE /v1/snapshots/t?force=maybe", "", 400, api.CodeInvalid, "true or false"},
	} {
		t.Run(tt.request+tt.body, func(t *testing.T) {
			method, path, _ := strings.Cut(tt.request, " ")
			rec := httptest.NewRecorder()
			handler.ServeHTTP(rec, httptest.NewRequest(method, path, strings.NewReader(tt.body)))
			var e api.Error
			if err := json.Unmarshal(rec.Body.Bytes(), &e); err != nil {
				t.Fatalf("the body is no error: %v: %s", err, rec.Body)
			}
			if rec.Code != tt.status || e.Code != tt.code || !strings.Contains(e.Message, tt.says) {
				t.Errorf("status %d, %s: %q; want %d, %s, something of %q", rec.Code, e.Code, e.Message, tt.status, tt.code, tt.says)
			}
			if e.RequestID == "" || e.Text != e.Message {
				t.Errorf("no request id, or two texts: %+v", e)
			}
		})
	}
}

func TestHostFacts(t *testing.T) {
	rec := httptest.NewRecorder()
	testServer(t).ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/v1/host", nil))
	var info api.HostInfo
	if err := json.Unmarshal(rec.Body.Bytes(), &info); err != nil {
		t.Fatal(err)
	}
	if len(info.LoadAverage) != 3 {
		t.Errorf("load average: %v", info.LoadAverage)
	}
}
