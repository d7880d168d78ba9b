package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
)

// Leftovers lists what nobody needs any more.
func (c *Client) Leftovers(ctx context.Context) ([]api.Leftover, error) {
	var list []api.Leftover
	return list, c.do(ctx, http.MethodGet, "/v1/leftovers", nil, &list)
}

// Cleanup removes it, and says of each what became of it.
func (c *Client) Cleanup(ctx context.Context) ([]api.Leftover, error) {
	var list []api.Leftover
	return list, c.do(ctx, http.MethodDelete, "/v1/leftovers", nil, &list)
}
