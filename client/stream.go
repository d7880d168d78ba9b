package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"forkd.dev/forkd/api"
)

const jsonLines = "application/x-ndjson"

// ExecStream runs a command and calls event for what it prints, as it comes, up to its end. When ctx ends, or event returns
// an error, which is returned, the command goes on until its time is up.
func (c *Client) ExecStream(ctx context.Context, id string, req api.ExecRequest, event func(api.ExecEvent) error) error {
	ended := false
	err := stream(ctx, c, "/v1/sandboxes/"+seg(id)+"/exec", req, func(e api.ExecEvent) error {
		if e.Type == "error" {
			return &api.Error{Text: e.Text, Code: e.Code, Message: e.Text}
		}
		ended = e.Type == "exit"
		return event(e)
	})
	if err == nil && !ended {
		return c.unreachable(ctx, io.ErrUnexpectedEOF)
	}
	return err
}

// EvalStream evaluates code in a context and calls event for what it gives, as it comes. When ctx ends the evaluation is
// interrupted.
func (c *Client) EvalStream(ctx context.Context, id string, req api.EvalRequest, event func(*api.EvalEvent) error) error {
	ended := false
	err := stream(ctx, c, "/v1/sandboxes/"+seg(id)+"/eval", req, func(e api.EvalEvent) error {
		ended = e.Type == "end_of_execution" || e.Type == "unexpected_end_of_execution"
		return event(&e)
	})
	if err == nil && !ended {
		return c.unreachable(ctx, io.ErrUnexpectedEOF)
	}
	return err
}

// stream posts a request and calls event for each line of the reply.
func stream[E any](ctx context.Context, c *Client, path string, in any, event func(E) error) error {
	resp, err := c.sendWith(ctx, http.MethodPost, path, http.Header{"Accept": {jsonLines}}, in)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for lines := json.NewDecoder(resp.Body); ; {
		var e E
		switch err := lines.Decode(&e); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return c.unreachable(ctx, err)
		}
		if err := event(e); err != nil {
			return err
		}
	}
}

// ReadFilePart opens at most n bytes of a file of a sandbox, from offset on; the caller closes it. The offset is before the
// file's end. A file whose size nobody knows, as those of /proc, is read from its beginning, and what is before thrown away.
func (c *Client) ReadFilePart(ctx context.Context, id, path, user string, offset, n int64) (io.ReadCloser, error) {
	part := http.Header{"Range": {fmt.Sprintf("bytes=%d-%d", offset, offset+n-1)}}
	resp, err := c.sendWith(ctx, http.MethodGet, c.filesPath(id, "", fileQuery(path, user)), part, nil)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusPartialContent {
		return resp.Body, nil
	}
	if _, err := io.CopyN(io.Discard, resp.Body, offset); err != nil && !errors.Is(err, io.EOF) {
		return nil, errors.Join(c.unreachable(ctx, err), resp.Body.Close())
	}
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(resp.Body, n), resp.Body}, nil
}
