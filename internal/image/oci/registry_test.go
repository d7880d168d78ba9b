package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/klauspost/compress/gzip"

	"forkd.dev/forkd/internal/image/flatten"
)

// server is a registry that misbehaves on demand and counts.
type server struct {
	*httptest.Server
	t testing.TB

	mu       sync.Mutex
	requests map[string]int // "GET /v2/…"
	spoil    func(w http.ResponseWriter, r *http.Request) (done bool)
}

func newServer(t testing.TB) *server {
	t.Helper()
	s := &server{t: t, requests: map[string]int{}}
	working := registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.requests[r.Method+" "+r.URL.Path]++
		spoil := s.spoil
		s.mu.Unlock()
		if spoil != nil && spoil(w, r) {
			return
		}
		working.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *server) host() string { return strings.TrimPrefix(s.URL, "http://") }

func (s *server) set(spoil func(http.ResponseWriter, *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spoil, s.requests = spoil, map[string]int{}
}

func (s *server) count(part string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for path, times := range s.requests {
		if strings.Contains(path, part) {
			n += times
		}
	}
	return n
}

func (s *server) put(path, mediaType string, data []byte) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodPut, s.URL+path, bytes.NewReader(data))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", mediaType)
	answer, err := s.Client().Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode >= 300 {
		s.t.Fatalf("PUT %s: %s", path, answer.Status)
	}
}

// blob uploads one.
func (s *server) blob(data []byte) descriptor {
	s.t.Helper()
	d := descriptor{Digest: Digest(data), Size: int64(len(data))}
	answer, err := s.Client().Post(s.URL+"/v2/app/blobs/uploads/?digest="+d.Digest, "application/octet-stream", bytes.NewReader(data))
	if err != nil {
		s.t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode >= 300 {
		s.t.Fatalf("upload: %s", answer.Status)
	}
	return d
}

// manifest uploads one under a tag and returns its descriptor.
func (s *server) manifest(tag, mediaType string, v any) descriptor {
	s.t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		s.t.Fatal(err)
	}
	s.put("/v2/app/manifests/"+tag, mediaType, data)
	return descriptor{MediaType: mediaType, Digest: Digest(data), Size: int64(len(data))}
}

// layerBytes is a small layer, packed, and the digest of what it unpacks to.
func layerBytes(t testing.TB, name, content string) (packed []byte, diffID string) {
	t.Helper()
	var plain, out bytes.Buffer
	w := tar.NewWriter(&plain)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(w, content)
	w.Close()
	z := gzip.NewWriter(&out)
	_, _ = z.Write(plain.Bytes())
	z.Close()
	return out.Bytes(), Digest(plain.Bytes())
}

