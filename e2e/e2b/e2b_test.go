package e2b

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

var update = flag.Bool("update", false, "write the table of versions into docs/e2b.md, after all that there is was run")

// usualTemplate is what the tests' sandboxes are forked of; FORKD_TEST_E2B_TEMPLATE names another, such as
// code-interpreter-v1, in a home that FORKD_TEST_E2B names and that has it.
const usualTemplate = "python-numpy"

// clients are the published ones, pinned: a change of theirs is seen when these lines are changed and not on any day. Of each
// the newest, and an older minor.
type client struct {
	name     string // of the table's column
	language string
	packages []string
	long     bool // in the long run alone
}

func clients() []client {
	return []client{
		{"Python", "python", []string{"e2b==2.63.0", "e2b-code-interpreter==2.11.5"}, false},
		{"Python, older", "python", []string{"e2b==2.55.1", "e2b-code-interpreter==2.10.5"}, true},
		{"JavaScript", "node", []string{"e2b@2.51.0", "@e2b/code-interpreter@2.8.0"}, false},
		{"JavaScript, older", "node", []string{"e2b@2.50.0", "@e2b/code-interpreter@2.7.2"}, true},
	}
}

func TestMain(m *testing.M) { testenv.Main(m.Run) }

// TestClients: every method of E2B's clients does what E2B's documentation says.
func TestClients(t *testing.T) {
	testenv.Need(t, "qemu", "agent", "mke2fs", "binary", "net", "root")
	all := testenv.Soak() || *update
	template := usualTemplate
	if name := os.Getenv("FORKD_TEST_E2B_TEMPLATE"); name != "" {
		template = name
	}
	d := start(t, template)
	t.Run("traps", func(t *testing.T) { d.traps(t, template) })
	results := map[string][]result{}
	for _, c := range clients() {
		if c.long && !all {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			argv := c.install(t)
			results[c.name] = d.suite(t, argv, template, all)
			if all || c.language == "python" { // every build is of the same machine, whoever asks for it
				t.Run("templates", func(t *testing.T) { d.templates(t, c, argv, template, all) })
			}
		})
	}
	if *update && !t.Failed() {
		writeTable(t, results)
	}
}

// daemon is one that serves E2B's clients.
type daemon struct {
	bin, home string
	env       []string // for the clients
}

// start has a daemon with the template, and the environment that it prints.
func start(t *testing.T, template string) *daemon {
	t.Helper()
	d := &daemon{bin: testenv.Binary(t), home: os.Getenv("FORKD_TEST_E2B")}
	if d.home == "" {
		d.home = filepath.Join(t.TempDir(), "home")
		if seed := testenv.Seed(); seed != "" {
			for _, sub := range []string{"layers", "images", "snapshots", "cache"} {
				if err := os.CopyFS(filepath.Join(d.home, sub), os.DirFS(filepath.Join(seed, sub))); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	t.Cleanup(func() {
		if _, err := d.run(context.WithoutCancel(t.Context()), "daemon", "stop", "--kill"); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(10*time.Minute))
	defer cancel()
	// One of this run's is as it should be; one that was kept may be of another version's.
	if _, err := d.run(ctx, "snapshot-info", template); err != nil || os.Getenv("FORKD_TEST_E2B") != "" {
		if _, err := d.run(ctx, "build", template, "-t", template, "--replace"); err != nil {
			t.Fatal(err)
		}
	}
	out, err := d.run(ctx, "env", "e2b", "--bind", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		d.env = append(d.env, strings.TrimPrefix(strings.TrimSpace(line), "export "))
	}
	if len(d.env) != 3 {
		t.Fatalf("forkd env e2b: %s", out)
	}
	return d
}

func (d *daemon) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, d.bin, args...)
	cmd.Env = append(os.Environ(), "FORKD_HOME="+d.home, "FORKD_HOST=")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("forkd %s: %w\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

// result is a line of a suite.
type result struct {
	Method  string  `json:"method"`
	OK      bool    `json:"ok"`
	Absent  bool    `json:"absent"`
	Note    string  `json:"note"`
	Seconds float64 `json:"seconds"`
}

func (d *daemon) suite(t *testing.T, argv []string, template string, all bool) (results []result) {
	t.Helper()
	argv = append(slices.Clone(argv), template)
	if !all {
		argv = append(argv, "quick")
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(5*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // Words of ours.
	cmd.Env = append(os.Environ(), d.env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r result
		if json.Unmarshal(lines.Bytes(), &r) != nil || r.Method == "" {
			continue
		}
		results = append(results, r)
		if !r.OK {
			t.Errorf("%s: %s", r.Method, r.Note)
		}
	}
	if err != nil && !t.Failed() || len(results) == 0 {
		t.Errorf("%s: %v\n%s", strings.Join(argv, " "), err, stderr.String())
	}
	return results
}

// install puts the packages where nothing else is, and returns how the suite is run with them.
func (c *client) install(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(2*time.Minute))
	defer cancel()
	try := func(missing string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // Words of ours.
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			testenv.Missing(t, missing, fmt.Sprintf("%s cannot be installed: %.300s", strings.Join(c.packages, ", "), out))
		}
	}
	suite := filepath.Join(testenv.Root(t), "e2e", "e2b", "testdata", "suite")
	if c.language == "python" {
		testenv.Need(t, "python3")
		try("pypi", "python3", "-m", "venv", "venv")
		try("pypi", append([]string{
			filepath.Join(dir, "venv", "bin", "pip"), "install", "--quiet", "--no-compile", "--disable-pip-version-check", "--retries", "1",
		}, c.packages...)...)
		return []string{filepath.Join(dir, "venv", "bin", "python"), suite + ".py"}
	}
	testenv.Need(t, "node", "npm")
	if err := os.WriteFile(filepath.Join(dir, "package.json"), []byte(`{"private": true, "type": "module"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	try("npm", append([]string{"npm", "install", "--silent", "--no-audit", "--no-fund", "--no-save"}, c.packages...)...)
	text, err := os.ReadFile(suite + ".mjs") // beside the packages, where node looks for them
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "suite.mjs"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"node", filepath.Join(dir, "suite.mjs")}
}

const (
	tableBegin = "<!-- begin: written by the tests -->\n"
	tableEnd   = "<!-- end -->\n"
)

// writeTable writes what was found out.
func writeTable(t *testing.T, results map[string][]result) {
	t.Helper()
	var b strings.Builder
	b.WriteString("| clients | versions | tried | work | not in that version, or not in the template |\n|---|---|---|---|---|\n")
	for _, c := range clients() {
		list := results[c.name]
		var works int
		absent := map[string]bool{}
		for _, r := range list {
			if r.Absent {
				absent["`"+r.Method+"`"] = true
			} else if r.OK {
				works++
			}
		}
		fmt.Fprintf(&b, "| %s | `%s` | %d | %d | %s |\n", c.name, strings.Join(c.packages, "`, `"), len(list), works,
			strings.Join(slices.Sorted(maps.Keys(absent)), ", "))
	}
	path := filepath.Join(testenv.Root(t), "docs", "e2b.md")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), tableBegin)
	_, after, ok2 := strings.Cut(rest, tableEnd)
	if !ok || !ok2 {
		t.Fatal("docs/e2b.md has no place for the table")
	}
	if err := os.WriteFile(path, []byte(before+tableBegin+b.String()+tableEnd+after), 0o644); err != nil { //nolint:gosec // A document.
		t.Fatal(err)
	}
}
