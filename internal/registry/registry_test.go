package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/store/storetest"
)

// home has snapshots whose layers are small.
type home struct{ *storetest.Home }

func newHome(t testing.TB) *home {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	t.Setenv("NO_PROXY", "*")
	return &home{storetest.New(t, storetest.Sizes{Memory: 8 << 20, Disk: 8 << 20, ImagePages: 30, RootPages: 1200, BranchedPages: 100, Step: 16})}
}

// chain makes a pack's manifest of n snapshots, each standing on the one before it.
func (h *home) chain(n int) pack.Manifest {
	img, snapshots := h.Chain(n)
	return pack.Manifest{
		PackedAt: time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC), Tool: "test",
		Images: []store.Image{img}, Snapshots: snapshots,
	}
}

// collect makes a source of the first n snapshots.
func (h *home) collect(m pack.Manifest, n int) *pack.Source {
	h.T.Helper()
	m.Snapshots = m.Snapshots[:n]
	src, err := pack.Collect(h.T.Context(), pack.Spec{
		Dir: h.T.TempDir(), Layers: h.Layers, Manifest: m,
		State: func(s store.Snapshot) ([]byte, error) { return h.States[s.State], nil },
		Kernel: func(store.Snapshot) ([]byte, error) {
			return (&pack.KernelFile{Version: "6.1-1", Release: "6.1.0-1-test", Image: []byte("an image")}).Encode()
		},
	})
	if err != nil {
		h.T.Fatal(err)
	}
	return src
}

// server is a registry that misbehaves on demand and counts.
type server struct {
	*httptest.Server
	in, out atomic.Int64 // bytes of bodies

	mu    sync.Mutex
	spoil func(w http.ResponseWriter, r *http.Request) (done bool)
}

