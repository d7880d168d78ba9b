package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/e2e/load"
	"forkd.dev/forkd/internal/testenv"
)

// parentTag is the snapshot most tests fork.
const parentTag = "python-numpy"

// suite is the daemon that most tests share.
var suite struct {
	home string
	once sync.Once
	err  error
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == load.Word { // in a guest
		if err := load.Main(context.Background(), os.Args[2:], os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "load:", err)
			os.Exit(1) //nolint:forbidigo // it is a main of its own.
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == attemptsWord { // in a guest
		if err := makeAttempts(context.Background(), os.Args[2:], os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "attempts:", err)
			os.Exit(1) //nolint:forbidigo // it is a main of its own.
		}
		return
	}
	dir, err := os.MkdirTemp("", "forkd-e2e-")
	if err != nil {
		panic(err)
	}
	suite.home = filepath.Join(dir, "home")
	testenv.Main(func() int {
		code := m.Run()
		return max(code, endSuite(dir))
	}, dir)
}

// endSuite stops the shared daemon and looks for what it left behind.
func endSuite(dir string) int {
	code := 0
	complain := func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "e2e: "+format+"\n", args...)
		code = 1
	}
	if bin, err := binary(); err == nil {
		if r := runIn(context.Background(), bin, suite.home, nil, nil, "daemon", "stop", "--kill"); r.code != 0 {
			complain("stop the daemon: %s", r.stderr)
		}
	}
	for _, left := range leftovers(suite.home) {
		complain("left behind: %s", left)
	}
	if keep := os.Getenv("FORKD_TEST_KEEP"); keep != "" && code == 0 {
		if err := saveSeed(suite.home, keep); err != nil {
			complain("keep what was built: %v", err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		complain("%v", err)
	}
	return code
}

// leftovers are the files, sockets and processes that must not outlive a daemon.
func leftovers(home string) []string {
	var left []string
	for _, sub := range []string{"machines", "hot", "tmp"} {
		entries, err := os.ReadDir(filepath.Join(home, sub))
		if err != nil {
			continue
		}
		for _, e := range entries {
			left = append(left, filepath.Join(sub, e.Name()))
		}
	}
	if _, err := os.Lstat(filepath.Join(home, "forkd.sock")); err == nil {
		left = append(left, "forkd.sock")
	} else if pid := networkOf(home); pid != 0 {
		left = append(left, fmt.Sprintf("process of networks %d", pid))
	}
	left = append(left, groupsOf(home)...)
	for _, pid := range machinesOf(home) {
		left = append(left, fmt.Sprintf("process %d", pid))
	}
	return left
}

// groupsOf finds the control groups of a home's VM processes.
func groupsOf(home string) []string {
	resolved, err := filepath.EvalSymlinks(home)
	if err != nil {
		return nil
	}
	sum := sha256.Sum256([]byte(resolved))
	name := "forkd-" + hex.EncodeToString(sum[:6])
	var found []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, "/"+name+"/") {
			found = append(found, path)
		}
		return nil // Groups come and go.
	})
	return found
}

// machinesOf finds VM processes by their working directory.
func machinesOf(home string) []int {
	resolved, err := filepath.EvalSymlinks(filepath.Join(home, "machines"))
	if err != nil {
		return nil
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		cwd, err := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		if err == nil && strings.HasPrefix(cwd, resolved+"/") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// alive reports whether a process runs; one that only waits to be reaped does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}

func binary() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	bin := filepath.Join(filepath.Dir(wd), "bin", "forkd")
	_, err = os.Stat(bin)
	return bin, err
}

// forkd runs the program against one home.
type forkd struct {
	t    testing.TB
	bin  string
	home string
	env  []string
}

type result struct {
	stdout, stderr string
	code           int
}

// shared is the program on the shared daemon, with the default parent built.
func shared(t testing.TB) *forkd {
	t.Helper()
	testenv.Need(t, "qemu", "agent", "mke2fs", "binary")
	f := &forkd{t: t, bin: testenv.Binary(t), home: suite.home}
	suite.once.Do(func() { suite.err = prepare(t, f) })
	if suite.err != nil {
		t.Fatalf("prepare the parent: %v", suite.err)
	}
	return f
}

// prepare builds the default parent, or takes it from an earlier run.
func prepare(t testing.TB, f *forkd) error {
	if seed := os.Getenv("FORKD_TEST_SEED"); seed != "" {
		if err := copySeed(seed, f.home); err != nil {
			return err
		}
		if os.Getenv("FORKD_TEST_SEED_AS_IS") != "" { // It is of another QEMU, and would be built again.
			return nil
		}
	}
	testenv.Need(t, "net", "keyring")
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(10*time.Minute))
	defer cancel()
	r := runIn(ctx, f.bin, f.home, nil, nil, "build", parentTag, "-t", parentTag)
	if strings.Contains(r.stderr, "--replace") { // an earlier run's, of another build
		r = runIn(ctx, f.bin, f.home, nil, nil, "build", parentTag, "-t", parentTag, "--replace")
	}
	if r.code != 0 {
		return errors.New(r.stderr)
	}
	return nil
}

