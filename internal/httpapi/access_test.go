package httpapi

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

// guarded is the API with nothing behind its guard: whoever is let in gets 204. There are sandboxes sba and sbb.
func guarded(t *testing.T) (*Server, http.Handler) {
	t.Helper()
	tokens, err := access.Open(filepath.Join(t.TempDir(), "tokens.json"))
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{
		Log: slog.New(slog.DiscardHandler), Tokens: tokens,
		failures: access.Failures{Burst: 1 << 20}, find: func(id string) (string, error) {
			switch id {
			case "sba", "sbb":
				return id, nil
			case "name": // of a workspace
				return "sba", nil
			}
			return "", host.ErrNotFound
		},
	}
	mux := http.NewServeMux()
	for _, op := range s.operations() {
		op.handle = func(w http.ResponseWriter, _ *http.Request) error {
			w.WriteHeader(http.StatusNoContent)
			return nil
		}
		mux.HandleFunc(op.pattern, func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, op) })
	}
	return s, mux
}

func makeToken(t *testing.T, s *Server, spec access.Spec) (id, secret string) {
	t.Helper()
	spec.By = access.Owner()
	token, secret, err := s.Tokens.Create(spec)
	if err != nil {
		t.Fatal(err)
	}
	return token.ID, secret
}

// caller is somebody who asks.
type caller struct {
	name  string
	token string           // "": none
	on    access.Principal // on the unix socket; zero: TCP
}

func callers(t *testing.T, s *Server) []caller {
	t.Helper()
	one := func(scope access.Scope, sandbox string) string {
		_, secret := makeToken(t, s, access.Spec{Scope: scope, Sandbox: sandbox})
		return secret
	}
	revokedID, revoked := makeToken(t, s, access.Spec{Scope: access.Admin})
	if err := s.Tokens.Revoke(revokedID, ""); err != nil {
		t.Fatal(err)
	}
	_, expired := makeToken(t, s, access.Spec{Scope: access.Admin, TTL: time.Nanosecond})
	all := []caller{
		{name: "none"},
		{name: "wrong", token: "fkd_tk00000000_x"},
		{name: "revoked", token: revoked},
		{name: "expired", token: expired},
		{name: "read", token: one(access.Read, "")},
		{name: "use", token: one(access.Use, "")},
		{name: "manage", token: one(access.Manage, "")},
		{name: "admin", token: one(access.Admin, "")},
		{name: "its-read", token: one(access.Read, "sba")},
		{name: "its-use", token: one(access.Use, "sba")},
		{name: "its-manage", token: one(access.Manage, "sba")},
		{name: "other's", token: one(access.Manage, "sbb")},
		{name: "gone's", token: one(access.Manage, "sbc")},
		{name: "owner", on: access.Peer(7, 7)},
		{name: "root", on: access.Peer(0, 7)},
		{name: "stranger", on: access.Peer(8, 7)},
		{name: "stranger+admin", on: access.Peer(8, 7)},
		{name: "owner+read", on: access.Owner(), token: one(access.Read, "")},
	}
	for i := range all {
		if all[i].name == "stranger+admin" {
			all[i].token = one(access.Admin, "")
		}
	}
	return all
}

func (c caller) asks(method, path string) *http.Request {
	r := httptest.NewRequest(method, path, nil)
	if c.on.Name != "" {
		r.RemoteAddr = "@"
		r = r.WithContext(access.With(r.Context(), c.on))
	}
	if c.token != "" {
		r.Header.Set("Authorization", "Bearer "+c.token)
	}
	return r
}

var wildcard = regexp.MustCompile(`\{[^}]*\}`)

// TestAccess: what every operation answers to everybody, as a table. A new route is a reviewed line of it.
func TestAccess(t *testing.T) {
	s, handler := guarded(t)
	all := callers(t, s)
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 1, ' ', 0)
	fmt.Fprint(w, "operation\tneeds")
	for _, c := range all {
		fmt.Fprint(w, "\t", c.name)
	}
	fmt.Fprintln(w)
	for _, op := range s.operations() {
		method, path, ok := strings.Cut(op.pattern, " ")
		switch {
		case !ok && op.pattern == "/":
			method, path = http.MethodGet, "/nowhere"
		case !ok: // any method
			method, path = http.MethodPatch, op.pattern
		}
		path = wildcard.ReplaceAllString(strings.ReplaceAll(path, "{id}", "sba"), "x")
		fmt.Fprintf(w, "%s\t%s", op.pattern, op.scope)
		for _, c := range all {
			rec := httptest.NewRecorder()
			handler.ServeHTTP(rec, c.asks(method, path))
			answer := "yes"
			if rec.Code != http.StatusNoContent {
				answer = refusal(t, rec)
			}
			fmt.Fprint(w, "\t", answer)
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	const file = "testdata/access.golden"
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("who may do what has changed; go test -run TestAccess -update writes it (-want +got):\n%s", diff)
	}
}

