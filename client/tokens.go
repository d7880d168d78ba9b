package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
)

// CreateToken makes a token: the reply is the only one that has it.
func (c *Client) CreateToken(ctx context.Context, req api.TokenRequest) (*api.Token, error) {
	v := &api.Token{}
	path := "/v1/tokens"
	if req.Sandbox != "" { // needs no administrator
		path = "/v1/sandboxes/" + seg(req.Sandbox) + "/tokens"
	}
	return v, c.do(ctx, http.MethodPost, path, req, v)
}

// Tokens lists all, or those of one sandbox.
func (c *Client) Tokens(ctx context.Context, sandbox string) ([]api.Token, error) {
	path := "/v1/tokens"
	if sandbox != "" {
		path = "/v1/sandboxes/" + seg(sandbox) + "/tokens"
	}
	var v []api.Token
	return v, c.do(ctx, http.MethodGet, path, nil, &v)
}

// RevokeToken ends a token, and what is being done with it.
func (c *Client) RevokeToken(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, "/v1/tokens/"+seg(id), nil, nil)
}

// RevokeSandboxToken ends a token of a sandbox; whoever manages sandboxes may.
func (c *Client) RevokeSandboxToken(ctx context.Context, sandbox, id string) error {
	return c.do(ctx, http.MethodDelete, "/v1/sandboxes/"+seg(sandbox)+"/tokens/"+seg(id), nil, nil)
}
