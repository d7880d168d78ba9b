package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
)

// GC removes what the request lets go, or says what that would be.
func (c *Client) GC(ctx context.Context, req api.GCRequest) (*api.GCReply, error) {
	v := &api.GCReply{}
	return v, c.do(ctx, http.MethodPost, "/v1/gc", req, v)
}

// Pin keeps a snapshot from being removed; without on it lets it be.
func (c *Client) Pin(ctx context.Context, tag string, on bool) (*api.Snapshot, error) {
	v := &api.Snapshot{}
	if on {
		return v, c.do(ctx, http.MethodPut, "/v1/snapshots/"+seg(tag)+"/pin", struct{}{}, v)
	}
	return v, c.do(ctx, http.MethodDelete, "/v1/snapshots/"+seg(tag)+"/pin", nil, v)
}
