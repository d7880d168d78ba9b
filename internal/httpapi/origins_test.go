package httpapi_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/httpapi"
)

// TestOrigins: pages of the origins that are named may read answers, and no others; nobody may without it being said; services
// say for themselves.
func TestOrigins(t *testing.T) {
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	const page = "https://app.example.com"
	preflight := map[string]string{"Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "authorization, x-metadata-a"}
	allowed := map[string]string{"Access-Control-Allow-Origin": page}
	may := map[string]string{
		"Access-Control-Allow-Origin": page, "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
		"Access-Control-Allow-Headers": "authorization, x-metadata-a", "Access-Control-Max-Age": "600",
	}
	for _, c := range []struct {
		name, method, url, origin string
		origins                   []string
		asks, want                map[string]string
		status                    int
	}{
		{"nothing is said", "OPTIONS", "/v1/sandboxes", page, nil, preflight, nil, 401},
		{"a preflight", "OPTIONS", "/v1/sandboxes", page, []string{"http://localhost:5173", page}, preflight, may, 204},
		{"any", "OPTIONS", "/v1/sandboxes", page, []string{"*"}, preflight, may, 204},
		{"another's preflight", "OPTIONS", "/v1/sandboxes", "https://evil.example.com", []string{page}, preflight, nil, 401},
		{"one that only begins so", "OPTIONS", "/v1/sandboxes", page + ".evil.example", []string{page}, preflight, nil, 401},
		{"no preflight", "OPTIONS", "/v1/sandboxes", page, []string{page}, nil, allowed, 401},
		{"a request", "GET", "/v1/sandboxes", page, []string{page}, nil, allowed, 401},
		{"another's request", "GET", "/v1/sandboxes", "null", []string{page}, nil, nil, 401},
		{"no page's", "GET", "/v1/sandboxes", "", []string{"*"}, nil, nil, 401},
		{"a port", "PUT", "/v1/sandboxes/sb1/ports/80", page, []string{page}, nil, allowed, 401},
		{"a service by path", "OPTIONS", "/v1/sandboxes/sb1/ports/80/x", page, []string{page}, preflight, nil, 401},
		{"a service by name", "OPTIONS", "http://80-sb1.sb.example.com:8889/v1/sandboxes", page, []string{page}, preflight, nil, 401},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequestWithContext(t.Context(), c.method, c.url, http.NoBody)
			if c.origin != "" {
				r.Header.Set("Origin", c.origin)
			}
			for k, v := range c.asks {
				r.Header.Set(k, v)
			}
			w := httptest.NewRecorder()
			httpapi.Origins(c.origins, "sb.example.com", next).ServeHTTP(w, r)
			if w.Code != c.status {
				t.Errorf("status %d", w.Code)
			}
			got := map[string]string{}
			for k := range w.Header() {
				if k != "Vary" && k != "Access-Control-Expose-Headers" {
					got[k] = w.Header().Get(k)
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" && len(got)+len(c.want) > 0 {
				t.Error(diff)
			}
		})
	}
}

func TestCheckOrigin(t *testing.T) {
	for text, good := range map[string]bool{
		"*": true, "https://a.example": true, "http://localhost:5173": true, "tauri://localhost": true,
		"": false, "a.example": false, "https://a.example/": false, "https://a.example/x": false, "https://u@a.example": false, "HTTPS://a.example": false,
		"https://": false, "null": false,
	} {
		if err := httpapi.CheckOrigin(text); (err == nil) != good {
			t.Errorf("%q: %v", text, err)
		}
	}
}
