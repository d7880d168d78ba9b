package client

import (
	"context"
	"io"
	"net/http"

	"forkd.dev/forkd/api"
)

// Processes lists what was started in a sandbox from outside and runs, with ended also what has ended and can still be
// asked for.
func (c *Client) Processes(ctx context.Context, id string, ended bool) ([]api.Process, error) {
	path := "/v1/sandboxes/" + seg(id) + "/processes"
	if ended {
		path += "?ended=true"
	}
	var v []api.Process
	return v, c.do(ctx, http.MethodGet, path, nil, &v)
}

// Signal sends a signal to a process, named by its pid or tag.
func (c *Client) Signal(ctx context.Context, id, process string, req api.SignalRequest) error {
	return c.do(ctx, http.MethodPost, "/v1/sandboxes/"+seg(id)+"/processes/"+seg(process)+"/signal", req, nil)
}

// FollowLogs copies the newest part of a sandbox's console to w, and what it prints from then on, until the sandbox or
// ctx ends.
func (c *Client) FollowLogs(ctx context.Context, id string, w io.Writer) error {
	resp, err := c.send(ctx, http.MethodGet, "/v1/sandboxes/"+seg(id)+"/logs?follow=true", "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(w, resp.Body); err != nil {
		return c.unreachable(ctx, err)
	}
	return nil
}