// image uploads an image of two layers for a platform.
func (s *server) image(tag, arch string) (manifest descriptor, layers []descriptor) {
	s.t.Helper()
	var ids []string
	for i := range 2 {
		packed, id := layerBytes(s.t, fmt.Sprintf("file-%d", i), arch+strings.Repeat(" content", 5000))
		d := s.blob(packed)
		d.MediaType = "application/vnd.oci.image.layer.v1.tar+gzip"
		layers, ids = append(layers, d), append(ids, id)
	}
	cfg, err := json.Marshal(map[string]any{
		"architecture": arch, "os": "linux", "config": map[string]any{"User": "me", "Env": []string{"A=b"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	config := s.blob(cfg)
	config.MediaType = typeConfig
	return s.manifest(tag, typeManifest, map[string]any{"schemaVersion": 2, "mediaType": typeManifest, "config": config, "layers": layers}), layers
}

func newCache(t testing.TB) *Cache {
	t.Helper()
	return &Cache{Dir: filepath.Join(t.TempDir(), "oci"), Most: 1 << 30, RetryGap: time.Millisecond}
}

// pull finds an image and reads all of it.
func pull(t testing.TB, ref string, cache *Cache) error {
	t.Helper()
	img, err := OpenRegistry(t.Context(), ref, cache, "amd64")
	if err != nil {
		return err
	}
	defer img.Close()
	if img.Config.User != "me" {
		t.Errorf("the configuration is %+v", img.Config)
	}
	return unpackAll(t.Context(), img)
}

func unpackAll(ctx context.Context, img *Image) error {
	tree := flatten.New(flatten.DefaultLimits(1 << 30))
	for _, l := range img.Layers {
		if err := tree.Add(ctx, l); err != nil {
			return err
		}
	}
	return tree.Write(ctx, io.Discard)
}

func noDocker(t *testing.T) {
	t.Helper()
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
}

// The second time nothing is downloaded, and of a reference with a digest not even the manifest.
func TestRegistryOnce(t *testing.T) {
	noDocker(t)
	s, cache := newServer(t), newCache(t)
	d, _ := s.image("v1", "amd64")
	s.set(nil)
	if err := pull(t, s.host()+"/app:v1", cache); err != nil {
		t.Fatal(err)
	}
	if n := s.count("/blobs/"); n == 0 {
		t.Error("nothing was downloaded")
	}
	s.set(nil)
	if err := pull(t, s.host()+"/app:v1", cache); err != nil {
		t.Fatal(err)
	}
	if n := s.count("/blobs/"); n != 0 {
		t.Errorf("%d blobs were downloaded again", n)
	}
	s.Close()
	if err := pull(t, s.host()+"/app@"+d.Digest, cache); err != nil {
		t.Errorf("what is there, without its registry: %v", err)
	}
}

// A layer that was damaged in the cache is noticed and fetched again.
func TestCacheDamaged(t *testing.T) {
	noDocker(t)
	s, cache := newServer(t), newCache(t)
	_, layers := s.image("v1", "amd64")
	if err := pull(t, s.host()+"/app:v1", cache); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cache.path(layers[1].Digest), []byte("damage"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.set(nil)
	if err := pull(t, s.host()+"/app:v1", cache); err != nil {
		t.Error(err)
	}
	if n := s.count("GET /v2/app/blobs/"); n != 1 {
		t.Errorf("%d blobs were fetched", n)
	}
}

func TestCacheTrim(t *testing.T) {
	noDocker(t)
	s, cache := newServer(t), newCache(t)
	_, layers := s.image("v1", "amd64")
	if err := pull(t, s.host()+"/app:v1", cache); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(cache.path(layers[0].Digest), old, old); err != nil {
		t.Fatal(err)
	}
	stale := filepath.Join(cache.Dir, "tmp-old")
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ages := time.Now().Add(-48 * time.Hour)
	_ = os.Chtimes(stale, ages, ages)
	img, err := OpenRegistry(t.Context(), s.host()+"/app:v1", cache, "amd64")
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	r, err := img.Layers[0].Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	cache.Most = 0
	cache.Trim()
	entries, _ := os.ReadDir(filepath.Join(cache.Dir, "sha256"))
	if _, err := os.Stat(stale); len(entries) != 0 || err == nil {
		t.Errorf("%d files are left", len(entries))
	}
	if err := unpackAll(t.Context(), img); err != nil {
		t.Errorf("an image in use lost its layers: %v", err)
	}
}

func TestPlatforms(t *testing.T) {
	noDocker(t)
	s, cache := newServer(t), newCache(t)
	amd, _ := s.image("amd", "amd64")
	arm, _ := s.image("arm", "arm64")
	amd.Platform, arm.Platform = &platform{OS: "linux", Architecture: "amd64"}, &platform{OS: "linux", Architecture: "arm64", Variant: "v8"}
	windows := arm
	windows.Platform = &platform{OS: "windows", Architecture: "amd64"}
	noise := amd
	noise.Platform = &platform{OS: "unknown", Architecture: "unknown"}
	index := func(list ...descriptor) map[string]any {
		return map[string]any{"schemaVersion": 2, "mediaType": typeIndex, "manifests": list}
	}
	inner := s.manifest("multi", typeIndex, index(noise, windows, arm, amd))
	s.manifest("nested", typeIndex, index(inner))
	s.manifest("other", typeIndex, index(noise, windows, arm))
	for _, tag := range []string{"multi", "nested", "amd"} {
		if err := pull(t, s.host()+"/app:"+tag, cache); err != nil {
			t.Errorf("%s: %v", tag, err)
		}
	}
	for tag, want := range map[string]string{
		"other":   "no such image for linux/amd64; there are: windows/amd64, linux/arm64/v8",
		"arm":     "no such image for linux/amd64; this one is for linux/arm64",
		"missing": "no such image",
	} {
		if err := pull(t, s.host()+"/app:"+tag, cache); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", tag, err)
		}
	}
}

// isBlob picks the requests for blobs.
func isBlob(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/")
}

func TestRegistryTrouble(t *testing.T) {
	noDocker(t)
	s := newServer(t)
	d, layers := s.image("v1", "amd64")
	good := s.host() + "/app:v1"
	var mu sync.Mutex
	failures := func(n int, answer func(http.ResponseWriter, *http.Request)) func(http.ResponseWriter, *http.Request) bool {
		seen := map[string]int{}
		return func(w http.ResponseWriter, r *http.Request) bool {
			mu.Lock()
			seen[r.URL.Path]++
			fail := seen[r.URL.Path] <= n
			mu.Unlock()
			if !fail || !isBlob(r) {
				return false
			}
			answer(w, r)
			return true
		}
	}
	unavailable := func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "later", http.StatusServiceUnavailable) }
	broken := func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusInternalServerError) }
	cut := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		_, _ = io.WriteString(w, "short")
	}
	short := func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "short") }
	other := func(w http.ResponseWriter, r *http.Request) {
		for _, l := range layers {
			if strings.HasSuffix(r.URL.Path, l.Digest) {
				_, _ = io.WriteString(w, strings.Repeat("x", int(l.Size)))
				return
			}
		}
		_, _ = io.WriteString(w, "{}")
	}
	for _, c := range []struct {
		name  string
		spoil func(http.ResponseWriter, *http.Request) bool
		want  string // "": it works in the end
	}{
		{"busy once", failures(1, unavailable), ""},
		{"broken twice", failures(2, broken), ""},
		{"cut once", failures(1, cut), ""},
		{"short once", failures(1, short), ""},
		{"damaged once", failures(1, other), ""},
		{"always broken", failures(1000, broken), "500"},
		{"always cut", failures(1000, cut), "unexpected EOF"},
		{"always short", failures(1000, short), "sha256"},
		{"always damaged", failures(1000, other), "sha256"},
		{"gone", failures(1000, func(w http.ResponseWriter, _ *http.Request) { http.NotFound(w, &http.Request{}) }), "404"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.set(c.spoil)
			cache := newCache(t)
			err := pull(t, good, cache)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v", err)
			}
			if left, _ := filepath.Glob(filepath.Join(cache.Dir, "tmp-*")); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
	s.set(nil)
	wrong := d.Digest[:len(d.Digest)-4] + "0000"
	if err := pull(t, s.host()+"/app@"+wrong, newCache(t)); err == nil {
		t.Error("a digest that nothing has")
	}
	// A registry that answers a digest with something else.
	s.set(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/manifests/sha256:") {
			return false
		}
		w.Header().Set("Content-Type", typeManifest)
		_, _ = io.WriteString(w, `{"schemaVersion":2}`)
		return true
	})
	if err := pull(t, s.host()+"/app@"+d.Digest, newCache(t)); err == nil || !strings.Contains(err.Error(), "sha256") {
		t.Errorf("another manifest than asked for: %v", err)
	}
}

