package e2e

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// sdks builds the SDKs as users get them and returns where their tools and they are.
func sdks(t *testing.T) (tools string) {
	t.Helper()
	root := testenv.Root(t)
	ranForeign(t, 5*time.Minute, nil, filepath.Join(root, "scripts", "sdk"), "build")
	return filepath.Join(root, ".tools", "sdk")
}

// ranForeign runs a program that is not ours; it returns what that printed.
func ranForeign(t *testing.T, most time.Duration, env []string, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(most))
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s %.200q: %v\n%s", program, args, err, tail(string(out), 60))
	}
	return string(out)
}

// served is a copy of the parent with a daemon that also answers over TCP, and the environment of its clients.
func served(t *testing.T) (f *forkd, env []string) {
	t.Helper()
	f = copied(t)
	var token api.Token
	f.json(&token, "token", "create", "sdk", "--scope", "admin")
	f.run("daemon", "stop")
	f.env = append(f.env, "FORKD_BIND=127.0.0.1:0")
	f.run("daemon", "start")
	return f, []string{"FORKD_URL=" + f.status().Address, "FORKD_TOKEN=" + token.Token, "FORKD_HOME=" + f.home, "FORKD_HOST="}
}

// spoil makes two snapshots that cannot be forked: one of another kind of machine, and one that is damaged.
func spoil(t *testing.T, f *forkd) {
	t.Helper()
	from := filepath.Join(f.home, "snapshots", parentTag)
	manifest, err := os.ReadFile(filepath.Join(from, "manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	var old api.SnapshotInfo
	f.json(&old, "snapshot-info", parentTag)
	machine, _ := old.Engine["machine"].(string)
	f.run("daemon", "stop")
	for _, tag := range []string{"foreign", "damaged"} {
		dir := filepath.Join(f.home, "snapshots", tag)
		if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(manifest), `"tag": "`+parentTag+`"`, `"tag": "`+tag+`"`)
		if tag == "foreign" {
			text = strings.ReplaceAll(text, machine, "another-"+machine)
		}
		if err := os.WriteFile(filepath.Join(dir, "manifest.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	damage(t, filepath.Join(f.home, "snapshots", "damaged", "state"), "flip")
	f.run("daemon", "start")
}

// TestSDKCodes: the SDKs have an error for each code that docs/api.md has; that they have those of the scenarios is theirs to test.
func TestSDKCodes(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "docs", "api.md"))
	if err != nil {
		t.Fatal(err)
	}
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| [45]\\d\\d \\|").FindAllSubmatch(text, -1) {
		documented = append(documented, string(row[1]))
	}
	text, err = os.ReadFile(filepath.Join("..", "sdk", "scenarios.json"))
	if err != nil {
		t.Fatal(err)
	}
	var suite struct{ Codes []string }
	if err := json.Unmarshal(text, &suite); err != nil {
		t.Fatal(err)
	}
	slices.Sort(documented)
	slices.Sort(suite.Codes)
	if diff := cmp.Diff(documented, suite.Codes); diff != "" || len(documented) == 0 {
		t.Errorf("codes of the API and of the SDKs:\n%s", diff)
	}
}

// TestSDKs: the Python package, with and without an event loop, and the TypeScript package do what sdk/scenarios.json says, by
// the same names and with the same results; every error code is its exception. Without the soak the half of Python's without an
// event loop is left out, as it is made of the other; its docstrings' examples are run.
func TestSDKs(t *testing.T) {
	testenv.Need(t, "root", "sdk-python", "sdk-node")
	tools := sdks(t)
	python := filepath.Join(tools, "python", "bin", "python")
	scenarios, err := filepath.Abs(filepath.Join("..", "sdk", "scenarios.json"))
	if err != nil {
		t.Fatal(err)
	}
	if out := ranForeign(t, time.Minute, nil, python, filepath.Join("..", "sdk", "python", "tests", "codes.py"), scenarios); out != "ok\n" {
		t.Errorf("codes: %s", out)
	}
	f, env := served(t)
	spoil(t, f)
	env[0] = "FORKD_URL=" + f.status().Address

	big := filepath.Join(t.TempDir(), "big")
	content := make([]byte, 3_000_000)
	for i := range content {
		content[i] = byte(i * i >> 7)
	}
	if err := os.WriteFile(big, content, 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(content)
	runner := filepath.Join("..", "sdk", "python", "tests", "scenarios.py")
	kinds := map[string][]string{
		"python-async": {python, runner, "async", scenarios},
		"typescript": {
			"node", filepath.Join("..", "sdk", "typescript", "scenarios.mjs"),
			filepath.Join(tools, "node", "built", "node_modules", "forkd", "dist", "index.js"), scenarios,
		},
	}
	if testenv.Soak() {
		kinds["python-sync"] = []string{python, runner, "sync", scenarios}
	}
	for name, command := range kinds {
		t.Run(name, func(t *testing.T) {
			f.t = t
			args := append(command[1:],
				"snapshot="+parentTag, "run="+name, "big="+big, "big_sha256="+hex.EncodeToString(sum[:]), "foreign=foreign", "damaged=damaged",
				"wrong_token=fkd_tk00000000_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
			)
			t.Log(lastLine(ranForeign(t, 3*time.Minute, env, command[0], args...)))
			if ids := f.ids(); len(ids) != 0 {
				t.Errorf("sandboxes left: %q", ids)
			}
			// The last of the scenarios has the daemon refuse strangers; a new one has not met them.
			f.run("daemon", "stop")
			f.run("daemon", "start")
			env[0] = "FORKD_URL=" + f.status().Address
		})
	}
	t.Run("controller", func(t *testing.T) { // what is done with the class of the existing package can be done with ours
		f.t = t
		if out := ranForeign(t, 2*time.Minute, env, python, filepath.Join("testdata", "controller.py"), parentTag); out != "ok\n" {
			t.Error(out)
		}
	})
	t.Run("examples", func(t *testing.T) {
		f.t = t
		// Over the unix socket, and with nobody there who answers: a daemon is started.
		f.run("daemon", "stop")
		local := []string{"FORKD_URL=", "FORKD_TOKEN=", "FORKD_HOST=", "FORKD_HOME=" + f.home, "FORKD_BIN=" + f.bin}
		t.Log(lastLine(ranForeign(t, 2*time.Minute, local, python, filepath.Join("..", "sdk", "python", "tests", "examples.py"), parentTag)))
	})
	t.Run("dry run", func(t *testing.T) { // of a recipe; the others' are with the tests of recipes, which build them
		f.t = t
		withPytest(t, f, filepath.Join(tools, "python"), "parallel-pytest")
		local := []string{"FORKD_URL=", "FORKD_TOKEN=", "FORKD_HOST=", "FORKD_HOME=" + f.home, "FORKD_BIN=" + f.bin}
		dryRun := filepath.Join("..", "recipes", "parallel-pytest", "dry_run.py")
		t.Log(ranForeign(t, 3*time.Minute, local, python, dryRun, "parallel-pytest", "2"))
	})
}

// withPytest makes a snapshot of the parent with the pytest of a virtual environment of this machine, imported.
func withPytest(t *testing.T, f *forkd, venv, tag string) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(venv, "lib", "python3*", "site-packages"))
	if err != nil || len(found) != 1 {
		t.Fatalf("packages in %s: %q, %v", venv, found, err)
	}
	args := []string{"-c", `tar -C "$0" -cf "$1" py.py pytest _pytest pluggy iniconfig packaging $(cd "$0" && ls -d pluggy-*.dist-info)`}
	archive := filepath.Join(t.TempDir(), "pytest.tar")
	ranForeign(t, time.Minute, nil, "sh", append(args, found[0], archive)...)
	id := f.forkOf(parentTag, 1)[0].ID
	f.run("cp", archive, id+":/tmp/pytest.tar")
	f.run("exec", id, "--", "sh", "-ec", "tar -C /usr/local/lib/python3.11/dist-packages -xf /tmp/pytest.tar; rm /tmp/pytest.tar")
	f.run("eval", id, "import pytest")
	f.run("branch", id, "-t", tag)
	f.run("kill", id)
}

