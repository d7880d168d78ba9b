package layer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
)

// The model of a disk: what each page holds, 0 for zero.
const (
	modelPage  = 64 << 10
	modelPages = 512
)

type model [modelPages]uint64

// ReadAt makes the content of a page from its number.
func (m *model) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	for i := int64(0); i < int64(len(p)); i += modelPage {
		id := m[(off+i)/modelPage]
		binary.LittleEndian.PutUint64(p[i:], id)
		binary.LittleEndian.PutUint64(p[i+modelPage-8:], id)
	}
	return len(p), nil
}

// modelSink finds out what pages hold, and refuses to be told twice.
type modelSink struct {
	mu    sync.Mutex
	pages model
	seen  [modelPages]bool
}

func (s *modelSink) WriteAt(p []byte, off int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if off%modelPage != 0 || len(p)%modelPage != 0 {
		return 0, fmt.Errorf("%d bytes at %d are not whole pages", len(p), off)
	}
	for i := 0; i < len(p); i += modelPage {
		n := (off + int64(i)) / modelPage
		id := binary.LittleEndian.Uint64(p[i:])
		if s.seen[n] || binary.LittleEndian.Uint64(p[i+modelPage-8:]) != id {
			return 0, fmt.Errorf("page %d comes twice or is torn", n)
		}
		s.seen[n], s.pages[n] = true, id
	}
	return len(p), nil
}

func (s *modelSink) Zero(off, n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := off / modelPage; i < (off+n)/modelPage; i++ {
		if s.seen[i] {
			return fmt.Errorf("page %d comes twice", i)
		}
		s.seen[i] = true
	}
	return nil
}

// chainTest is a chain of layers, and what each holds.
type chainTest struct {
	t      *testing.T
	store  *Store
	layers []Digest
	models []*model
	id     uint64
}

// add stores a layer that names pages according to program: triples of place, length and kind, of which one takes what the
// first layer has at other places.
func (c *chainTest) add(program []byte) {
	c.t.Helper()
	now := &model{}
	parent := Digest{}
	if n := len(c.models); n > 0 {
		*now, parent = *c.models[n-1], c.layers[n-1]
	}
	var kinds [modelPages]byte
	for ; len(program) >= 3; program = program[3:] {
		first, n := int(program[0])*2, int(program[1])%32+1
		for i := first; i < min(first+n, modelPages); i++ {
			kinds[i] = 1 + program[2]%2
			now[i] = 0
			switch {
			case kinds[i] == 1 && program[2]&4 != 0 && len(c.models) > 0 && c.models[0][(i*3+7)%modelPages] != 0:
				now[i] = c.models[0][(i*3+7)%modelPages]
			case kinds[i] == 1:
				c.id++
				now[i] = c.id
			}
		}
	}
	spec := WriteSpec{PageSize: modelPage, Size: modelPages * modelPage, Parent: parent, From: now}
	for i, k := range kinds {
		if k != 0 {
			spec.Extents = appendExtent(spec.Extents, Extent{Offset: int64(i) * modelPage, Length: modelPage, Zero: k == 2})
		}
	}
	if n := len(c.layers); n > 0 {
		spec.Like = []Digest{c.layers[c.id%uint64(n)]}
	}
	info, err := c.store.Write(c.t.Context(), spec)
	if err != nil {
		c.t.Fatal(err)
	}
	c.layers, c.models = append(c.layers, info.Digest), append(c.models, now)
}

// check compares layer i, taken over layer over (-1: none), with the model.
func (c *chainTest) check(d Digest, want *model, over int) {
	c.t.Helper()
	below, base := Digest{}, model{}
	if over >= 0 {
		below, base = c.layers[over], *c.models[over]
	}
	st, err := c.store.Resolve(c.t.Context(), d, below)
	if err != nil {
		c.t.Fatal(err)
	}
	sink := &modelSink{}
	if err := st.Apply(c.t.Context(), sink); err != nil {
		c.t.Fatal(err)
	}
	packed := &modelSink{}
	if err := st.Pack(c.t.Context(), packed); err != nil {
		c.t.Fatal(err)
	}
	next := int64(0)
	end := int64(-1)
	zero := false
	for _, e := range st.Extents() {
		if e.Offset < end || e.Offset == end && e.Zero == zero {
			c.t.Fatalf("extents are not in order, or should be one: %+v", st.Extents())
		}
		end, zero = e.Offset+e.Length, e.Zero
		for i := e.Offset / modelPage; i < end/modelPage; i++ {
			base[i] = 0
			if !e.Zero {
				base[i] = packed.pages[next]
				next++
				if base[i] != sink.pages[i] {
					c.t.Fatalf("page %d is %d, packed %d", i, sink.pages[i], base[i])
				}
			}
			if !sink.seen[i] {
				c.t.Fatalf("page %d is named and did not come", i)
			}
			sink.seen[i] = false
		}
	}
	if sink.seen != [modelPages]bool{} {
		c.t.Fatal("pages came that are not named")
	}
	if base != *want {
		c.t.Fatalf("layer %s over %s holds something else", d, below)
	}
}

