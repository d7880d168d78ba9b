package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/internal/pack"
)

// Pushed is what became of a push.
type Pushed struct {
	Digest string // of the manifest: what to pull by
	Sent   int64  // bytes
	There  int64  // bytes of blobs that the registry had
}

// Push brings an artifact to a registry under the reference's tag: first the blobs that it lacks, the manifest last. What
// has arrived of an interrupted push stays there: another goes on from it. tell may be nil; it is called often, one call
// at a time.
func (r *Repository) Push(ctx context.Context, a *Artifact, src Source, tell func(Progress)) (Pushed, error) {
	if _, ok := r.ref.(name.Tag); !ok {
		return Pushed{}, fmt.Errorf("%w: %s: one pushes to a tag; the digest is what comes of it", ErrReference, r.ref)
	}
	out := Pushed{Digest: a.Digest}
	p := Progress{Total: a.Bytes()}
	var mu sync.Mutex
	add := func(done, sent, there int64) {
		mu.Lock()
		defer mu.Unlock()
		p.Done += done
		out.Sent += sent
		out.There += there
		if tell != nil {
			tell(p)
		}
	}
	add(0, 0, 0)
	config := upload{digest: Digest(a.config), size: int64(len(a.config)), open: func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(a.config)), nil
	}}
	uploads := []upload{config}
	for _, b := range a.blobs {
		uploads = append(uploads, upload{digest: b.digest, size: b.size, open: func() (io.ReadCloser, error) {
			return newBlobReader(src, b), nil
		}})
	}
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(parallelBlobs)
	for _, u := range uploads {
		group.Go(func() error { return r.upload(gctx, u, add) })
	}
	err := group.Wait()
	if err == nil {
		err = r.putManifest(ctx, a)
	}
	if err != nil {
		return Pushed{}, r.explain(err)
	}
	add(int64(len(a.manifest)), int64(len(a.manifest)), 0)
	return out, nil
}

// upload is a blob on its way.
type upload struct {
	digest string
	size   int64
	open   func() (io.ReadCloser, error)
}

func (r *Repository) upload(ctx context.Context, u upload, add func(done, sent, there int64)) error {
	what := "send blob " + u.digest
	place := "" // of an upload that has begun
	var moved, told int64
	return r.retry(ctx, func() int64 { return moved }, func() error {
		there, err := r.has(ctx, u)
		if err != nil {
			return err
		}
		if there {
			add(u.size-told, 0, u.size)
			return nil
		}
		from := int64(0)
		if place != "" {
			place, from = r.arrived(ctx, place, u.size)
		}
		if place == "" {
			if place, err = r.begin(ctx, what); err != nil {
				return err
			}
			from = 0
		}
		body, err := u.open()
		if err != nil {
			return err
		}
		defer body.Close()
		if _, err := io.CopyN(io.Discard, body, from); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		counted := &countingReader{r: body, add: func(n int64) {
			moved += n
			done := n
			if told+done > u.size { // some of it goes a second time
				done = u.size - told
			}
			told += done
			add(done, n, 0)
		}}
		next, err := r.send(ctx, what, place, counted, from, u.size)
		if err != nil {
			return err
		}
		place = ""
		return r.commit(ctx, what, next, u.digest)
	})
}

// has asks whether the registry has a blob.
func (r *Repository) has(ctx context.Context, u upload) (bool, error) {
	what := "look for blob " + u.digest
	req, err := r.request(ctx, http.MethodHead, "/blobs/"+u.digest, nil)
	if err != nil {
		return false, err
	}
	answer, err := r.do(req, what, http.StatusOK, http.StatusNotFound)
	if err != nil {
		return false, err
	}
	_ = answer.Body.Close()
	if answer.StatusCode == http.StatusOK && answer.ContentLength >= 0 && answer.ContentLength != u.size {
		return false, fmt.Errorf("%w: %s: it says that it has %d bytes, and they are %d", ErrRegistry, what, answer.ContentLength, u.size)
	}
	return answer.StatusCode == http.StatusOK, nil
}

// begin starts an upload and returns its place.
func (r *Repository) begin(ctx context.Context, what string) (string, error) {
	req, err := r.request(ctx, http.MethodPost, "/blobs/uploads/", nil)
	if err != nil {
		return "", err
	}
	answer, err := r.do(req, what, http.StatusAccepted)
	if s, ok := errors.AsType[*statusError](err); ok && (s.status == http.StatusNotFound || s.status == http.StatusMethodNotAllowed) {
		return "", fmt.Errorf("%w%w", errNoUploads, err)
	}
	if err != nil {
		return "", err
	}
	_ = answer.Body.Close()
	return location(what, answer)
}

// location is where an upload goes on.
func location(what string, answer *http.Response) (string, error) {
	u, err := answer.Location()
	if err != nil {
		return "", fmt.Errorf("%w: %s: it does not say where to", ErrRegistry, what)
	}
	return u.String(), nil
}