// TestMCP: the official client of the Model Context Protocol lists and calls every tool of forkd mcp, over standard input and
// output and over HTTP.
func TestMCP(t *testing.T) {
	testenv.Need(t, "root", "sdk-python")
	python := filepath.Join(testenv.Root(t), ".tools", "sdk", "python", "bin", "python")
	f := copied(t)
	f.run("daemon", "start")
	script := filepath.Join("testdata", "mcp_client.py")
	home := []string{"FORKD_HOME=" + f.home, "FORKD_HOST=", "FORKD_TOKEN="}
	t.Run("stdio", func(t *testing.T) {
		if out := ranForeign(t, 2*time.Minute, home, python, script, parentTag, f.bin, "mcp"); out != "ok\n" {
			t.Error(out)
		}
	})
	t.Run("http", func(t *testing.T) {
		f.t = t
		var token api.Token
		scope := "manage"
		if testenv.Soak() { // some tools need more
			scope = "admin"
		}
		f.json(&token, "token", "create", "mcp", "--scope", scope)
		ctx, stop := context.WithCancel(t.Context())
		server := exec.CommandContext(ctx, f.bin, "mcp", "--http", "127.0.0.1:0")
		server.Cancel = func() error { return server.Process.Signal(os.Interrupt) }
		server.Env = append(os.Environ(), home...)
		said, err := server.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			stop()
			if err := server.Wait(); err != nil && ctx.Err() == nil {
				t.Errorf("the server: %v", err)
			}
		}()
		line, err := bufio.NewReader(said).ReadString('\n')
		address, _, found := strings.Cut(line, " ")
		if err != nil || !found {
			t.Fatalf("the server says %q: %v", line, err)
		}
		args := []string{script, parentTag, address, token.Token}
		if !testenv.Soak() {
			args = append(args, "short")
		}
		if out := ranForeign(t, 2*time.Minute, home, python, args...); out != "ok\n" {
			t.Error(strings.ReplaceAll(out, token.Token, "TOKEN"))
		}
	})
}
