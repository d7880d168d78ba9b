package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// recipeText writes a recipe. One with the default parent's image needs no building of that.
func recipeText(t testing.TB, text string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "recipe.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestBuildAgainIsACacheHit(t *testing.T) {
	f := shared(t)
	r := f.try("build", parentTag, "-t", parentTag)
	if r.code != 0 || !strings.Contains(r.stderr, "up to date (cached)") {
		t.Errorf("building again: %+v", r)
	}
}

// TestBuildFailures: what the user got wrong is named, with the guest's console where it explains, and nothing is left.
func TestBuildFailures(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	testenv.Need(t, "net", "keyring")
	parent := parentRecipe(t)
	tests := []struct {
		name, text string
		want       []string
	}{
		{"unknown base", "base: debian:slink\n", []string{"debian:slink", "recipe.yaml:1"}},
		{"unknown package", "base: debian:bookworm\npackages: [no-such-package-here]\n", []string{"no-such-package-here"}},
		{"unknown key", "base: debian:bookworm\nfoo: 1\n", []string{"recipe.yaml:2", "foo"}},
		{"negative memory", "base: debian:bookworm\nmachine: {memory: -512MiB}\n", []string{"recipe.yaml:2", "memory"}},
		{"larger than the host", parent + "machine: {memory: 900GiB}\n", []string{"this host has"}},
		{"too many cpus", parent + "machine: {cpus: 63}\n", []string{"this host has"}},
		{"warm-up raises", parent + "warmup: {context: python, code: 'print(\"before\"); 1/0'}\n", []string{"ZeroDivisionError", "before", "warm-up"}},
		{"warm-up fails", parent + "warmup: {command: [sh, -c, 'echo said; exit 3']}\n", []string{"exit status 3", "said"}},
		{"never ready", parent + "warmup: {command: [sleep, '1000'], ready: {port: 81, timeout: 3s}}\n", []string{"port 81", "not ready within 3s"}},
		{"ends before ready", parent + "warmup: {command: [sh, -c, 'echo bye; exit 3'], ready: {file: /no/such}}\n", []string{"ended before it was ready", "exit status 3", "bye"}},
		{"ends while it is checked", parent + "warmup: {command: [sh, -c, 'sleep 1; kill $$'], ready: {command: sleep 100}}\n", []string{"ended before it was ready", "terminated"}},
		{
			"answers otherwise", parent + "warmup: {command: [python3, -m, http.server, '8000'], ready: {http: http://127.0.0.1:8000/none, timeout: 20s}}\n",
			[]string{"http://127.0.0.1:8000/none answers with status 404", "not ready within 20s", "GET /none HTTP/1.0"},
		},
		{
			"second of two", parent + "warmup: {services: [{name: a, command: sleep 1000, ready: {command: 'true'}}, {name: b, command: sleep 1000, ready: {command: 'echo why; exit 4', timeout: 3s}}]}\n",
			[]string{"warm-up failed: b: it was not ready within 3s", "exit status 4", "why"},
		},
		{"takes too long", parent + "warmup: {context: python, code: 'while True: pass', timeout: 3s}\n", []string{"within 3s"}},
	}
	t.Run("each", func(t *testing.T) {
		for i, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel() // most of it is waiting
				f, tag := &forkd{t, f.bin, f.home, f.env}, "failing-"+strconv.Itoa(i)
				r := f.try("build", recipeText(t, tt.text), "-t", tag)
				if r.code != 1 {
					t.Errorf("exit code %d, want 1", r.code)
				}
				for _, want := range tt.want {
					if !strings.Contains(r.stderr, want) {
						t.Errorf("the error lacks %q:\n%s", want, r.stderr)
					}
				}
				if r := f.try("snapshot-info", tag); r.code != 1 {
					t.Errorf("a snapshot is left: %+v", r)
				}
			})
		}
	})
	if left := leftovers(f.home); len(left) > 1+len(machinesOf(f.home)) {
		t.Logf("running: %v", left)
	}
}

