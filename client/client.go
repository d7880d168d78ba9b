// Package client talks to a forkd daemon: over its unix socket, or over TCP. It is the only way the command line
// reaches the daemon, and what other Go programs use. A Client is safe for concurrent use.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"

	"forkd.dev/forkd/api"
)

// Errors of the way to the daemon, as opposed to its refusals, which are *api.Error.
var (
	// ErrNoDaemon means that nothing answers at the address.
	ErrNoDaemon = errors.New("no daemon answers")
	// ErrGone means that the daemon ended in the middle of a request.
	ErrGone = errors.New("the daemon went away in the middle of the request")
)

// Client is a connection to one daemon. New connects to nothing yet.
type Client struct {
	address string // as the user gave it
	base    string
	token   string
	dial    func(ctx context.Context) (net.Conn, error)
	http    *http.Client
}

// New makes a client of unix:///path, http://host:port or https://host:port. See Open for tokens and certificates.
func New(address string) (*Client, error) { return Open(Config{Address: address}) }

func newClient(cfg Config, base string, dial func(context.Context) (net.Conn, error)) *Client {
	connect := func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }
	transport := &http.Transport{DialContext: connect, DialTLSContext: connect, DisableCompression: true}
	return &Client{address: cfg.Address, base: base, token: cfg.Token, dial: dial, http: &http.Client{Transport: transport}}
}

// authorize shows the token, if there is one.
func (c *Client) authorize(req *http.Request) {
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
}

// Address is what New was given.
func (c *Client) Address() string { return c.address }

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// do sends a request and decodes the reply into out, unless it is nil. The error of a refusal is an *api.Error.
func (c *Client) do(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode request: %w", err)
		}
		body = bytes.NewReader(b)
	}
	resp, err := c.send(ctx, method, path, "application/json", body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		_, err := io.Copy(io.Discard, resp.Body)
		return err
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("read the daemon's reply: %w", err)
	}
	return nil
}

// send sends a request; the caller closes the body of the reply, which is a success.
func (c *Client) send(ctx context.Context, method, path, contentType string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	if body != nil {
		req.Header.Set("Content-Type", contentType)
	}
	return c.roundTrip(req)
}

// sendWith is send with headers, and with a JSON body unless in is nil.
func (c *Client) sendWith(ctx context.Context, method, path string, header http.Header, in any) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
		body = bytes.NewReader(b)
		header.Set("Content-Type", "application/json")
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header = header
	return c.roundTrip(req)
}

func (c *Client) roundTrip(req *http.Request) (*http.Response, error) {
	c.authorize(req)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(req.Context(), err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		defer resp.Body.Close()
		return nil, refusal(resp)
	}
	return resp, nil
}

func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if e, ok := errors.AsType[*untrustedError](err); ok {
		return fmt.Errorf("%w (%s): %w", ErrUntrusted, c.address, e)
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return fmt.Errorf("%w at %s: %w", ErrNoDaemon, c.address, op.Err)
	}
	if errors.Is(err, fs.ErrNotExist) { // not even the socket's directory is there
		return fmt.Errorf("%w at %s", ErrNoDaemon, c.address)
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	return fmt.Errorf("%w (%s): %w", ErrGone, c.address, err)
}

func refusal(resp *http.Response) error {
	const most = 1 << 20
	text, err := io.ReadAll(io.LimitReader(resp.Body, most))
	if err != nil {
		return fmt.Errorf("read the daemon's error: %w", err)
	}
	e := &api.Error{}
	if err := json.Unmarshal(text, e); err != nil || e.Message == "" {
		return fmt.Errorf("the daemon replied %s: %.200q", resp.Status, text)
	}
	e.Status = resp.StatusCode
	return e
}

func seg(s string) string { return url.PathEscape(s) }

// Version asks who the daemon is.
func (c *Client) Version(ctx context.Context) (*api.VersionInfo, error) {
	v := &api.VersionInfo{}
	return v, c.do(ctx, http.MethodGet, "/version", nil, v)
}

// Host asks what the host offers.
func (c *Client) Host(ctx context.Context) (*api.HostInfo, error) {
	v := &api.HostInfo{}
	return v, c.do(ctx, http.MethodGet, "/v1/host", nil, v)
}

// Fork makes children of a snapshot.
func (c *Client) Fork(ctx context.Context, req api.ForkRequest) ([]api.Sandbox, error) {
	var v []api.Sandbox
	return v, c.do(ctx, http.MethodPost, "/v1/sandboxes", req, &v)
}

// Sandboxes lists those with all the labels ("key=value").
func (c *Client) Sandboxes(ctx context.Context, labels []string) ([]api.Sandbox, error) {
	return c.FilterSandboxes(ctx, SandboxFilter{Labels: labels})
}

// Sandbox describes one.
func (c *Client) Sandbox(ctx context.Context, id string) (*api.Sandbox, error) {
	v := &api.Sandbox{}
	return v, c.do(ctx, http.MethodGet, "/v1/sandboxes/"+seg(id), nil, v)
}

// Kill ends a sandbox.
func (c *Client) Kill(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, "/v1/sandboxes/"+seg(id), nil, nil)
}

