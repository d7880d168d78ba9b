package httpapi

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
)

func (s *Server) leftovers(w http.ResponseWriter, r *http.Request) error {
	return replyLeftovers(w, r, s.Host.Leftovers)
}

func (s *Server) cleanup(w http.ResponseWriter, r *http.Request) error {
	return replyLeftovers(w, r, s.Host.Cleanup)
}

func replyLeftovers(w http.ResponseWriter, r *http.Request, find func(context.Context) ([]host.Leftover, error)) error {
	all, err := find(r.Context())
	if err != nil {
		return err
	}
	list := []api.Leftover{}
	for _, l := range all {
		out := api.Leftover{
			Kind: l.Kind, Name: l.Name, Detail: l.Detail, Bytes: l.Bytes, Hint: l.Hint, Kept: l.Kept, Removed: l.Removed,
		}
		if l.Err != nil {
			out.Error = toAPI(l.Err)
		}
		if l.Removed {
			noteTouched(r, l.Kind, l.Name)
		}
		list = append(list, out)
	}
	return Reply(w, http.StatusOK, list)
}
