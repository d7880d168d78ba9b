package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
)

// SetTTL gives a sandbox another time to live, from now on.
func (c *Client) SetTTL(ctx context.Context, id string, req api.TTLRequest) (*api.Sandbox, error) {
	v := &api.Sandbox{}
	return v, c.do(ctx, http.MethodPut, "/v1/sandboxes/"+seg(id)+"/ttl", req, v)
}
