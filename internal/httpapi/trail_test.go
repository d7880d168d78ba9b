package httpapi

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/audit"
)

// audited is the API with an audit log.
func audited(t *testing.T, change func(*audit.Config)) (*Server, string) {
	t.Helper()
	cfg := audit.Config{Path: filepath.Join(t.TempDir(), "audit.log")}
	if change != nil {
		change(&cfg)
	}
	log, err := audit.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = log.Close() })
	s := newServer(t)
	s.Audit = log
	return s, cfg.Path
}

func askAs(s *Server, who access.Principal, request, body string) *httptest.ResponseRecorder {
	method, path, _ := strings.Cut(request, " ")
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.RemoteAddr = "@"
	rec := httptest.NewRecorder()
	s.Handler().ServeHTTP(rec, r.WithContext(access.With(r.Context(), who)))
	return rec
}

func entries(t *testing.T, path string) []audit.Entry {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var all []audit.Entry
	for line := range bytes.Lines(text) {
		var e audit.Entry
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		if e.Time.IsZero() || e.RequestID == "" {
			t.Errorf("without a time or a request: %s", line)
		}
		all = append(all, e)
	}
	return all
}

// short is what of an entry does not differ from run to run.
func short(e audit.Entry) string {
	var words []string
	for _, w := range []string{string(e.Phase), e.Principal, e.Method, e.Route, http.StatusText(e.Status), e.Code, strings.Join(e.Argv, " ")} {
		if w != "" {
			words = append(words, w)
		}
	}
	if len(e.Touched) > 0 {
		b, _ := json.Marshal(e.Touched)
		words = append(words, string(b))
	}
	return strings.Join(words, " ")
}

func TestAudit(t *testing.T) {
	s, path := audited(t, nil)
	owner := access.Owner()
	askAs(s, owner, "GET /v1/snapshots", "")
	askAs(s, owner, "GET /version", "")                   // asked all the time
	askAs(s, owner, "GET /healthz", "")                   // anybody may
	askAs(s, access.Principal{}, "GET /v1/snapshots", "") // no token
	askAs(s, owner, "DELETE /v1/snapshots/py", "")
	askAs(s, owner, "POST /v1/sandboxes", `{"snapshot_tag":"py","n":2}`)
	askAs(s, owner, "POST /v1/sandboxes", `{"snapshot_tag":`)
	askAs(s, access.Principal{Name: "ci", Scope: access.Read, TokenID: "t1"}, "POST /v1/sandboxes/sbx/exec", `{"args":["ls","-l"]}`)
	askAs(s, owner, "POST /v1/sandboxes/sbx/exec", `{"args":["ls","-l"]}`)
	askAs(s, owner, "GET /v1/sandboxes/sbx/files?path=/etc/passwd", "")
	askAs(s, owner, "GET /v1/tree?all=true", "")
	var got []string
	for _, e := range entries(t, path) {
		got = append(got, short(e))
	}
	want := []string{
		"owner GET /v1/snapshots OK",
		"nobody GET /v1/snapshots Unauthorized unauthorized",
		`owner DELETE /v1/snapshots/{tag} Not Found not_found {"snapshot":["py"]}`,
		`owner POST /v1/sandboxes Not Found not_found {"snapshot":["py"]}`,
		`owner POST /v1/sandboxes Bad Request invalid`,
		`ci POST /v1/sandboxes/{id}/exec Forbidden denied {"sandbox":["sbx"]}`,
		`owner POST /v1/sandboxes/{id}/exec Not Found not_found ls -l {"sandbox":["sbx"]}`,
		`owner GET /v1/sandboxes/{id}/files Not Found not_found {"file":["/etc/passwd"],"sandbox":["sbx"]}`,
		"owner GET /v1/tree OK",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestRequiredAudit: what cannot be written down is not done; what changes nothing is.
func TestRequiredAudit(t *testing.T) {
	s, path := audited(t, func(c *audit.Config) { c.Required, c.Argv = true, audit.Program })
	owner := access.Owner()
	askAs(s, owner, "POST /v1/sandboxes/sbx/exec", `{"args":["ls","-l"]}`)
	var got []string
	for _, e := range entries(t, path) {
		got = append(got, short(e))
	}
	want := []string{
		`begin owner POST /v1/sandboxes/{id}/exec {"sandbox":["sbx"]}`,
		`begin owner POST /v1/sandboxes/{id}/exec ls {"sandbox":["sbx"]}`,
		`owner POST /v1/sandboxes/{id}/exec Not Found not_found ls {"sandbox":["sbx"]}`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	// Its place is taken away while it is closed, so it cannot be opened again.
	if err := s.Audit.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Dir(path), filepath.Dir(path)+".gone"); err != nil {
		t.Fatal(err)
	}
	for request, want := range map[string]int{
		"DELETE /v1/snapshots/py": 503, "POST /v1/sandboxes": 503, "POST /v1/sandboxes/sbx/exec": 503, "PUT /v1/sandboxes/sbx/files?path=x": 503,
		"GET /v1/snapshots": 200, "GET /v1/sandboxes/sbx": 404, "GET /healthz": 200, "POST /v1/nothing": 404,
	} {
		if rec := askAs(s, owner, request, ""); rec.Code != want && rec.Code != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d, want %d: %s", request, rec.Code, want, rec.Body)
		}
	}
	socket := httptest.NewRequest(http.MethodGet, "/v1/sandboxes/sbx/exec", nil)
	socket, _ = s.leave(socket, operation{pattern: "GET /v1/sandboxes/{id}/exec", scope: access.Use}, "req", time.Now())
	if err := s.noteArgv(socket, "ls"); err == nil {
		t.Error("a command over a WebSocket would be run")
	}
	if err := os.Rename(filepath.Dir(path)+".gone", filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	if rec := askAs(s, owner, "DELETE /v1/snapshots/py", ""); rec.Code != http.StatusNotFound {
		t.Errorf("with the log back: %d: %s", rec.Code, rec.Body)
	}
	if s.Audit.Failed() == 0 {
		t.Error("the failures are not counted")
	}
}
