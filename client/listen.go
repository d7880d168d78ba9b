package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
)

// Listen has the daemon serve TCP, if it does not already, and says where.
func (c *Client) Listen(ctx context.Context, bind string) (*api.VersionInfo, error) {
	v := &api.VersionInfo{}
	return v, c.do(ctx, http.MethodPost, "/v1/listener", api.ListenRequest{Bind: bind}, v)
}
