// Package enginetest is the contract of package engine as tests that every engine runs, on real machines: Run. It has
// a fixture of its own, a tiny guest that is booted once and from whose checkpoint every test is restored, so that an
// engine is tested without the product's agent and images.
//
// Only tests may import it.
package enginetest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/testenv"
)

// The machine every test uses.
const (
	MemoryBytes = 128 << 20
	DiskBytes   = 1 << 20
)

// Kit is what machines are started from.
type Kit struct {
	Kernel  string // uncompressed where that is possible
	BzImage string
	Initrd  string
	dir     string
	ids     atomic.Int64
}

// NewKit fetches Debian's kernel (from the cache of earlier runs, if it is there), builds the guest and packs both. It
// skips the test where something is missing.
func NewKit(t testing.TB) *Kit {
	t.Helper()
	testenv.Need(t, "qemu", "net", "keyring")
	k := &Kit{dir: t.TempDir()}
	kernel, err := image.FetchKernel(t.Context(), image.Host{
		Root: os.DirFS("/"), CacheDir: cacheDir(t), Arch: runtime.GOARCH, Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	k.Kernel, k.BzImage, k.Initrd = kernel.Path, kernel.BzImage, filepath.Join(k.dir, "initramfs")
	agent := guestProgram(t)
	f, err := os.Create(k.Initrd)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(image.WriteInitramfs(f, agent, kernel), f.Close()); err != nil {
		t.Fatal(err)
	}
	return k
}

// guestProgram builds the guest where there is a Go to build it with, and keeps it in the tree; else it takes what an
// earlier run kept there: tests that run without privileges have no compiler.
func guestProgram(t testing.TB) []byte {
	t.Helper()
	kept := filepath.Join(testenv.Root(t), "internal", "engine", "enginetest", "bin", "guest-"+runtime.GOARCH)
	if _, err := exec.LookPath("go"); err == nil {
		fresh := filepath.Join(t.TempDir(), "guest")
		build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", fresh,
			"forkd.dev/forkd/internal/engine/enginetest/guest")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build guest: %v\n%s", err, out)
		}
		keepProgram(fresh, kept)
		kept = fresh
	}
	program, err := os.ReadFile(kept)
	if err != nil {
		testenv.Missing(t, "guest", "no go in the path to build it with, and none was built before: "+err.Error())
	}
	return program
}

// keepProgram is a convenience, so that its failure (a tree that cannot be written) is none.
func keepProgram(from, to string) {
	data, err := os.ReadFile(from)
	if err != nil || os.MkdirAll(filepath.Dir(to), 0o755) != nil {
		return
	}
	tmp, err := os.CreateTemp(filepath.Dir(to), ".guest")
	if err != nil {
		return
	}
	_, err = tmp.Write(data)
	if errors.Join(err, tmp.Chmod(0o755), tmp.Close()) != nil || os.Rename(tmp.Name(), to) != nil {
		_ = os.Remove(tmp.Name())
	}
}

// cacheDir outlives the run, so that only the first one downloads.
func cacheDir(t testing.TB) string {
	dir, err := os.UserCacheDir()
	if err == nil {
		dir = filepath.Join(dir, "forkd-test")
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return t.TempDir()
	}
	return dir
}

// Spec describes a fresh machine of so many CPUs with an empty disk of its own; boot it, or set Boot to nil to restore.
func (k *Kit) Spec(t testing.TB, cpus int) *engine.Spec {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(dir, "disk")
	if err := os.WriteFile(disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(disk, DiskBytes); err != nil {
		t.Fatal(err)
	}
	return &engine.Spec{
		ID: fmt.Sprintf("test-%d", k.ids.Add(1)), Dir: dir, CPUs: cpus, MemoryBytes: MemoryBytes,
		Disk: engine.Disk{Path: disk, Format: "raw"},
		Boot: &engine.Boot{Kernel: k.Kernel, Initrd: k.Initrd},
	}
}

// Guest is a conversation with the test guest.
type Guest struct {
	t    testing.TB
	m    engine.Machine
	conn net.Conn
	r    *bufio.Reader
}

// Talk connects to the guest of a machine and waits until it answers.
func Talk(t testing.TB, m engine.Machine) *Guest {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(40*time.Second))
	defer cancel()
	g, err := TryTalk(ctx, m)
	if err != nil {
		t.Fatalf("%v\nconsole: %s", err, m.Console())
	}
	g.t = t
	t.Cleanup(g.Close)
	return g
}

// TryTalk is Talk with an error.
func TryTalk(ctx context.Context, m engine.Machine) (*Guest, error) {
	conn, err := m.DialGuest(ctx)
	if err != nil {
		return nil, err
	}
	g := &Guest{m: m, conn: conn, r: bufio.NewReader(conn)}
	// What is sent before the guest has opened the port may be lost, so it is asked until it answers; the empty line
	// ends whatever a connection before this one left half said.
	nonce := fmt.Sprintf("%x", time.Now().UnixNano())
	for {
		if _, err := fmt.Fprintf(conn, "\nping %s\n", nonce); err != nil {
			return nil, errors.Join(fmt.Errorf("talk to the guest: %w", err), conn.Close())
		}
		_ = conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if g.readUntil("pong " + nonce) {
			return g, g.settle(nonce)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("the guest does not answer: %w", context.Cause(ctx)), conn.Close())
		case <-m.Done():
			return nil, errors.Join(m.Err(), conn.Close())
		default:
		}
	}
}

func (g *Guest) readUntil(want string) bool {
	for {
		line, err := g.r.ReadString('\n')
		if err != nil {
			return false
		}
		if strings.TrimSpace(line) == want {
			return true
		}
	}
}

// settle skips the answers to pings that were only late.
func (g *Guest) settle(nonce string) error {
	last := nonce + "-last"
	if _, err := fmt.Fprintf(g.conn, "ping %s\n", last); err != nil {
		return err
	}
	_ = g.conn.SetReadDeadline(time.Now().Add(testenv.Timeout(20 * time.Second)))
	if !g.readUntil("pong " + last) {
		return errors.New("the guest fell silent")
	}
	return nil
}

// Ask sends one request and returns the answer without its "ok".
func (g *Guest) Ask(request string) (string, error) {
	if _, err := fmt.Fprintln(g.conn, request); err != nil {
		return "", err
	}
	_ = g.conn.SetReadDeadline(time.Now().Add(testenv.Timeout(20 * time.Second)))
	line, err := g.r.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("%s: %w", request, err)
	}
	answer, ok := strings.CutPrefix(strings.TrimSpace(line), "ok")
	if !ok {
		return "", fmt.Errorf("%s: the guest says %q", request, line)
	}
	return strings.TrimPrefix(answer, " "), nil
}

// Close ends the conversation, not the machine.
func (g *Guest) Close() { _ = g.conn.Close() }

// Do is Ask for a request that must succeed.
func (g *Guest) Do(request string) string {
	g.t.Helper()
	answer, err := g.Ask(request)
	if err != nil {
		g.t.Fatalf("%v\nconsole: %s", err, g.m.Console())
	}
	return answer
}
