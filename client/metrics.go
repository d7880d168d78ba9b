package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
)

// Metrics is what a sandbox uses.
func (c *Client) Metrics(ctx context.Context, id string) (*api.Metrics, error) {
	v := &api.Metrics{}
	return v, c.do(ctx, http.MethodGet, "/v1/sandboxes/"+seg(id)+"/metrics", nil, v)
}
