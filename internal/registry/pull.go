package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/internal/pack"
)

// Sink is what is pulled into: a pack.Sink.
type Sink interface {
	Needs(x pack.Member) bool
	Put(ctx context.Context, x pack.Member, r io.Reader) error
}

// Progress is how far a transfer is, in bytes. Total may be less than a blob's sizes: what is there already does not
// travel.
type Progress struct{ Done, Total int64 }

// Find reads what a snapshot is, and nothing of its members. By tag it is what the registry says; by digest what that
// stands for, or an error.
func (r *Repository) Find(ctx context.Context) (*Artifact, error) {
	a, err := r.find(ctx)
	if err != nil {
		return nil, r.explain(err)
	}
	return a, nil
}

func (r *Repository) find(ctx context.Context) (*Artifact, error) {
	manifest, err := r.manifest(ctx, r.ref.Identifier())
	if err != nil {
		return nil, err
	}
	if d, ok := r.ref.(name.Digest); ok && d.DigestStr() != Digest(manifest) {
		return nil, fmt.Errorf("%w: asked for %s it sends another manifest, %s", ErrRegistry, d.DigestStr(), Digest(manifest))
	}
	m, err := parseManifest(manifest)
	if err != nil {
		return nil, err
	}
	var config []byte
	err = r.retry(ctx, nil, func() error {
		config, err = r.small(ctx, m.Config)
		return err
	})
	if err != nil {
		return nil, err
	}
	return parse(manifest, config)
}

func (r *Repository) manifest(ctx context.Context, identifier string) (text []byte, err error) {
	const what = "read its manifest"
	err = r.retry(ctx, nil, func() error {
		req, err := r.request(ctx, http.MethodGet, "/manifests/"+identifier, nil)
		if err != nil {
			return err
		}
		req.Header.Set("Accept", typeManifest+", application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.v2+json")
		answer, err := r.do(req, what, http.StatusOK)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if text, err = io.ReadAll(answer.Body); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	})
	return text, err
}

func (r *Repository) request(ctx context.Context, method, path string, body io.Reader) (*http.Request, error) {
	return http.NewRequestWithContext(ctx, method, r.base+path, body)
}

// small reads a whole blob that fits in memory.
func (r *Repository) small(ctx context.Context, d descriptor) ([]byte, error) {
	const what = "read its index"
	body, _, err := r.blobFrom(ctx, what, d.Digest, d.Size, 0, d.Size)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	var b bytes.Buffer
	if _, err := io.Copy(&b, io.LimitReader(body, d.Size)); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if int64(b.Len()) < d.Size {
		return nil, fmt.Errorf("%s: after %d of %d bytes: %w", what, b.Len(), d.Size, io.ErrUnexpectedEOF)
	}
	if Digest(b.Bytes()) != d.Digest {
		return nil, fmt.Errorf("%w: %s: the bytes do not match their digest %s", ErrRegistry, what, d.Digest)
	}
	return b.Bytes(), nil
}

// blobFrom asks for bytes of a blob from one offset to another. The answer may begin skip bytes earlier: not every
// registry knows ranges.
func (r *Repository) blobFrom(ctx context.Context, what, digest string, size, from, to int64) (body io.ReadCloser, skip int64, err error) {
	req, err := r.request(atMost(ctx, size), http.MethodGet, "/blobs/"+digest, nil)
	if err != nil {
		return nil, 0, err
	}
	if from > 0 || to < size {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", from, to-1))
	}
	answer, err := r.do(req, what, http.StatusOK, http.StatusPartialContent)
	if err != nil {
		return nil, 0, err
	}
	if answer.StatusCode == http.StatusOK {
		return answer.Body, from, nil
	}
	if start, ok := rangeStart(answer.Header.Get("Content-Range")); !ok || start != from {
		_ = answer.Body.Close()
		return nil, 0, fmt.Errorf("%w: %s: asked for bytes from %d it sends %.60q", ErrRegistry, what, from, answer.Header.Get("Content-Range"))
	}
	return answer.Body, 0, nil
}