// seedDirs are what a home needs to have its snapshots.
func seedDirs() []string { return []string{"layers", "images", "snapshots", "cache"} }

func copySeed(seed, home string) error {
	if _, err := os.Stat(filepath.Join(seed, "snapshots", parentTag)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := os.MkdirAll(home, 0o700); err != nil {
		return err
	}
	for _, sub := range seedDirs() {
		if err := os.CopyFS(filepath.Join(home, sub), os.DirFS(filepath.Join(seed, sub))); err != nil {
			return fmt.Errorf("copy seed: %w", err)
		}
	}
	return nil
}

func saveSeed(home, keep string) error {
	for _, sub := range seedDirs() {
		if err := os.CopyFS(filepath.Join(keep, sub), os.DirFS(filepath.Join(home, sub))); err != nil {
			return err
		}
	}
	return nil
}

// alone is the program with an empty home of its own, whose daemon ends with the test.
func alone(t testing.TB, env ...string) *forkd {
	t.Helper()
	testenv.Need(t, "qemu", "binary")
	f := &forkd{t: t, bin: testenv.Binary(t), home: filepath.Join(t.TempDir(), "home"), env: env}
	t.Cleanup(func() {
		runIn(context.WithoutCancel(t.Context()), f.bin, f.home, f.env, nil, "daemon", "stop", "--kill")
		for _, left := range leftovers(f.home) {
			t.Errorf("left behind: %s", left)
		}
	})
	return f
}

// aloneOn is alone on a file system of its own, of that size, which only root can mount.
func aloneOn(t testing.TB, size string) *forkd {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "small")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("forkd-test", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the daemon has been stopped
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	f := alone(t)
	f.home = filepath.Join(dir, "home")
	if err := os.MkdirAll(f.home, 0o700); err != nil {
		t.Fatal(err)
	}
	return f
}

// copied is the program with a home of its own that has the parent, to be damaged.
func copied(t testing.TB, env ...string) *forkd {
	t.Helper()
	shared(t)
	f := alone(t, env...)
	for _, sub := range []string{"layers", "images", "snapshots"} {
		if err := os.CopyFS(filepath.Join(f.home, sub), os.DirFS(filepath.Join(suite.home, sub))); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// try runs a command and returns whatever happens.
func (f *forkd) try(args ...string) result {
	f.t.Helper()
	return f.tryIn(nil, args...)
}

func (f *forkd) tryIn(stdin io.Reader, args ...string) result {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout(3*time.Minute))
	defer cancel()
	return runIn(ctx, f.bin, f.home, f.env, stdin, args...)
}

// run runs a command that must succeed, and returns its standard output.
func (f *forkd) run(args ...string) string {
	f.t.Helper()
	r := f.try(args...)
	if r.code != 0 {
		f.t.Fatalf("forkd %s: exit code %d\nstdout: %s\nstderr: %s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// json runs a command that must succeed and decodes what it prints.
func (f *forkd) json(v any, args ...string) {
	f.t.Helper()
	out := f.run(append(args[:1:1], append([]string{"--json"}, args[1:]...)...)...)
	if err := json.Unmarshal([]byte(out), v); err != nil {
		f.t.Fatalf("forkd %s --json: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// fork makes n children that end with the test.
func (f *forkd) fork(n int, flags ...string) []api.Sandbox {
	f.t.Helper()
	return f.forkOf(parentTag, n, flags...)
}

// forkOf makes n children of a snapshot, which end with the test.
func (f *forkd) forkOf(tag string, n int, flags ...string) []api.Sandbox {
	f.t.Helper()
	var children []api.Sandbox
	f.json(&children, append([]string{"fork", tag, "-n", strconv.Itoa(n)}, flags...)...)
	if len(children) != n {
		f.t.Fatalf("asked for %d children, got %d", n, len(children))
	}
	ids := []string{"kill"}
	for _, c := range children {
		ids = append(ids, c.ID)
	}
	f.t.Cleanup(func() { f.try(ids...) })
	return children
}

// one makes one child.
func (f *forkd) one(flags ...string) string {
	f.t.Helper()
	return f.fork(1, flags...)[0].ID
}

// eval evaluates and returns what is printed.
func (f *forkd) eval(id, code string) string {
	f.t.Helper()
	return strings.TrimSuffix(f.run("eval", id, code), "\n")
}

func runIn(ctx context.Context, bin, home string, env []string, stdin io.Reader, args ...string) result {
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Env = append(os.Environ(), "FORKD_HOME="+home, "FORKD_HOST=")
	cmd.Env = append(cmd.Env, env...)
	cmd.Stdin = stdin
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	r := result{stdout.String(), stderr.String(), 0}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		r.code = exit.ExitCode()
	} else if err != nil {
		r.code, r.stderr = -1, err.Error()
	}
	if ctx.Err() != nil {
		r.stderr += "\n" + ctx.Err().Error()
	}
	return r
}