// Exec runs a command and returns what it printed.
func (c *Client) Exec(ctx context.Context, id string, req api.ExecRequest) (*api.ExecResponse, error) {
	v := &api.ExecResponse{}
	return v, c.do(ctx, http.MethodPost, "/v1/sandboxes/"+seg(id)+"/exec", req, v)
}

// Eval evaluates code in a context and returns what it gave.
func (c *Client) Eval(ctx context.Context, id string, req api.EvalRequest) (*api.EvalResponse, error) {
	v := &api.EvalResponse{}
	return v, c.do(ctx, http.MethodPost, "/v1/sandboxes/"+seg(id)+"/eval", req, v)
}

// Logs is the newest part of a sandbox's console.
func (c *Client) Logs(ctx context.Context, id string) ([]byte, error) {
	resp, err := c.send(ctx, http.MethodGet, "/v1/sandboxes/"+seg(id)+"/logs", "", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// Snapshots lists all.
func (c *Client) Snapshots(ctx context.Context) ([]api.Snapshot, error) {
	var v []api.Snapshot
	return v, c.do(ctx, http.MethodGet, "/v1/snapshots", nil, &v)
}

// SnapshotsAndSteps lists the steps of builds as well, which are kept for later builds.
func (c *Client) SnapshotsAndSteps(ctx context.Context) ([]api.Snapshot, error) {
	var v []api.Snapshot
	return v, c.do(ctx, http.MethodGet, "/v1/snapshots?all=true", nil, &v)
}

// SnapshotInfo describes one.
func (c *Client) SnapshotInfo(ctx context.Context, tag string) (*api.SnapshotInfo, error) {
	v := &api.SnapshotInfo{}
	return v, c.do(ctx, http.MethodGet, "/v1/snapshots/"+seg(tag)+"/info", nil, v)
}

// RemoveSnapshot deletes one.
func (c *Client) RemoveSnapshot(ctx context.Context, tag string) error {
	return c.do(ctx, http.MethodDelete, "/v1/snapshots/"+seg(tag), nil, nil)
}

// Images lists all.
func (c *Client) Images(ctx context.Context) ([]api.Image, error) {
	var v []api.Image
	return v, c.do(ctx, http.MethodGet, "/v1/images", nil, &v)
}

// RemoveImage deletes one.
func (c *Client) RemoveImage(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, "/v1/images/"+seg(id), nil, nil)
}

// Tree is the family tree.
func (c *Client) Tree(ctx context.Context) ([]api.TreeNode, error) {
	var v []api.TreeNode
	return v, c.do(ctx, http.MethodGet, "/v1/tree", nil, &v)
}

// TreeAndSteps is the family tree with the steps of builds.
func (c *Client) TreeAndSteps(ctx context.Context) ([]api.TreeNode, error) {
	var v []api.TreeNode
	return v, c.do(ctx, http.MethodGet, "/v1/tree?all=true", nil, &v)
}

// Build sends a recipe (a tar stream whose first entry is recipe.yaml, then the files it names) and calls event for
// every line of progress. It returns the snapshot.
func (c *Client) Build(ctx context.Context, opts BuildOptions, recipe io.Reader, event func(api.BuildEvent)) (*api.Snapshot, error) {
	q := opts.query()
	resp, err := c.send(ctx, http.MethodPost, "/v1/builds?"+q.Encode(), "application/x-tar", recipe)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	lines := json.NewDecoder(resp.Body)
	for {
		var e api.BuildEvent
		if err := lines.Decode(&e); err != nil {
			return nil, c.unreachable(ctx, err)
		}
		switch {
		case e.Error != nil:
			return nil, e.Error
		case e.Snapshot != nil:
			return e.Snapshot, nil
		}
		event(e)
	}
}

// BuildOptions say what to make of a recipe, or of a Dockerfile.
type BuildOptions struct {
	Tag     string
	Kernel  string // path on the daemon's host; empty: Debian's
	Replace bool   // an existing snapshot of this tag, once the new one is ready
	NoCache bool   // do all steps again

	// Of a Dockerfile, sent as a tar stream with the file itself as Dockerfile and its context below context/.
	Dockerfile  string // its name, for messages; empty: a recipe is sent
	Target      string
	BuildArgs   []string // NAME=VALUE
	Base        string   // the base, as FROM says it, whose files are sent along
	CPUs        int      // of the machine; 0: the default, or the base's
	MemoryBytes int64
	DiskBytes   int64
	Network     string // what a recipe would have under network, in a line
}

func (o *BuildOptions) query() url.Values {
	q := url.Values{"tag": {o.Tag}}
	set := func(name, value string, given bool) {
		if given {
			q.Set(name, value)
		}
	}
	set("kernel", o.Kernel, o.Kernel != "")
	set("replace", "true", o.Replace)
	set("no_cache", "true", o.NoCache)
	if o.Dockerfile == "" {
		return q
	}
	set("dockerfile", o.Dockerfile, true)
	set("target", o.Target, o.Target != "")
	set("base", o.Base, o.Base != "")
	set("cpus", strconv.Itoa(o.CPUs), o.CPUs != 0)
	set("memory_bytes", strconv.FormatInt(o.MemoryBytes, 10), o.MemoryBytes != 0)
	set("disk_bytes", strconv.FormatInt(o.DiskBytes, 10), o.DiskBytes != 0)
	set("network", o.Network, o.Network != "")
	q["build_arg"] = o.BuildArgs
	return q
}