func TestRegistryCredentials(t *testing.T) {
	noDocker(t)
	s := newServer(t)
	s.image("v1", "amd64")
	s.set(func(w http.ResponseWriter, r *http.Request) bool {
		if user, password, ok := r.BasicAuth(); ok && user == "me" && password == "secret" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	ref := s.host() + "/app:v1"
	if err := pull(t, ref, newCache(t)); err == nil || !strings.Contains(err.Error(), "docker login "+s.host()) {
		t.Errorf("without credentials: %v", err)
	}
	text := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, s.host(), base64.StdEncoding.EncodeToString([]byte("me:secret")))
	if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := pull(t, ref, newCache(t)); err != nil {
		t.Errorf("with docker's configuration: %v", err)
	}
}

func TestPlainHTTP(t *testing.T) {
	guard := newTransport()
	defer guard.CloseIdleConnections()
	for host, allowed := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "127.9.9.9:5000": true, "[::1]:5000": true, "10.0.0.1": false, "192.168.1.1:5000": false,
		"registry.local": false, "example.org": false, "127.0.0.1.example.org": false,
	} {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host+"/", http.NoBody)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		answer, err := guard.RoundTrip(req.WithContext(ctx))
		if err == nil {
			answer.Body.Close()
		}
		if refused := errors.Is(err, errPlain); refused == allowed {
			t.Errorf("%s: %v", host, err)
		}
	}
	noDocker(t)
	if _, err := OpenRegistry(t.Context(), "10.255.255.1:1/x", &Cache{Dir: t.TempDir(), RetryGap: time.Millisecond}, "amd64"); err == nil {
		t.Error("a registry without encryption")
	}
}

