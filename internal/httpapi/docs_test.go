package httpapi

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
)

func get(t *testing.T, h http.Handler, path string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, path, http.NoBody)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, r)
	return rec
}

// TestDocsNeedNothingFromElsewhere: whatever the page refers to is here, of the kind that it is taken for, and its policy
// allows nothing else.
func TestDocsNeedNothingFromElsewhere(t *testing.T) {
	h := testServer(t)
	page := get(t, h, "/docs/")
	if page.Code != http.StatusOK || !strings.HasPrefix(page.Header().Get("Content-Type"), "text/html") {
		t.Fatal(page.Code, page.Header())
	}
	policy := page.Header().Get("Content-Security-Policy")
	if !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "http") || strings.Contains(policy, "unsafe-eval") ||
		strings.Contains(policy, "script-src 'self' 'unsafe") {
		t.Errorf("policy %s", policy)
	}
	refs := regexp.MustCompile(`(?:src|href)="([^"]*)"`).FindAllStringSubmatch(page.Body.String(), -1)
	if len(refs) < 5 {
		t.Errorf("the page refers to %q", refs)
	}
	for _, ref := range refs {
		rec := get(t, h, ref[1])
		if rec.Code != http.StatusOK || rec.Body.Len() == 0 {
			t.Errorf("%s: %d", ref[1], rec.Code)
		}
		kind := rec.Header().Get("Content-Type")
		for suffix, want := range map[string]string{".js": "text/javascript", ".css": "text/css", ".png": "image/png", ".json": "application/json"} {
			if strings.HasSuffix(ref[1], suffix) && !strings.HasPrefix(kind, want) {
				t.Errorf("%s is %s", ref[1], kind)
			}
		}
	}
	if strings.Contains(page.Body.String(), "<script>") {
		t.Error("a script in the page, which its policy forbids")
	}
	if got := get(t, h, "/openapi.json").Body.String(); got != string(api.OpenAPI) {
		t.Error("/openapi.json is not the document")
	}
	for _, path := range []string{"/docs/nosuch", "/docs/../tokens.json", "/docs/swagger-ui.css.gz"} {
		if rec := get(t, h, path); rec.Code == http.StatusOK {
			t.Errorf("%s: %d", path, rec.Code)
		}
	}
}

func TestDocsAreSentAsTheyAreStored(t *testing.T) {
	h := testServer(t)
	plain, packed := get(t, h, "/docs/swagger-ui.css"), get(t, h, "/docs/swagger-ui.css", "Accept-Encoding", "gzip")
	if packed.Header().Get("Content-Encoding") != "gzip" || plain.Header().Get("Content-Encoding") != "" || packed.Body.Len() >= plain.Body.Len() {
		t.Errorf("%v, %d bytes of %d", packed.Header(), packed.Body.Len(), plain.Body.Len())
	}
}