// refusal checks that a refusal is complete and tells nothing that it should not.
func refusal(t *testing.T, rec *httptest.ResponseRecorder) string {
	t.Helper()
	var e api.Error
	if err := json.Unmarshal(rec.Body.Bytes(), &e); err != nil || e.Message == "" || e.RequestID == "" || e.Text != e.Message {
		t.Errorf("%d: %s", rec.Code, rec.Body)
	}
	if strings.Contains(rec.Body.String(), "fkd_") {
		t.Errorf("the token is repeated: %s", rec.Body)
	}
	if rec.Code == http.StatusUnauthorized && rec.Header().Get("WWW-Authenticate") == "" {
		t.Error("401 without WWW-Authenticate")
	}
	return fmt.Sprint(rec.Code)
}

// TestEveryRouteIsGuarded: what needs no token is what is listed here.
func TestEveryRouteIsGuarded(t *testing.T) {
	open := map[string]bool{"GET /healthz": true, "GET /openapi.json": true, "GET /docs/{file...}": true, "/": true}
	for _, op := range (&Server{}).operations() {
		if op.scope == access.None && !open[op.pattern] {
			t.Errorf("%s needs no token", op.pattern)
		}
	}
}

func TestAuthorizationHeaders(t *testing.T) {
	s, handler := guarded(t)
	_, secret := makeToken(t, s, access.Spec{Scope: access.Read})
	for _, tt := range []struct {
		headers []string
		status  int
	}{
		{nil, 401},
		{[]string{"Bearer " + secret}, 204},
		{[]string{"bearer " + secret}, 204},
		{[]string{"Bearer   " + secret + " "}, 204},
		{[]string{secret}, 401},
		{[]string{"Bearer"}, 401},
		{[]string{"Bearer "}, 401},
		{[]string{"Basic " + secret}, 401},
		{[]string{"Bearer " + secret + " x"}, 401},
		{[]string{"Bearer " + secret, "Bearer " + secret}, 401},
		{[]string{"Bearer x", "Bearer " + secret}, 401},
		{[]string{""}, 401},
	} {
		r := httptest.NewRequest(http.MethodGet, "/version", nil)
		for _, h := range tt.headers {
			r.Header.Add("Authorization", h)
		}
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, r)
		if rec.Code != tt.status {
			t.Errorf("%q: %d, want %d", tt.headers, rec.Code, tt.status)
		}
	}
}

func TestManyWrongTokens(t *testing.T) {
	s, handler := guarded(t)
	s.failures.Burst, s.failures.Every = 3, time.Hour
	_, here := makeToken(t, s, access.Spec{Scope: access.Read})
	_, late := makeToken(t, s, access.Spec{Scope: access.Read})
	ask := func(addr, token string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodGet, "/version", nil)
		r.RemoteAddr = addr
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, r)
		return rec
	}
	if rec := ask("192.0.2.1:1", here); rec.Code != 204 {
		t.Fatal(rec.Code)
	}
	for i := range 3 {
		if rec := ask(fmt.Sprintf("192.0.2.1:%d", i+1), "x"); rec.Code != 401 {
			t.Fatal(rec.Code)
		}
	}
	for _, tt := range []struct {
		what, addr, token string
		status            int
	}{
		{"the fourth wrong one", "192.0.2.1:9", "x", 429},
		{"a guess that hits", "192.0.2.1:9", late, 429},
		{"who was there before", "192.0.2.1:9", here, 204},
		{"from elsewhere", "192.0.2.2:9", late, 204},
	} {
		rec := ask(tt.addr, tt.token)
		if rec.Code != tt.status {
			t.Errorf("%s: %d, want %d", tt.what, rec.Code, tt.status)
		}
		if rec.Code == 429 && rec.Header().Get("Retry-After") == "" {
			t.Errorf("%s: no Retry-After", tt.what)
		}
	}
	for range 10 { // no token is no guess
		if rec := ask("192.0.2.3:1", ""); rec.Code != 401 {
			t.Error(rec.Code)
		}
	}
}

// TestTokenEndsWork: what lasts long ends with the token that it was begun with.
func TestTokenEndsWork(t *testing.T) {
	s, _ := guarded(t)
	begun := make(chan struct{})
	handler := s.router([]operation{{"GET /v1/events", access.Read, "", func(_ http.ResponseWriter, r *http.Request) error {
		begun <- struct{}{}
		<-r.Context().Done()
		return r.Context().Err()
	}}})
	for _, ttl := range []time.Duration{0, 300 * time.Millisecond} {
		id, secret := makeToken(t, s, access.Spec{Scope: access.Read, TTL: ttl})
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			handler.ServeHTTP(httptest.NewRecorder(), caller{token: secret}.asks(http.MethodGet, "/v1/events"))
		}()
		<-begun
		if ttl == 0 {
			if err := s.Tokens.Revoke(id, ""); err != nil {
				t.Fatal(err)
			}
		}
		<-ended
	}
}

