package mcp

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

const (
	scheme   = "forkd://"
	jsonType = "application/json"
	textType = "text/plain"
)

// resources are what can be looked at without a tool: each sandbox and snapshot, lists of them, the tree.
func (s *server) resources(m *mcp.Server) {
	for _, r := range []*mcp.Resource{
		{URI: scheme + "sandboxes", Name: "sandboxes", Description: "All sandboxes.", MIMEType: jsonType},
		{URI: scheme + "snapshots", Name: "snapshots", Description: "All snapshots.", MIMEType: jsonType},
		{URI: scheme + "tree", Name: "tree", Description: "Images, snapshots and sandboxes as a family tree.", MIMEType: jsonType},
	} {
		m.AddResource(r, s.read)
	}
	for _, t := range []*mcp.ResourceTemplate{
		{URITemplate: scheme + "sandboxes/{id}", Name: "sandbox", Description: "A sandbox.", MIMEType: jsonType},
		{URITemplate: scheme + "sandboxes/{id}/logs", Name: "console", Description: "A sandbox's console.", MIMEType: textType},
		{URITemplate: scheme + "snapshots/{tag}", Name: "snapshot", Description: "A snapshot.", MIMEType: jsonType},
	} {
		m.AddResourceTemplate(t, s.read)
	}
	m.AddReceivingMiddleware(s.listed)
}

// listed adds to the list of resources what is there now.
func (s *server) listed(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
		res, err := next(ctx, method, req)
		list, ok := res.(*mcp.ListResourcesResult)
		if err != nil || !ok || list.NextCursor != "" {
			return res, err
		}
		c, err := s.cfg.Connect(ctx)
		if err != nil {
			return nil, explain(err)
		}
		defer c.Close()
		sandboxes, err := c.Sandboxes(ctx, nil)
		if err != nil {
			return nil, explain(err)
		}
		snapshots, err := c.Snapshots(ctx)
		if err != nil {
			return nil, explain(err)
		}
		for i := range sandboxes {
			v := &sandboxes[i]
			list.Resources = append(list.Resources, &mcp.Resource{
				URI: scheme + "sandboxes/" + url.PathEscape(v.ID), Name: v.ID, MIMEType: jsonType,
				Description: fmt.Sprintf("Sandbox of %s, %s.", v.SnapshotTag, v.State),
			})
		}
		for i := range snapshots {
			v := &snapshots[i]
			list.Resources = append(list.Resources, &mcp.Resource{
				URI: scheme + "snapshots/" + url.PathEscape(v.Tag), Name: v.Tag, MIMEType: jsonType, Description: fmt.Sprintf("Snapshot, %s.", v.Status),
			})
		}
		return list, nil
	}
}

func (s *server) read(ctx context.Context, req *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
	uri := req.Params.URI
	c, err := s.cfg.Connect(ctx)
	if err != nil {
		return nil, explain(err)
	}
	defer c.Close()
	value, err := lookAt(ctx, c, strings.Split(strings.TrimPrefix(uri, scheme), "/"))
	if e, ok := err.(*api.Error); ok && e.Code == api.CodeNotFound { //nolint:errorlint // It is returned as it is.
		return nil, mcp.ResourceNotFoundError(uri)
	}
	if err != nil {
		return nil, explain(err)
	}
	content := &mcp.ResourceContents{URI: uri, MIMEType: jsonType}
	if text, ok := value.(string); ok {
		content.MIMEType, content.Text = textType, text
	} else {
		text, err := json.MarshalIndent(value, "", "  ")
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", uri, err)
		}
		content.Text = string(text)
	}
	return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{content}}, nil
}

// lookAt is what a resource's path names.
func lookAt(ctx context.Context, c *client.Client, path []string) (any, error) {
	for i := range path {
		part, err := url.PathUnescape(path[i])
		if err != nil {
			return nil, &api.Error{Code: api.CodeNotFound, Message: "no such resource"}
		}
		path[i] = part
	}
	switch {
	case len(path) == 1 && path[0] == "sandboxes":
		list, err := c.Sandboxes(ctx, nil)
		return brief(list...), err
	case len(path) == 1 && path[0] == "snapshots":
		return c.Snapshots(ctx)
	case len(path) == 1 && path[0] == "tree":
		return c.Tree(ctx)
	case len(path) == 2 && path[0] == "sandboxes":
		return c.Sandbox(ctx, path[1])
	case len(path) == 3 && path[0] == "sandboxes" && path[2] == "logs":
		text, err := c.Logs(ctx, path[1])
		if len(text) == 0 { // A content without text is none.
			text = []byte("(nothing was printed)\n")
		}
		return strings.ToValidUTF8(string(text), "\uFFFD"), err
	case len(path) == 2 && path[0] == "snapshots":
		return c.SnapshotInfo(ctx, path[1])
	}
	return nil, &api.Error{Code: api.CodeNotFound, Message: "no such resource"}
}
