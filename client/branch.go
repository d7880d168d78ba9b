package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"forkd.dev/forkd/api"
)

// Branch captures a sandbox, which runs on. The snapshot is ready, or, when the request's Wait is false, writing: it
// becomes ready or failed by itself.
func (c *Client) Branch(ctx context.Context, id string, req api.BranchRequest) (*api.Snapshot, error) {
	v := &api.Snapshot{}
	return v, c.do(ctx, http.MethodPost, "/v1/sandboxes/"+seg(id)+"/branch", req, v)
}

// Pause halts a sandbox's CPUs; its memory stays.
func (c *Client) Pause(ctx context.Context, id string) (*api.Sandbox, error) {
	return c.change(ctx, id, "pause")
}

// Resume lets a paused sandbox run on.
func (c *Client) Resume(ctx context.Context, id string) (*api.Sandbox, error) {
	return c.change(ctx, id, "resume")
}

// Suspend writes a sandbox to disk and frees its memory; it keeps its id.
func (c *Client) Suspend(ctx context.Context, id string) (*api.Sandbox, error) {
	return c.change(ctx, id, "suspend")
}

// Wake lets a suspended sandbox run on.
func (c *Client) Wake(ctx context.Context, id string) (*api.Sandbox, error) {
	return c.change(ctx, id, "wake")
}

func (c *Client) change(ctx context.Context, id, what string) (*api.Sandbox, error) {
	v := &api.Sandbox{}
	return v, c.do(ctx, http.MethodPost, "/v1/sandboxes/"+seg(id)+"/"+what, nil, v)
}

// Ping asks a sandbox's agent for a sign of life.
func (c *Client) Ping(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodPost, "/v1/sandboxes/"+seg(id)+"/ping", nil, nil)
}

// Compact makes a snapshot with the content of tag that stands on no other.
func (c *Client) Compact(ctx context.Context, tag, to string) (*api.Snapshot, error) {
	v := &api.Snapshot{}
	return v, c.do(ctx, http.MethodPost, "/v1/snapshots/"+seg(tag)+"/compact", api.CompactRequest{To: to}, v)
}

// WaitSnapshot describes a snapshot once it is no longer being written, or after that time as it is then: look at its
// Status.
func (c *Client) WaitSnapshot(ctx context.Context, tag string, most time.Duration) (*api.SnapshotInfo, error) {
	v := &api.SnapshotInfo{}
	q := url.Values{"wait": {strconv.FormatFloat(most.Seconds(), 'f', -1, 64)}}
	return v, c.do(ctx, http.MethodGet, "/v1/snapshots/"+seg(tag)+"?"+q.Encode(), nil, v)
}

// RemoveSnapshotCascade deletes a snapshot and those that stand on it. It returns the tags that are gone.
func (c *Client) RemoveSnapshotCascade(ctx context.Context, tag string) ([]string, error) {
	return c.removeWith(ctx, tag, "cascade")
}

// RemoveSnapshotForce deletes a snapshot alone, and leaves those that stand on it what they need of it.
func (c *Client) RemoveSnapshotForce(ctx context.Context, tag string) ([]string, error) {
	return c.removeWith(ctx, tag, "force")
}

func (c *Client) removeWith(ctx context.Context, tag, how string) ([]string, error) {
	v := &api.RemoveReply{}
	err := c.do(ctx, http.MethodDelete, "/v1/snapshots/"+seg(tag)+"?"+how+"=true", nil, v)
	return v.Removed, err
}
