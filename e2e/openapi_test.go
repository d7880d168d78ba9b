package e2e

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

const schemathesis = "schemathesis==4.32.5"

// unasked are the checks of schemathesis that are not asked for. Who may do what is a golden table of its own. That whatever
// fits its schema is taken cannot be: users, paths and environments of a sandbox are no matter of schemas.
const unasked = "ignored_auth,missing_required_header,positive_data_acceptance"

// TestOpenAPIDocument: a real daemon, with a sandbox, does what its document says, whatever it is asked. Malformed requests
// are refused, replies are of their schemas, nothing is an internal error.
func TestOpenAPIDocument(t *testing.T) {
	f := copied(t)
	venv := pythonPrograms(t, schemathesis)
	var token api.Token
	f.json(&token, "token", "create", "schemathesis", "--scope", "admin")
	f.run("daemon", "stop")
	f.env = append(f.env, "FORKD_BIND=127.0.0.1:0")
	f.run("daemon", "start")
	id := f.one()

	text, err := os.ReadFile(filepath.Join("testdata", "schemathesis.toml"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config := filepath.Join(dir, "schemathesis.toml")
	filled := strings.NewReplacer("SANDBOX", id, "SNAPSHOT", parentTag).Replace(string(text))
	if err := os.WriteFile(config, []byte(filled), 0o600); err != nil {
		t.Fatal(err)
	}
	examples, most, phases, seed := 1, 3*time.Minute, "coverage", "1" // the same each time: the bounds of every schema, and beyond
	if testenv.Soak() {
		examples, most, phases, seed = 100, 40*time.Minute, "coverage,fuzzing", strconv.FormatInt(time.Now().Unix(), 10)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(most))
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(venv, "bin", "st"), "--config-file", config, "run", f.status().Address+"/openapi.json",
		"--header", "Authorization: Bearer "+token.Token, "--max-examples", strconv.Itoa(examples), "--phases", phases,
		"--checks", "all", "--exclude-checks", unasked, "--max-response-time", "60", "--continue-on-failure", "--seed", seed)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	report := strings.ReplaceAll(string(out), token.Token, "TOKEN")
	if err != nil {
		at := strings.Index(report, "= ERRORS")
		if at < 0 {
			at = max(0, strings.Index(report, "= FAILURES"))
		}
		t.Errorf("schemathesis, seed %s: %v\n%s", seed, err, report[at:])
	}
	for line := range strings.Lines(report) {
		if strings.Contains(line, "generated,") || strings.Contains(line, "Selected:") {
			t.Log(strings.TrimSpace(line))
		}
	}
	if state := f.sandbox(id).State; state != "running" {
		t.Errorf("the sandbox is %s", state)
	}
}

// TestAskedAgain: a fork that is asked for again with its key is the same fork, also by the next daemon.
func TestAskedAgain(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	f.run("daemon", "start")
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(f.home, "forkd.sock"))
	}}}
	defer c.CloseIdleConnections()
	fork := func(key, body string) (int, string, bool) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://forkd/v1/sandboxes", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Idempotency-Key", key)
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text), resp.Header.Get("Idempotent-Replayed") == "true"
	}
	one := `{"snapshot_tag":"` + parentTag + `","labels":{"test":"asked-again"}}`
	status, first, replayed := fork("once", one)
	if status != http.StatusCreated || replayed {
		t.Fatal(status, first)
	}
	if status, again, replayed := fork("once", one); status != http.StatusCreated || again != first || !replayed {
		t.Errorf("asked again: %d, replayed %v, %s; want %s", status, replayed, again, first)
	}
	if status, text, _ := fork("once", `{"snapshot_tag":"`+parentTag+`","n":2}`); status != http.StatusBadRequest || !strings.Contains(text, "key_reused") {
		t.Errorf("another request: %d %s", status, text)
	}
	if status, text, _ := fork("refused", `{"snapshot_tag":"nosuch"}`); status != http.StatusNotFound {
		t.Errorf("no such snapshot: %d %s", status, text)
	}
	var list []api.Sandbox
	f.json(&list, "ls", "--label", "test=asked-again")
	if len(list) != 1 {
		t.Fatalf("%d sandboxes; one was asked for", len(list))
	}
	// The next daemon goes on with the sandbox, and knows that it is what was asked for.
	f.run("daemon", "stop")
	f.run("daemon", "start")
	c.CloseIdleConnections()
	if status, again, replayed := fork("once", one); status != http.StatusCreated || again != first || !replayed {
		t.Errorf("asked another daemon: %d, replayed %v, %s; want %s", status, replayed, again, first)
	}
	f.run("kill", list[0].ID)
}
