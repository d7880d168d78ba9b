package client

import (
	"context"
	"net/http"
	"net/url"

	"forkd.dev/forkd/api"
)

// SandboxFilter says which sandboxes are wanted; what is empty lets all through.
type SandboxFilter struct {
	Labels   []string // KEY=VALUE, all of them
	State    string
	Snapshot string // the tag that they were forked from
}

// FilterSandboxes lists those that pass.
func (c *Client) FilterSandboxes(ctx context.Context, f SandboxFilter) ([]api.Sandbox, error) {
	q := url.Values{}
	if len(f.Labels) > 0 {
		q["label"] = f.Labels
	}
	if f.State != "" {
		q.Set("state", f.State)
	}
	if f.Snapshot != "" {
		q.Set("snapshot", f.Snapshot)
	}
	path := "/v1/sandboxes"
	if len(q) > 0 {
		path += "?" + q.Encode()
	}
	var v []api.Sandbox
	return v, c.do(ctx, http.MethodGet, path, nil, &v)
}
