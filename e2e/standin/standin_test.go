package standin

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestStandIns: they answer under their names, with a certificate that the authority stands for.
func TestStandIns(t *testing.T) {
	w, err := Start()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(w.CA) {
		t.Fatal("no authority")
	}
	for name := range w.Names() {
		c := &tls.Config{RootCAs: roots, ServerName: name, MinVersion: tls.VersionTLS12}
		conn, err := tls.Dial("tcp", w.secure.Listener.Addr().String(), c)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		_ = conn.Close()
	}
	for url, says := range map[string]string{
		"http://pypi.org/simple/forkd-standin/":                      "files.pythonhosted.org",
		"http://registry.npmjs.org/forkd-standin":                    "sha512-",
		"http://deb.debian.org/debian/dists/standin/Release":         "binary-amd64",
		"http://proxy.golang.org/example.com/standin/@v/v1.0.0.info": "v1.0.0",
		"http://go.googlesource.com/standin/info/refs":               "refs/heads/main",
		"http://other.example.com/":                                  "no such site",
	} {
		rec := httptest.NewRecorder()
		w.serve(rec, httptest.NewRequest(http.MethodGet, url, nil))
		if !strings.Contains(rec.Body.String(), says) {
			t.Errorf("%s: %d %q", url, rec.Code, rec.Body)
		}
	}
	if got := w.Requests(); len(got) != 6 {
		t.Errorf("noted %q", got)
	}
}
