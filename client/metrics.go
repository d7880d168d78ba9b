package client

import (
	"context"
	"net/http"
	"net/url"

	"forkd.dev/forkd/api"
)

// Metrics is what a sandbox uses.
func (c *Client) Metrics(ctx context.Context, id string) (*api.Metrics, error) {
	v := &api.Metrics{}
	return v, c.do(ctx, http.MethodGet, "/v1/sandboxes/"+seg(id)+"/metrics", nil, v)
}

// Usage is what a sandbox costs its host.
func (c *Client) Usage(ctx context.Context, id string) (*api.Usage, error) {
	v := &api.Usage{}
	return v, c.do(ctx, http.MethodGet, "/v1/sandboxes/"+seg(id)+"/usage", nil, v)
}

// Usages is what all sandboxes with all the labels ("key=value") cost their host.
func (c *Client) Usages(ctx context.Context, labels []string) ([]api.Usage, error) {
	var v []api.Usage
	q := ""
	if len(labels) > 0 {
		q = "?" + url.Values{"label": labels}.Encode()
	}
	return v, c.do(ctx, http.MethodGet, "/v1/usage"+q, nil, &v)
}
