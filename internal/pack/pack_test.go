package pack

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/store/storetest"
)

// home has snapshots whose layers are small.
type home struct{ *storetest.Home }

func newHome(t testing.TB) *home {
	t.Helper()
	return &home{storetest.New(t, storetest.Sizes{Memory: testMemory, Disk: testDisk, ImagePages: 4, RootPages: 400, BranchedPages: 20, Step: 32})}
}

const (
	testMemory = 4 << 20
	testDisk   = 2 << 20
)

// chain makes a pack's manifest of n snapshots, each standing on the one before it.
func (h *home) chain(n int) Manifest {
	img, snapshots := h.Chain(n)
	return Manifest{
		PackedAt: time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC), Tool: "test",
		Images: []store.Image{img}, Snapshots: snapshots,
	}
}

func (h *home) collect(m Manifest) *Source {
	h.T.Helper()
	src, err := Collect(h.T.Context(), Spec{
		Dir: h.T.TempDir(), Layers: h.Layers, Manifest: m,
		State:  func(s store.Snapshot) ([]byte, error) { return h.States[s.State], nil },
		Kernel: func(store.Snapshot) ([]byte, error) { return tinyKernel().Encode() },
	})
	if err != nil {
		h.T.Fatal(err)
	}
	return src
}

func tinyKernel() *KernelFile {
	return &KernelFile{Version: "6.1-1", Release: "6.1.0-1-test", Image: []byte("an image"), Modules: []KernelModule{
		{"virtio", []byte("a module")}, {"virtio_blk", []byte("another module")},
	}}
}

// carry moves what is needed.
func carry(ctx context.Context, src *Source, sink *Sink) error {
	for _, x := range sink.Needed() {
		r, err := src.Open(x)
		if err != nil {
			return err
		}
		if err := sink.Put(ctx, x, r); err != nil {
			return err
		}
	}
	return nil
}

func TestCarry(t *testing.T) {
	here, there := newHome(t), newHome(t)
	m := here.chain(5)
	whole := here.collect(m)
	base := m
	base.Snapshots = m.Snapshots[:1]
	first := here.collect(base)

	sink := newSink(t, there, first.Manifest())
	if err := carry(t.Context(), first, sink); err != nil {
		t.Fatal(err)
	}
	if err := sink.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	b, err := whole.Manifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	decoded, err := Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	// A relative moves what is its own.
	sink = newSink(t, there, decoded)
	if err := carry(t.Context(), whole, sink); err != nil {
		t.Fatal(err)
	}
	if moved, own := sink.Fetched(), decoded.Bytes()-first.Manifest().Bytes(); moved != own {
		t.Errorf("%d bytes moved of %d, which is not the %d that are new", moved, decoded.Bytes(), own)
	}
	if err := sink.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, s := range m.Snapshots {
		for _, d := range []layer.Digest{s.Memory, s.Disk} {
			a, errA := here.Layers.Chain(t.Context(), d)
			b, errB := there.Layers.Chain(t.Context(), d)
			if errA != nil || errB != nil || len(a) != len(b) {
				t.Fatalf("%s: %d layers (%v), %d there (%v)", s.Tag, len(a), errA, len(b), errB)
			}
		}
		if got, err := sink.State(s); err != nil || !bytes.Equal(got, here.States[s.State]) {
			t.Errorf("device state %q, %v", got, err)
		}
	}
	if err := sink.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(sink.dir); !os.IsNotExist(err) {
		t.Errorf("the sink's directory is still there: %v", err)
	}
}

// tinyPack is a pack of a few kilobytes.
func tinyPack(t testing.TB) []byte {
	t.Helper()
	h := newHome(t)
	h.Sizes.RootPages, h.Sizes.Step = 2, 0
	var b bytes.Buffer
	if err := Write(t.Context(), &b, h.collect(h.chain(1))); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestFile: what is written is what is read, of the size that was said, by tar's own reader too.
func TestFile(t *testing.T) {
	h := newHome(t)
	src := h.collect(h.chain(3))
	var b bytes.Buffer
	if err := Write(t.Context(), &b, src); err != nil {
		t.Fatal(err)
	}
	text, err := src.Manifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	if want := Size(src.Manifest(), text); int64(b.Len()) != want {
		t.Errorf("%d bytes, %d were announced", b.Len(), want)
	}
	p, err := Inspect(t.Context(), bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	if p.Digest() != sha256.Sum256(text) || p.Manifest().Head().Tag != "c" {
		t.Errorf("pack %s of %s", p.Digest(), p.Manifest().Head().Tag)
	}
	names := 0
	for r := tar.NewReader(bytes.NewReader(b.Bytes())); ; names++ {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeReg || h.Mode != 0o600 || names == 0 && h.Name != "manifest.json" {
			t.Errorf("%+v", h)
		}
	}
	if want := len(p.Manifest().Members) + 1; names != want {
		t.Errorf("%d files for tar, want %d", names, want)
	}
}

func newSink(t *testing.T, h *home, m *Manifest) *Sink {
	t.Helper()
	sink, err := NewSink(t.Context(), filepath.Join(filepath.Dir(t.TempDir()), "sink"), h.Layers, m)
	if err != nil {
		t.Fatal(err)
	}
	return sink
}
