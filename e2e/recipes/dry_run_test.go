package recipes

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/testenv"
)

// dryRun runs a recipe's dry run, with the Python SDK as users get it, against the shared daemon. It checks its claims itself.
func (f *forkd) dryRun(recipe string, args ...string) {
	f.t.Helper()
	root := testenv.Root(f.t)
	ctx, cancel := context.WithTimeout(f.t.Context(), testenv.Timeout(10*time.Minute))
	defer cancel()
	if out, err := exec.CommandContext(ctx, filepath.Join(root, "scripts", "sdk"), "build").CombinedOutput(); err != nil {
		f.t.Fatalf("build the SDKs: %v\n%s", err, out)
	}
	bin, err := filepath.Abs(f.bin)
	if err != nil {
		f.t.Fatal(err)
	}
	script := filepath.Join(root, "recipes", recipe, "dry_run.py")
	cmd := exec.CommandContext(ctx, filepath.Join(root, ".tools", "sdk", "python", "bin", "python"), append([]string{script}, args...)...)
	cmd.Env = append(os.Environ(), "FORKD_HOME="+suite.home, "FORKD_HOST=", "FORKD_URL=", "FORKD_TOKEN=", "FORKD_BIN="+bin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		f.t.Errorf("the dry run of %s: %v", recipe, err)
	}
	f.t.Logf("%s", out)
}

// TestCodingAgentFixes: three fixes of a bug in three children, with 50 MiB that they share.
func TestCodingAgentFixes(t *testing.T) {
	heavy(t)
	testenv.Need(t, "sdk-python")
	built(t, "coding-agent").dryRun("coding-agent")
}

// TestParallelPytest: tests of strangers, dealt to children.
func TestParallelPytest(t *testing.T) {
	heavy(t)
	testenv.Need(t, "sdk-python")
	built(t, "parallel-pytest").dryRun("parallel-pytest")
}

// TestLangGraph: an agent is branched in the middle of a thought. The packages are fetched here, as a machine whose guests cannot
// reach PyPI would.
func TestLangGraph(t *testing.T) {
	heavy(t)
	testenv.Need(t, "sdk-python")
	root := testenv.Root(t)
	dir := filepath.Join(t.TempDir(), "langgraph")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, "recipes", "langgraph"))); err != nil {
		t.Fatal(err)
	}
	agent := filepath.Join(dir, "agent")
	cmd := exec.CommandContext(t.Context(), filepath.Join(root, ".tools", "sdk", "python", "bin", "python"), "-m", "pip", "download", "--quiet",
		"--dest", filepath.Join(agent, "wheels"), "--python-version", "3.11", "--only-binary", ":all:", "--requirement", filepath.Join(agent, "requirements.txt"))
	if out, err := cmd.CombinedOutput(); err != nil {
		testenv.Missing(t, "pypi", "LangGraph cannot be fetched: "+string(out))
	}
	builtOf(t, dir, "langgraph").dryRun("langgraph")
}
