package httpapi

import (
	"net/http"

	"forkd.dev/forkd/api"
)

// setTTL gives a sandbox another time to live, from now on.
func (s *Server) setTTL(w http.ResponseWriter, r *http.Request) error {
	var req api.TTLRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := secondsOK("ttl_seconds", req.TTLSeconds); err != nil {
		return err
	}
	v, err := s.Host.SetTTL(r.PathValue("id"), seconds(req.TTLSeconds), req.Longer)
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, s.sandboxView(v))
}