func TestManifests(t *testing.T) {
	for name, c := range map[string]struct{ manifest, want string }{
		"no JSON":        {`<html>`, "no JSON"},
		"schema 1":       {`{"schemaVersion":1}`, "schema 1"},
		"an artifact":    {`{"schemaVersion":2,"config":{"mediaType":"application/vnd.wasm.config","digest":"sha256:x"}}`, "no container image"},
		"unknown":        {`{"schemaVersion":2,"mediaType":"text/plain"}`, "a manifest of the type"},
		"no digest":      {`{"schemaVersion":2,"config":{"mediaType":"` + typeConfig + `","digest":"md5:1"}}`, "only sha256"},
		"empty index":    {`{"schemaVersion":2,"mediaType":"` + typeIndex + `"}`, "no image for any platform"},
		"large config":   {`{"schemaVersion":2,"config":{"mediaType":"` + typeConfig + `","digest":"sha256:` + strings.Repeat("a", 64) + `","size":99999999999}}`, "at most"},
		"path as digest": {`{"schemaVersion":2,"config":{"mediaType":"` + typeConfig + `","digest":"sha256:../../../../etc/passwd"}}`, "only sha256"},
	} {
		dir := fstest.MapFS{}
		digest := Digest([]byte(c.manifest))
		dir[blobPath(digest)] = &fstest.MapFile{Data: []byte(c.manifest)}
		dir["index.json"] = &fstest.MapFile{Data: fmt.Appendf(nil, `{"manifests":[{"mediaType":"","digest":%q,"size":%d}]}`, digest, len(c.manifest))}
		if _, err := OpenLayout(t.Context(), dir, "", "amd64"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// testLayout is a layout of two named images.
func testLayout(t testing.TB) fstest.MapFS {
	t.Helper()
	dir := fstest.MapFS{}
	put := func(data []byte) descriptor {
		d := descriptor{Digest: Digest(data), Size: int64(len(data))}
		dir[blobPath(d.Digest)] = &fstest.MapFile{Data: data}
		return d
	}
	encode := func(v any) []byte {
		data, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	var index manifest
	for _, name := range []string{"one", "two"} {
		packed, id := layerBytes(t, name, name)
		l := put(packed)
		l.MediaType = "application/vnd.docker.image.rootfs.diff.tar.gzip"
		cfg := put(encode(map[string]any{"os": "linux", "architecture": "amd64", "config": map[string]any{"User": "me"}, "rootfs": map[string]any{"diff_ids": []string{id}}}))
		cfg.MediaType = typeDockerConfig
		d := put(encode(map[string]any{"schemaVersion": 2, "mediaType": typeDockerManifest, "config": cfg, "layers": []descriptor{l}}))
		d.MediaType, d.Annotations = typeDockerManifest, map[string]string{refName: name}
		index.Manifests = append(index.Manifests, d)
	}
	dir["index.json"] = &fstest.MapFile{Data: encode(index)}
	return dir
}

func TestLayout(t *testing.T) {
	dir := testLayout(t)
	for _, which := range []string{"one", "two"} {
		img, err := OpenLayout(t.Context(), dir, which, "amd64")
		if err != nil {
			t.Fatal(err)
		}
		if err := unpackAll(t.Context(), img); err != nil {
			t.Error(err)
		}
		if _, err := OpenLayout(t.Context(), dir, img.Digest, "amd64"); err != nil {
			t.Errorf("by digest: %v", err)
		}
	}
	for which, want := range map[string]string{"": "several; say which after #: one, two", "three": `named "three"; there are: one, two`} {
		if _, err := OpenLayout(t.Context(), dir, which, "amd64"); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", which, err)
		}
	}
	if _, err := OpenLayout(t.Context(), fstest.MapFS{}, "", "amd64"); err == nil || !strings.Contains(err.Error(), "no OCI image layout") {
		t.Error(err)
	}
	for name, f := range dir {
		if !strings.HasPrefix(name, "blobs/") {
			continue
		}
		damaged := maps.Clone(dir)
		data := bytes.Clone(f.Data)
		data[len(data)/2] ^= 1
		damaged[name] = &fstest.MapFile{Data: data}
		failed := 0
		for _, which := range []string{"one", "two"} {
			img, err := OpenLayout(t.Context(), damaged, which, "amd64")
			if err == nil {
				err = unpackAll(t.Context(), img)
			}
			if err != nil {
				failed++
			}
		}
		if failed != 1 {
			t.Errorf("a damaged blob %s: %d images noticed", name, failed)
		}
	}
}

// dockerArchive is what `docker save` writes; older versions name a shared layer by a link.
func dockerArchive(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(name string, data []byte) {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(data))}); err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write(data)
	}
	packed, id := layerBytes(t, "file", "content")
	put("aaa/layer.tar", packed)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bbb/layer.tar", Linkname: "../aaa/layer.tar"}); err != nil {
		t.Fatal(err)
	}
	cfg, _ := json.Marshal(map[string]any{"os": "linux", "architecture": "amd64", "config": map[string]any{"User": "me"}, "rootfs": map[string]any{"diff_ids": []string{id}}})
	bad, _ := json.Marshal(map[string]any{"os": "linux", "architecture": "amd64", "rootfs": map[string]any{"diff_ids": []string{Digest(nil)}}})
	put("good.json", cfg)
	put("bad.json", bad)
	list, _ := json.Marshal([]saved{
		{Config: "good.json", RepoTags: []string{"app:v1"}, Layers: []string{"bbb/layer.tar"}},
		{Config: "bad.json", RepoTags: []string{"app:bad"}, Layers: []string{"aaa/layer.tar"}},
		{Config: "good.json", RepoTags: []string{"app:lost"}, Layers: []string{"ccc/layer.tar"}},
		{Config: "../../etc/passwd", RepoTags: []string{"app:out"}, Layers: nil},
	})
	put("manifest.json", list)
	w.Close()
	return b.Bytes()
}