func rangeStart(text string) (int64, bool) {
	text, ok := strings.CutPrefix(text, "bytes ")
	first, _, found := strings.Cut(text, "-")
	n, err := strconv.ParseInt(first, 10, 64)
	return n, ok && found && err == nil
}

// Download fetches what sink needs of an artifact, several blobs at once, of each only what is needed. What has come stays
// in sink whatever happens: another Download goes on from there. tell may be nil; it is called often, one call at a time.
func (r *Repository) Download(ctx context.Context, a *Artifact, sink Sink, tell func(Progress)) error {
	var p Progress
	var mu sync.Mutex
	var todo []blob
	for _, b := range a.blobs {
		n := int64(0)
		for _, x := range b.members {
			if sink.Needs(x) {
				n += x.Size
			}
		}
		if p.Total += n; n > 0 {
			todo = append(todo, b)
		}
	}
	add := func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		p.Done += n
		if tell != nil {
			tell(p)
		}
	}
	add(0)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallelBlobs)
	for _, b := range todo {
		group.Go(func() error { return r.fetch(ctx, b, sink, add) })
	}
	return r.explain(group.Wait())
}

// maxGap is what is rather read and thrown away than left out by another request.
const maxGap = 64 << 10

// fetch gets what is needed of one blob.
func (r *Repository) fetch(ctx context.Context, b blob, sink Sink, add func(int64)) error {
	var got atomic.Int64
	return r.retry(ctx, got.Load, func() error {
		for {
			from, members := nextRun(b, sink)
			if len(members) == 0 {
				return nil
			}
			if err := r.fetchRun(ctx, b, from, members, sink, func(n int64) { got.Add(n); add(n) }); err != nil {
				return err
			}
		}
	})
}

// nextRun is the first run of members of a blob of which about all are needed, and where it begins.
func nextRun(b blob, sink interface{ Needs(x pack.Member) bool }) (from int64, run []pack.Member) {
	at, gap := int64(0), int64(0)
	last := 0
	for _, x := range b.members {
		switch need := sink.Needs(x); {
		case need && len(run) == 0:
			from, run, gap, last = at, append(run, x), 0, 1
		case need:
			run, gap = append(run, x), 0
			last = len(run)
		case len(run) > 0:
			run = append(run, x)
			if gap += x.Size; gap > maxGap {
				return from, run[:last]
			}
		}
		at += x.Size
	}
	return from, run[:last]
}

func (r *Repository) fetchRun(ctx context.Context, b blob, from int64, members []pack.Member, sink Sink, add func(int64)) error {
	to := from
	for _, x := range members {
		to += x.Size
	}
	what := fmt.Sprintf("read bytes %d to %d of blob %s", from, to, b.digest)
	body, skip, err := r.blobFrom(ctx, what, b.digest, b.size, from, to)
	if err != nil {
		return err
	}
	defer body.Close()
	if n, err := io.CopyN(io.Discard, body, skip); err != nil {
		return fmt.Errorf("%s: it ends after %d bytes: %w", what, n, short(err))
	}
	for _, x := range members {
		if !sink.Needs(x) {
			if _, err := io.CopyN(io.Discard, body, x.Size); err != nil {
				return fmt.Errorf("%s: %w", what, short(err))
			}
			continue
		}
		end := &endReader{r: body}
		err := sink.Put(ctx, x, end)
		switch {
		case err != nil && end.err != nil && end.n < x.Size && ctx.Err() == nil: // the network's fault, whatever the sink makes of it
			return fmt.Errorf("%s: %w", what, short(end.err))
		case errors.Is(err, pack.ErrDamaged):
			return fmt.Errorf("%w: %s: %w", ErrRegistry, what, err)
		case err != nil:
			return err
		}
		add(x.Size)
	}
	return nil
}

// endReader remembers how a body ended, and after how many bytes.
type endReader struct {
	r   io.Reader
	n   int64
	err error
}

func (e *endReader) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	e.n += int64(n)
	if err != nil {
		e.err = err
	}
	return n, err
}

// short is what a body that ends too early ends with.
func short(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
