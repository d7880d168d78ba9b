package layer

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

const envCrashDir = "FORKD_TEST_LAYER_CRASH"

// TestWriteUntilKilled is the process that TestKilledWriter kills: it writes layers for ever and prints their digests.
func TestWriteUntilKilled(t *testing.T) {
	dir := os.Getenv(envCrashDir)
	if dir == "" {
		t.Skip("only a helper of TestKilledWriter")
	}
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for seed := uint64(0); ; seed++ {
		info := put(t, s, image(seed, 2<<20), nil, Digest{})
		fmt.Fprintln(os.Stdout, "wrote", seed, info.Digest)
	}
}

// What Write returned is whole after kill -9; what was being written is no layer, and Sweep removes its remains.
func TestKilledWriter(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestWriteUntilKilled$")
	cmd.Env = append(os.Environ(), envCrashDir+"="+dir, "TMPDIR="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var written []Digest
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var seed uint64
		var text string
		if _, err := fmt.Sscanf(lines.Text(), "wrote %d %s", &seed, &text); err != nil {
			t.Errorf("helper says %q", lines.Text())
			continue
		}
		d, err := ParseDigest(text)
		if err != nil {
			t.Error(err)
		}
		written = append(written, d)
		if len(written) == 3 {
			if err := cmd.Process.Kill(); err != nil {
				t.Error(err)
			}
		}
	}
	_ = cmd.Wait()

	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sweep(t.Context(), rootsOf(written...)); err != nil {
		t.Fatal(err)
	}
	wantNoTmp(t, s)
	for seed, d := range written {
		wantContent(t, s, d, image(uint64(seed), 2<<20))
	}
	if _, err := s.Sweep(t.Context(), rootsOf()); err != nil {
		t.Fatal(err)
	}
	if left := append(files(t, s, "chunks"), files(t, s, "maps")...); len(left) > 0 {
		t.Errorf("left without roots: %q", left)
	}
}

func TestFullDisk(t *testing.T) {
	testenv.Need(t, "root")
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=3m"); err != nil {
		testenv.Missing(t, "root", "mounting a small file system: "+err.Error())
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s, err := Open(filepath.Join(dir, "layers"))
	if err != nil {
		t.Fatal(err)
	}
	small := image(1, 1<<20)
	kept := put(t, s, small, nil, Digest{})
	large := make([]byte, 6<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(large)
	_, err = s.Write(t.Context(), specOf(t, large, nil))
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "full") || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v, want a full disk, and which", err)
	}
	wantNoTmp(t, s)
	wantContent(t, s, kept.Digest, small)
	if freed, err := s.Sweep(t.Context(), rootsOf(kept.Digest)); err != nil || freed == 0 {
		t.Errorf("Sweep on the full disk = %d, %v", freed, err)
	}
	put(t, s, image(3, 1<<20), nil, Digest{})
	wantContent(t, s, kept.Digest, small)
}