func TestDockerArchive(t *testing.T) {
	plain := dockerArchive(t)
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = z.Write(plain)
	z.Close()
	dir := t.TempDir()
	for name, data := range map[string][]byte{"a.tar": plain, "a.tar.gz": packed.Bytes(), "cut.tar.gz": packed.Bytes()[:100], "no.tar": []byte("no archive at all")} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files := os.DirFS(dir)
	tmp := filepath.Join(dir, "tmp")
	for _, name := range []string{"a.tar", "a.tar.gz"} {
		img, err := OpenDockerArchive(t.Context(), files, name, "app:v1", "amd64", tmp)
		if err != nil {
			t.Fatal(err)
		}
		if err := unpackAll(t.Context(), img); err != nil || img.Config.User != "me" {
			t.Error(err)
		}
		img.Close()
	}
	if left, _ := os.ReadDir(tmp); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	for which, want := range map[string]string{
		"": "several; say which after #: app:v1", "app:none": `named "app:none"`, "app:lost": "no member", "app:out": "no member",
	} {
		if _, err := OpenDockerArchive(t.Context(), files, "a.tar", which, "amd64", tmp); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", which, err)
		}
	}
	img, err := OpenDockerArchive(t.Context(), files, "a.tar", "app:bad", "amd64", tmp)
	if err != nil {
		t.Fatal(err)
	}
	if err := unpackAll(t.Context(), img); err == nil {
		t.Error("a layer that is not what its configuration says")
	}
	img.Close()
	for _, name := range []string{"cut.tar.gz", "no.tar"} {
		if _, err := OpenDockerArchive(t.Context(), files, name, "", "amd64", tmp); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTar(t *testing.T) {
	packed, _ := layerBytes(t, "file", "content")
	sum := sha256.Sum256(packed)
	digest := "sha256:" + hex.EncodeToString(sum[:])
	files := fstest.MapFS{"f": {Data: packed}}
	img, err := OpenTar(t.Context(), files, "f", digest)
	if err != nil {
		t.Fatal(err)
	}
	if err := unpackAll(t.Context(), img); err != nil {
		t.Error(err)
	}
	if _, err := OpenTar(t.Context(), files, "f", Digest(nil)); err == nil {
		t.Error("another digest")
	}

	requests := 0
	var mu sync.Mutex
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		requests++
		n := requests
		mu.Unlock()
		switch {
		case r.URL.Path != "/root.tar.gz":
			http.NotFound(w, r)
		case n == 1:
			http.Error(w, "later", http.StatusBadGateway)
		default:
			_, _ = w.Write(packed)
		}
	}))
	defer web.Close()
	cache := newCache(t)
	for range 2 { // once more from the cache
		img, err := OpenTarURL(t.Context(), web.URL+"/root.tar.gz", digest, cache)
		if err != nil {
			t.Fatal(err)
		}
		if err := unpackAll(t.Context(), img); err != nil || img.Digest != digest {
			t.Error(err)
		}
		img.Close()
	}
	if requests != 2 {
		t.Errorf("%d requests", requests)
	}
	if _, err := OpenTarURL(t.Context(), web.URL+"/none", "", cache); err == nil || !strings.Contains(err.Error(), "404") {
		t.Error(err)
	}
	if _, err := OpenTarURL(t.Context(), web.URL+"/root.tar.gz", Digest(nil), cache); err == nil || !strings.Contains(err.Error(), "sha256") {
		t.Errorf("another digest: %v", err)
	}
}

