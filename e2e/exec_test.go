package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

func TestExec(t *testing.T) {
	f := shared(t)
	id := f.one()
	tests := []struct {
		name   string
		args   []string
		stdin  string
		stdout string
		code   int
	}{
		{"output and code", []string{"--", "sh", "-c", "echo hi; exit 3"}, "", "hi\n", 3},
		{"signal", []string{"--", "sh", "-c", "kill -9 $$"}, "", "", 137},
		{"stdin", []string{"-i", "--", "cat"}, "through\n", "through\n", 0},
		{"no stdin", []string{"--", "cat"}, "not passed on", "", 0},
		{"environment", []string{"-e", "A=b c", "--", "printenv", "A"}, "", "b c\n", 0},
		{"directory", []string{"-w", "/usr", "--", "pwd"}, "", "/usr\n", 0},
		{"arguments are kept", []string{"--", "printf", "%s|", "a b", "", "*"}, "", "a b||*|", 0},
		{"binary output", []string{"--", "printf", `\000\377`}, "", "\x00\xff", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := &forkd{t, f.bin, f.home, f.env}
			r := f.tryIn(strings.NewReader(tt.stdin), append([]string{"exec", id}, tt.args...)...)
			if r.stdout != tt.stdout || r.code != tt.code {
				t.Errorf("got %q, code %d, want %q, %d; stderr %q", r.stdout, r.code, tt.stdout, tt.code, r.stderr)
			}
		})
	}
}

func TestExecFailures(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	tests := []struct {
		name string
		args []string
		want string
	}{
		{"unknown sandbox", []string{"exec", "sbnosuchsandbox", "--", "true"}, "not found"},
		{"no such program", []string{"exec", id, "--", "/no/such"}, "/no/such"},
		{"no such directory", []string{"exec", id, "-w", "/no/such", "--", "true"}, "/no/such"},
		{"no such user", []string{"exec", id, "-u", "nobodyhere", "--", "true"}, "nobodyhere"},
		{"unknown snapshot", []string{"run", "nosuchtag", "--", "true"}, "not found"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := f.try(tt.args...)
			if r.code != 125 || !strings.Contains(r.stderr, tt.want) {
				t.Errorf("code %d, stderr %q; want 125 and %q", r.code, r.stderr, tt.want)
			}
		})
	}
	t.Run("time limit", func(t *testing.T) {
		r := f.try("exec", id, "--timeout", "500ms", "--", "sleep", "100")
		if r.code != 137 {
			t.Errorf("code %d, stderr %q; want 137", r.code, r.stderr)
		}
	})
}

func TestEval(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	tests := []struct {
		code, stdout, stderr string
		exit                 int
	}{
		{"1+1", "2\n", "", 0},
		{"x = 5", "", "", 0},
		{"x * 2", "10\n", "", 0},
		{"None", "", "", 0},
		{"'a\\nb'", "'a\\nb'\n", "", 0},
		{"print('p'); 3", "p\n3\n", "", 0},
		{"import sys; _ = sys.stderr.write('e\\n')", "", "e\n", 0},
		{"1/0", "", "ZeroDivisionError: division by zero", 1},
		{"x +", "", "SyntaxError", 1},
		{"def f():\n    return 4\nf()", "4\n", "", 0},
		{"numpy.arange(3)", "array([0, 1, 2])\n", "", 0},
	}
	for _, tt := range tests {
		r := f.try("eval", id, tt.code)
		if r.stdout != tt.stdout || r.code != tt.exit || !strings.Contains(r.stderr, tt.stderr) {
			t.Errorf("eval %q: %+v; want %q, stderr with %q, code %d", tt.code, r, tt.stdout, tt.stderr, tt.exit)
		}
	}
	t.Run("published form", func(t *testing.T) {
		if got := f.run("eval", "--child", id, "--", "x * 3"); got != "15\n" {
			t.Errorf("eval --child printed %q", got)
		}
	})
	t.Run("json", func(t *testing.T) {
		var res api.EvalResponse
		f.json(&res, "eval", id, "print('o'); x")
		if res.Result == nil || *res.Result != "5" || res.Stdout != "o\n" {
			t.Errorf("eval --json: %+v", res)
		}
	})
	t.Run("time limit", func(t *testing.T) {
		r := f.try("eval", "--timeout", "300ms", id, "while True: pass")
		if r.code != 1 {
			t.Errorf("code %d, stderr %q", r.code, r.stderr)
		}
		if got := f.eval(id, "x"); got != "5" {
			t.Errorf("after the interruption x is %q", got)
		}
	})
}