// arrived asks how much of an upload has arrived. It is begun anew where that cannot be said.
func (r *Repository) arrived(ctx context.Context, place string, size int64) (next string, from int64) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, place, nil)
	if err != nil {
		return "", 0
	}
	answer, err := r.do(req, "ask what has arrived", http.StatusNoContent)
	if err != nil {
		return "", 0
	}
	_ = answer.Body.Close()
	var first, last int64
	if _, err := fmt.Sscanf(strings.TrimPrefix(answer.Header.Get("Range"), "bytes="), "%d-%d", &first, &last); err != nil || first != 0 || last < 0 || last >= size {
		return "", 0
	}
	next, err = location("", answer)
	if err != nil {
		return "", 0
	}
	if last == 0 { // no bytes and one are told in the same words
		return "", 0
	}
	return next, last + 1
}

func (r *Repository) send(ctx context.Context, what, place string, body io.Reader, from, size int64) (next string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPatch, place, body)
	if err != nil {
		return "", fmt.Errorf("%w: %s: it names a place that is none", ErrRegistry, what)
	}
	req.ContentLength = size - from
	req.Header.Set("Content-Type", "application/octet-stream")
	req.Header.Set("Content-Range", fmt.Sprintf("%d-%d", from, size-1))
	answer, err := r.do(req, what, http.StatusAccepted, http.StatusNoContent, http.StatusCreated)
	if err != nil {
		return "", err
	}
	_ = answer.Body.Close()
	return location(what, answer)
}

func (r *Repository) commit(ctx context.Context, what, place, digest string) error {
	u, err := url.Parse(place)
	if err != nil {
		return fmt.Errorf("%w: %s: it names a place that is none", ErrRegistry, what)
	}
	q := u.Query()
	q.Set("digest", digest)
	u.RawQuery = q.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, u.String(), nil)
	if err != nil {
		return err
	}
	answer, err := r.do(req, what, http.StatusCreated, http.StatusNoContent, http.StatusAccepted)
	if s, ok := errors.AsType[*statusError](err); ok && (s.status == http.StatusNotFound || s.status == http.StatusBadRequest ||
		s.status == http.StatusRequestedRangeNotSatisfiable) {
		return fmt.Errorf("%w%w", errPassing, fmt.Errorf("%w: %s", ErrUpload, s.Error())) // from the beginning
	}
	if err != nil {
		return err
	}
	return answer.Body.Close()
}

// errNoUploads: nothing can be begun to be sent.
var errNoUploads = errors.New("")

// ErrUpload is wrapped where the registry did not take what was sent.
var ErrUpload = errors.New("the registry did not take a blob")

func (r *Repository) putManifest(ctx context.Context, a *Artifact) error {
	return r.retry(ctx, nil, func() error {
		req, err := r.request(ctx, http.MethodPut, "/manifests/"+r.ref.Identifier(), bytes.NewReader(a.manifest))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", typeManifest)
		answer, err := r.do(req, "send its manifest", http.StatusCreated, http.StatusOK, http.StatusAccepted)
		if err != nil {
			return err
		}
		if got := answer.Header.Get("Docker-Content-Digest"); got != "" && got != a.Digest {
			err = fmt.Errorf("%w: it keeps the manifest as %.80q, which is %s", ErrRegistry, got, a.Digest)
		}
		return errors.Join(err, answer.Body.Close())
	})
}

type countingReader struct {
	r   io.Reader
	add func(int64)
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if n > 0 {
		c.add(int64(n))
	}
	return n, err
}

// blobReader reads members end to end, from any place on.
type blobReader struct {
	src Source
	b   blob
	at  int64
	cur io.ReadCloser
	end int64 // of the current member
}

func newBlobReader(src Source, b blob) *blobReader { return &blobReader{src: src, b: b} }

func (b *blobReader) Read(p []byte) (int, error) {
	for {
		if b.at >= b.b.size {
			return 0, io.EOF
		}
		if b.cur == nil {
			if err := b.open(); err != nil {
				return 0, err
			}
		}
		n, err := b.cur.Read(p)
		b.at += int64(n)
		if errors.Is(err, io.EOF) {
			short := b.at < b.end
			err = b.close()
			if short && err == nil {
				err = io.ErrUnexpectedEOF
			}
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// open opens the member at the present place, and reads up to there.
func (b *blobReader) open() error {
	start := int64(0)
	for _, x := range b.b.members {
		if b.end = start + x.Size; b.at < b.end {
			return b.openMember(x, b.at-start)
		}
		start = b.end
	}
	return io.ErrUnexpectedEOF
}

func (b *blobReader) openMember(x pack.Member, skip int64) (err error) {
	if b.cur, err = b.src.Open(x); err != nil {
		b.cur = nil
		return err
	}
	if _, err := io.CopyN(io.Discard, b.cur, skip); err != nil {
		return errors.Join(fmt.Errorf("read %s: %w", x, short(err)), b.close())
	}
	return nil
}

func (b *blobReader) close() error {
	if b.cur == nil {
		return nil
	}
	err := b.cur.Close()
	b.cur = nil
	return err
}

// Seek implements io.Seeker.
func (b *blobReader) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += b.at
	case io.SeekEnd:
		offset += b.b.size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	if offset != b.at {
		_ = b.close()
	}
	b.at = offset
	return offset, nil
}

func (b *blobReader) Close() error { return b.close() }
