package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/internal/image/flatten"
)

// parallelLayers is how many layers are downloaded at once.
const parallelLayers = 4

// registryBlobs are the blobs of a repository. Layers are downloaded when the first of them is opened, all at once.
type registryBlobs struct {
	repo   name.Repository
	puller *remote.Puller
	cache  *Cache

	wanted []descriptor
	files  map[string]*os.File // by digest; nil until then
	done   func()
}

// OpenRegistry finds an image in a registry, with the credentials of this user's docker configuration.
func OpenRegistry(ctx context.Context, ref string, cache *Cache, arch string) (*Image, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return nil, err
	}
	wire := newTransport()
	puller, err := remote.NewPuller(remote.WithAuthFromKeychain(authn.DefaultKeychain), remote.WithTransport(wire),
		remote.WithUserAgent("forkd"), remote.WithRetryBackoff(remote.Backoff{Duration: cache.RetryGap, Factor: 3, Jitter: 0.1, Steps: 3}))
	if err != nil {
		return nil, err
	}
	b := &registryBlobs{repo: parsed.Context(), puller: puller, cache: cache, done: wire.CloseIdleConnections}
	img, err := b.find(ctx, parsed, arch)
	if err != nil {
		b.close()
		return nil, explain(parsed, err)
	}
	img.close = append(img.close, b.close)
	return img, nil
}

func (b *registryBlobs) find(ctx context.Context, ref name.Reference, arch string) (*Image, error) {
	if digest, ok := ref.(name.Digest); ok {
		d := descriptor{Digest: digest.DigestStr(), MediaType: ""}
		return open(ctx, b, d, arch)
	}
	found, err := b.puller.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	d := descriptor{Digest: found.Digest.String(), MediaType: string(found.MediaType), Size: found.Size}
	if err := b.keep(ctx, d, found.Manifest); err != nil {
		return nil, err
	}
	return open(ctx, b, d, arch)
}

// keep puts something small that arrived already into the cache.
func (b *registryBlobs) keep(ctx context.Context, d descriptor, data []byte) error {
	f, _, err := b.cache.fetch(ctx, "manifest", d.Digest, -1, func(context.Context) (io.ReadCloser, int64, error) {
		return io.NopCloser(bytes.NewReader(data)), int64(len(data)), nil
	})
	if err != nil {
		return err
	}
	return f.Close()
}

func (b *registryBlobs) close() {
	for _, f := range b.files {
		f.Close()
	}
	b.done()
}

func (b *registryBlobs) small(ctx context.Context, d descriptor) ([]byte, error) {
	f, _, err := b.cache.fetch(ctx, "manifest", d.Digest, -1, func(ctx context.Context) (io.ReadCloser, int64, error) {
		if d.MediaType == typeConfig || d.MediaType == typeDockerConfig {
			return b.blob(ctx, d)
		}
		found, err := b.puller.Get(ctx, b.repo.Digest(d.Digest))
		if err != nil {
			return nil, 0, lasting(err)
		}
		return io.NopCloser(bytes.NewReader(found.Manifest)), int64(len(found.Manifest)), nil
	})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, maxConfig)
}

// blob begins to download one.
func (b *registryBlobs) blob(ctx context.Context, d descriptor) (io.ReadCloser, int64, error) {
	layer, err := b.puller.Layer(ctx, b.repo.Digest(d.Digest))
	if err != nil {
		return nil, 0, lasting(err)
	}
	r, err := layer.Compressed()
	return r, -1, lasting(err)
}

// lasting marks what another attempt would not mend.
func lasting(err error) error {
	if answer, ok := errors.AsType[*transport.Error](err); ok && answer.StatusCode < 500 && answer.StatusCode != http.StatusTooManyRequests {
		return fmt.Errorf("%w%w", errPermanent, err)
	}
	if errors.Is(err, errPlain) {
		return fmt.Errorf("%w%w", errPermanent, err)
	}
	return err
}

func (b *registryBlobs) layer(_ context.Context, d descriptor) (flatten.Opener, error) {
	b.wanted = append(b.wanted, d)
	return func(ctx context.Context) (io.ReadCloser, error) {
		if err := b.fetch(ctx); err != nil {
			return nil, err
		}
		return view(b.files[d.Digest])
	}, nil
}

// fetch makes all layers available.
func (b *registryBlobs) fetch(ctx context.Context) error {
	if b.files != nil {
		return nil
	}
	files := make([]*os.File, len(b.wanted))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallelLayers)
	for i, d := range b.wanted {
		group.Go(func() error {
			what := fmt.Sprintf("layer %d of %d", i+1, len(b.wanted))
			f, _, err := b.cache.fetch(ctx, what, d.Digest, d.Size, func(ctx context.Context) (io.ReadCloser, int64, error) { return b.blob(ctx, d) })
			files[i] = f
			return err
		})
	}
	err := group.Wait()
	b.files = map[string]*os.File{}
	for i, f := range files {
		if f == nil {
			continue
		}
		if old := b.files[b.wanted[i].Digest]; old != nil {
			old.Close() // a layer may be there twice
		}
		b.files[b.wanted[i].Digest] = f
	}
	if err != nil {
		for _, f := range b.files {
			f.Close()
		}
		b.files = nil
		return err
	}
	b.cache.Trim()
	return nil
}

// explain says what to do about a registry's refusal.
func explain(ref name.Reference, err error) error {
	answer, ok := errors.AsType[*transport.Error](err)
	if !ok {
		return err
	}
	switch answer.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Errorf("%s does not let us read %s; log in there with: docker login %s (%w)", ref.Context().RegistryStr(),
			ref.Context().RepositoryStr(), ref.Context().RegistryStr(), err)
	case http.StatusNotFound:
		return fmt.Errorf("%w: %s has no %s, or does not show it to us (%w)", ErrNotFound, ref.Context().RegistryStr(), ref.Identifier(), err)
	}
	return err
}

// errPlain is wrapped by refusals to speak without encryption.
var errPlain = errors.New("plain HTTP is for registries on this machine's loopback only")

// plainGuard refuses requests over plain HTTP to anything but the loopback.
type plainGuard struct{ *http.Transport }

func newTransport() *plainGuard {
	dialer := &net.Dialer{Timeout: 30 * time.Second}
	return &plainGuard{&http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: parallelLayers,
		IdleConnTimeout: 30 * time.Second, TLSHandshakeTimeout: 20 * time.Second, ResponseHeaderTimeout: 60 * time.Second,
		DisableCompression: true, // a digest is of the bytes as they are
	}}
}

func (g *plainGuard) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" && !loopback(r.URL.Hostname()) {
		return nil, fmt.Errorf("%s: %w", r.URL.Host, errPlain)
	}
	return g.Transport.RoundTrip(r)
}

func loopback(host string) bool {
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback()
}
