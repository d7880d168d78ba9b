package e2e

import (
	"context"
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
		_, failures, _ := strings.Cut(report, "= FAILURES")
		t.Errorf("schemathesis, seed %s: %v\n%s", seed, err, failures+tail(report, 60))
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
