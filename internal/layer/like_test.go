package layer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

// noise is pages of which none is like another.
func noise(seed uint64, pages int) []byte {
	r := rand.New(rand.NewPCG(seed, 2))
	b := make([]byte, pages*page)
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}

// shuffled is b with its pages at other places, in groups of one to eight.
func shuffled(seed uint64, b []byte) []byte {
	r := rand.New(rand.NewPCG(seed, 3))
	var groups [][]byte
	for at := 0; at < len(b); {
		n := min(page*(1+r.IntN(8)), len(b)-at)
		groups = append(groups, b[at:at+n])
		at += n
	}
	r.Shuffle(len(groups), func(i, k int) { groups[i], groups[k] = groups[k], groups[i] })
	return slices.Concat(groups...)
}

// putLike stores b as a root that shares chunks with like.
func putLike(t *testing.T, s *Store, b []byte, like Digest) Info {
	t.Helper()
	spec := specOf(t, b, nil)
	spec.Like = []Digest{like}
	info, err := s.Write(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// stored is what chunks take.
func stored(t *testing.T, s *Store) (n int64) {
	t.Helper()
	for _, f := range files(t, s, "chunks") {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		n += info.Size()
	}
	return n
}

// Pages that another layer has are not stored again, wherever they are: of ten images with the same pages at other places
// and a few of their own each takes little more than those.
func TestLike(t *testing.T) {
	s := openStore(t)
	const pages, own = 2000, 20
	first := noise(1, pages)
	all := map[Digest][]byte{}
	root := putLike(t, s, first, Digest{})
	one := stored(t, s)
	for i := range uint64(10) {
		b := shuffled(i, first)
		b = append(b[:len(b)-own*page:len(b)-own*page], noise(100+i, own)...)
		all[putLike(t, s, b, root.Digest).Digest] = b
	}
	if took := stored(t, s); took > one+10*(own+5)*page {
		t.Errorf("ten more take %d bytes, the first %d", took-one, one)
	}
	// The first goes: what the others need of it stays.
	heads := []Digest{}
	for d := range all {
		heads = append(heads, d)
	}
	if _, err := s.Sweep(t.Context(), func(context.Context) ([]Digest, error) { return heads, nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stat(t.Context(), root.Digest); !errors.Is(err, ErrNotFound) {
		t.Errorf("the first is there: %v", err)
	}
	for d, b := range all {
		wantContent(t, s, d, b)
	}
	rep, err := s.Verify(t.Context(), heads)
	if err != nil || len(rep.Damages) > 0 || rep.Layers != 10 {
		t.Errorf("verify: %+v, %v", rep, err)
	}
	// What is damaged breaks all that use it.
	m, err := s.readMap(heads[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(s.chunkPath(m.chunks[0].digest), 10); err != nil {
		t.Fatal(err)
	}
	if rep, err = s.Verify(t.Context(), heads); err != nil || len(rep.Damages) != 1 || len(rep.Damages[0].Layers) < 2 {
		t.Errorf("verify: %+v, %v", rep, err)
	}
}

// Of two layers that are given, each gives what the other has not; one that is not there is no reason to store what another has.
func TestLikeTwo(t *testing.T) {
	s := openStore(t)
	a, b := noise(1, 500), noise(2, 500)
	like := []Digest{putLike(t, s, a, Digest{}).Digest, {1}, putLike(t, s, b, Digest{}).Digest}
	before := stored(t, s)
	both := slices.Concat(b[:300*page], noise(3, 10), a[100*page:])
	spec := specOf(t, both, nil)
	spec.Like = like
	info, err := s.Write(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if took := stored(t, s) - before; took > 20*page {
		t.Errorf("ten pages of its own take %d bytes", took)
	}
	wantContent(t, s, info.Digest, both)
}

// Chunks of which little is used are left alone: a layer keeps no more than one and a half times its size.
func TestLikeBounded(t *testing.T) {
	s := openStore(t)
	first := noise(1, 4096) // of sixteen chunks
	root := putLike(t, s, first, Digest{})
	for _, use := range [][]int{{256, 31, 32, 1, 200, 100, 129, 256, 3}, {256, 256, 256, 256, 31, 32, 33}, {171}, {170}, {1, 2, 3}} {
		var b []byte
		for i, n := range use {
			b = append(b, first[i<<20:i<<20+n*page]...)
		}
		m := mustMap(t, s, putLike(t, s, b, root.Digest).Digest)
		theirs := map[Digest]bool{}
		for _, c := range mustMap(t, s, root.Digest).chunks {
			theirs[c.digest] = true
		}
		whole, used := int64(0), int64(0)
		for _, p := range m.spans {
			if theirs[m.chunks[p.chunk].digest] {
				used += int64(p.length)
			}
		}
		for _, c := range m.chunks {
			if theirs[c.digest] {
				whole += c.length
			}
		}
		if whole*2 > used*3 {
			t.Errorf("%v: chunks of %d bytes for %d", use, whole, used)
		}
		wantContent(t, s, digestOf(m), b)
	}
}

func digestOf(m *pageMap) Digest {
	out, err := ParseMap(m.encode())
	if err != nil {
		panic(err)
	}
	return out.Digest
}

// A layer with chunks of its own has no page that it does not need, and the same digest whenever it is given them.
func TestOwn(t *testing.T) {
	s := openStore(t)
	first := noise(1, 1000)
	secret := []byte("somebody else's secret")
	copy(first[500*page:], secret)
	root := put(t, s, first, nil, Digest{})
	b := append(shuffled(1, first[:480*page]), shuffled(2, first[520*page:])...)
	shared := putLike(t, s, b, root.Digest)
	now := bytes.Clone(b)
	copy(now[7*page:], noise(9, 3))
	top := put(t, s, now, b, shared.Digest)
	if shares, err := s.Shares(t.Context(), top.Digest); err != nil || !shares {
		t.Fatalf("it does not share chunks: %v, %v", shares, err)
	}
	replaced, err := s.Own(t.Context(), top.Digest)
	if err != nil || len(replaced) != 2 || replaced[top.Digest].Parent != replaced[shared.Digest].Digest {
		t.Fatalf("replaced %+v, %v", replaced, err)
	}
	head := replaced[top.Digest].Digest
	wantContent(t, s, head, now)
	wantContent(t, s, top.Digest, now) // as before
	for _, d := range []Digest{head, replaced[shared.Digest].Digest} {
		m := mustMap(t, s, d)
		length := int64(0)
		r, err := s.newChunkReader()
		if err != nil {
			t.Fatal(err)
		}
		defer r.close()
		for _, c := range m.chunks {
			length += c.length
			plain, err := r.read(c)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(plain, secret) {
				t.Error("a chunk holds what is none of the layer's")
			}
		}
		if m.spans != nil || length != m.dataBytes() {
			t.Errorf("chunks of %d bytes for %d", length, m.dataBytes())
		}
	}
	again, err := s.Own(t.Context(), top.Digest)
	if err != nil || again[top.Digest].Digest != head {
		t.Errorf("again: %+v, %v", again, err)
	}
	if more, err := s.Own(t.Context(), head); err != nil || len(more) != 0 {
		t.Errorf("of what has chunks of its own: %+v, %v", more, err)
	}
}

// A Like is a hint: without it, or with a damaged one, all is stored.
func TestLikeUnreadable(t *testing.T) {
	s := openStore(t)
	b := noise(1, 600)
	plain := put(t, s, b, nil, Digest{})
	if d := putLike(t, s, b, plain.Digest).Digest; d != plain.Digest {
		t.Errorf("what is the same has another name: %s", d)
	}
	moved := shuffled(1, b)
	want := put(t, openStore(t), moved, nil, Digest{}).Digest
	if err := os.Truncate(s.chunkPath(mustMap(t, s, plain.Digest).chunks[1].digest), 3); err != nil {
		t.Fatal(err)
	}
	other, err := s.Write(t.Context(), WriteSpec{
		PageSize: modelPage, Size: modelPage, Extents: []Extent{{Length: modelPage}}, From: bytes.NewReader(noise(2, 16)),
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, like := range []Digest{{1}, plain.Digest, other.Digest} {
		if d := putLike(t, s, moved, like).Digest; d != want {
			t.Errorf("like %s: not stored as a whole", like)
		}
	}
	wantContent(t, s, want, moved)
}

func mustMap(t *testing.T, s *Store, d Digest) *pageMap {
	t.Helper()
	m, err := s.readMap(d)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Merged layers of a chain take no room but for their maps, however the pages of the upper ones are scattered.
func TestMergedShare(t *testing.T) {
	s := openStore(t)
	b := noise(1, 4096)
	root := put(t, s, b, nil, Digest{})
	one := stored(t, s)
	r := rand.New(rand.NewPCG(5, 5))
	for i := range uint64(10) {
		now := bytes.Clone(b)
		for k := range 60 { // here and there a page
			copy(now[r.IntN(4096)*page:], noise(1000*i+uint64(k), 1))
		}
		top := put(t, s, now, b, root.Digest)
		before := stored(t, s)
		flat, err := s.MergeShared(t.Context(), top.Digest, Digest{})
		if err != nil {
			t.Fatal(err)
		}
		if more := stored(t, s) - before; more > 61*page {
			t.Errorf("%d bytes more", more)
		}
		wantContent(t, s, flat.Digest, now)
	}
	if all := stored(t, s); all*10 > one*13 {
		t.Errorf("ten take %d bytes, one %d", all, one)
	}
}
