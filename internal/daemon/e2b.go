package daemon

import (
	"context"
	"net/http"
	"path/filepath"
	"time"

	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/e2bapi"
	"forkd.dev/forkd/internal/httpapi"
)

// withE2B puts E2B's protocol in front of the native API: their routes do not collide.
// The builds that its clients begin end with life, and are waited for by wait.
func withE2B(life context.Context, cfg Config, s *httpapi.Server) (handler http.Handler, wait func(), err error) {
	seed, err := access.OpenSeed(cfg.Home.Seed())
	if err != nil {
		return nil, nil, err
	}
	uploads := filepath.Join(cfg.Home.Cache(), "e2b")
	if err := e2bapi.SweepUploads(uploads, time.Now()); err != nil {
		cfg.Log.Warn("sweep the files of templates' builds", "error", err)
	}
	e := e2bapi.New(e2bapi.Config{
		Host: s.Host, API: s, Seed: seed, Domain: cfg.Domain, Egress: cfg.E2BEgress, Log: cfg.Log, Life: life, Uploads: uploads,
	})
	return s.Patient(e.Handler(s.Handler())), e.Wait, nil //nolint:contextcheck // Each request has its own.
}
