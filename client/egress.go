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

func egressPath(id string) string { return "/v1/sandboxes/" + seg(id) + "/egress" }

// Egress is what a sandbox may reach, and what it has come to.
func (c *Client) Egress(ctx context.Context, id string) (*api.EgressState, error) {
	v := &api.EgressState{}
	return v, c.do(ctx, http.MethodGet, egressPath(id), nil, v)
}

// SetEgress says what a sandbox may reach from now on. Flows that it may not have any more are cut.
func (c *Client) SetEgress(ctx context.Context, id string, policy api.Egress) (*api.EgressState, error) {
	v := &api.EgressState{}
	return v, c.do(ctx, http.MethodPut, egressPath(id), policy, v)
}

// ChangeEgress changes what a sandbox may reach.
func (c *Client) ChangeEgress(ctx context.Context, id string, change api.EgressChange) (*api.EgressState, error) {
	v := &api.EgressState{}
	return v, c.do(ctx, http.MethodPatch, egressPath(id), change, v)
}

// FlowOptions say which flows are wanted. The zero value: those that are kept.
type FlowOptions struct {
	Follow   bool     // go on with what happens: a flow is told when it begins, unless it is refused at once, and when it ends
	Since    uint64   // only those after the one of this id
	Verdicts []string // allowed, refused, cut; none: any
}

// Flows calls each for the flows of a sandbox and, with Follow, for those that come, until ctx, the sandbox or the daemon ends or
// each returns an error, which is returned.
func (c *Client) Flows(ctx context.Context, id string, opts FlowOptions, each func(api.Flow) error) error {
	q := url.Values{"follow": {strconv.FormatBool(opts.Follow)}, "verdict": opts.Verdicts}
	if opts.Since > 0 {
		q.Set("since", strconv.FormatUint(opts.Since, 10))
	}
	resp, err := c.send(ctx, http.MethodGet, "/v1/sandboxes/"+seg(id)+"/flows?"+q.Encode(), "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := json.NewDecoder(resp.Body)
	for {
		var f api.Flow
		switch err := lines.Decode(&f); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return c.unreachable(ctx, err)
		}
		if err := each(f); err != nil {
			return err
		}
	}
}
