package httpapi

import (
	"fmt"
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/lineage"
)

// createSnapshot is the existing forkd's way to a first snapshot: a kernel and a root file system made elsewhere, with its
// agent in it, from paths that the client names.
func (s *Server) createSnapshot(w http.ResponseWriter, r *http.Request) error {
	var req api.CreateSnapshotRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := lineage.CheckTag(req.Tag); err != nil {
		return err
	}
	return &host.HintError{
		Err: fmt.Errorf("snapshot %s of kernel %.200q and root file system %.200q: %w: snapshots are built from recipes here, "+
			"and images of containers or tar files are bases of those", req.Tag, req.Kernel, req.Rootfs, host.ErrUnsupported),
		Try: "POST /v1/builds, or: forkd build RECIPE -t " + req.Tag,
	}
}
