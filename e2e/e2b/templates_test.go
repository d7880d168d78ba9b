package e2b

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// templates: templates are built of images of a registry by E2B's clients, with every kind of step, and used; what fails says
// which step it was and why.
func (d *daemon) templates(t *testing.T, c client, argv []string, template string, all bool) {
	t.Helper()
	testenv.Need(t, "keyring")
	if runtime.GOARCH != "amd64" {
		t.Skip("the packages that the image is made of are fetched for amd64 only")
	}
	registry := newRegistry(t, filepath.Join(d.home, "cache"))
	ending, dir := ".py", t.TempDir()
	if c.language == "node" {
		ending, dir = ".mjs", filepath.Dir(argv[1]) // beside the packages, where node looks for them
	}
	text, err := os.ReadFile(filepath.Join(testenv.Root(t), "e2e", "e2b", "testdata", "templates"+ending))
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(dir, "templates"+ending)
	if err := os.WriteFile(script, text, 0o600); err != nil {
		t.Fatal(err)
	}
	argv = []string{argv[0], script, registry, template}
	if !all {
		argv = append(argv, "quick")
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(10*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // Words of ours.
	cmd.Env, cmd.Dir = append(os.Environ(), d.env...), dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	ran := 0
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r result
		if json.Unmarshal(lines.Bytes(), &r) != nil || r.Method == "" {
			continue
		}
		ran++
		t.Logf("%s: %.1f s", r.Method, r.Seconds)
		if !r.OK {
			t.Errorf("%s: %s", r.Method, r.Note)
		}
	}
	if err != nil && !t.Failed() || ran == 0 {
		t.Errorf("%s: %v\n%s", strings.Join(argv, " "), err, stderr.String())
	}
}
