package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const page = 4096

// buffer is a Sink and a source in memory.
type buffer struct{ b []byte }

func (m *buffer) WriteAt(p []byte, off int64) (int, error) { return copy(m.b[off:], p), nil }
func (m *buffer) Zero(off, n int64) error                  { clear(m.b[off : off+n]); return nil }

// image is size bytes of which every page is zero, dull or random.
func image(seed uint64, size int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, size)
	for off := 0; off < size; off += page {
		switch r.IntN(4) {
		case 0, 1:
			for i := off; i < off+page; i += 8 {
				b[i], b[i+1] = byte(r.Uint32()), byte(r.Uint32())
			}
		case 2:
			b[off+r.IntN(page)] = 1
		}
	}
	return b
}

func openStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func fileOf(t *testing.T, b []byte) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	for off := 0; off < len(b); off += page { // keep holes
		if p := b[off : off+page]; !bytes.Equal(p, make([]byte, page)) {
			if _, err := f.WriteAt(p, int64(off)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := f.Truncate(int64(len(b))); err != nil {
		t.Fatal(err)
	}
	return f
}

// put stores b over parent, whose content is old (nil for a root).
func put(t *testing.T, s *Store, b, old []byte, parent Digest) Info {
	t.Helper()
	spec := specOf(t, b, old)
	spec.Parent = parent
	info, err := s.Write(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func specOf(t *testing.T, b, old []byte) WriteSpec {
	t.Helper()
	var base *os.File
	if old != nil {
		base = fileOf(t, old)
	}
	extents, err := Diff(t.Context(), fileOf(t, b), base, page, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return WriteSpec{PageSize: page, Size: int64(len(b)), Extents: extents, From: bytes.NewReader(b)}
}

// get reads the content of a layer and its ancestors.
func get(t *testing.T, s *Store, d Digest) ([]byte, error) {
	t.Helper()
	chain, err := s.Chain(t.Context(), d)
	if err != nil {
		return nil, err
	}
	m := &buffer{make([]byte, chain[0].Size)}
	for _, info := range chain {
		if err := s.Apply(t.Context(), info.Digest, m); err != nil {
			return nil, err
		}
	}
	return m.b, nil
}

func wantContent(t *testing.T, s *Store, d Digest, want []byte) {
	t.Helper()
	got, err := get(t, s, d)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("layer %s came back different", d)
	}
}

// files lists a store's files of one kind.
func files(t *testing.T, s *Store, kind string) []string {
	t.Helper()
	var paths []string
	err := filepath.WalkDir(filepath.Join(s.dir, kind), func(p string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			paths = append(paths, p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

func wantNoTmp(t *testing.T, s *Store) {
	t.Helper()
	if left := files(t, s, "tmp"); len(left) > 0 {
		t.Errorf("temporary files left: %q", left)
	}
}

func TestRoundTrip(t *testing.T) {
	s := openStore(t)
	root := image(1, 18<<20)
	a := put(t, s, root, nil, Digest{})

	child := bytes.Clone(root)
	copy(child[15<<20:], image(2, 3<<20))
	clear(child[2<<20 : 4<<20])
	b := put(t, s, child, root, a.Digest)

	same := put(t, s, child, child, b.Digest) // an empty layer is a layer
	wantContent(t, s, a.Digest, root)
	wantContent(t, s, b.Digest, child)
	wantContent(t, s, same.Digest, child)
	wantNoTmp(t, s)
	if b.OwnBytes > 3<<20 || same.OwnBytes != 0 {
		t.Errorf("children own %d and %d bytes, more than changed", b.OwnBytes, same.OwnBytes)
	}

	chain, err := s.Chain(t.Context(), same.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Info{a, b, same}, chain); diff != "" {
		t.Errorf("chain (-written +read):\n%s", diff)
	}
	if again := put(t, s, root, nil, Digest{}); again != a {
		t.Errorf("the same content gave %+v, then %+v", a, again)
	}
}

// Invariant 3: a hole never means "unchanged" nor "zero over the parent": what became zero is named.
func TestPageThatBecameZeroIsZero(t *testing.T) {
	s := openStore(t)
	root := bytes.Repeat([]byte{7}, 8*page)
	a := put(t, s, root, nil, Digest{})
	child := bytes.Clone(root)
	clear(child[2*page : 4*page])
	b := put(t, s, child, root, a.Digest)
	extents, err := s.Extents(t.Context(), b.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Extent{{Offset: 2 * page, Length: 2 * page, Zero: true}}, extents); diff != "" {
		t.Error(diff)
	}
	wantContent(t, s, b.Digest, child)
}

func TestWriteRefuses(t *testing.T) {
	s := openStore(t)
	root := put(t, s, image(1, 1<<20), nil, Digest{})
	ok := WriteSpec{PageSize: page, Size: 1 << 20, From: bytes.NewReader(make([]byte, 1<<20))}
	for name, change := range map[string]func(*WriteSpec){
		"page size":       func(w *WriteSpec) { w.PageSize = 1000 },
		"other page size": func(w *WriteSpec) { w.PageSize = 65536; w.Parent = root.Digest },
		"size":            func(w *WriteSpec) { w.Size++ },
		"negative size":   func(w *WriteSpec) { w.Size = -page },
		"unknown parent":  func(w *WriteSpec) { w.Parent = Digest{1} },
		"unaligned":       func(w *WriteSpec) { w.Extents = []Extent{{Offset: 1, Length: page}} },
		"empty extent":    func(w *WriteSpec) { w.Extents = []Extent{{}} },
		"beyond":          func(w *WriteSpec) { w.Extents = []Extent{{Offset: 1 << 20, Length: page}} },
		"descending":      func(w *WriteSpec) { w.Extents = []Extent{{Offset: page, Length: page}, {Length: page}} },
		"short source":    func(w *WriteSpec) { w.Extents = []Extent{{Length: page}}; w.From = strings.NewReader("x") },
	} {
		t.Run(name, func(t *testing.T) {
			spec := ok
			change(&spec)
			if _, err := s.Write(t.Context(), spec); err == nil {
				t.Error("accepted")
			}
			wantNoTmp(t, s)
		})
	}
	if n := len(files(t, s, "maps")); n != 1 {
		t.Errorf("%d maps after refused writes", n)
	}
}

func TestDamageIsRefused(t *testing.T) {
	content := image(3, 2<<20)
	rewrite := func(change func([]byte) []byte) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			t.Helper()
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, change(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	damage := map[string]func(*testing.T, string){
		"first bit":  rewrite(func(b []byte) []byte { b[0] ^= 1; return b }),
		"middle bit": rewrite(func(b []byte) []byte { b[len(b)/2] ^= 0x10; return b }),
		"last bit":   rewrite(func(b []byte) []byte { b[len(b)-1] ^= 0x80; return b }),
		"truncated":  rewrite(func(b []byte) []byte { return b[:len(b)-1] }),
		"empty":      rewrite(func([]byte) []byte { return nil }),
		"longer":     rewrite(func(b []byte) []byte { return append(b, 0) }),
		"far longer": rewrite(func(b []byte) []byte { return append(b, make([]byte, 2*maxStoredChunk)...) }),
	}
	for _, kind := range []string{"chunks", "maps"} {
		for name, do := range damage {
			t.Run(kind+"/"+name, func(t *testing.T) {
				t.Parallel()
				s := openStore(t)
				info := put(t, s, content, nil, Digest{})
				path := files(t, s, kind)[0]
				do(t, path)
				_, err := get(t, s, info.Digest)
				if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), filepath.Base(path)) {
					t.Fatalf("got %v, want ErrCorrupt naming %s", err, filepath.Base(path))
				}
				// The content is at hand again: writing it repairs the store.
				put(t, s, content, nil, Digest{})
				wantContent(t, s, info.Digest, content)
			})
		}
	}
	t.Run("every byte of a map", func(t *testing.T) {
		s := openStore(t)
		info := put(t, s, content[:256<<10], nil, Digest{})
		intact, err := os.ReadFile(s.mapPath(info.Digest))
		if err != nil {
			t.Fatal(err)
		}
		for i := range intact {
			b := bytes.Clone(intact)
			b[i] ^= 1 << (i % 8)
			if err := os.WriteFile(s.mapPath(info.Digest), b, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Stat(t.Context(), info.Digest); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("byte %d: got %v, want ErrCorrupt", i, err)
			}
		}
	})
	t.Run("chunk that inflates without end", func(t *testing.T) {
		s := openStore(t)
		info := put(t, s, content, nil, Digest{})
		e, err := newEncoder()
		if err != nil {
			t.Fatal(err)
		}
		bomb := e.EncodeAll(make([]byte, 64<<20), nil)
		if err := errors.Join(e.Close(), os.WriteFile(files(t, s, "chunks")[0], bomb, 0o600)); err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := get(t, s, info.Digest); !errors.Is(err, ErrCorrupt) {
			t.Errorf("got %v, want ErrCorrupt", err)
		}
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > 32<<20 {
			t.Errorf("reading it allocated %d bytes", n)
		}
	})
	t.Run("chunk missing", func(t *testing.T) {
		s := openStore(t)
		info := put(t, s, content, nil, Digest{})
		if err := os.Remove(files(t, s, "chunks")[0]); err != nil {
			t.Fatal(err)
		}
		if _, err := get(t, s, info.Digest); !errors.Is(err, ErrCorrupt) {
			t.Errorf("got %v, want ErrCorrupt", err)
		}
	})
	t.Run("parent missing", func(t *testing.T) {
		s := openStore(t)
		root := put(t, s, content, nil, Digest{})
		child := put(t, s, image(4, 2<<20), content, root.Digest)
		if err := os.Remove(s.mapPath(root.Digest)); err != nil {
			t.Fatal(err)
		}
		if _, err := get(t, s, child.Digest); !errors.Is(err, ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
	})
	t.Run("hostile map of a right digest", func(t *testing.T) {
		s := openStore(t)
		b := sampleMap().encode()
		b[8] = 99
		d := Digest(sha256.Sum256(b))
		if err := os.WriteFile(s.mapPath(d), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Stat(t.Context(), d); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "version 99") {
			t.Errorf("got %v, want ErrCorrupt and the version", err)
		}
	})
}

func TestIntactChunksAreReused(t *testing.T) {
	s := openStore(t)
	content := image(5, 4<<20)
	put(t, s, content, nil, Digest{})
	before := map[string]fs.FileInfo{}
	for _, p := range files(t, s, "chunks") {
		st, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		before[p] = st
	}
	put(t, s, content, nil, Digest{})
	for p, old := range before {
		if st, err := os.Stat(p); err != nil || !os.SameFile(st, old) {
			t.Errorf("chunk %s was written again (%v)", filepath.Base(p), err)
		}
	}
}

func TestConcurrentWritesOfTheSame(t *testing.T) {
	s := openStore(t)
	content := image(6, 2<<20)
	spec := specOf(t, content, nil)
	var wg sync.WaitGroup
	digests := make([]Digest, 8)
	for i := range digests {
		wg.Go(func() {
			info, err := s.Write(t.Context(), spec)
			if err != nil {
				t.Error(err)
			}
			digests[i] = info.Digest
		})
	}
	wg.Wait()
	for _, d := range digests {
		if d != digests[0] {
			t.Errorf("digests %s and %s of one content", d, digests[0])
		}
	}
	wantContent(t, s, digests[0], content)
	wantNoTmp(t, s)
}

// source calls a function before every read.
type source struct {
	*bytes.Reader
	before func()
}

func (s source) ReadAt(p []byte, off int64) (int, error) {
	s.before()
	return s.Reader.ReadAt(p, off)
}

func TestCancelledWriteLeavesNoLayer(t *testing.T) {
	s := openStore(t)
	spec := specOf(t, image(7, 8<<20), nil)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the user went away")
	spec.From = source{spec.From.(*bytes.Reader), func() { cancel(why) }}
	if _, err := s.Write(ctx, spec); !errors.Is(err, why) {
		t.Errorf("got %v, want the cause", err)
	}
	wantNoTmp(t, s)
	if m := files(t, s, "maps"); len(m) > 0 {
		t.Errorf("maps left: %q", m)
	}
}

type badSink struct{ err error }

func (b badSink) WriteAt([]byte, int64) (int, error) { return 0, b.err }
func (b badSink) Zero(int64, int64) error            { return b.err }

func TestApplyReturnsTheSinksError(t *testing.T) {
	s := openStore(t)
	info := put(t, s, image(8, 4<<20), nil, Digest{})
	full := errors.New("sink is full")
	if err := s.Apply(t.Context(), info.Digest, badSink{full}); !errors.Is(err, full) || errors.Is(err, ErrCorrupt) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Apply(ctx, info.Digest, badSink{full}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want cancelled", err)
	}
}

func TestNotFound(t *testing.T) {
	s := openStore(t)
	for _, d := range []Digest{{}, {1}} {
		if _, err := s.Stat(t.Context(), d); !errors.Is(err, ErrNotFound) {
			t.Errorf("Stat(%s): %v", d, err)
		}
		if err := s.Apply(t.Context(), d, &buffer{}); !errors.Is(err, ErrNotFound) {
			t.Errorf("Apply(%s): %v", d, err)
		}
	}
}

func rootsOf(ds ...Digest) func(context.Context) ([]Digest, error) {
	return func(context.Context) ([]Digest, error) { return ds, nil }
}

func TestSweep(t *testing.T) {
	s := openStore(t)
	root, other := image(10, 4<<20), image(11, 4<<20)
	child := bytes.Clone(root)
	copy(child[1<<20:], image(12, 1<<20))
	a := put(t, s, root, nil, Digest{})
	b := put(t, s, child, root, a.Digest)
	put(t, s, other, nil, Digest{})
	if err := os.WriteFile(filepath.Join(s.dir, "tmp", "123"), []byte("left by a crash"), 0o600); err != nil {
		t.Fatal(err)
	}
	freed, err := s.Sweep(t.Context(), rootsOf(b.Digest))
	if err != nil || freed == 0 {
		t.Fatalf("Sweep = %d, %v", freed, err)
	}
	wantNoTmp(t, s)
	wantContent(t, s, a.Digest, root)
	wantContent(t, s, b.Digest, child)
	if n := len(files(t, s, "maps")); n != 2 {
		t.Errorf("%d maps left, want 2", n)
	}
	if freed, err := s.Sweep(t.Context(), rootsOf(b.Digest)); freed != 0 || err != nil {
		t.Errorf("second Sweep = %d, %v", freed, err)
	}

	// An unreadable root: what it needs is unknown, so nothing may go.
	before := len(files(t, s, "chunks"))
	if _, err := s.Sweep(t.Context(), rootsOf(Digest{9})); !errors.Is(err, ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
	if after := len(files(t, s, "chunks")); after != before {
		t.Errorf("%d chunks, %d after the refused Sweep", before, after)
	}

	if _, err := s.Sweep(t.Context(), rootsOf()); err != nil {
		t.Error(err)
	}
	if left := append(files(t, s, "chunks"), files(t, s, "maps")...); len(left) > 0 {
		t.Errorf("left without roots: %q", left)
	}
}

// A layer written while a Sweep waits is among the roots the Sweep then asks for.
func TestSweepWaitsForHolds(t *testing.T) {
	s := openStore(t)
	content := image(13, 4<<20)
	release, err := s.Hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var recorded []Digest
	swept := make(chan error, 1)
	go func() {
		_, err := s.Sweep(t.Context(), func(context.Context) ([]Digest, error) {
			mu.Lock()
			defer mu.Unlock()
			return recorded, nil
		})
		swept <- err
	}()
	info := put(t, s, content, nil, Digest{}) // nests in the Hold, also while the Sweep waits
	select {
	case err := <-swept:
		t.Fatalf("Sweep did not wait: %v", err)
	default:
	}
	mu.Lock()
	recorded = []Digest{info.Digest}
	mu.Unlock()
	release()
	release()
	if err := <-swept; err != nil {
		t.Fatal(err)
	}
	wantContent(t, s, info.Digest, content)

	again, err := s.Hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer again()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Sweep(ctx, rootsOf()); !errors.Is(err, context.Canceled) {
		t.Errorf("Sweep while held and cancelled: %v", err)
	}
}
