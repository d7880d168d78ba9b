package client

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/guest/call"
)

func portsPath(id string) string { return "/v1/sandboxes/" + seg(id) + "/ports" }

// Ports lists the ports on which services of a sandbox listen, and those that are public.
func (c *Client) Ports(ctx context.Context, id string) ([]api.Port, error) {
	var v api.PortList
	err := c.do(ctx, http.MethodGet, portsPath(id), nil, &v)
	return v.Ports, err
}

// FollowPorts calls each with the ports of a sandbox, and again whenever they change, until ctx, the sandbox or the daemon ends or
// each returns an error, which is returned.
func (c *Client) FollowPorts(ctx context.Context, id string, each func([]api.Port) error) error {
	resp, err := c.send(ctx, http.MethodGet, portsPath(id)+"?follow=true", "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := json.NewDecoder(resp.Body)
	for {
		var v api.PortList
		switch err := lines.Decode(&v); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return c.unreachable(ctx, err)
		}
		if err := each(v.Ports); err != nil {
			return err
		}
	}
}

// SetPort says who may connect to a port of a sandbox.
func (c *Client) SetPort(ctx context.Context, id string, port int, change api.PortChange) error {
	return c.do(ctx, http.MethodPut, portsPath(id)+"/"+strconv.Itoa(port), change, nil)
}

// PortConn is a connection to a service in a sandbox.
type PortConn interface {
	net.Conn
	CloseWrite() error
}

// DialPort connects to a service in a sandbox. Ctx bounds the attempt, not the connection, which has no deadlines.
func (c *Client) DialPort(ctx context.Context, id string, port int) (PortConn, error) {
	conn, err := call.DialPort(ctx, c.Guest(id), port)
	if err != nil {
		return nil, err
	}
	return conn, nil
}
