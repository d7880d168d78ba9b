package httpapi

import (
	"fmt"
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/lineage"
)

// createSnapshot is the existing forkd's way to a first snapshot: a kernel and a root file system made elsewhere, from paths
// that the client names. That file system's own init, with the existing forkd's agent, is not started: ours is.
func (s *Server) createSnapshot(w http.ResponseWriter, r *http.Request) error {
	var req api.CreateSnapshotRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := lineage.CheckTag(req.Tag); err != nil {
		return err
	}
	noteTouched(r, "snapshot", req.Tag)
	if req.Tap != "" {
		return &host.HintError{
			Err: fmt.Errorf("tap %.60q: %w: no sandbox has an interface of the host", req.Tap, host.ErrUnsupported), Try: "leave tap out",
		}
	}
	view, err := s.Host.Build(r.Context(), host.BuildSpec{
		Tag: req.Tag, Kernel: req.Kernel,
		Rootfs: &host.RootfsSpec{Path: req.Rootfs, CPUs: req.CPUs, MemoryBytes: req.MemoryBytes},
	}, func(host.Event) {})
	if err != nil {
		return err
	}
	noteCreated(r, "snapshot", view.Tag)
	return Reply(w, http.StatusCreated, snapshot(view))
}
