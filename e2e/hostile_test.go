package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// liars is the program with a guest agent that lies (e2e/liar), and a snapshot of it.
func liars(t *testing.T) *forkd {
	t.Helper()
	testenv.Need(t, "qemu", "mke2fs", "binary", "keyring")
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("the lying agent is built by the test, and there is no go in PATH")
	}
	dir := t.TempDir()
	root := filepath.Dir(mustGetwd(t))
	agent, bin := filepath.Join(dir, "agent"), filepath.Join(dir, "forkd")
	overlay := filepath.Join(dir, "overlay.json")
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {
		filepath.Join(root, "internal/agentbin/bin/forkd-agent-"+runtime.GOARCH): agent,
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(overlay, replace, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", agent, "./e2e/liar"},
		{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-overlay", overlay, "-o", bin, "./cmd/forkd"},
	} {
		cmd := exec.CommandContext(t.Context(), goTool, args...)
		cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	f := alone(t)
	f.bin = bin
	if seed := os.Getenv("FORKD_TEST_SEED"); seed != "" { // for its packages: the kernel's
		if err := os.CopyFS(filepath.Join(f.home, "cache"), os.DirFS(filepath.Join(seed, "cache"))); err != nil {
			t.Fatal(err)
		}
	}
	recipe := filepath.Join(dir, "recipe")
	if err := os.Mkdir(recipe, 0o700); err != nil {
		t.Fatal(err)
	}
	var base bytes.Buffer
	w := tar.NewWriter(&base)
	for _, name := range []string{"etc/", "tmp/"} {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Typeflag: tar.TypeDir}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"base.tar":    base.String(),
		"recipe.yaml": "name: liar\nbase: tar:base.tar\nmachine: {cpus: 1, memory: 256MiB, disk: 1GiB}\n",
	} {
		if err := os.WriteFile(filepath.Join(recipe, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f.run("build", recipe, "-t", "liar")
	return f
}

func mustGetwd(t *testing.T) string {
	t.Helper()
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return wd
}

// steers fails the test if a text could steer a terminal.
func steers(t *testing.T, what, text string) {
	t.Helper()
	for _, r := range text {
		if r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 || r == 0x202e {
			t.Errorf("%s would steer a terminal: %.300q", what, text)
			return
		}
	}
}

// TestHostileGuest: real machines whose agent lies can be forked, asked, listed and ended; each costs a bounded time, and
// the daemon neither falls nor grows.
func TestHostileGuest(t *testing.T) {
	testenv.OncePerRun(t)
	f := liars(t)
	daemon := f.status().PID
	before := residentMiB(t, daemon)

	t.Run("awakening", func(t *testing.T) {
		for mode, want := range map[string]string{
			"silent":  "did not confirm its new identity",
			"garbage": "did not confirm its new identity",
			"version": "speaks version",
			"huge":    "hello of 4294967295 bytes",
			"clock":   "questions for the time",
			"refuse":  "I will not",
			"die":     "",
		} {
			t.Run(mode, func(t *testing.T) {
				start := time.Now()
				r := f.try("fork", "liar", "--env", "LIE="+mode)
				if r.code != 1 || !strings.Contains(r.stderr, want) || r.stdout != "" {
					t.Errorf("exit code %d, %q, %s", r.code, r.stdout, r.stderr)
				}
				if took := time.Since(start); took > testenv.Timeout(50*time.Second) {
					t.Errorf("it took %s", took)
				}
				steers(t, "the error", r.stderr)
			})
		}
		if list := f.run("ls", "-q"); list != "" {
			t.Errorf("children that were never confirmed are listed: %s", list)
		}
	})

	for mode, check := range map[string]func(t *testing.T, f *forkd, id string){
		"report": func(t *testing.T, f *forkd, id string) {
			steers(t, "inspect", f.run("inspect", id))
			steers(t, "ls", f.run("ls"))
		},
		"console": func(t *testing.T, f *forkd, id string) {
			await(t, 30*time.Second, "the flood", func() bool { return strings.Contains(f.run("logs", id), "flood") })
			for range 3 {
				text := f.run("logs", id)
				steers(t, "logs", text)
				if len(text) > 128<<10 || !strings.Contains(text, "flood") {
					t.Errorf("%d bytes of console: %.100q", len(text), text)
				}
				steers(t, "logs --json", f.run("logs", "--json", id))
			}
		},
		"mute": func(t *testing.T, f *forkd, id string) {
			f.bounded(t, 40*time.Second, "neither ended nor stopped", "exec", id, "--timeout", "1s", "--", "/bin/true")
			f.bounded(t, 50*time.Second, "did not answer", "pause", id)
		},
		"deaf": func(t *testing.T, f *forkd, id string) {
			f.bounded(t, 40*time.Second, "neither ended nor stopped", "exec", id, "--timeout", "1s", "--", "/bin/true")
		},
		"opens": func(t *testing.T, f *forkd, id string) {
			f.bounded(t, 40*time.Second, "", "exec", id, "--", "/bin/true")
		},
		"parts": func(t *testing.T, f *forkd, id string) {
			f.bounded(t, 40*time.Second, "more than", "exec", id, "--", "/bin/true")
		},
		"entries": func(t *testing.T, f *forkd, id string) {
			f.bounded(t, 40*time.Second, "too many parts", "exec", id, "--", "/bin/true")
		},
		"error": func(t *testing.T, f *forkd, id string) {
			r := f.bounded(t, 40*time.Second, "evil", "exec", id, "--", "/bin/true")
			if len(r.stderr) > 32<<10 {
				t.Errorf("an error of %d bytes", len(r.stderr))
			}
		},
		"off": func(t *testing.T, f *forkd, id string) {
			f.bounded(t, 40*time.Second, "", "exec", id, "--", "/bin/true")
		},
		"output": func(t *testing.T, f *forkd, id string) {
			c := f.client()
			got, err := c.Exec(t.Context(), id, api.ExecRequest{Args: []string{"/bin/yes"}, TimeoutSecs: 0.5})
			if err == nil {
				t.Errorf("it ended: %+v", got.ExitCode)
			}
		},
	} {
		t.Run(mode, func(t *testing.T) {
			f := *f
			f.t = t
			id := f.forkOf("liar", 1, "--env", "LIE="+mode)[0].ID
			check(t, &f, id)
			start := time.Now()
			if r := f.try("kill", id); r.code != 0 {
				t.Errorf("kill: %s", r.stderr)
			}
			if took := time.Since(start); took > testenv.Timeout(10*time.Second) {
				t.Errorf("to end it took %s", took)
			}
		})
	}

	if after := residentMiB(t, daemon); after > before+300 {
		t.Errorf("the daemon grew from %d to %d MiB", before, after)
	}
	if now := f.status().PID; now != daemon {
		t.Errorf("the daemon was %d and is %d", daemon, now)
	}
}

// bounded runs a verb that must fail, in time, with a text in its error that is fit for a terminal.
func (f *forkd) bounded(t *testing.T, limit time.Duration, want string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(limit))
	defer cancel()
	r := runIn(ctx, f.bin, f.home, f.env, nil, args...)
	if ctx.Err() != nil || r.code == 0 || !strings.Contains(r.stderr, want) {
		t.Errorf("forkd %s: exit code %d, %v: %.2000q", strings.Join(args, " "), r.code, ctx.Err(), r.stderr)
	}
	steers(t, args[0], r.stderr)
	return r
}

func residentMiB(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize() >> 20
}
