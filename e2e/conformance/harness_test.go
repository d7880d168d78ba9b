package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/testenv"
)

// parentTag is the snapshot whose child all cases share.
const parentTag = "python-numpy"

// suite is the one daemon with the one sandbox of this package.
var suite struct {
	dir  string
	once sync.Once
	err  error
	id   string
	c    *client.Client
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "forkd-conformance-")
	if err != nil {
		panic(err)
	}
	suite.dir = dir
	testenv.Main(func() int { return max(m.Run(), endSuite()) }, dir)
}

func home() string { return filepath.Join(suite.dir, "home") }

func endSuite() int {
	code := 0
	if suite.c != nil {
		suite.c.Close()
	}
	if bin, err := program(); err == nil {
		if out, err := command(context.Background(), bin, "daemon", "stop", "--kill").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "conformance: stop the daemon: %v: %s\n", err, out)
			code = 1
		}
	}
	if err := os.RemoveAll(suite.dir); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		code = 1
	}
	return code
}

// program is testenv.Binary without a test.
func program() (string, error) {
	if path := os.Getenv(testenv.EnvBinary); path != "" {
		return path, nil
	}
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(filepath.Dir(wd)), "bin", "forkd")
	_, err = os.Stat(path)
	return path, err
}

// command is a run of the program against the suite's daemon.
func command(ctx context.Context, bin string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Env = append(os.Environ(), "FORKD_HOME="+home(), "FORKD_HOST=")
	return cmd
}

// guest is the shared sandbox, as its callers reach it.
type guest struct {
	t  *testing.T
	id string
	c  *client.Client
	*client.Guest
	ctx context.Context //nolint:containedctx // a test's fixture lives as long as the test
}

// newGuest is the shared sandbox for one test. What the test makes in it must have names of its own (see dir).
func newGuest(t *testing.T) *guest {
	t.Helper()
	testenv.Need(t, "qemu", "agent", "mke2fs", "binary")
	testenv.OncePerRun(t)
	suite.once.Do(func() { suite.err = prepare(t) })
	if suite.err != nil {
		t.Fatalf("prepare the sandbox: %v", suite.err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(10*time.Second))
	t.Cleanup(cancel)
	return &guest{t: t, id: suite.id, c: suite.c, Guest: suite.c.Guest(suite.id), ctx: ctx}
}

// prepare takes the parent from an earlier run, or builds it, and forks the sandbox.
func prepare(t *testing.T) error {
	t.Helper()
	bin := testenv.Binary(t)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(10*time.Minute))
	defer cancel()
	if seed := testenv.Seed(); seed != "" {
		if err := copySeed(seed); err != nil {
			return err
		}
	}
	if _, err := os.Stat(filepath.Join(home(), "snapshots", parentTag)); errors.Is(err, os.ErrNotExist) {
		testenv.Need(t, "net", "keyring")
		if out, err := command(ctx, bin, "build", parentTag, "-t", parentTag).CombinedOutput(); err != nil {
			return fmt.Errorf("build the parent: %w: %s", err, out)
		}
	}
	var children []api.Sandbox
	cmd := command(ctx, bin, "fork", "--json", parentTag, "-e", "CONFORMANCE_SANDBOX=sandbox", "-e", "CONFORMANCE_LAYER=sandbox")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("fork: %w: %s", err, stderr.Bytes())
	}
	if err := json.Unmarshal(out, &children); err != nil || len(children) != 1 {
		return fmt.Errorf("fork: %w: %s", err, out)
	}
	suite.id = children[0].ID
	suite.c, err = client.New("unix://" + filepath.Join(home(), "forkd.sock"))
	return err
}

func copySeed(seed string) error {
	if err := os.MkdirAll(home(), 0o700); err != nil {
		return err
	}
	for _, sub := range []string{"layers", "images", "snapshots", "cache"} {
		from := filepath.Join(seed, sub)
		if _, err := os.Stat(from); errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err := os.CopyFS(filepath.Join(home(), sub), os.DirFS(from)); err != nil {
			return fmt.Errorf("copy seed: %w", err)
		}
	}
	return nil
}

// dir is a directory in the guest that the test has for itself, until it ends.
func (g *guest) dir() string {
	g.t.Helper()
	path := "/tmp/conformance-" + strings.Map(func(r rune) rune {
		if r == '/' || r <= ' ' || r > '~' {
			return '_'
		}
		return r
	}, g.t.Name())
	g.sh("mkdir -p '" + path + "'")
	g.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(g.t.Context()), testenv.Timeout(10*time.Second))
		defer cancel()
		_, _ = g.Run(ctx, shell("rm -rf '"+path+"'"), nil, output(nil, nil), nil)
	})
	return path
}

// sh runs a script as root in the guest, which must succeed, and returns its standard output.
func (g *guest) sh(script string) string {
	g.t.Helper()
	var stdout, stderr bytes.Buffer
	end, err := g.Run(g.ctx, shell(script), nil, output(&stdout, &stderr), nil)
	if err != nil {
		g.t.Fatalf("%s: %v", script, err)
	}
	if end.Code() != 0 {
		g.t.Fatalf("%s: %s: %s", script, end.Status, &stderr)
	}
	return stdout.String()
}

// open begins a call.
func (g *guest) open(method string, req any) *wire.Stream {
	g.t.Helper()
	s, err := g.Open(g.ctx, method, req)
	if err != nil {
		g.t.Fatalf("%s: %v", method, err)
	}
	g.t.Cleanup(func() { _ = s.Close() })
	return s
}

// unary makes a call with at most one message as its reply.
func (g *guest) unary(method string, req, reply any) error {
	g.t.Helper()
	s := g.open(method, req)
	stop := context.AfterFunc(g.ctx, func() { _ = s.Close() })
	defer stop()
	for {
		kind, payload, err := s.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return s.Close()
		case err != nil:
			return errors.Join(err, s.Close())
		case kind == wire.KindMessage && reply != nil:
			if err := json.Unmarshal(payload, reply); err != nil {
				return err
			}
		}
	}
}

// code is the code of a refusal, "" for none, and what went wrong otherwise.
func code(err error) string {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*wire.Error](err); ok {
		return e.Code
	}
	return "no refusal: " + err.Error()
}