// TestBigFileBothWays: constant memory on both sides shows as a guest and a daemon that stay small; the digest shows
// that nothing was lost.
func TestBigFileBothWays(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	megabytes := 128
	if testenv.Soak() {
		megabytes = 1024
	}
	dir := t.TempDir()
	src, want := randomFile(t, filepath.Join(dir, "src"), megabytes)
	f.run("cp", src, id+":/root/big")
	f.run("cp", id+":/root/big", filepath.Join(dir, "back"))
	back, err := os.Open(filepath.Join(dir, "back"))
	if err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, back); err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		t.Errorf("the file came back with digest %s, want %s", got, want)
	}
	if rss := f.run("exec", id, "--", "sh", "-c", "awk '/VmHWM/ {print $2}' /proc/1/status"); len(rss) > len("65536\n") {
		t.Errorf("the agent's memory reached %s KiB", strings.TrimSpace(rss))
	}
}

func randomFile(t *testing.T, path string, megabytes int) (string, string) {
	t.Helper()
	w, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.New()
	r := rand.NewChaCha8([32]byte{1})
	if _, err := io.CopyN(io.MultiWriter(w, sum), r, int64(megabytes)<<20); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return path, hex.EncodeToString(sum.Sum(nil))
}

func TestCopyDirectories(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	dir := t.TempDir()
	src := filepath.Join(dir, "tree")
	for _, err := range []error{
		os.MkdirAll(filepath.Join(src, "sub"), 0o755), os.WriteFile(filepath.Join(src, "sub", "run"), []byte("#!/bin/sh\necho ran\n"), 0o755),
		os.WriteFile(filepath.Join(src, "data"), []byte("d"), 0o640), os.Symlink("sub/run", filepath.Join(src, "link")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if r := f.try("cp", src, id+":/root/"); r.code != 2 || !strings.Contains(r.stderr, "-r") {
		t.Errorf("copying a directory without -r: %+v", r)
	}
	f.run("cp", "-r", src, id+":/root/")
	if got := f.run("exec", id, "--", "/root/tree/link"); got != "ran\n" {
		t.Errorf("the copied link runs to %q", got)
	}
	f.run("cp", "-r", id+":/root/tree", filepath.Join(dir, "back"))
	info, err := os.Stat(filepath.Join(dir, "back", "data"))
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("data came back as %v, %v", info, err)
	}
	if target, err := os.Readlink(filepath.Join(dir, "back", "link")); err != nil || target != "sub/run" {
		t.Errorf("the link came back as %q, %v", target, err)
	}
}

func TestMuchOutput(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	const lines = 400_000
	out := f.run("exec", id, "--", "seq", fmt.Sprint(lines))
	if got := strings.Count(out, "\n"); got != lines || !strings.HasSuffix(out, fmt.Sprintf("\n%d\n", lines)) {
		t.Errorf("got %d lines, want %d", got, lines)
	}
}

// TestTree: image, snapshot and sandbox hang together.
func TestTree(t *testing.T) {
	f := shared(t)
	id := f.one()
	out := f.run("tree")
	for _, want := range []string{"image python-numpy@", "- snapshot python-numpy", "sandbox " + id} {
		out := strings.ReplaceAll(out, "─", "-") // plain characters where the locale has no others
		if !strings.Contains(out, want) {
			t.Errorf("tree lacks %q:\n%s", want, out)
		}
	}
	var nodes []api.TreeNode
	if err := json.Unmarshal([]byte(f.run("--json", "tree")), &nodes); err != nil || len(nodes) == 0 {
		t.Errorf("tree --json: %v", err)
	}
}

// TestInterrupt: ctrl-c reaches what runs in the guest, and nothing is left running there.
func TestInterrupt(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	for _, args := range [][]string{
		// exec: a signal in the instant in which dash starts a program (vfork) can be lost to both.
		{"exec", id, "--", "sh", "-c", "echo begun; exec sleep 1000"},
		{"eval", id, "print('begun', flush=True)\nwhile True: pass"},
	} {
		cmd := exec.CommandContext(t.Context(), f.bin, args...)
		cmd.Env = append(os.Environ(), "FORKD_HOME="+f.home)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		begun := make([]byte, len("begun"))
		if _, err := io.ReadFull(out, begun); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, out)
		err = cmd.Wait()
		exit, ok := errors.AsType[*exec.ExitError](err)
		if want := map[string]int{"exec": 130, "eval": 1}[args[0]]; !ok || exit.ExitCode() != want {
			t.Errorf("%s ended with %v, want exit code %d", args[0], err, want)
		}
	}
	if got := f.eval(id, "'alive'"); got != "'alive'" {
		t.Errorf("after the interruption: %q", got)
	}
	if out := f.run("exec", id, "--", "sh", "-c", "cat /proc/[0-9]*/comm"); strings.Contains(out, "sleep") {
		t.Errorf("the interrupted command still runs:\n%s", out)
	}
}