// FuzzLayout reads arbitrary manifests: no crash, and no file but blobs by their digest.
func FuzzLayout(f *testing.F) {
	dir := testLayout(f)
	f.Add(dir["index.json"].Data, []byte(`{"schemaVersion":2}`))
	f.Add([]byte(`{"manifests":[{"digest":"sha256:../..","size":1}]}`), []byte(`[]`))
	f.Add([]byte(`{"manifests":[{"platform":{"os":"linux"}},{"platform":null}]}`), []byte(`{"manifests":[]}`))
	f.Fuzz(func(t *testing.T, index, blob []byte) {
		files := fstest.MapFS{"index.json": {Data: index}, blobPath(Digest(blob)): {Data: blob}}
		for _, which := range []string{"", "one"} {
			if img, err := OpenLayout(t.Context(), files, which, "amd64"); err == nil {
				_ = unpackAll(t.Context(), img)
				img.Close()
			}
		}
	})
}

// What is sent of a layout is enough for the image that is meant, and nothing of the others.
func TestLayoutFiles(t *testing.T) {
	dir := testLayout(t)
	dir["blobs/sha256/"+strings.Repeat("0", 64)] = &fstest.MapFile{Data: []byte("nobody's")}
	for which, want := range map[string]int{"one": 4, "": 7, "three": 1} {
		files, err := LayoutFiles(dir, which)
		if err != nil || len(files) != want {
			t.Errorf("%q: %d files, %v", which, len(files), err)
		}
		if which != "one" {
			continue
		}
		part := fstest.MapFS{}
		for _, name := range files {
			part[name] = dir[name]
		}
		img, err := OpenLayout(t.Context(), part, which, "amd64")
		if err != nil {
			t.Fatal(err)
		}
		if err := unpackAll(t.Context(), img); err != nil {
			t.Error(err)
		}
	}
	if _, err := LayoutFiles(fstest.MapFS{}, ""); err == nil {
		t.Error("no layout")
	}
}

// FuzzDockerArchive reads arbitrary archives: no crash, and nothing left behind.
func FuzzDockerArchive(f *testing.F) {
	whole := dockerArchive(f)
	f.Add(whole)
	f.Add(whole[:700])
	f.Add([]byte("\x1f\x8b\x08\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "a.tar"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		tmp := filepath.Join(dir, "tmp")
		for _, which := range []string{"", "app:v1"} {
			if img, err := OpenDockerArchive(t.Context(), os.DirFS(dir), "a.tar", which, "amd64", tmp); err == nil {
				_ = unpackAll(t.Context(), img)
				img.Close()
			}
		}
		if left, _ := os.ReadDir(tmp); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
}
