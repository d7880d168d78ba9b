package daemon

import (
	"net/http"

	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/e2bapi"
	"forkd.dev/forkd/internal/httpapi"
)

// withE2B puts E2B's protocol in front of the native API: their routes do not collide.
func withE2B(cfg Config, s *httpapi.Server) (http.Handler, error) {
	seed, err := access.OpenSeed(cfg.Home.Seed())
	if err != nil {
		return nil, err
	}
	return e2bapi.New(e2bapi.Config{Host: s.Host, API: s, Seed: seed, Domain: cfg.Domain, Log: cfg.Log}).Handler(s.Handler()), nil
}
