package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// The existing forkd's clients, as they are published. Their versions are pinned, so that a change of theirs is seen when
// these lines are changed and not on any day.
const (
	publishedSDK = "forkd==0.5.3"
	publishedMCP = "forkd-mcp==0.2.1"
)

// TestPublishedClients: the Python SDK and the MCP server of the existing forkd, unmodified from PyPI, drive this daemon over
// TCP with a token.
func TestPublishedClients(t *testing.T) {
	f := copied(t)
	venv := pythonPrograms(t, publishedSDK, publishedMCP)
	var token api.Token
	f.json(&token, "token", "create", "clients", "--scope", "manage")
	var admin api.Token // for the one call that names files of the host
	f.json(&admin, "token", "create", "administrator", "--scope", "admin")
	rootfs := rootfsFile(t)
	f.run("daemon", "stop")
	f.env = append(f.env, "FORKD_BIND=127.0.0.1:0")
	f.run("daemon", "start")
	address := f.status().Address
	if !strings.HasPrefix(address, "http://127.0.0.1:") {
		t.Fatalf("the daemon serves %q", address)
	}
	scripts := [][]string{
		{"controller.py", parentTag},
		{"mcp_server.py", filepath.Join(venv, "bin", "forkd-mcp"), parentTag, rootfs},
	}
	if testenv.Soak() { // what is done with that server can be done with ours
		ours := filepath.Join(t.TempDir(), "forkd-mcp")
		if err := os.WriteFile(ours, []byte("#!/bin/sh\nexec '"+f.bin+"' mcp\n"), 0o700); err != nil { //nolint:gosec // A program.
			t.Fatal(err)
		}
		scripts = append(scripts, []string{"mcp_server.py", ours, parentTag, rootfs})
	}
	for _, script := range scripts {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(2*time.Minute))
		defer cancel()
		script[0] = filepath.Join("testdata", script[0])
		cmd := exec.CommandContext(ctx, filepath.Join(venv, "bin", "python"), script...)
		cmd.Env = append(os.Environ(), "FORKD_URL="+address, "FORKD_TOKEN="+token.Token, "FORKD_ADMIN_TOKEN="+admin.Token, "FORKD_HTTP_TIMEOUT=120")
		began := time.Now()
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", script[0], err, out)
		}
		t.Logf("%s: %s after %s", script[0], lastLine(string(out)), time.Since(began).Round(time.Second/10))
	}
	if ids := f.ids(); len(ids) != 0 {
		t.Errorf("sandboxes left: %q", ids)
	}
}

// pythonPrograms installs packages into a virtual environment. It skips where there is no Python or no index of packages.
func pythonPrograms(t *testing.T, packages ...string) (venv string) {
	t.Helper()
	// Of the two halves of a run one is enough, and the user without privileges does not know where this host gets packages.
	testenv.Need(t, "root", "python3", "net")
	venv = filepath.Join(t.TempDir(), "venv")
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(time.Minute))
	defer cancel()
	for _, args := range [][]string{
		{"python3", "-m", "venv", venv},
		append([]string{
			filepath.Join(venv, "bin", "pip"), "install", "--quiet", "--no-compile", "--disable-pip-version-check", "--retries", "1", "--timeout", "10",
		}, packages...),
	} {
		if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil { //nolint:gosec // Words of ours.
			testenv.Missing(t, "pypi", strings.Join(packages, ", ")+" cannot be installed: "+lastLine(string(out)))
		}
	}
	return venv
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}
