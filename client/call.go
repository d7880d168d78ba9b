package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

// callProtocol as httpapi has it.
const callProtocol = "forkd-call/1"

// Guest opens calls into one sandbox's agent, through the daemon. It implements call.Opener.
type Guest struct {
	c  *Client
	id string
}

// Guest returns the calls of a sandbox; it does not look whether there is one.
func (c *Client) Guest(id string) *Guest { return &Guest{c: c, id: id} }

// Open opens a stream for one call.
func (g *Guest) Open(ctx context.Context, method string, in any) (*wire.Stream, error) {
	conn, err := g.c.upgrade(ctx, "/v1/sandboxes/"+seg(g.id)+"/call")
	if err != nil {
		return nil, err
	}
	s := wire.NewStream(conn)
	if err := s.SendRequest(method, in); err != nil {
		return nil, errors.Join(fmt.Errorf("send %s: %w", method, err), s.Close())
	}
	return s, nil
}

// Run starts a process and returns how it ended.
func (g *Guest) Run(ctx context.Context, req wire.StartRequest, stdin io.Reader, out call.Output, started call.Started) (*wire.ProcessEnd, error) {
	return call.Run(ctx, g, req, stdin, out, started)
}

// Eval evaluates code in a context, streaming what it prints.
func (g *Guest) Eval(ctx context.Context, req wire.EvalRequest, out call.Output) (*wire.EvalResult, error) {
	return call.Eval(ctx, g, req, out)
}

// upgrade makes a connection of its own for one call.
func (c *Client) upgrade(ctx context.Context, path string) (net.Conn, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	buffered, err := c.handshake(ctx, conn, c.base+path)
	if !stop() && ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &upgraded{Conn: conn, r: buffered}, nil
}

func (c *Client) handshake(ctx context.Context, conn net.Conn, url string) (*bufio.Reader, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, nil)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", callProtocol)
	c.authorize(req)
	if err := req.Write(conn); err != nil {
		return nil, fmt.Errorf("send request: %w", err)
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		return nil, fmt.Errorf("read the daemon's reply: %w", err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		return nil, refusal(resp)
	}
	return r, nil
}

// upgraded reads what the reader had buffered first.
type upgraded struct {
	net.Conn
	r *bufio.Reader
}

func (u *upgraded) Read(p []byte) (int, error) { return u.r.Read(p) }
