package e2e

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
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

// TestSDKCodes: the SDKs have an error for each code of the API, which docs/api.md has as well, and the scenarios have a daemon say
// each, or tell why nobody can; that the SDKs have those of the scenarios is theirs to test.
func TestSDKCodes(t *testing.T) {
	source, err := os.ReadFile(filepath.Join("..", "api", "api.go"))
	if err != nil {
		t.Fatal(err)
	}
	var codes []string
	for _, row := range regexp.MustCompile(`(?m)^\tCode\w+ +Code = "([a-z_]+)"`).FindAllSubmatch(source, -1) {
		codes = append(codes, string(row[1]))
	}
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
	var suite struct {
		Codes     []string
		Unsaid    map[string]string
		Scenarios []struct{ Steps []struct{ Error string } }
	}
	if err := json.Unmarshal(text, &suite); err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	for _, s := range suite.Scenarios {
		for _, step := range s.Steps {
			said[step.Error] = true
		}
	}
	for _, code := range codes {
		if said[code] == (suite.Unsaid[code] != "") {
			t.Errorf("code %s: a scenario has a daemon say it: %v; why none can: %q", code, said[code], suite.Unsaid[code])
		}
	}
	slices.Sort(documented)
	slices.Sort(codes)
	slices.Sort(suite.Codes)
	if diff := cmp.Diff(codes, documented); diff != "" {
		t.Errorf("codes of the API and of docs/api.md:\n%s", diff)
	}
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
	built := filepath.Join(tools, "node", "built", "node_modules", "forkd", "dist", "index.js")
	if out := ranForeign(t, time.Minute, nil, "node", filepath.Join("..", "sdk", "typescript", "codes.mjs"), built, scenarios); out != "ok\n" {
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
			"node", filepath.Join("..", "sdk", "typescript", "scenarios.mjs"), built, scenarios,
		},
	}
	if testenv.Soak() {
		kinds["python-sync"] = []string{python, runner, "sync", scenarios}
	}
	quiet := alone(t) // serves no TCP, which it is asked to where another does already
	quiet.run("token", "create", "sdk")
	socket, taken := "unix://"+quiet.status().Socket, strings.TrimPrefix(f.status().Address, "http://")
	for name, command := range kinds {
		t.Run(name, func(t *testing.T) {
			f.t = t
			args := append(command[1:],
				"snapshot="+parentTag, "run="+name, "big="+big, "big_sha256="+hex.EncodeToString(sum[:]), "foreign=foreign", "damaged=damaged",
				"socket="+socket, "taken="+taken, "wrong_token=fkd_tk00000000_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
			)
			t.Log(lastLine(ranForeign(t, 3*time.Minute, env, command[0], args...)))
			if ids := f.ids(); len(ids) != 0 {
				t.Errorf("sandboxes left: %q", ids)
			}
			// The last of the scenarios has the daemon refuse strangers; a new one has not met them.
			f.run("daemon", "stop")
			f.run("daemon", "start")
			env[0] = "FORKD_URL=" + f.status().Address
			taken = strings.TrimPrefix(f.status().Address, "http://")
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
		args := []string{filepath.Join("..", "sdk", "python", "tests", "examples.py"), parentTag}
		if !testenv.Soak() { // that each method has one is looked at all the same
			args = append(args, "._sync.files.")
		}
		t.Log(lastLine(ranForeign(t, 5*time.Minute, local, python, args...)))
		f.run("daemon", "stop")
		client := `const { Client } = await import(process.argv[1]); const c = new Client(); console.log((await c.version()).api); await c.close();`
		if out := ranForeign(t, time.Minute, local, "node", "--input-type=module", "-e", client, built); out != "v1\n" {
			t.Errorf("a daemon that the TypeScript SDK starts says %q", out)
		}
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

// TestSDKStreams: what is long goes through the SDKs and the daemon in constant memory, both ways.
func TestSDKStreams(t *testing.T) {
	testenv.Need(t, "root", "sdk-python", "sdk-node")
	tools := sdks(t)
	f, env := served(t)
	python := filepath.Join(tools, "python", "bin", "python")
	streams := filepath.Join("..", "sdk", "python", "tests", "streams.py")
	size, most := "8", 2*time.Minute
	if testenv.Soak() {
		size, most = "1024", time.Hour
	}
	for name, command := range map[string][]string{
		"python-sync": {python, streams, "sync"}, "python-async": {python, streams, "async"},
		"typescript": {
			"node", filepath.Join("..", "sdk", "typescript", "streams.mjs"), filepath.Join(tools, "node", "built", "node_modules", "forkd", "dist", "index.js"),
		},
	} {
		if !testenv.Soak() && name != "python-async" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			f.t = t
			before := peak(t, f.status().PID)
			t.Log(lastLine(ranForeign(t, most, env, command[0], append(command[1:], parentTag, size)...)))
			grown := (peak(t, f.status().PID) - before) >> 20
			t.Logf("the daemon: %d MiB more", grown)
			if grown > 128 {
				t.Errorf("the daemon took %d MiB more for streams of %s MiB", grown, size)
			}
		})
	}
}

// peak is the most memory that a process has had, in bytes.
func peak(t *testing.T, pid int) int64 {
	t.Helper()
	status, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	if row == nil {
		t.Fatalf("no VmHWM of %d", pid)
	}
	kib, err := strconv.ParseInt(string(row[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// TestSDKRuntimes: the package that Node has works in Deno, Bun and, on a page of another origin, in a browser.
func TestSDKRuntimes(t *testing.T) {
	testenv.Need(t, "root", "sdk-node", "sdk-runtimes")
	tools := sdks(t)
	runtimes := filepath.Join(tools, "runtimes", "node_modules", ".bin")
	scenarios, err := filepath.Abs(filepath.Join("..", "sdk", "scenarios.json"))
	if err != nil {
		t.Fatal(err)
	}
	f, env := served(t)
	at := freePort(t)
	f.run("daemon", "stop")
	f.env = append(f.env, fmt.Sprintf("FORKD_ORIGINS=http://127.0.0.1:%d", at))
	f.run("daemon", "start")
	env[0] = "FORKD_URL=" + f.status().Address
	pkg := filepath.Join(tools, "node", "built", "node_modules", "forkd")
	script := func(name string) string { return filepath.Join("..", "sdk", "typescript", name) }
	for _, command := range [][]string{{filepath.Join(runtimes, "deno"), "run", "-A"}, {filepath.Join(runtimes, "bun")}} {
		t.Run(filepath.Base(command[0]), func(t *testing.T) {
			f.t = t
			for _, args := range [][]string{
				{script("codes.mjs"), filepath.Join(pkg, "dist", "index.js"), scenarios}, {script("smoke.mjs"), filepath.Join(pkg, "dist", "index.js"), parentTag},
			} {
				if out := ranForeign(t, 2*time.Minute, env, command[0], slices.Concat(command[1:], args)...); !strings.HasSuffix(out, "ok\n") {
					t.Errorf("%s: %s", args[0], out)
				}
			}
		})
	}
	t.Run("browser", func(t *testing.T) {
		f.t = t
		browser := "" // then that it can be bundled for one is all that is shown
		for _, name := range []string{"chromium-headless-shell", "chromium"} {
			if path, err := exec.LookPath(name); err == nil && browser == "" {
				browser = path
			}
		}
		out := ranForeign(t, 4*time.Minute, env, "node", script("browser.mjs"), pkg, filepath.Join(runtimes, "esbuild"), browser, parentTag, strconv.Itoa(at))
		if out != "ok\n" {
			t.Error(out)
		}
		if browser == "" {
			t.Log("there is no Chromium here: the package was bundled for browsers, and not run in one")
		}
	})
}

// freePort is one that nobody listens on now.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // It is TCP's.
}

// TestMCP: the official clients of the Model Context Protocol list and call every tool of forkd mcp, over standard input and
// output and over HTTP: Python's, and in the long run TypeScript's.
func TestMCP(t *testing.T) {
	testenv.Need(t, "root", "sdk-python")
	python := filepath.Join(testenv.Root(t), ".tools", "sdk", "python", "bin", "python")
	f := copied(t)
	f.run("daemon", "start")
	script := filepath.Join("testdata", "mcp_client.py")
	var node string
	home := []string{"FORKD_HOME=" + f.home, "FORKD_HOST=", "FORKD_TOKEN=", "FORKD_URL="}
	if testenv.Soak() {
		home = append(home, "ROOTFS="+rootfsFile(t))
		node = nodeMCP(t)
	}
	t.Run("stdio", func(t *testing.T) {
		if out := ranForeign(t, 2*time.Minute, home, python, script, parentTag, f.bin, "mcp"); out != "ok\n" {
			t.Error(out)
		}
		if node != "" {
			listed(t, ranForeign(t, 4*time.Minute, home, "node", node, parentTag, f.bin, "mcp"))
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
		if node != "" {
			listed(t, ranForeign(t, 4*time.Minute, home, "node", node, parentTag, address, token.Token))
		}
	})
}

// nodeMCP installs the protocol's TypeScript SDK, as it is published, and returns the script that uses it.
func nodeMCP(t *testing.T) (script string) {
	t.Helper()
	testenv.Need(t, "node", "npm")
	dir := t.TempDir()
	text, err := os.ReadFile(filepath.Join("testdata", "mcp_client.mjs"))
	if err != nil {
		t.Fatal(err)
	}
	script = filepath.Join(dir, "mcp_client.mjs") // beside the package, where node looks for it
	if err := os.WriteFile(script, text, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(2*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, "npm", "install", "--prefix", dir, "--silent", "--no-audit", "--no-fund", "--no-save", "@modelcontextprotocol/sdk@1.32.2")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		testenv.Missing(t, "npm", fmt.Sprintf("the TypeScript SDK of the Model Context Protocol cannot be installed: %.300s", out))
	}
	return script
}

// listed wants the last word of a client of the Model Context Protocol, which is how many tools it has called.
func listed(t *testing.T, out string) {
	t.Helper()
	if !strings.HasPrefix(lastLine(out), "ok ") {
		t.Error(out)
		return
	}
	t.Logf("tools listed and called: %s", strings.TrimPrefix(lastLine(out), "ok "))
}
