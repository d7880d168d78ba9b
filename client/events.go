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

// EventOptions say which events are wanted. The zero value: those that are kept.
type EventOptions struct {
	Follow    bool    // go on with what happens
	Since     *uint64 // only what came after the event of this sequence
	Tail      *int    // only so many of those that are kept
	Types     []string
	Sandboxes []string // ids
	Snapshots []string // tags
}

// Events calls each for what has happened and, with Follow, for what happens, until ctx or the daemon ends or each returns an
// error, which is returned.
func (c *Client) Events(ctx context.Context, opts EventOptions, each func(api.Event) error) error {
	q := url.Values{"follow": {strconv.FormatBool(opts.Follow)}, "type": opts.Types, "sandbox": opts.Sandboxes, "snapshot": opts.Snapshots}
	switch {
	case opts.Since != nil:
		q.Set("since", strconv.FormatUint(*opts.Since, 10))
	case opts.Tail != nil:
		q.Set("tail", strconv.Itoa(*opts.Tail))
	case opts.Follow: // the daemon's own choice would be from now on
		q.Set("tail", strconv.Itoa(allKept))
	}
	resp, err := c.send(ctx, http.MethodGet, "/v1/events?"+q.Encode(), "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := json.NewDecoder(resp.Body)
	for {
		var e api.Event
		switch err := lines.Decode(&e); {
		case errors.Is(err, io.EOF) && !opts.Follow:
			return nil
		case err != nil:
			return c.unreachable(ctx, err)
		}
		if err := each(e); err != nil {
			return err
		}
	}
}

// allKept is more than any daemon keeps.
const allKept = 1 << 30
