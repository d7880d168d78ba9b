package httpapi

import (
	"net/http"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

func (s *Server) gcOperations() []operation {
	return []operation{
		{"POST /v1/gc", access.Manage, "Remove what nothing needs any more, and snapshots by age, number or size", s.gc},
		{"PUT /v1/snapshots/{tag}/pin", access.Manage, "Keep a snapshot from being removed", s.pin(true)},
		{"DELETE /v1/snapshots/{tag}/pin", access.Manage, "Let it be removed again", s.pin(false)},
	}
}

func gcDocuments() map[string]*document {
	return map[string]*document{
		"POST /v1/gc": {
			id: "gc", body: api.GCRequest{}, replies: ok(api.GCReply{}),
			about: "What is pinned, has sandboxes, or has something on it that stays is never removed. Last used is last forked or packed, or made.",
		},
		"PUT /v1/snapshots/{tag}/pin":    {id: "pinSnapshot", body: struct{}{}, replies: ok(api.Snapshot{})},
		"DELETE /v1/snapshots/{tag}/pin": {id: "unpinSnapshot", replies: ok(api.Snapshot{})},
	}
}

func (s *Server) gc(w http.ResponseWriter, r *http.Request) error {
	var req api.GCRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	const most = 100 * 365 * 24 * 3600
	res, err := s.Host.GC(r.Context(), host.GCSpec{
		OlderThan: time.Duration(min(req.OlderThanSeconds, most) * float64(time.Second)), KeepLast: req.KeepLast, MaxBytes: req.MaxBytes,
		Images: req.Images, DryRun: req.DryRun,
	})
	if err != nil {
		return err
	}
	out := api.GCReply{Items: []api.GCItem{}, Kept: res.Kept, FreedBytes: res.Freed, LeftBytes: res.Left}
	for _, i := range res.Items {
		item := api.GCItem{Kind: i.Kind, Name: i.Name, LastUsedUnix: i.LastUsed.Unix(), Why: i.Why, Removed: i.Removed}
		if i.Err != nil {
			item.Error = toAPI(i.Err)
		}
		if i.Removed {
			noteTouched(r, i.Kind, i.Name)
		}
		out.Items = append(out.Items, item)
	}
	return Reply(w, http.StatusOK, out)
}

func (s *Server) pin(on bool) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		v, err := s.Host.Pin(r.PathValue("tag"), on)
		if err != nil {
			return err
		}
		return Reply(w, http.StatusOK, snapshot(v))
	}
}
