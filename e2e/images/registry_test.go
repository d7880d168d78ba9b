package images

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"forkd.dev/forkd/internal/testenv"
)

// registryServer is a registry on the loopback that wants a password, and counts the blobs it gives.
type registryServer struct {
	*httptest.Server
	blobs atomic.Int64
}

func newRegistry(t *testing.T) *registryServer {
	t.Helper()
	s := &registryServer{}
	handler := registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, ok := r.BasicAuth(); !ok || user != "me" || password != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			s.blobs.Add(1)
		}
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *registryServer) host() string { return strings.TrimPrefix(s.URL, "http://") }

// push uploads all blobs of a layout, and one manifest under a tag.
func (s *registryServer) push(t *testing.T, dir, tag string, manifest descriptor) {
	t.Helper()
	send := func(method, path, mediaType string, data []byte) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		req.SetBasicAuth("me", "secret")
		req.Header.Set("Content-Type", mediaType)
		answer, err := s.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		if answer.StatusCode >= 300 {
			t.Fatalf("%s %s: %s", method, path, answer.Status)
		}
	}
	names, err := filepath.Glob(filepath.Join(dir, "blobs", "sha256", "*"))
	if err != nil {
		t.Fatal(err)
	}
	var data []byte
	for _, name := range names {
		blob, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		digest := "sha256:" + filepath.Base(name)
		if digest == manifest.Digest {
			data = blob
		}
		send(http.MethodPost, "/v2/app/blobs/uploads/?digest="+digest, "application/octet-stream", blob)
	}
	send(http.MethodPut, "/v2/app/manifests/"+tag, manifest.MediaType, data)
}

// An image of a registry that wants a password, found through an index of several platforms, with a recipe on top; and
// again, when nothing is downloaded.
func TestRegistry(t *testing.T) {
	testenv.OncePerRun(t)
	prepare(t)
	dir := t.TempDir()
	l := newLayout(t, dir)
	f := &family{name: "app", pack: "gzip", layers: []layer{
		of(join2(openPackages(t, filepath.Join(home(), "cache")).busybox(), etc())...), of(file("app/data", 0o644, "data\n")),
	}, config: config{User: "app", Env: []string{"FROM=image", "BOTH=image"}, WorkingDir: "/app", Entrypoint: []string{"sh", "-c"}, Cmd: []string{"echo $FROM $BOTH $(cat data made /etc/greeting)"}}}
	manifest := l.image(f, runtime.GOARCH)
	manifest.Platform = &platform{OS: "linux", Architecture: runtime.GOARCH}
	other := manifest
	other.Platform = &platform{OS: "linux", Architecture: "riscv64"}
	index := l.json(typeIndex, map[string]any{"schemaVersion": 2, "mediaType": typeIndex, "manifests": []descriptor{other, manifest}})
	foreign := l.json(typeIndex, map[string]any{"schemaVersion": 2, "mediaType": typeIndex, "manifests": []descriptor{other}})

	s := newRegistry(t)
	s.push(t, dir, "unnamed", manifest)
	s.push(t, dir, "v1", index)
	s.push(t, dir, "foreign", foreign)
	lines := []string{
		"env: {BOTH: recipe}", "files: [{content: \"hello\\n\", path: /etc/greeting, owner: app}]", "run: ['id > /app/made', 'chown app /app/made']",
	}
	ref := "oci:" + s.host() + "/app:v1"
	if _, text, err := try(t, "build", recipe(t, ref, lines...), "-t", "registry"); err == nil || !strings.Contains(text, "docker login "+s.host()) {
		t.Errorf("without a password: %v %s", err, text)
	}
	auth := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, s.host(), base64.StdEncoding.EncodeToString([]byte("me:secret")))
	if err := os.WriteFile(filepath.Join(suite.dir, "docker", "config.json"), []byte(auth), 0o600); err != nil {
		t.Fatal(err)
	}
	build(t, "registry", ref, lines...)
	if got, want := forkd(t, "run", "registry"), "image recipe data uid=0(root) gid=0(root) hello\n"; got != want {
		t.Errorf("it printed %q, not %q", got, want)
	}
	if info := forkd(t, "snapshot-info", "registry"); !strings.Contains(info, "BOTH=recipe FROM=image") || !strings.Contains(info, "/app") {
		t.Errorf("snapshot-info shows %s", info)
	}
	before := s.blobs.Load()
	if before == 0 {
		t.Error("nothing was downloaded")
	}
	forkd(t, "build", recipe(t, ref, lines...), "-t", "registry")
	if n := s.blobs.Load() - before; n != 0 {
		t.Errorf("%d blobs were downloaded again", n)
	}
	for tag, want := range map[string]string{
		"foreign": "no such image for linux/" + runtime.GOARCH + "; there are: linux/riscv64",
		"none":    "no such image",
	} {
		if _, text, err := try(t, "build", recipe(t, "oci:"+s.host()+"/app:"+tag), "-t", "none"); err == nil || !strings.Contains(text, want) {
			t.Errorf("%s: %v %s", tag, err, text)
		}
	}
}

// What cannot be built says why, before any machine is started.
func TestRefused(t *testing.T) {
	testenv.OncePerRun(t)
	prepare(t)
	dir := t.TempDir()
	l := newLayout(t, dir)
	d := l.add(&family{name: "small", pack: "gzip", layers: []layer{of(file("hello", 0o755, string(program("hello\n"))))}})
	here := "oci-layout:" + dir + "#small"
	for _, c := range []struct{ name, base, lines, want string }{
		{"packages", here, "packages: [python3]", "on a debian base only"},
		{"run without a shell", here, "run: ['true']", "no /bin/sh"},
		{"unknown user", here, "user: someone", `no user "someone"`},
		{"another image", "oci-layout:" + dir + "#large", "", "there are: small"},
		{"no directory", "oci-layout:" + dir + "/none", "", "no such file or directory"},
		{"no layout", "oci-layout:" + filepath.Join(dir, "blobs"), "", "no OCI image layout"},
		{"no archive", "docker-archive:" + filepath.Join(dir, "index.json"), "", "not a usable image"},
		{"another digest", "tar:" + filepath.Join(dir, "index.json") + "#" + d.Digest, "", "has the digest"},
		{"unknown kind", "docker:alpine", "", "is not known; use debian, oci,"},
	} {
		if _, text, err := try(t, "build", recipe(t, c.base, c.lines), "-t", "refused"); err == nil || !strings.Contains(text, c.want) {
			t.Errorf("%s: %v %s", c.name, err, text)
		}
	}
}
