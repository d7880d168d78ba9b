package recipes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// envHome is a home that is used and left as it is, with the snapshots that were built there, instead of an empty one.
const envHome = "FORKD_TEST_RECIPES"

// suite is the daemon that the tests share.
var suite struct {
	home string
}

func TestMain(m *testing.M) {
	if suite.home = os.Getenv(envHome); suite.home != "" {
		testenv.Main(func() int { return max(m.Run(), endSuite("")) })
		return
	}
	dir, err := os.MkdirTemp("", "forkd-recipes-")
	if err != nil {
		panic(err)
	}
	suite.home = filepath.Join(dir, "home")
	testenv.Main(func() int { return max(m.Run(), endSuite(dir)) }, dir)
}

// endSuite stops the daemon, and removes dir if there is one.
func endSuite(dir string) int {
	code := 0
	if _, err := os.Stat(suite.home); err == nil {
		f := &forkd{bin: os.Getenv(testenv.EnvBinary)}
		if f.bin == "" {
			f.bin = filepath.Join("..", "..", "bin", "forkd")
		}
		if r := f.start(context.Background(), "daemon", "stop", "--kill"); r.code != 0 {
			fmt.Fprintf(os.Stderr, "recipes: stop the daemon: %s\n", r.stderr)
			code = 1
		}
	}
	if dir == "" {
		return code
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, "recipes:", err)
		code = 1
	}
	return code
}

// forkd runs the program against the shared daemon.
type forkd struct {
	t   testing.TB
	bin string
}

type result struct {
	stdout, stderr string
	code           int
}

// heavy skips a test whose recipe takes minutes to build, unless the long counts were asked for or the home is kept.
func heavy(t *testing.T) {
	t.Helper()
	if !testenv.Soak() && os.Getenv(envHome) == "" {
		t.Skipf("builds an image for minutes: make test-recipes, or set %s or %s", testenv.EnvSoak, envHome)
	}
}

// built is the program, with a snapshot of the recipe that has the recipe's name as its tag.
func built(t *testing.T, recipe string) *forkd {
	t.Helper()
	return builtOf(t, filepath.Join(testenv.Root(t), "recipes", recipe), recipe)
}

// builtOf is the same of a recipe in that directory.
func builtOf(t *testing.T, dir, recipe string) *forkd {
	t.Helper()
	testenv.Need(t, "qemu", "agent", "mke2fs", "binary", "net", "keyring")
	if os.Getenv(envHome) == "" {
		testenv.OncePerRun(t)
	}
	f := &forkd{t: t, bin: testenv.Binary(t)}
	f.seed()
	start := time.Now()
	f.within(20*time.Minute, "build", dir, "-t", recipe, "--replace")
	var s api.Snapshot
	f.json(&s, "snapshot-info", recipe)
	t.Logf("built in %.0f s: %d MiB of memory, %d MiB of disk", time.Since(start).Seconds(), (s.MemoryOwnBytes+s.MemorySharedBytes)>>20,
		(s.DiskOwnBytes+s.DiskSharedBytes)>>20)
	return f
}

// seed takes what an earlier package has downloaded.
func (f *forkd) seed() {
	f.t.Helper()
	cache := filepath.Join(suite.home, "cache")
	if _, err := os.Stat(cache); err == nil || testenv.Seed() == "" {
		return
	}
	if err := os.CopyFS(cache, os.DirFS(filepath.Join(testenv.Seed(), "cache"))); err != nil {
		f.t.Fatal(err)
	}
}

func (f *forkd) start(ctx context.Context, args ...string) result {
	cmd := exec.CommandContext(ctx, f.bin, args...)
	cmd.Env = append(os.Environ(), "FORKD_HOME="+suite.home, "FORKD_HOST=")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	r := result{stdout: stdout.String(), stderr: stderr.String()}
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

// within runs a command that must succeed in that time, on an idle machine with KVM, and returns what it printed.
func (f *forkd) within(limit time.Duration, args ...string) string {
	f.t.Helper()
	// Not the test's context: children are ended in its cleanup.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(f.t.Context()), testenv.Timeout(limit))
	defer cancel()
	r := f.start(ctx, args...)
	if r.code != 0 {
		f.t.Errorf("forkd %s: exit code %d\nstdout: %s\nstderr: %s", strings.Join(args, " "), r.code, r.stdout, r.stderr)
		return ""
	}
	return r.stdout
}

func (f *forkd) run(args ...string) string {
	f.t.Helper()
	return f.within(time.Minute, args...)
}

// exec runs a shell script in a child, which must succeed.
func (f *forkd) exec(id, script string) string {
	f.t.Helper()
	return strings.TrimSuffix(f.run("exec", id, "--", "sh", "-ec", script), "\n")
}

func (f *forkd) eval(id, code string) string {
	f.t.Helper()
	return strings.TrimSuffix(f.run("eval", id, code), "\n")
}

// json runs a command and decodes what it prints.
func (f *forkd) json(v any, args ...string) {
	f.t.Helper()
	out := f.run(append(args[:1:1], append([]string{"--json"}, args[1:]...)...)...)
	if f.t.Failed() {
		f.t.FailNow()
	}
	if err := json.Unmarshal([]byte(out), v); err != nil {
		f.t.Fatalf("forkd %s --json: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// fork makes n children that end with the test.
func (f *forkd) fork(tag string, n int) []api.Sandbox {
	f.t.Helper()
	var children []api.Sandbox
	f.json(&children, "fork", tag, "-n", strconv.Itoa(n))
	ids := []string{"kill"}
	for _, c := range children {
		ids = append(ids, c.ID)
	}
	f.t.Cleanup(func() { f.run(ids...) })
	if len(children) != n {
		f.t.Fatalf("asked for %d children, got %d", n, len(children))
	}
	return children
}

// atOnce is how many children are used at the same time.
const atOnce = 4

// each uses every child.
func each(children []api.Sandbox, use func(i int, id string)) {
	var all sync.WaitGroup
	turn := make(chan struct{}, atOnce)
	for i, c := range children {
		turn <- struct{}{}
		all.Go(func() {
			defer func() { <-turn }()
			use(i, c.ID)
		})
	}
	all.Wait()
}

// firstAnswer forks one more child and returns how long it took until it had answered.
func (f *forkd) firstAnswer(tag string, answer func(id string)) time.Duration {
	f.t.Helper()
	start := time.Now()
	children := f.fork(tag, 1)
	answer(children[0].ID)
	return time.Since(start)
}

// timed is how long something took.
func (f *forkd) timed(do func()) time.Duration {
	start := time.Now()
	do()
	return time.Since(start)
}

// distinct fails the test when two children said the same.
func distinct(t testing.TB, what string, said []string) {
	t.Helper()
	first := map[string]int{}
	for i, s := range said {
		if j, twice := first[s]; twice || s == "" {
			t.Errorf("%s of child %d: %q, as child %d has it", what, i, s, j)
		}
		first[s] = i
	}
}
