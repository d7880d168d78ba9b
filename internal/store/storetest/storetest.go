// Package storetest makes snapshots without machines, for tests of what moves them: layers of a few pages, records that name them,
// device states of a line. Tests alone import it.
package storetest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
)

const (
	memoryPage = 4 << 10
	diskPage   = 64 << 10
)

// Sizes are those of a Home's snapshots.
type Sizes struct {
	Memory, Disk             int64 // of a machine, in bytes
	ImagePages               int64 // of the image's disk that are written
	RootPages, BranchedPages int64 // of memory that the first snapshot has, and each that stands on another
	Step                     int   // bytes between random words: pages compress, but not to nothing; 0: pages are zero
}

// Home is a store of layers with snapshots.
type Home struct {
	T      testing.TB
	Dir    string // of layers
	Layers *layer.Store
	States map[string][]byte // device states by digest
	Sizes  Sizes
}

// New is an empty one.
func New(t testing.TB, sizes Sizes) *Home {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "layers")
	s, err := layer.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return &Home{T: t, Dir: dir, Layers: s, States: map[string][]byte{}, Sizes: sizes}
}

// Digest is a text's, as records have it.
func Digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// write stores a layer of some pages that depend on seed.
func (h *Home) write(pageSize, size int64, parent layer.Digest, seed uint64, pages int64) layer.Info {
	h.T.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	data := make([]byte, size)
	for i := 0; i < len(data) && h.Sizes.Step > 0; i += h.Sizes.Step {
		binary.LittleEndian.PutUint64(data[i:], r.Uint64())
	}
	info, err := h.Layers.Write(h.T.Context(), layer.WriteSpec{
		PageSize: pageSize, Size: size, Parent: parent, From: bytes.NewReader(data),
		Extents: []layer.Extent{{Offset: pageSize * int64(seed%7), Length: pageSize * pages}},
	})
	if err != nil {
		h.T.Fatal(err)
	}
	return info
}

// Chain makes n snapshots a, b, …, each standing on the one before it, and the image below them.
func (h *Home) Chain(n int) (store.Image, []store.Snapshot) {
	h.T.Helper()
	base := h.write(diskPage, h.Sizes.Disk, layer.Digest{}, 1, h.Sizes.ImagePages)
	img := store.Image{
		FormatVersion: store.FormatVersion, ID: Digest("image"), Name: "tiny", Base: "debian:bookworm",
		Disk: base.Digest, DiskBytes: h.Sizes.Disk, OwnBytes: base.OwnBytes,
	}
	var all []store.Snapshot
	var memory layer.Digest
	disk := base.Digest
	for i := range n {
		pages := h.Sizes.RootPages
		if i > 0 {
			pages = h.Sizes.BranchedPages
		}
		memory = h.write(memoryPage, h.Sizes.Memory, memory, uint64(100+i), pages).Digest
		disk = h.write(diskPage, h.Sizes.Disk, disk, uint64(200+i), 2).Digest
		name := string(rune('a' + i))
		state := []byte("device state of " + name)
		s := store.Snapshot{
			FormatVersion: store.FormatVersion, Tag: name, CreatedAt: time.Unix(int64(1000+i), 0).UTC(),
			Image: img.ID, ImageDisk: img.Disk, Memory: memory, Disk: disk, Recipe: "tiny", RecipeText: "name: tiny\n",
			Kernel: "6.1-1 " + Digest("kernel"),
			Engine: engine.Format{Engine: "fake", Arch: "amd64", CPUs: 1, MemoryBytes: h.Sizes.Memory},
		}.WithState(state)
		if i > 0 {
			s.Parent, s.ParentID = all[i-1].Tag, all[i-1].ID()
		}
		h.States[s.State] = state
		all = append(all, s)
	}
	return img, all
}
