package registry

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/testenv"
)

// dockerRegistry is Debian's docker-registry as a process, which can be killed and started again.
type dockerRegistry struct {
	t       *testing.T
	config  string
	address string
	cmd     *exec.Cmd
}

func newDockerRegistry(t *testing.T) *dockerRegistry {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &dockerRegistry{t: t, config: filepath.Join(t.TempDir(), "config.yml"), address: l.Addr().String()}
	text := fmt.Sprintf("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %s}}\nhttp: {addr: %s}\n", t.TempDir(), d.address)
	if err := os.WriteFile(d.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	d.start()
	t.Cleanup(d.kill)
	return d
}

func (d *dockerRegistry) start() {
	d.t.Helper()
	d.cmd = exec.CommandContext(context.WithoutCancel(d.t.Context()), "docker-registry", "serve", d.config)
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		conn, err := net.DialTimeout("tcp", d.address, time.Second)
		if err == nil {
			_ = conn.Close()
			return
		}
		if time.Now().After(deadline) {
			d.t.Fatal(err)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-d.t.Context().Done():
			return
		}
	}
}

func (d *dockerRegistry) kill() {
	_ = d.cmd.Process.Kill()
	_ = d.cmd.Wait()
}

func (d *dockerRegistry) ref(tag string) string { return d.address + "/team/warm:" + tag }

// TestRegistryProcess: pushes and pulls that end at random points go on when they are begun again, also where the registry was
// killed; and a branch moves its own layers.
func TestRegistryProcess(t *testing.T) {
	testenv.Need(t, "docker-registry")
	here, d := newHome(t), newDockerRegistry(t)
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
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(200))*time.Millisecond)
		before, err := there.pull(ctx, d.ref("b"), dir, testOptions(false))
		cancel()
		if err == nil {
			continue // it was faster
		}
		after, err := there.pull(t.Context(), d.ref("b"), dir, testOptions(false))
		if err != nil || before+after > total {
			t.Errorf("round %d, resumed: %d and %d bytes of %d, %v", i, before, after, total, err)
		}
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