// parentRecipe is the default parent's recipe without its warm-up and machine: the same image.
func parentRecipe(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(testenv.Root(t), "recipes", parentTag, "recipe.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var keep []string
	skip := false
	for line := range strings.Lines(string(b)) {
		if !strings.HasPrefix(line, " ") {
			skip = strings.HasPrefix(line, "warmup:") || strings.HasPrefix(line, "machine:") || strings.HasPrefix(line, "name:")
		}
		if !skip {
			keep = append(keep, line)
		}
	}
	return strings.Join(keep, "")
}

// TestService: services with ready checks go on running in every child, under their names, as their users, and are named as
// not renewed.
func TestService(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	const tag = "e2e-service"
	text := parentRecipe(t) + `
warmup:
  services:
    - name: web
      command: [python3, -c, "import http.server as h; print('up', flush=True); h.HTTPServer(('127.0.0.1', 8000), h.SimpleHTTPRequestHandler).serve_forever()"]
      workdir: /srv
      ready:
        - {log: ^up$, port: "127.0.0.1:8000"}
        - {http: "http://127.0.0.1:8000/", interval: 200ms}
    - name: writer
      command: echo $WHAT by $(id -un) > /tmp/out; exec sleep infinity
      user: nobody
      workdir: /
      env: {WHAT: written}
      ready: {file: /tmp/out, command: grep -q written /tmp/out}
  command: [touch, /srv/after]
  context: python
  code: import os; after = os.listdir("/srv")
`
	f.run("build", recipeText(t, text), "-t", tag)
	t.Cleanup(func() { f.run("rmi", tag) })
	var children []api.Sandbox
	f.json(&children, "fork", tag, "-n", "2")
	t.Cleanup(func() { f.run("kill", "--tag", tag) })
	for _, c := range children {
		code := `import urllib.request as u; u.urlopen("http://127.0.0.1:8000/").status, b"after" in u.urlopen("http://127.0.0.1:8000/").read(), after`
		if got := f.eval(c.ID, code); got != "(200, True, ['after'])" {
			t.Errorf("the service answers %q in %s", got, c.ID)
		}
		if got := f.run("exec", c.ID, "--", "cat", "/tmp/out"); got != "written by nobody\n" {
			t.Errorf("the second service wrote %q", got)
		}
		named := false
		for _, n := range c.CloneReport.NotRenewed {
			named = named || n.What == "process" && strings.Contains(n.Name, "http.server")
		}
		if !named {
			t.Errorf("the report does not name the service: %+v", c.CloneReport.NotRenewed)
		}
	}
	if r := f.try("rmi", tag); r.code != 1 || !strings.Contains(r.stderr, "running") {
		t.Errorf("removing a snapshot in use: %+v", r)
	}
}

// TestForkHooks: executable files in /etc/forkd/fork.d run in every child before its other processes; an SSH host key
// becomes another in every child.
func TestForkHooks(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	const tag = "e2e-hooks"
	text := parentRecipe(t) + `
warmup:
  command: [sh, -c, "mkdir -p /etc/ssh; echo old > /etc/ssh/ssh_host_ed25519_key; mkdir -p /etc/forkd/fork.d; printf '#!/bin/sh\necho $FORKD_FORK_INDEX of $FORKD_FORK_COUNT > /root/hooked\n' > /etc/forkd/fork.d/10-note; chmod +x /etc/forkd/fork.d/10-note"]
`
	f.run("build", recipeText(t, text), "-t", tag)
	t.Cleanup(func() { f.run("rmi", tag) })
	var children []api.Sandbox
	f.json(&children, "fork", tag, "-n", "2")
	t.Cleanup(func() { f.run("kill", "--tag", tag) })
	if got := f.run("exec", children[1].ID, "--", "cat", "/root/hooked"); got != "1 of 2\n" {
		t.Errorf("the hook wrote %q", got)
	}
	key := func(id string) string { return f.run("exec", id, "--", "cat", "/etc/ssh/ssh_host_ed25519_key") }
	a, b := key(children[0].ID), key(children[1].ID)
	if a == b || !strings.HasPrefix(a, "-----BEGIN OPENSSH PRIVATE KEY-----") || !strings.HasPrefix(b, "-----BEGIN OPENSSH PRIVATE KEY-----") {
		t.Errorf("the SSH host keys are %q and %q", a, b)
	}
}
