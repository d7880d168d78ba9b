package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

// Evaluate evaluates code in a context, streaming what it prints and what it shows.
func (g *Guest) Evaluate(ctx context.Context, req wire.EvalRequest, out call.Evaluation) (*wire.EvalResult, error) {
	return call.Evaluate(ctx, g, req, out)
}

// Contexts lists a sandbox's interpreters.
func (c *Client) Contexts(ctx context.Context, id string) ([]api.Context, error) {
	var v []api.Context
	return v, c.do(ctx, http.MethodGet, "/v1/sandboxes/"+seg(id)+"/contexts", nil, &v)
}

// CreateContext starts an interpreter.
func (c *Client) CreateContext(ctx context.Context, id string, req api.ContextRequest) (*api.Context, error) {
	v := &api.Context{}
	return v, c.do(ctx, http.MethodPost, "/v1/sandboxes/"+seg(id)+"/contexts", req, v)
}

// RestartContext starts an interpreter anew as it was started first.
func (c *Client) RestartContext(ctx context.Context, id, name string) (*api.Context, error) {
	v := &api.Context{}
	return v, c.do(ctx, http.MethodPost, contextPath(id, name)+"/restart", nil, v)
}

// InterruptContext interrupts what an interpreter evaluates.
func (c *Client) InterruptContext(ctx context.Context, id, name string) error {
	return c.do(ctx, http.MethodPost, contextPath(id, name)+"/interrupt", nil, nil)
}

// RemoveContext ends an interpreter.
func (c *Client) RemoveContext(ctx context.Context, id, name string) error {
	return c.do(ctx, http.MethodDelete, contextPath(id, name), nil, nil)
}

func contextPath(id, name string) string {
	return "/v1/sandboxes/" + seg(id) + "/contexts/" + seg(name)
}
