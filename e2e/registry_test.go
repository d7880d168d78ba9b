package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
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