// run makes a chain of what program says and does everything to it.
func (c *chainTest) run(program []byte) {
	c.t.Helper()
	for len(program) > 0 && len(c.layers) < 6 {
		n := min(len(program), 1+3*(int(program[0])%7))
		c.add(program[1:n])
		program = program[n:]
	}
	top := len(c.layers) - 1
	for i := range c.layers {
		c.check(c.layers[i], c.models[i], -1)
		c.check(c.layers[top], c.models[top], i)
	}
	for over := -1; over < top; over++ {
		onto := Digest{}
		if over >= 0 {
			onto = c.layers[over]
		}
		info, err := c.store.Merge(c.t.Context(), c.layers[top], onto)
		if err != nil {
			c.t.Fatal(err)
		}
		if info.Parent != onto {
			c.t.Fatalf("merged onto %s, not %s", info.Parent, onto)
		}
		c.check(info.Digest, c.models[top], -1)
		c.check(info.Digest, c.models[top], over)
		shared, err := c.store.MergeShared(c.t.Context(), c.layers[top], onto)
		if err != nil {
			c.t.Fatal(err)
		}
		c.check(shared.Digest, c.models[top], -1)
		c.check(shared.Digest, c.models[top], over)
		c.own(shared.Digest, c.models[top])
		if over >= 0 {
			continue
		}
		extents, err := c.store.Extents(c.t.Context(), info.Digest)
		if err != nil {
			c.t.Fatal(err)
		}
		for _, e := range extents {
			if e.Zero {
				c.t.Fatalf("a root names pages as zero: %+v", e)
			}
		}
	}
	c.unlink()
	// A link in the middle goes, its child stands on its parent, and the chain grows on.
	for round := range 3 {
		k := min(len(c.layers)/2, len(c.layers)-2)
		if k < 1 {
			return
		}
		info, err := c.store.Merge(c.t.Context(), c.layers[k+1], c.layers[k-1])
		if err != nil {
			c.t.Fatal(err)
		}
		c.check(info.Digest, c.models[k+1], -1)
		c.layers, c.models = append(c.layers[:k:k], info.Digest), append(c.models[:k:k], c.models[k+1])
		c.add([]byte{byte(k*31 + round), 40, 0, byte(k * 17), 9, 1})
		c.check(c.layers[k+1], c.models[k+1], -1)
	}
}

// own gives a layer chunks of its own: they hold what it names, and nothing else.
func (c *chainTest) own(d Digest, want *model) {
	c.t.Helper()
	replaced, err := c.store.Own(c.t.Context(), d)
	if err != nil {
		c.t.Fatal(err)
	}
	if info, ok := replaced[d]; ok {
		d = info.Digest
	}
	c.check(d, want, -1)
	if shares, err := c.store.Shares(c.t.Context(), d); err != nil || shares {
		c.t.Fatalf("it shares chunks: %v, %v", shares, err)
	}
}

// unlink takes out every link but the last, one at a time, from a chain and from a part of it.
func (c *chainTest) unlink() {
	c.t.Helper()
	top := len(c.layers) - 1
	for gone := range top {
		heads := []Digest{c.layers[top], c.layers[(gone+top+1)/2], c.layers[gone]}
		if gone > 0 {
			heads = append(heads, c.layers[gone-1])
		}
		replaced, err := c.store.Unlink(c.t.Context(), c.layers[gone], heads)
		if err != nil {
			c.t.Fatal(err)
		}
		if len(replaced) != top-gone {
			c.t.Fatalf("%d layers were replaced, %d stand on layer %d", len(replaced), top-gone, gone)
		}
		for i := gone + 1; i <= top; i++ {
			c.check(replaced[c.layers[i]].Digest, c.models[i], -1)
		}
		chain, err := c.store.Chain(c.t.Context(), replaced[c.layers[top]].Digest)
		if err != nil || len(chain) != top {
			c.t.Fatalf("the chain has %d layers, %v, want %d", len(chain), err, top)
		}
	}
}

