package pack

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
)

// home is a layer store with snapshots whose layers are small.
type home struct {
	t      testing.TB
	dir    string // of layers
	layers *layer.Store
	states map[string][]byte
	pages  int64 // of a root's memory
}

func newHome(t testing.TB) *home {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layers")
	s, err := layer.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return &home{t: t, dir: dir, layers: s, states: map[string][]byte{}, pages: 400}
}

const (
	testMemory = 4 << 20
	testDisk   = 2 << 20
)

// write stores a layer of some pages that depend on seed.
func (h *home) write(pageSize, size int64, parent layer.Digest, seed uint64, pages int64) layer.Info {
	h.t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	data := make([]byte, size)
	for i := 0; i < len(data) && h.pages > 2; i += 32 {
		binary.LittleEndian.PutUint64(data[i:], r.Uint64()) // it compresses, but not to nothing
	}
	info, err := h.layers.Write(h.t.Context(), layer.WriteSpec{
		PageSize: pageSize, Size: size, Parent: parent, From: bytes.NewReader(data),
		Extents: []layer.Extent{{Offset: pageSize * int64(seed%7), Length: pageSize * pages}},
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return info
}

func hexOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// chain makes a pack's manifest of n snapshots, each standing on the one before it.
func (h *home) chain(n int) Manifest {
	base := h.write(diskPage, testDisk, layer.Digest{}, 1, 4)
	img := store.Image{
		FormatVersion: store.FormatVersion, ID: hexOf([]byte("image")), Name: "tiny", Base: "debian:bookworm",
		Disk: base.Digest, DiskBytes: testDisk, OwnBytes: base.OwnBytes,
	}
	m := Manifest{
		FormatVersion: FormatVersion, PackedAt: time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC), Tool: "test",
		Images: []store.Image{img},
	}
	var mem, dsk layer.Digest
	dsk = base.Digest
	for i := range n {
		pages := h.pages
		if i > 0 {
			pages = 20
		}
		mi := h.write(memoryPage, testMemory, mem, uint64(100+i), pages)
		di := h.write(diskPage, testDisk, dsk, uint64(200+i), 2)
		mem, dsk = mi.Digest, di.Digest
		state := []byte("device state of " + string(rune('a'+i)))
		s := store.Snapshot{
			FormatVersion: store.FormatVersion, Tag: string(rune('a' + i)), CreatedAt: time.Unix(int64(1000+i), 0).UTC(),
			Image: img.ID, ImageDisk: img.Disk, Memory: mem, Disk: dsk, Recipe: "tiny", RecipeText: "name: tiny\n",
			Engine: engine.Format{Engine: "fake", Arch: "amd64", CPUs: 1, MemoryBytes: testMemory},
		}.WithState(state)
		if i > 0 {
			p := m.Snapshots[i-1]
			s.Parent, s.ParentID = p.Tag, p.ID()
		}
		h.states[s.State] = state
		m.Snapshots = append(m.Snapshots, s)
	}
	return m
}

func (h *home) collect(m Manifest) *Source {
	h.t.Helper()
	src, err := Collect(h.t.Context(), Spec{
		Dir: h.t.TempDir(), Layers: h.layers, Manifest: m,
		State: func(s store.Snapshot) ([]byte, error) { return h.states[s.State], nil },
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return src
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
			a, errA := here.layers.Chain(t.Context(), d)
			b, errB := there.layers.Chain(t.Context(), d)
			if errA != nil || errB != nil || len(a) != len(b) {
				t.Fatalf("%s: %d layers (%v), %d there (%v)", s.Tag, len(a), errA, len(b), errB)
			}
		}
		if got, err := sink.State(s); err != nil || !bytes.Equal(got, here.states[s.State]) {
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
	h.pages = 2
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
	sink, err := NewSink(t.Context(), filepath.Join(filepath.Dir(t.TempDir()), "sink"), h.layers, m)
	if err != nil {
		t.Fatal(err)
	}
	return sink
}
