package registry

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/testenv"
)

// envServe has the test binary be a registry: address, then a directory for blobs.
const envServe = "FORKD_TEST_SERVE_REGISTRY"

func TestMain(m *testing.M) {
	if address, dir, ok := strings.Cut(os.Getenv(envServe), " "); ok {
		serveRegistry(address, dir)
		return
	}
	testenv.Main(m.Run)
}

// serveRegistry is go-containerregistry's as a process. Blobs outlive it; manifests and uploads do not.
func serveRegistry(address, dir string) {
	handler := ggcr.New(ggcr.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)), ggcr.WithBlobHandler(ggcr.NewDiskBlobHandler(dir)))
	server := &http.Server{Addr: address, Handler: handler, ReadHeaderTimeout: time.Minute}
	fmt.Fprintln(os.Stderr, server.ListenAndServe())
}

// process is a registry in a process of its own, which can be killed and started again.
type process struct {
	t       *testing.T
	address string
	command []string
	env     string
	cmd     *exec.Cmd
}

// freeAddress is one that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return l.Addr().String()
}

// newDockerRegistry is Debian's.
func newDockerRegistry(t *testing.T) *process {
	t.Helper()
	testenv.Need(t, "docker-registry")
	config, address := filepath.Join(t.TempDir(), "config.yml"), freeAddress(t)
	text := fmt.Sprintf("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %s}}\nhttp: {addr: %s}\n", t.TempDir(), address)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return begin(&process{t: t, address: address, command: []string{"docker-registry", "serve", config}})
}

// newGoRegistry is go-containerregistry's: this binary, as TestMain has it.
func newGoRegistry(t *testing.T) *process {
	t.Helper()
	address := freeAddress(t)
	return begin(&process{t: t, address: address, command: []string{os.Args[0]}, env: envServe + "=" + address + " " + t.TempDir()})
}

func begin(p *process) *process {
	p.t.Helper()
	p.start()
	p.t.Cleanup(p.kill)
	return p
}

func (p *process) start() {
	p.t.Helper()
	p.cmd = exec.CommandContext(context.WithoutCancel(p.t.Context()), p.command[0], p.command[1:]...)
	p.cmd.Env = append(os.Environ(), p.env)
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	for deadline := time.Now().Add(testenv.Timeout(time.Minute)); ; {
		conn, err := net.DialTimeout("tcp", p.address, time.Second)
		if err == nil {
			_ = conn.Close()
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatal(err)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-p.t.Context().Done():
			return
		}
	}
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func (p *process) ref(tag string) string { return p.address + "/team/warm:" + tag }

// TestRegistryProcess: pushes and pulls that end at random points go on when they are begun again, also where the registry was
// killed; and a branch moves its own layers.
func TestRegistryProcess(t *testing.T) {
	for name, begin := range map[string]func(*testing.T) *process{"docker-registry": newDockerRegistry, "go-containerregistry": newGoRegistry} {
		t.Run(name, func(t *testing.T) { testRegistryProcess(t, begin(t)) })
	}
}

func testRegistryProcess(t *testing.T, d *process) {
	here := newHome(t)
	m := here.chain(3)
	src := here.collect(m, 2)
	total := src.Manifest().Bytes()
	r := rand.New(rand.NewPCG(3, 4))
	rounds := 3
	if testenv.Soak() {
		rounds = 20
	}
	for i := range rounds {
		ctx, cancel := context.WithCancel(t.Context())
		limit := r.Int64N(total)
		var sent atomic.Int64
		broken := &breaking{Source: src, read: func(n int64) {
			if sent.Add(n) > 2*limit { // each is read twice: for its digest, and to be sent
				cancel()
			}
		}}
		_, err := push(ctx, d.ref(fmt.Sprintf("r%d", i)), broken, testOptions(true))
		if err == nil && ctx.Err() != nil {
			t.Errorf("round %d: it went on when it was to end", i)
		}
		cancel()
		if i%2 == 1 {
			d.kill()
			d.start()
		}
	}
	if _, err := push(t.Context(), d.ref("b"), src, testOptions(true)); err != nil {
		t.Fatal(err)
	}
	for i := range rounds {
		there, dir := newHome(t), t.TempDir()
		ctx, cancel := context.WithCancel(t.Context())
		limit := r.Int64N(total)
		before, err := there.pullTelling(ctx, d.ref("b"), dir, func(p Progress) {
			if p.Done > limit {
				cancel()
			}
		})
		if err == nil && ctx.Err() != nil {
			t.Errorf("round %d: it went on when it was to end", i)
		}
		cancel()
		after, err := there.pull(t.Context(), d.ref("b"), dir, testOptions(false))
		if err != nil || before+after != total || before == 0 {
			t.Errorf("round %d, resumed: %d and %d bytes of %d, %v", i, before, after, total, err)
		}
		there.check(*src.Manifest())
	}
	there := newHome(t)
	if _, err := there.pull(t.Context(), d.ref("b"), t.TempDir(), testOptions(false)); err != nil {
		t.Fatal(err)
	}
	whole := here.collect(m, 3)
	own := whole.Manifest().Bytes() - total
	got, err := push(t.Context(), d.ref("c"), whole, testOptions(true))
	if err != nil || got.Sent*10 > own*12 {
		t.Errorf("a branch of %d bytes: %+v, %v", own, got, err)
	}
	if n, err := there.pull(t.Context(), d.ref("c"), t.TempDir(), testOptions(false)); err != nil || n*10 > own*12 {
		t.Errorf("a branch of %d bytes: %d were fetched, %v", own, n, err)
	}
	there.check(m)
}

// breaking tells what is read of a source.
type breaking struct {
	Source
	read func(n int64)
}

func (b *breaking) Open(x pack.Member) (io.ReadCloser, error) {
	r, err := b.Source.Open(x)
	if err == nil {
		b.read(x.Size)
	}
	return r, err
}
