package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
)

// CreateSnapshot boots a copy of a root file system that is in a file on the daemon's host, and freezes the machine. It
// needs scope admin.
func (c *Client) CreateSnapshot(ctx context.Context, req api.CreateSnapshotRequest) (*api.Snapshot, error) {
	v := &api.Snapshot{}
	return v, c.do(ctx, http.MethodPost, "/v1/snapshots", req, v)
}
