package client

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
)

// Workspaces lists all workspaces.
func (c *Client) Workspaces(ctx context.Context) ([]api.Workspace, error) {
	var list []api.Workspace
	return list, c.do(ctx, http.MethodGet, "/v1/workspaces", nil, &list)
}

// CreateWorkspace forks a sandbox under a name.
func (c *Client) CreateWorkspace(ctx context.Context, req api.WorkspaceRequest) (*api.Workspace, error) {
	v := &api.Workspace{}
	return v, c.do(ctx, http.MethodPost, "/v1/workspaces", req, v)
}

// Workspace describes one.
func (c *Client) Workspace(ctx context.Context, name string) (*api.Workspace, error) {
	v := &api.Workspace{}
	return v, c.do(ctx, http.MethodGet, "/v1/workspaces/"+seg(name), nil, v)
}

// SuspendWorkspace stores a workspace and frees its memory.
func (c *Client) SuspendWorkspace(ctx context.Context, name string) (*api.Workspace, error) {
	v := &api.Workspace{}
	return v, c.do(ctx, http.MethodPost, "/v1/workspaces/"+seg(name)+"/suspend", nil, v)
}

// ResumeWorkspace lets a suspended one run on.
func (c *Client) ResumeWorkspace(ctx context.Context, name string) (*api.Workspace, error) {
	v := &api.Workspace{}
	return v, c.do(ctx, http.MethodPost, "/v1/workspaces/"+seg(name)+"/resume", nil, v)
}

// RemoveWorkspace ends a workspace and its sandbox.
func (c *Client) RemoveWorkspace(ctx context.Context, name string) error {
	return c.do(ctx, http.MethodDelete, "/v1/workspaces/"+seg(name), nil, nil)
}
