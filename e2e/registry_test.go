package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/registry"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/store/storetest"
	"forkd.dev/forkd/internal/testenv"
)

// storeBytes is what the layers of a home take.
func (f *forkd) storeBytes() int64 {
	f.t.Helper()
	var res api.GCReply
	f.json(&res, "gc", "--dry-run")
	return res.LeftBytes
}

// TestServedRegistry: several snapshots of one recipe take little more than one; another home pulls them from the daemon itself,
// with a token that opens nothing else, and their children are as warm.
func TestServedRegistry(t *testing.T) {
	testenv.OncePerRun(t)
	links := 2
	if testenv.Soak() {
		links = 9
	}
	here, there := copied(t), alone(t)
	one := here.storeBytes()
	for i := range links {
		id := here.one()
		here.eval(id, fmt.Sprintf("mine = %d; mine", i))
		here.run("exec", id, "--", "sh", "-c", fmt.Sprintf("echo %d > /root/mine", i))
		here.branch(id, "-t", fmt.Sprintf("difference-%d", i), "--mode", diff)
		here.run("kill", id)
	}
	if all := here.storeBytes(); all*10 > one*13 {
		t.Errorf("%d snapshots take %d bytes, one %d", links+1, all, one)
	}

	token := strings.Fields(here.run("token", "create", "mirror", "--scope", "pull"))[0]
	here.run("daemon", "stop")
	here.run("daemon", "start", "--bind", "127.0.0.1:0")
	var status struct {
		Address string `json:"address"`
	}
	here.json(&status, "daemon", "status")
	host := strings.TrimPrefix(status.Address, "http://")
	dir := t.TempDir()
	config, err := json.Marshal(map[string]any{"auths": map[string]any{host: map[string]any{
		"auth": base64.StdEncoding.EncodeToString([]byte("any:" + token)),
	}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600); err != nil {
		t.Fatal(err)
	}
	if r := there.try("pull", host+"/snapshots:difference-0"); r.code != 1 || !strings.Contains(r.stderr, "docker login") {
		t.Errorf("without a token: %+v", r)
	}
	there.env = append(there.env, "DOCKER_CONFIG="+dir)
	var first, second api.Pulled
	there.json(&first, "pull", host+"/snapshots:difference-0")
	there.json(&second, "pull", host+"/snapshots:difference-1", "-t", "other")
	if second.FetchedBytes*20 > first.FetchedBytes {
		t.Errorf("a relative moved %d bytes, the first %d", second.FetchedBytes, first.FetchedBytes)
	}
	id := there.forkOf("other", 1)[0].ID
	if out := there.eval(id, `mine, open("/root/mine").read().strip(), int(numpy.arange(5).sum())`); out != "(1, '1', 10)" {
		t.Errorf("a child of what was pulled says %s", out)
	}
	there.run("kill", id)
	there.run("pin", "other")
	if r := there.try("rmi", "other"); r.code != 1 || !strings.Contains(r.stderr, "forkd unpin other") {
		t.Errorf("removed what is pinned: %+v", r)
	}
}

// foreign pushes what a host of another kind would have made of a recipe: nothing of it can run anywhere.
func foreign(t *testing.T, ref string, change func(*store.Snapshot)) {
	t.Helper()
	h := storetest.New(t, storetest.Sizes{Memory: 1 << 20, Disk: 1 << 20, ImagePages: 1, RootPages: 1, BranchedPages: 1})
	img, line := h.Chain(1)
	line[0].Tag = "foreign"
	change(&line[0])
	src, err := pack.Collect(t.Context(), pack.Spec{
		Dir: t.TempDir(), Layers: h.Layers, State: func(m store.Snapshot) ([]byte, error) { return h.States[m.State], nil },
		Manifest: pack.Manifest{Tool: "test", Snapshots: line, Images: []store.Image{img}},
	})
	if err != nil {
		t.Fatal(err)
	}
	r, err := registry.Open(t.Context(), ref, registry.Options{Push: true})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	a, err := registry.Describe(t.Context(), src)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Push(t.Context(), a, src, nil); err != nil {
		t.Fatal(err)
	}
}

// TestPullRewarm: what was made for another processor is refused before any of its members is fetched, and with --rewarm made here
// from the recipe that it has.
func TestPullRewarm(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	testenv.Need(t, "net", "keyring")
	var format struct {
		Engine engine.Format `json:"engine"`
	}
	text, err := os.ReadFile(filepath.Join(f.home, "snapshots", parentTag, "manifest.json"))
	if err == nil {
		err = json.Unmarshal(text, &format)
	}
	if err != nil {
		t.Fatal(err)
	}
	var blobs atomic.Int64
	working := ggcr.New(ggcr.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			blobs.Add(1)
		}
		working.ServeHTTP(w, r)
	}))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/team/foreign"
	recipe := parentRecipe(t)
	for tag, change := range map[string]func(*store.Snapshot){
		"other":  func(m *store.Snapshot) { m.RecipeText = recipe },
		"branch": func(m *store.Snapshot) { m.RecipeText, m.Branch = recipe, &store.Branch{From: "sbx", Mode: diff} },
		"none":   func(m *store.Snapshot) { m.RecipeText = "" },
		"files":  func(m *store.Snapshot) { m.RecipeText = recipe + "files: [{source: here, path: /there}]\n" },
	} {
		foreign(t, ref+":"+tag, func(m *store.Snapshot) {
			change(m)
			m.Recipe, m.Engine = "recipe.yaml", format.Engine
			m.Engine.CPUModel, m.Engine.MemoryBytes = "other-cpu", 1<<20
		})
	}
	blobs.Store(0)
	want := []string{"other-cpu", format.Engine.CPUModel, "--rewarm"}
	r := f.try("pull", ref+":other", "-t", "rewarmed")
	for _, word := range want {
		if r.code != 1 || !strings.Contains(r.stderr, word) {
			t.Errorf("what cannot run here: exit code %d, the error lacks %q:\n%s", r.code, word, r.stderr)
		}
	}
	if n := blobs.Load(); n != 1 { // the index
		t.Errorf("%d blobs were fetched of what cannot run here", n)
	}
	for tag, want := range map[string]string{"branch": "it is a branch", "none": "it has no recipe", "files": "do not travel with it"} {
		if r := f.try("pull", ref+":"+tag, "-t", "rewarmed", "--rewarm"); r.code != 1 || !strings.Contains(r.stderr, "other-cpu") || !strings.Contains(r.stderr, want) {
			t.Errorf("%s: exit code %d, want %q:\n%s", tag, r.code, want, r.stderr)
		}
	}
	var got api.Pulled
	f.json(&got, "pull", ref+":other", "-t", "rewarmed", "--rewarm")
	t.Cleanup(func() { f.try("rmi", "rewarmed") })
	if !strings.Contains(got.Rewarm, "other-cpu") || !slices.Equal(got.New, []string{"rewarmed"}) || got.FetchedBytes != 0 {
		t.Errorf("pulled %+v", got)
	}
	// Again it is there already, whatever the index of packages says by now; another snapshot's tag is not taken for it.
	var again api.Pulled
	f.json(&again, "pull", ref+":other", "-t", "rewarmed", "--rewarm")
	if len(again.New) > 0 || !slices.Equal(again.Present, []string{"rewarmed"}) || again.Snapshot.ID != got.Snapshot.ID {
		t.Errorf("again: %+v", again)
	}
	if r := f.try("pull", ref+":none", "-t", "rewarmed", "--rewarm"); r.code != 1 || !strings.Contains(r.stderr, "it has no recipe") {
		t.Errorf("another one under that tag: %+v", r)
	}
	if out := f.inOne("rewarmed", "sh", "-c", "ls -d /usr/lib/python3/dist-packages/numpy"); out != "/usr/lib/python3/dist-packages/numpy" {
		t.Errorf("a child of what was built says %q", out)
	}
}
