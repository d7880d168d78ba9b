package host

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
)

// kernelNamed is what records of a line call their kernel.
func kernelNamed(seed string) string {
	sum := sha256.Sum256([]byte("kernel " + seed))
	return "6.1-1 " + hex.EncodeToString(sum[:])
}

// addKernel puts a kernel into the cache as if it had been fetched.
func addKernel(t *testing.T, h *Host, name, boot string) {
	t.Helper()
	modules := []image.ModuleFile{{Name: "virtio", Data: []byte("a module")}}
	if _, err := image.KeepKernel(h.cfg.Home.Cache(), kernelDigest(name), "6.1-1", "6.1.0-test", []byte(boot), modules); err != nil {
		t.Fatal(err)
	}
}

// kernelsOf lists the cache's kernels by their digests, with what they boot.
func kernelsOf(t *testing.T, h *Host) map[string]string {
	t.Helper()
	all := map[string]string{}
	dirs, err := os.ReadDir(filepath.Join(h.cfg.Home.Cache(), "kernels"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, d := range dirs {
		k, err := image.CachedKernel(h.cfg.Home.Cache(), d.Name())
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(k.Path)
		if err != nil {
			t.Fatal(err)
		}
		all[d.Name()] = string(b)
	}
	return all
}

// kernelIn is the content of a pack's kernel.
func kernelIn(t *testing.T, b []byte) string {
	t.Helper()
	p, err := pack.Inspect(t.Context(), bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	d, ok := p.Manifest().Kernel(p.Manifest().Head().Kernel)
	if !ok {
		return ""
	}
	return d.String()
}

// TestKernelsTravel: a kernel comes with the snapshots that were made with it, goes on from there, and goes with the last of them.
func TestKernelsTravel(t *testing.T) {
	here, there := fakeHost(t, newFakeEngine(), nil), fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "one", "a", "b")
	addKernel(t, here, kernelNamed("one"), "a kernel")
	whole := packed(t, here, "b")
	content := kernelIn(t, whole)
	if content == "" {
		t.Fatal("the pack has no kernel")
	}
	got, err := there.Unpack(t.Context(), bytes.NewReader(whole), ReceiveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if have := kernelsOf(t, there); len(have) != 1 || have[content] != "a kernel" {
		t.Errorf("kernels %q, want the one with digest %s", have, content)
	}
	if v, err := there.Verify(t.Context(), "b"); err != nil || len(v.Damages) > 0 {
		t.Errorf("%+v, %v", v, err)
	}
	for _, h := range []*Host{here, there} {
		p, err := h.Provenance("b")
		if err != nil || len(p.Links) != 2 || p.Links[0].Content != content || p.Links[1].Content != content {
			t.Errorf("provenance %+v, %v", p.Links, err)
		}
	}
	// On from there, and with one that is there already.
	third := fakeHost(t, newFakeEngine(), nil)
	addKernel(t, third, kernelNamed("one"), "a kernel")
	again, err := third.Unpack(t.Context(), bytes.NewReader(packed(t, there, "b")), ReceiveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if again.Fetched >= got.Fetched {
		t.Errorf("%d bytes were taken where the kernel was there, %d where it was not", again.Fetched, got.Fetched)
	}
	if have := kernelsOf(t, third); len(have) != 1 || have[kernelDigest(kernelNamed("one"))] == "" {
		t.Errorf("kernels %q, want the one that was there", have)
	}
	if kernelIn(t, packed(t, third, "b")) != content {
		t.Error("it does not travel from there")
	}
	if err := os.Mkdir(filepath.Join(there.cfg.Home.Cache(), "kernels", "keep-1"), 0o700); err != nil { // of a daemon that was killed
		t.Fatal(err)
	}
	if _, err := there.RemoveSnapshot(t.Context(), "a", RemoveOptions{Cascade: true}); err != nil {
		t.Fatal(err)
	}
	if have := kernelsOf(t, there); len(have) > 0 {
		t.Errorf("kernels of no snapshot are left: %q", have)
	}
	// One that nobody has any more is not in the pack, which any forkd reads.
	if err := os.RemoveAll(here.cfg.Home.Cache()); err != nil {
		t.Fatal(err)
	}
	if b := packed(t, here, "b"); kernelIn(t, b) != "" || !bytes.Contains(b[:1024], []byte(`{"format_version":1,`)) {
		t.Errorf("a pack without a kernel begins with %.40q", b[512:])
	}
}

// TestForeignKernelHasNoPlaceHere: whatever a pack calls its kernel, what is here under that name stays, and boots what is made here.
func TestForeignKernelHasNoPlaceHere(t *testing.T) {
	here, there := fakeHost(t, newFakeEngine(), nil), fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "two", "a")
	addLine(t, there, "one", "mine")
	addKernel(t, here, kernelNamed("two"), "an evil kernel")
	addKernel(t, there, kernelNamed("one"), "a good kernel")
	addKernel(t, there, kernelNamed("two"), "another good kernel")
	whole := packed(t, here, "a")
	if _, err := there.Unpack(t.Context(), bytes.NewReader(whole), ReceiveOptions{Tag: "theirs"}); err != nil {
		t.Fatal(err)
	}
	have := kernelsOf(t, there)
	if len(have) != 3 || have[kernelDigest(kernelNamed("two"))] != "another good kernel" || have[kernelIn(t, whole)] != "an evil kernel" {
		t.Errorf("kernels %q", have)
	}
	if kernelIn(t, packed(t, there, "theirs")) != kernelIn(t, whole) || kernelIn(t, packed(t, there, "mine")) == kernelIn(t, whole) {
		t.Error("a snapshot goes on with the other's kernel")
	}
	// What boots an image that is here where none can be fetched.
	for tag, want := range map[string]string{"mine": "a good kernel", "theirs": "an evil kernel"} {
		m, err := there.snapshot(tag)
		if err != nil {
			t.Fatal(err)
		}
		img, err := there.imagesOf([]store.Snapshot{m})
		if err != nil {
			t.Fatal(err)
		}
		k, of := there.kernelOn(img[0])
		if k == nil {
			t.Fatalf("nothing boots the image of %s", tag)
		}
		if b, err := os.ReadFile(k.Path); err != nil || string(b) != want || of.Tag != tag {
			t.Errorf("the image of %s is booted with %q of %s, %v", tag, b, of.Tag, err)
		}
	}
	// Nor one of theirs on an image of ours.
	there.mu.Lock()
	m, mine := there.snapshots["theirs"], there.snapshots["mine"]
	delete(there.snapshots, "mine")
	m.Image, m.ImageDisk = mine.Image, mine.ImageDisk
	there.snapshots["theirs"] = m
	img := there.images[mine.Image]
	there.mu.Unlock()
	if k, _ := there.kernelOn(img); k != nil {
		t.Errorf("an image that was made here is booted with %s", k.Path)
	}
}

// TestDamagedKernel: it is told, packed by nobody, and comes anew.
func TestDamagedKernel(t *testing.T) {
	here, there := fakeHost(t, newFakeEngine(), nil), fakeHost(t, newFakeEngine(), nil)
	addLine(t, here, "one", "a", "b")
	addKernel(t, here, kernelNamed("one"), "a kernel")
	first, whole := packed(t, here, "a"), packed(t, here, "b")
	if _, err := there.Unpack(t.Context(), bytes.NewReader(first), ReceiveOptions{}); err != nil {
		t.Fatal(err)
	}
	boot := filepath.Join(there.cfg.Home.Cache(), "kernels", kernelIn(t, whole), "kernel")
	if err := os.WriteFile(boot, []byte("A kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	if v, err := there.Verify(t.Context(), "a"); err != nil || len(v.Damages) != 1 || v.Damages[0].What != "kernel of a" {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := there.Pack(t.Context(), "a", PackOptions{NoScrub: true}); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("it is packed: %v", err)
	}
	checkEmpty(t, there.cfg.Home.Temp())
	if _, err := there.Unpack(t.Context(), bytes.NewReader(whole), ReceiveOptions{}); err != nil {
		t.Fatal(err)
	}
	if v, err := there.Verify(t.Context(), "b"); err != nil || len(v.Damages) > 0 {
		t.Errorf("%+v, %v", v, err)
	}
}