// TestNamesOfSandboxes: a token opens a sandbox, by whatever name, and not a name.
func TestNamesOfSandboxes(t *testing.T) {
	s, _ := guarded(t)
	handler := s.router(append(s.tokenOperations(), operation{
		"GET /v1/sandboxes/{id}", access.Read, "", func(w http.ResponseWriter, r *http.Request) error {
			return Reply(w, http.StatusOK, r.PathValue("id"))
		},
	}))
	rec := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "/v1/sandboxes/name/tokens", strings.NewReader("{}"))
	handler.ServeHTTP(rec, r.WithContext(access.With(r.Context(), access.Owner())))
	var made api.Token
	if err := json.Unmarshal(rec.Body.Bytes(), &made); err != nil || made.Sandbox != "sba" {
		t.Fatalf("%v: %s", err, rec.Body)
	}
	for id, want := range map[string]int{"sba": 200, "name": 200, "sbb": 403, "sbc": 403} {
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, caller{token: made.Token}.asks(http.MethodGet, "/v1/sandboxes/"+id))
		if rec.Code != want || want == 200 && strings.TrimSpace(rec.Body.String()) != `"sba"` {
			t.Errorf("%s: %d %s, want %d", id, rec.Code, rec.Body, want)
		}
	}
	s.find = func(string) (string, error) { return "sbb", nil } // another has the name now
	rec = httptest.NewRecorder()
	handler.ServeHTTP(rec, caller{token: made.Token}.asks(http.MethodGet, "/v1/sandboxes/name"))
	if rec.Code != http.StatusUnauthorized {
		t.Errorf("%d %s", rec.Code, rec.Body)
	}
}

// TestHostFiles: a token that manages sandboxes has no file of the host opened.
func TestHostFiles(t *testing.T) {
	s, _ := guarded(t)
	handler := s.router(s.snapshotOperations())
	_, manage := makeToken(t, s, access.Spec{Scope: access.Manage})
	rec := httptest.NewRecorder()
	r := caller{token: manage}.asks(http.MethodPost, "/v1/builds?tag=t&kernel=/etc/shadow")
	r.Header.Set("Content-Type", tarType)
	handler.ServeHTTP(rec, r)
	if rec.Code != http.StatusForbidden || !strings.Contains(rec.Body.String(), "kernel") {
		t.Errorf("%d: %s", rec.Code, rec.Body)
	}
}

func TestTokensOverTheAPI(t *testing.T) {
	s, _ := guarded(t)
	handler := s.router(s.tokenOperations())
	_, manage := makeToken(t, s, access.Spec{Scope: access.Manage})
	post := func(token, path, body string) (int, api.Token) {
		r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
		if token == "" {
			r = r.WithContext(access.With(r.Context(), access.Owner()))
		} else {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, r)
		var v api.Token
		_ = json.Unmarshal(rec.Body.Bytes(), &v)
		return rec.Code, v
	}
	for _, tt := range []struct {
		token, path, body string
		status            int
	}{
		{"", "/v1/tokens", `{}`, 201},
		{"", "/v1/tokens", `{"name":"a","scope":"admin","ttl_seconds":60}`, 201},
		{"", "/v1/tokens", `{"scope":"none"}`, 400},
		{"", "/v1/tokens", `{"scope":"root"}`, 400},
		{"", "/v1/tokens", `{"name":"owner"}`, 400},
		{"", "/v1/tokens", `{"ttl_seconds":-1}`, 400},
		{"", "/v1/tokens", `{"ttl_seconds":1e300}`, 400},
		{"", "/v1/tokens", `{"scopes":"use"}`, 400},
		{"", "/v1/tokens", `{"sandbox":"sbc"}`, 404},
		{"", "/v1/sandboxes/sbc/tokens", `{}`, 404},
		{"", "/v1/sandboxes/sba/tokens", `{"sandbox":"sbb"}`, 400},
		{"", "/v1/sandboxes/sba/tokens", `{"scope":"admin"}`, 400},
		{"", "/v1/sandboxes/sba/tokens", `{"sandbox":"sba","scope":"manage"}`, 201},
		{manage, "/v1/sandboxes/sba/tokens", `{}`, 201},
		{manage, "/v1/tokens", `{}`, 403},
	} {
		status, v := post(tt.token, tt.path, tt.body)
		if status != tt.status || status == 201 && (v.ID == "" || !strings.HasPrefix(v.Token, "fkd_"+v.ID+"_")) {
			t.Errorf("%s %s: %d %+v, want %d", tt.path, tt.body, status, v, tt.status)
		}
	}
	_, of := post("", "/v1/sandboxes/sba/tokens", `{"scope":"manage"}`)
	if status, _ := post(of.Token, "/v1/sandboxes/sba/tokens", `{}`); status != 403 {
		t.Error("a sandbox's token made another:", status)
	}
	rec := httptest.NewRecorder()
	handler.ServeHTTP(rec, caller{on: access.Owner()}.asks(http.MethodGet, "/v1/tokens"))
	if rec.Code != 200 || strings.Contains(rec.Body.String(), "fkd_") || strings.Contains(rec.Body.String(), "sha256") {
		t.Errorf("%d: %s", rec.Code, rec.Body)
	}
}
