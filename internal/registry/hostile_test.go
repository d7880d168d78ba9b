package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/pack"
)

// patched is a registry's answer to a pull of a good snapshot, spoiled.
type patched struct {
	name  string
	want  error  // that is wrapped; nil: any
	say   string // in the message
	spoil func(w http.ResponseWriter, r *http.Request, good func() []byte) (done bool)
}

func isBlob(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/sha256:")
}

func isManifest(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/")
}

// hostile is what a registry may answer; kernel is the digest of the blob that has one.
func hostile(kernel string) []patched {
	manifest := func(change func(m *ociManifest)) func(http.ResponseWriter, *http.Request, func() []byte) bool {
		return func(w http.ResponseWriter, r *http.Request, good func() []byte) bool {
			if !isManifest(r) {
				return false
			}
			var m ociManifest
			if err := json.Unmarshal(good(), &m); err != nil {
				panic(err)
			}
			change(&m)
			text, _ := json.Marshal(m)
			w.Header().Set("Content-Type", typeManifest)
			_, _ = w.Write(text)
			return true
		}
	}
	redirect := func(to string) func(http.ResponseWriter, *http.Request, func() []byte) bool {
		return func(w http.ResponseWriter, r *http.Request, _ func() []byte) bool {
			if !isBlob(r) {
				return false
			}
			http.Redirect(w, r, to, http.StatusTemporaryRedirect)
			return true
		}
	}
	answer := func(when func(*http.Request) bool, status int, body string) func(http.ResponseWriter, *http.Request, func() []byte) bool {
		return func(w http.ResponseWriter, r *http.Request, _ func() []byte) bool {
			if !when(r) {
				return false
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
			return true
		}
	}
	isKernel := func(r *http.Request) bool {
		return r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/blobs/"+kernel)
	}
	always := func(*http.Request) bool { return true }
	return []patched{
		{"blob of other bytes", ErrRegistry, "", func(w http.ResponseWriter, r *http.Request, good func() []byte) bool {
			if !isBlob(r) {
				return false
			}
			b := good()
			b[len(b)/2] ^= 1
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
			return true
		}},
		{"blob that ends early", ErrRegistry, "EOF", func(w http.ResponseWriter, r *http.Request, good func() []byte) bool {
			if !isBlob(r) {
				return false
			}
			b := good()
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			_, _ = w.Write(b[:len(b)/2])
			return true
		}},
		{"blob without end", ErrRegistry, "", func(w http.ResponseWriter, r *http.Request, _ func() []byte) bool {
			if !isBlob(r) {
				return false
			}
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					break
				}
			}
			return true
		}},
		{"manifest without end", ErrRegistry, "more than", func(w http.ResponseWriter, r *http.Request, _ func() []byte) bool {
			if !isManifest(r) {
				return false
			}
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					break
				}
			}
			return true
		}},
		{"silence instead of a manifest", ErrRegistry, "nothing any more", func(w http.ResponseWriter, r *http.Request, _ func() []byte) bool {
			if !isManifest(r) {
				return false
			}
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return true
		}},
		{"silence in a blob", ErrRegistry, "nothing any more", func(w http.ResponseWriter, r *http.Request, good func() []byte) bool {
			if !isBlob(r) {
				return false
			}
			_, _ = w.Write(good()[:1])
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return true
		}},
		{"a kernel of other bytes", ErrRegistry, "kernel", func(w http.ResponseWriter, r *http.Request, good func() []byte) bool {
			if !isKernel(r) {
				return false
			}
			b := good()
			b[len(b)/2] ^= 1
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
			return true
		}},
		{"a kernel that ends early", ErrRegistry, "EOF", func(w http.ResponseWriter, r *http.Request, good func() []byte) bool {
			if !isKernel(r) {
				return false
			}
			b := good()
			w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			_, _ = w.Write(b[:len(b)/2])
			return true
		}},
		{"a kernel without end", ErrRegistry, "", func(w http.ResponseWriter, r *http.Request, _ func() []byte) bool {
			if !isKernel(r) {
				return false
			}
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					break
				}
			}
			return true
		}},
		{"a kernel that is not there", ErrNotFound, "", answer(isKernel, http.StatusNotFound, "")},
		{"another range", ErrRegistry, "asked for bytes", func(w http.ResponseWriter, r *http.Request, _ func() []byte) bool {
			if !isBlob(r) {
				return false
			}
			w.Header().Set("Content-Range", "bytes 7-8/9")
			w.WriteHeader(http.StatusPartialContent)
			return true
		}},
		{"redirect to a metadata service", ErrRegistry, "inside this host's network", redirect("https://169.254.169.254/latest")},
		{"redirect to a private address", ErrRegistry, "inside this host's network", redirect("https://10.0.0.1/x")},
		{"redirect to a mapped loopback", ErrRegistry, "inside this host's network", redirect("https://[::ffff:127.0.0.2]/x")},
		{"redirect to the loopback by another name", ErrRegistry, "inside this host's network", redirect("http://localhost:1/x")},
		{"redirect without encryption", ErrRegistry, "plain HTTP", redirect("http://192.0.2.1/x")},
		{"redirect to a file", nil, "", redirect("file:///etc/passwd")},
		{"redirects in a circle", ErrRegistry, "", func(w http.ResponseWriter, r *http.Request, _ func() []byte) bool {
			if !isBlob(r) {
				return false
			}
			http.Redirect(w, r, r.URL.Path, http.StatusFound)
			return true
		}},
		{"401 for ever", ErrDenied, "docker login", answer(always, http.StatusUnauthorized, "")},
		{"401 with a challenge that leads inside", nil, "private", func(w http.ResponseWriter, _ *http.Request, _ func() []byte) bool {
			w.Header().Set("WWW-Authenticate", `Bearer realm="https://10.0.0.1/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}},
		{"403", ErrDenied, "docker login", answer(isManifest, http.StatusForbidden, "")},
		{"404", ErrNotFound, "has no", answer(isManifest, http.StatusNotFound, "")},
		{"blobs that are not there", ErrNotFound, "", answer(isBlob, http.StatusNotFound, "")},
		{"500 for ever", ErrRegistry, "500", answer(isManifest, http.StatusInternalServerError, "\x1b[2J")},
		{"a page instead of a manifest", nil, "cannot be read", answer(isManifest, http.StatusOK, "<html>")},
		{"an image", ErrForeign, "container image", manifest(func(m *ociManifest) {
			m.ArtifactType, m.Config.MediaType = "", "application/vnd.oci.image.config.v1+json"
		})},
		{"another artifact", ErrForeign, "", manifest(func(m *ociManifest) { m.ArtifactType, m.Config.MediaType = "application/x", "application/x" })},
		{"a blob less", nil, "blobs", manifest(func(m *ociManifest) { m.Layers = m.Layers[1:] })},
		{"another blob's digest", nil, "another", manifest(func(m *ociManifest) { m.Layers[0].Digest = m.Layers[1].Digest })},
		{"another blob's size", nil, "another", manifest(func(m *ociManifest) { m.Layers[0].Size++ })},
		{"a digest that is a path", nil, "", manifest(func(m *ociManifest) { m.Layers[0].Digest = "sha256:../../../../etc/passwd" })},
		{"another kind of digest", nil, "sha256", manifest(func(m *ociManifest) { m.Config.Digest = "md5:abc" })},
		{"a size below nothing", nil, "bytes", manifest(func(m *ociManifest) { m.Layers[0].Size = -1 })},
		{"an index of an exabyte", nil, "bytes", manifest(func(m *ociManifest) { m.Config.Size = 1 << 60 })},
		{"an index of other bytes", ErrRegistry, "digest", manifest(func(m *ociManifest) { m.Config = m.Layers[0]; m.Config.MediaType = TypeIndex; m.Config.Size-- })},
		{"a blob as the index", nil, "index", manifest(func(m *ociManifest) { m.Config = m.Layers[0]; m.Config.MediaType = TypeIndex })},
	}
}

// Whatever a registry does, it is one clear error in a while, and nothing is left.
func TestHostileRegistries(t *testing.T) {
	here, s := newHome(t), newServer(t)
	src := here.collect(here.chain(1), 1)
	if _, err := push(t.Context(), s.ref("a"), src, testOptions(true)); err != nil {
		t.Fatal(err)
	}
	working := s.Config.Handler
	for _, x := range hostile(kernelBlob(t, src)) {
		t.Run(x.name, func(t *testing.T) {
			there := newHome(t)
			dir := filepath.Join(t.TempDir(), "pull")
			s.set(func(w http.ResponseWriter, r *http.Request) bool {
				return r.Header.Get("X-Good") == "" && x.spoil(w, r, func() []byte { return fetchGood(r.Context(), working, r) })
			})
			opts := testOptions(false)
			opts.Stall = 3 * time.Second
			if strings.HasPrefix(x.name, "silence") {
				opts.Stall = 200 * time.Millisecond
			}
			_, err := there.pull(t.Context(), s.ref("a"), dir, opts)
			if err == nil {
				t.Fatal("it was pulled")
			}
			if x.want != nil && !errors.Is(err, x.want) || !strings.Contains(err.Error(), x.say) {
				t.Errorf("%v; want %v and %q", err, x.want, x.say)
			}
			if strings.ContainsAny(err.Error(), "\x1b\n") || len(err.Error()) > 1000 {
				t.Errorf("not one clear error: %q", err)
			}
			if u, err := there.Layers.Usage(t.Context(), nil); err != nil || u.Total != 0 {
				t.Errorf("left in the store: %+v, %v", u, err)
			}
		})
	}
}

// kernelBlob is the digest of the blob that has the kernel.
func kernelBlob(t *testing.T, src *pack.Source) string {
	t.Helper()
	for _, x := range src.Manifest().Members {
		if x.Kind == pack.KernelMember {
			b, err := hash(t.Context(), src, []pack.Member{x})
			if err != nil {
				t.Fatal(err)
			}
			return b.digest
		}
	}
	t.Fatal("there is no kernel")
	return ""
}

// fetchGood is what a working registry answers.
func fetchGood(ctx context.Context, working http.Handler, r *http.Request) []byte {
	good := r.Clone(ctx)
	good.Header = http.Header{"X-Good": {"yes"}, "Accept": r.Header["Accept"]}
	rec := &recorded{header: http.Header{}}
	working.ServeHTTP(rec, good)
	return rec.Bytes()
}

type recorded struct {
	bytes.Buffer
	header http.Header
}

func (r *recorded) Header() http.Header { return r.header }
func (r *recorded) WriteHeader(int)     {}