func TestRestartContext(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	if r := f.try("eval", id, "import os; os._exit(4)"); r.code != 1 || !strings.Contains(r.stderr, "ContextKilled") ||
		!strings.Contains(r.stderr, "--restart") {
		t.Errorf("a context that ends itself: %+v", r)
	}
	if got := f.run("eval", "--restart", id, "1+1"); got != "2\n" {
		t.Errorf("the restarted context prints %q", got)
	}
}

func TestExecJSON(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	r := f.try("exec", "--json", f.one(), "--", "sh", "-c", "echo out; echo err >&2; exit 3")
	var res api.ExecResponse
	if err := json.Unmarshal([]byte(r.stdout), &res); err != nil || r.code != 3 {
		t.Fatalf("%v: %+v", err, r)
	}
	if want := (api.ExecResponse{Stdout: "out\n", Stderr: "err\n", ExitCode: 3}); res != want {
		t.Errorf("got %+v, want %+v", res, want)
	}
}

// TestPriority: the agent's monitor thread steps back, and neither what is started nor the agent's other threads do, some of
// which that one has made: files that are written at the same time make it.
func TestPriority(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	id := f.one()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if r := f.try("cp", name, fmt.Sprintf("%s:/tmp/file%d", id, i)); r.code != 0 {
				t.Errorf("%+v", r)
			}
		})
	}
	wg.Wait()
	for range 8 {
		wg.Go(func() {
			if r := f.try("exec", id, "--", "cut", "-d ", "-f19", "/proc/self/stat"); r.stdout != "0\n" {
				t.Errorf("a command's priority: %+v", r)
			}
		})
	}
	wg.Wait()
	// A thread that is made during a call is seen to when the next begins.
	var got []string
	for range 10 {
		got = strings.Fields(f.run("exec", id, "--", "sh", "-c", "cut -d' ' -f19 /proc/1/task/*/stat | sort | uniq -c"))
		if len(got) == 4 && got[1] == "0" && got[2] == "1" && got[3] == "10" {
			return
		}
	}
	t.Errorf("so many threads have which priority: %v; want all but one 0, and one 10", got)
}
