package client

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"forkd.dev/forkd/api"
)

func (c *Client) filesPath(id, route string, q url.Values) string {
	p := "/v1/sandboxes/" + seg(id) + "/files" + route
	if len(q) > 0 {
		p += "?" + q.Encode()
	}
	return p
}

func fileQuery(path, user string) url.Values {
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("user", user)
	}
	return q
}

// Files lists a directory of a sandbox, to a depth from 1. An empty user is the image's.
func (c *Client) Files(ctx context.Context, id, path string, depth int, user string) ([]api.File, error) {
	var v []api.File
	q := fileQuery(path, user)
	q.Set("depth", strconv.Itoa(depth))
	return v, c.do(ctx, http.MethodGet, c.filesPath(id, "/list", q), nil, &v)
}

// File describes a file of a sandbox.
func (c *Client) File(ctx context.Context, id, path, user string) (*api.File, error) {
	v := &api.File{}
	return v, c.do(ctx, http.MethodGet, c.filesPath(id, "/stat", fileQuery(path, user)), nil, v)
}

// ReadFile opens a file of a sandbox; the caller closes it.
func (c *Client) ReadFile(ctx context.Context, id, path, user string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, http.MethodGet, c.filesPath(id, "", fileQuery(path, user)), "", nil)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// WriteFile creates or replaces a file of a sandbox. It appears when all has arrived.
func (c *Client) WriteFile(ctx context.Context, id, path, user string, data io.Reader) (*api.File, error) {
	resp, err := c.send(ctx, http.MethodPut, c.filesPath(id, "", fileQuery(path, user)), "application/octet-stream", data)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var v [1]api.File
	return &v[0], json.NewDecoder(resp.Body).Decode(&v)
}

// MakeDir makes a directory of a sandbox, with those above it.
func (c *Client) MakeDir(ctx context.Context, id string, req api.FileRequest) (*api.File, error) {
	v := &api.File{}
	return v, c.do(ctx, http.MethodPost, c.filesPath(id, "/mkdir", nil), req, v)
}

// MoveFile renames within a sandbox.
func (c *Client) MoveFile(ctx context.Context, id string, req api.MoveRequest) (*api.File, error) {
	v := &api.File{}
	return v, c.do(ctx, http.MethodPost, c.filesPath(id, "/move", nil), req, v)
}

// RemoveFile deletes a file of a sandbox, or a directory with all that is in it.
func (c *Client) RemoveFile(ctx context.Context, id string, req api.FileRequest) error {
	return c.do(ctx, http.MethodPost, c.filesPath(id, "/remove", nil), req, nil)
}

// ComposeFiles makes one file of several, which are gone then.
func (c *Client) ComposeFiles(ctx context.Context, id string, req api.ComposeRequest) (*api.File, error) {
	v := &api.File{}
	return v, c.do(ctx, http.MethodPost, c.filesPath(id, "/compose", nil), req, v)
}

// WatchFiles calls event for every change in a directory of a sandbox until ctx ends or the directory is gone. The first
// event says that it has started: what happens from then on is reported.
func (c *Client) WatchFiles(ctx context.Context, id string, req api.WatchRequest, event func(api.FileEvent)) error {
	q := fileQuery(req.Path, req.User)
	for name, on := range map[string]bool{"recursive": req.Recursive, "entries": req.Entries, "allow_network_mounts": req.AllowNetworkMounts} {
		if on {
			q.Set(name, "true")
		}
	}
	resp, err := c.send(ctx, http.MethodGet, c.filesPath(id, "/watch", q), "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for lines := json.NewDecoder(resp.Body); ; {
		var e api.FileEvent
		err := lines.Decode(&e)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return c.unreachable(ctx, err)
		case e.Error != nil:
			return e.Error
		}
		event(e)
	}
}
