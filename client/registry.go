package client

import (
	"context"
	"encoding/json"
	"net/http"

	"forkd.dev/forkd/api"
)

// Push brings a snapshot to a registry; event is told how it goes.
func (c *Client) Push(ctx context.Context, tag string, req api.PushRequest, event func(api.TransferEvent)) (*api.Pushed, error) {
	last, err := c.transfer(ctx, "/v1/snapshots/"+seg(tag)+"/push", req, event)
	return last.Pushed, err
}

// Pull makes snapshots of one in a registry; event is told how it goes.
func (c *Client) Pull(ctx context.Context, req api.PullRequest, event func(api.TransferEvent)) (*api.Pulled, error) {
	req.Verify = false
	last, err := c.transfer(ctx, "/v1/pulls", req, event)
	return last.Pulled, err
}

// VerifyRemote reads all of a snapshot in a registry and checks it.
func (c *Client) VerifyRemote(ctx context.Context, req api.PullRequest, event func(api.TransferEvent)) (*api.RemoteVerified, error) {
	req.Verify = true
	last, err := c.transfer(ctx, "/v1/pulls", req, event)
	return last.Verified, err
}

// transfer follows one to its end and returns the last event.
func (c *Client) transfer(ctx context.Context, path string, body any, event func(api.TransferEvent)) (api.TransferEvent, error) {
	resp, err := c.sendWith(ctx, http.MethodPost, path, http.Header{}, body)
	if err != nil {
		return api.TransferEvent{}, err
	}
	defer resp.Body.Close()
	lines := json.NewDecoder(resp.Body)
	for {
		var e api.TransferEvent
		if err := lines.Decode(&e); err != nil {
			return api.TransferEvent{}, c.unreachable(ctx, err)
		}
		switch {
		case e.Error != nil:
			return api.TransferEvent{}, e.Error
		case e.Pushed != nil || e.Pulled != nil || e.Verified != nil:
			return e, nil
		}
		event(e)
	}
}
