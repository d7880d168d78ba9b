package httpapi

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"

	"github.com/swaggest/swgui/v5/static"

	"forkd.dev/forkd/api"
)

// docsPolicy lets the page have what this daemon serves, and nothing from elsewhere. Swagger UI sets styles on elements.
const docsPolicy = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

const docsPage = `<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>forkd ` + api.Version + `</title>
<link rel="stylesheet" href="/docs/swagger-ui.css">
<link rel="icon" type="image/png" href="/docs/favicon-32x32.png">
</head>
<body>
<div id="ui"></div>
<noscript>The document itself is <a href="/openapi.json">/openapi.json</a>.</noscript>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</body>
</html>
`

const docsScript = `window.ui = SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#ui",
  deepLinking: true,
  docExpansion: "list",
  validatorUrl: null,
});
`

func (s *Server) openAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	_, err := w.Write(api.OpenAPI)
	return err
}

// docs serves the document as a page to read and to try things on.
func (s *Server) docs(w http.ResponseWriter, r *http.Request) error {
	h := w.Header()
	h.Set("Content-Security-Policy", docsPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	switch name := r.PathValue("file"); name {
	case "":
		return send(w, "text/html; charset=utf-8", strings.NewReader(docsPage))
	case "start.js":
		return send(w, "text/javascript; charset=utf-8", strings.NewReader(docsScript))
	case "swagger-ui-bundle.js":
		return s.asset(w, r, name+".gz", "text/javascript; charset=utf-8")
	case "swagger-ui.css":
		return s.asset(w, r, name+".gz", "text/css; charset=utf-8")
	case "favicon-32x32.png":
		return s.asset(w, r, name, "image/png")
	}
	return noRoute(w, r)
}

func send(w http.ResponseWriter, media string, from io.Reader) error {
	w.Header().Set("Content-Type", media)
	w.WriteHeader(http.StatusOK)
	_, err := io.Copy(w, from)
	return err
}

// asset sends an embedded file, as it is stored where the client takes that.
func (s *Server) asset(w http.ResponseWriter, r *http.Request, name, media string) error {
	stored, err := fs.ReadFile(static.FS, name)
	if err != nil {
		return fmt.Errorf("read a page's file: %w", err)
	}
	w.Header().Set("Cache-Control", "max-age=3600")
	if !strings.HasSuffix(name, ".gz") {
		return send(w, media, bytes.NewReader(stored))
	}
	w.Header().Set("Vary", "Accept-Encoding")
	packed, err := wantsGzip(r)
	if err != nil {
		return err
	}
	if packed {
		w.Header().Set("Content-Encoding", "gzip")
		return send(w, media, bytes.NewReader(stored))
	}
	z, err := gzip.NewReader(bytes.NewReader(stored))
	if err != nil {
		return fmt.Errorf("read a page's file: %w", err)
	}
	return errors.Join(send(w, media, z), z.Close())
}
