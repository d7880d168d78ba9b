package httpapi

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/access"
)

// TestForeignService: another protocol's tokens open the ports of their sandbox and of no other, and none gets into a guest.
func TestForeignService(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	const secret, header = "no-form-at-all", "X-Their-Token"
	foreign := Operation{
		Fail: writeError,
		Shown: func(r *http.Request) (string, bool) {
			if token := r.Header.Get(header); token != "" {
				return token, true
			}
			return bearer(r)
		},
		Known: func(r *http.Request, shown string) (access.Token, bool) {
			return access.Token{ID: "theirs", Scope: access.Use, Sandbox: "sba"}, shown == secret
		},
		Sandbox: func(r *http.Request) string { return r.Header.Get("X-Of") },
	}
	port := privatePort
	front := httptest.NewServer(x.s.Service(foreign, func(r *http.Request) (string, int) { return r.Header.Get("X-Of"), port }, []string{header}))
	defer front.Close()
	for _, c := range []struct {
		name, sandbox, header, value string
		want                         int
	}{
		{"nothing shown", "sba", "X-None", "", http.StatusUnauthorized},
		{"a wrong one", "sba", header, "wrong", http.StatusUnauthorized},
		{"by their header", "sba", header, secret, http.StatusOK},
		{"as bearer", "sba", "Authorization", "Bearer " + secret, http.StatusOK},
		{"another sandbox", "sbb", header, secret, http.StatusForbidden},
		{"one of ours", "sba", "Authorization", "Bearer " + x.token, http.StatusOK},
	} {
		resp, body := do(t, x.request(t, "GET", front.URL+"/", "", "X-Of", c.sandbox, c.header, c.value))
		if resp.StatusCode != c.want {
			t.Errorf("%s: %s %s", c.name, resp.Status, body)
		}
		if strings.Contains(body, secret) || strings.Contains(body, x.token) {
			t.Errorf("%s: the service is told the token: %s", c.name, body)
		}
	}
	port = publicPort // where Authorization is the service's
	_, body := do(t, x.request(t, "GET", front.URL+"/", "", "X-Of", "sba", "Authorization", "Bearer its-own"))
	var got echoed
	if err := json.Unmarshal([]byte(body), &got); err != nil || got.Header.Get("Authorization") != "Bearer its-own" {
		t.Errorf("a public service is asked %s, %v", body, err)
	}
}