func newServer(t testing.TB) *server {
	t.Helper()
	s := &server{}
	working := ggcr.New(ggcr.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		spoil := s.spoil
		s.mu.Unlock()
		r.Body = &counter{ReadCloser: r.Body, n: &s.in}
		w = &countingWriter{ResponseWriter: w, n: &s.out}
		if spoil != nil && spoil(w, r) {
			return
		}
		working.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *server) set(spoil func(http.ResponseWriter, *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spoil = spoil
	s.in.Store(0)
	s.out.Store(0)
}

func (s *server) ref(tag string) string {
	return strings.TrimPrefix(s.URL, "http://") + "/team/warm:" + tag
}

type counter struct {
	io.ReadCloser
	n *atomic.Int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.n.Add(int64(n))
	return n, err
}

type countingWriter struct {
	http.ResponseWriter
	n *atomic.Int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.n.Add(int64(n))
	return n, err
}

func (c *countingWriter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func testOptions(push bool) Options {
	return Options{Push: push, Stall: 20 * time.Second, RetryGap: time.Millisecond}
}

func push(ctx context.Context, ref string, src Source, opts Options) (Pushed, error) {
	opts.Push = true
	r, err := Open(ctx, ref, opts)
	if err != nil {
		return Pushed{}, err
	}
	defer r.Close()
	a, err := Describe(ctx, src)
	if err != nil {
		return Pushed{}, err
	}
	return r.Push(ctx, a, src, nil)
}

// pull brings a snapshot into h, all of it or nothing.
func (h *home) pull(ctx context.Context, ref, dir string, opts Options) (fetched int64, err error) {
	return h.pullWith(ctx, ref, dir, opts, nil)
}

// pullTelling tells how far it is.
func (h *home) pullTelling(ctx context.Context, ref, dir string, tell func(Progress)) (fetched int64, err error) {
	return h.pullWith(ctx, ref, dir, testOptions(false), tell)
}

func (h *home) pullWith(ctx context.Context, ref, dir string, opts Options, tell func(Progress)) (fetched int64, err error) {
	r, err := Open(ctx, ref, opts)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	a, err := r.Find(ctx)
	if err != nil {
		return 0, err
	}
	sink, err := pack.NewSink(ctx, dir, h.Layers, a.Pack)
	if err != nil {
		return 0, err
	}
	if err := r.Download(ctx, a, sink, tell); err != nil {
		return sink.Fetched(), err
	}
	if err := sink.Install(ctx); err != nil {
		return sink.Fetched(), err
	}
	return sink.Fetched(), sink.Close()
}

func (h *home) check(m pack.Manifest) {
	h.T.Helper()
	for _, s := range m.Snapshots {
		rep, err := h.Layers.Verify(h.T.Context(), []layer.Digest{s.Memory, s.Disk})
		if err != nil || len(rep.Damages) > 0 {
			h.T.Errorf("%s there: %+v, %v", s.Tag, rep, err)
		}
	}
}

// A branch moves its own layers, in both directions, and a second push or pull nothing but what says so.
func TestPushPull(t *testing.T) {
	here, there, s := newHome(t), newHome(t), newServer(t)
	m := here.chain(3)
	src := here.collect(m, 2)
	first, err := push(t.Context(), s.ref("b"), src, testOptions(true))
	if err != nil {
		t.Fatal(err)
	}
	if first.Sent < src.Manifest().Bytes() {
		t.Errorf("%d bytes were sent of %d", first.Sent, src.Manifest().Bytes())
	}
	if _, err := there.pull(t.Context(), s.ref("b"), t.TempDir(), testOptions(false)); err != nil {
		t.Fatal(err)
	}
	whole := here.collect(m, 3)
	own := whole.Manifest().Bytes() - src.Manifest().Bytes()
	most := own * 12 / 10

	s.set(nil)
	second, err := push(t.Context(), s.ref("c"), whole, testOptions(true))
	if err != nil {
		t.Fatal(err)
	}
	if n := s.in.Load(); n > most || second.Sent > most {
		t.Errorf("a branch of %d bytes: %d were sent (%d by its own account)", own, n, second.Sent)
	}
	s.set(nil)
	if _, err := there.pull(t.Context(), s.ref("c"), t.TempDir(), testOptions(false)); err != nil {
		t.Fatal(err)
	}
	if n := s.out.Load(); n > most {
		t.Errorf("a branch of %d bytes: %d were fetched", own, n)
	}
	there.check(m)

	s.set(nil)
	again, err := push(t.Context(), s.ref("other"), whole, testOptions(true))
	if err != nil || again.Digest != second.Digest || again.Sent > own/4 {
		t.Errorf("pushed again: %+v, %v; before it was %s", again, err, second.Digest)
	}
	byDigest := strings.TrimSuffix(s.ref(""), ":") + "@" + second.Digest
	if n, err := there.pull(t.Context(), byDigest, t.TempDir(), testOptions(false)); err != nil || n > 1000 { // of states
		t.Errorf("pulled again, by digest: %d bytes, %v", n, err)
	}
}

// Whatever breaks off, the next attempt goes on, and little travels twice.
func TestInterrupted(t *testing.T) {
	here, s := newHome(t), newServer(t)
	m := here.chain(2)
	src := here.collect(m, 2)
	total := src.Manifest().Bytes()
	rounds := 6
	r := rand.New(rand.NewPCG(1, 2))
	for i := range rounds {
		tag := fmt.Sprintf("r%d", i)
		limit := r.Int64N(total)
		var moved atomic.Int64
		once := func(w http.ResponseWriter, req *http.Request) bool {
			if req.Method == http.MethodPatch && moved.Add(req.ContentLength) > limit && moved.Load() < 1<<40 {
				moved.Store(1 << 40)
				_, _ = io.CopyN(io.Discard, req.Body, req.ContentLength/2)
				panic(http.ErrAbortHandler)
			}
			return false
		}
		s.set(once)
		if _, err := push(t.Context(), s.ref(tag), src, testOptions(true)); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
	}
	s.set(nil)
	for i := range rounds {
		there := newHome(t)
		dir := t.TempDir()
		ctx, cancel := context.WithCancelCause(t.Context())
		limit := r.Int64N(total)
		s.set(func(http.ResponseWriter, *http.Request) bool {
			if s.out.Load() > limit {
				cancel(errors.New("the user has had enough"))
			}
			return false
		})
		before, err := there.pull(ctx, s.ref("r0"), dir, testOptions(false))
		if err == nil && ctx.Err() != nil {
			t.Fatalf("round %d: it went on when it was to end", i)
		}
		s.set(nil)
		after, err := there.pull(t.Context(), s.ref("r0"), dir, testOptions(false))
		if err != nil {
			t.Fatalf("round %d, resumed: %v", i, err)
		}
		if ctx.Err() != nil && before+after != total {
			t.Errorf("round %d: %d and %d bytes, of %d", i, before, after, total)
		}
		there.check(m)
	}
}

// TestReadOnlyRegistry: one that takes nothing is told from one that lacks what was asked for.
func TestReadOnlyRegistry(t *testing.T) {
	here, s := newHome(t), newServer(t)
	src := here.collect(here.chain(1), 1)
	for _, status := range []int{http.StatusNotFound, http.StatusMethodNotAllowed} {
		s.set(func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodGet || r.Method == http.MethodHead {
				return false
			}
			w.WriteHeader(status)
			return true
		})
		if _, err := push(t.Context(), s.ref("a"), src, testOptions(true)); !errors.Is(err, ErrUpload) || !strings.Contains(err.Error(), "takes no uploads") {
			t.Errorf("where uploads are answered with %d: %v", status, err)
		}
	}
}