func chainPrograms() [][]byte {
	r := rand.New(rand.NewPCG(7, 7))
	list := [][]byte{nil, {3, 0, 255, 0, 0, 3, 0, 1, 0, 0, 0}}
	for range 4 {
		p := make([]byte, 40+r.IntN(80))
		for i := range p {
			p[i] = byte(r.Uint32())
		}
		list = append(list, p)
	}
	return list
}

// FuzzChain: encoder, decoder and compactor against an array.
func FuzzChain(f *testing.F) {
	for _, p := range chainPrograms() {
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, program []byte) {
		c := &chainTest{t: t, store: openStore(t)}
		c.store.syncfs = func(int) error { return nil }
		c.run(program)
	})
}

func TestResolveRefuses(t *testing.T) {
	c := &chainTest{t: t, store: openStore(t)}
	c.add([]byte{0, 4, 0})
	c.add([]byte{8, 4, 0})
	if _, err := c.store.Resolve(t.Context(), c.layers[0], c.layers[1]); err == nil {
		t.Error("over a descendant")
	}
	if _, err := c.store.Resolve(t.Context(), Digest{}, Digest{}); !errors.Is(err, ErrNotFound) {
		t.Errorf("no digest: %v", err)
	}
	if _, err := c.store.Resolve(t.Context(), Digest{1}, Digest{}); !errors.Is(err, ErrNotFound) {
		t.Errorf("unknown digest: %v", err)
	}
	if st, err := c.store.Resolve(t.Context(), c.layers[1], c.layers[1]); err != nil || st.Extents() != nil || st.Size() != modelPages*modelPage {
		t.Errorf("over itself: %+v, %v", st, err)
	}
	if _, err := c.store.Merge(t.Context(), c.layers[0], c.layers[1]); err == nil {
		t.Error("merge onto a descendant")
	}
	other, err := c.store.Write(t.Context(), WriteSpec{PageSize: modelPage, Size: modelPage, Parent: c.layers[1]})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.store.Resolve(t.Context(), other.Digest, Digest{}); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a layer of another size than its parent: %v", err)
	}
}

// Merge does not touch chunks that stay as they are: here they are gone.
func TestMergeNamesChunksAgain(t *testing.T) {
	c := &chainTest{t: t, store: openStore(t)}
	c.add([]byte{0, 31, 0, 16, 31, 0, 32, 31, 0}) // pages 0-95: six chunks
	c.add([]byte{8, 15, 0, 128, 31, 0})           // pages 16-31, the second of them, and others far off
	chunks := files(t, c.store, "chunks")
	for _, path := range chunks {
		if err := os.Rename(path, path+".away"); err != nil {
			t.Fatal(err)
		}
	}
	info, err := c.store.Merge(t.Context(), c.layers[1], Digest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range chunks {
		if err := os.Rename(path+".away", path); err != nil {
			t.Fatal(err)
		}
	}
	c.check(info.Digest, c.models[1], -1)
	if len(files(t, c.store, "chunks")) != len(chunks) {
		t.Error("chunks were written")
	}
}

// What layers above cover is not read: damage to it does not matter, damage to anything else is named.
func TestResolveReadsOnlyWhatItNeeds(t *testing.T) {
	c := &chainTest{t: t, store: openStore(t)}
	c.add([]byte{0, 15, 0})
	below := files(t, c.store, "chunks")
	c.add([]byte{0, 15, 0, 64, 15, 0})
	for _, path := range below {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	c.check(c.layers[1], c.models[1], -1)
	st, err := c.store.Resolve(t.Context(), c.layers[0], Digest{})
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Apply(t.Context(), &modelSink{}); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a chunk that is needed is gone: %v", err)
	}
	if _, err := c.store.Merge(t.Context(), c.layers[1], Digest{}); err != nil {
		t.Errorf("merge: %v", err)
	}
}
