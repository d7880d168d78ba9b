package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"

	"forkd.dev/forkd/api"
)

// Pack is a pack file as it comes.
type Pack struct {
	io.ReadCloser
	Size   int64
	Digest string // of its manifest
}

// Pack packs a snapshot with all it stands on. Without scrub it is packed as it is; with it secrets are looked for and
// removed. The caller closes the pack.
func (c *Client) Pack(ctx context.Context, tag string, scrub bool) (*Pack, error) {
	path := "/v1/snapshots/" + seg(tag) + "/pack"
	if !scrub {
		path += "?scrub=false"
	}
	resp, err := c.send(ctx, http.MethodPost, path, "", nil) //nolint:bodyclose // The caller closes what it is given.
	if err != nil {
		return nil, err
	}
	return &Pack{ReadCloser: resp.Body, Size: resp.ContentLength, Digest: resp.Header.Get("X-Forkd-Pack-Digest")}, nil
}

// Unpack makes snapshots of a pack file. An empty tag is that of the pack.
func (c *Client) Unpack(ctx context.Context, tag string, r io.Reader) (*api.Unpacked, error) {
	path := "/v1/packs"
	if tag != "" {
		path += "?" + url.Values{"tag": {tag}}.Encode()
	}
	resp, err := c.send(ctx, http.MethodPost, path, "application/vnd.forkd.pack", r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	v := &api.Unpacked{}
	if err := json.NewDecoder(resp.Body).Decode(v); err != nil {
		return nil, c.unreachable(ctx, err)
	}
	return v, nil
}

// VerifySnapshot reads all that a snapshot is made of and says what is damaged.
func (c *Client) VerifySnapshot(ctx context.Context, tag string) (*api.Verified, error) {
	v := &api.Verified{}
	return v, c.do(ctx, http.MethodPost, "/v1/snapshots/"+seg(tag)+"/verify", struct{}{}, v)
}

// Provenance says where a snapshot comes from.
func (c *Client) Provenance(ctx context.Context, tag string) (*api.Provenance, error) {
	v := &api.Provenance{}
	return v, c.do(ctx, http.MethodGet, "/v1/snapshots/"+seg(tag)+"/provenance", nil, v)
}
