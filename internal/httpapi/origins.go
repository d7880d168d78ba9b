package httpapi

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// AnyOrigin lets pages of every origin read answers.
const AnyOrigin = "*"

// CheckOrigin says whether a text is an origin as browsers name them.
func CheckOrigin(text string) error {
	if text == AnyOrigin {
		return nil
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme == "" || u.Host == "" || u.Scheme+"://"+u.Host != text || text != strings.ToLower(text) {
		return fmt.Errorf("%.100q is no origin: give scheme, host and port as browsers do, such as https://app.example.com", text)
	}
	return nil
}

// Origins lets pages of these origins read the answers of next, which takes part in that no further: without a token they learn
// nothing. Cookies and the like are never asked for. What services in sandboxes answer is theirs to share. Without origins it
// is next as it is.
func Origins(origins []string, domain string, next http.Handler) http.Handler {
	if len(origins) == 0 {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if forServiceOf(r, domain) {
			next.ServeHTTP(w, r)
			return
		}
		h := w.Header()
		h.Add("Vary", "Origin")
		origin := r.Header.Get("Origin")
		if origin == "" || !slices.Contains(origins, origin) && !slices.Contains(origins, AnyOrigin) {
			next.ServeHTTP(w, r)
			return
		}
		h.Set("Access-Control-Allow-Origin", origin)
		if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
			h.Set("Access-Control-Expose-Headers", "X-Request-Id, Retry-After, Content-Range, Content-Disposition")
			next.ServeHTTP(w, r)
			return
		}
		h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
		if asked := r.Header.Get("Access-Control-Request-Headers"); asked != "" { // metadata of files has names of anybody's
			h.Set("Access-Control-Allow-Headers", asked)
		}
		if r.Header.Get("Access-Control-Request-Private-Network") == "true" {
			h.Set("Access-Control-Allow-Private-Network", "true")
		}
		h.Set("Access-Control-Max-Age", "600")
		w.WriteHeader(http.StatusNoContent)
	})
}

// forServiceOf reports whether a request is for a service in a sandbox: by path, or by a name below the domain.
func forServiceOf(r *http.Request, domain string) bool {
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if domain != "" && strings.HasSuffix(strings.ToLower(host), "."+domain) {
		return true
	}
	parts := strings.Split(r.URL.Path, "/") // "", v1, sandboxes, ID, ports, PORT, …
	return len(parts) > 6 && parts[1] == "v1" && parts[2] == "sandboxes" && parts[4] == "ports"
}
