package pack

import (
	"bytes"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/layer"
)

// TestSearch: every place is counted, and only what is looked for.
func TestSearch(t *testing.T) {
	texts := [][]byte{[]byte("the first secret"), []byte("the first secret of two"), []byte("short"), bytes.Repeat([]byte("x"), 40)}
	s := NewSearch(texts)
	page := make([]byte, 4096)
	copy(page[10:], "the first secret and the first secret of two, short")
	copy(page[4096-40:], texts[3])
	for i, p := range [][]byte{page, make([]byte, 4096), page[:20], []byte("the first secre")} {
		if n, err := s.WriteAt(p, int64(i)<<20); n != len(p) || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	}
	for i, want := range []int{2, 1, 0, 1} {
		if got := s.Left(i); got != want {
			t.Errorf("%q is at %d places, want %d", texts[i], got, want)
		}
	}
}

// TestSearchAcross: what goes over an edge between two pieces is found once, wherever the edge is in it, in whatever order the pieces
// come; where there is something else between them it is not.
func TestSearchAcross(t *testing.T) {
	const page = 4096
	secret, long := []byte("a secret of 23 letters!"), bytes.Repeat([]byte("0123456789abcdef"), maxSought/16)
	texts := [][]byte{secret, long}
	for size, step := range map[int]int{page: 3, 1 << 20: 250} { // of pieces
		for _, text := range texts {
			for cut := 1; cut < len(text); cut += step { // bytes before the edge
				memory := make([]byte, 5*size)
				for k := 1; k < 5; k++ { // over each edge
					copy(memory[k*size-cut:], text)
				}
				for _, order := range [][]int{{0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {0, 2, 4, 1, 3}, {1, 3, 0, 4, 2}} {
					s := NewSearch(texts)
					for _, k := range order {
						if _, err := s.WriteAt(memory[k*size:(k+1)*size], int64(k*size)); err != nil {
							t.Fatal(err)
						}
					}
					if got := s.Left(0) + s.Left(1); got != 4 {
						t.Fatalf("pieces of %d in order %v, %d of %d bytes before each edge: found %d times, want 4", size, order, cut, len(text), got)
					}
				}
			}
		}
	}
	// Pieces that are shorter than the text.
	memory := append(append(make([]byte, 100), long...), make([]byte, 100)...)
	for _, order := range []int{1, 7, 11} {
		s := NewSearch(texts)
		n := (len(memory) + 9) / 10
		for i := range n {
			k := i * order % n * 10
			if _, err := s.WriteAt(memory[k:min(k+10, len(memory))], int64(k)); err != nil {
				t.Fatal(err)
			}
		}
		if s.Left(1) != 1 || len(s.starts) != 1 || len(s.ends) != 1 {
			t.Errorf("in pieces of 10 bytes, every %d: found %d times, %d stretches", order, s.Left(1), len(s.starts))
		}
	}
	s := NewSearch(texts)
	_, _ = s.WriteAt(secret[:10], 0)
	_, _ = s.WriteAt(secret[10:], 11)
	if s.Left(0) != 0 {
		t.Error("what is not end to end was found")
	}
}

// TestSearchLayer: in a layer whose chunks are read from several goroutines, a secret over the edge of each of them is found.
func TestSearchLayer(t *testing.T) {
	h := newHome(t)
	secret := []byte("a secret of 23 letters!")
	const size = 8 << 20
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i * i >> 8)
	}
	want := 0
	for at := 1 << 20; at < size; at += 1 << 20 {
		copy(data[at-len(secret)/2:], secret)
		want++
	}
	info, err := h.Layers.Write(t.Context(), layer.WriteSpec{
		PageSize: memoryPage, Size: size, From: bytes.NewReader(data), Extents: []layer.Extent{{Offset: 0, Length: size}},
	})
	if err != nil {
		t.Fatal(err)
	}
	s := NewSearch([][]byte{secret})
	if err := h.Layers.Apply(t.Context(), info.Digest, s); err != nil {
		t.Fatal(err)
	}
	if s.Left(0) != want {
		t.Errorf("found %d times, want %d", s.Left(0), want)
	}
}

// TestSought: of what was found there is something to search for, and none of it is in everybody's programs.
func TestSought(t *testing.T) {
	key := "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n" + strings.Repeat("aB3d", 17) + "\n" + strings.Repeat("x", 300) + "\n-----END OPENSSH " + "PRIVATE KEY-----"
	token := "ghp" + "_" + strings.Repeat("a1B2", 9)
	got := NewTokens().All([]byte("A=" + token + "\n" + key + "\n"))
	want := []string{strings.Repeat("aB3d", 17), strings.Repeat("x", maxSought), token}
	if len(got) != len(want) {
		t.Fatalf("%q", got)
	}
	for i := range want {
		if string(got[i]) != want[i] {
			t.Errorf("%q, want %q", got[i], want[i])
		}
	}
	if got := Lines([]byte("ls\n  curl -H secret\n\n" + strings.Repeat("another line\n", 100))); len(got) != mostLines || string(got[0]) != "curl -H secret" {
		t.Errorf("%q", got)
	}
}

func BenchmarkSearch(b *testing.B) {
	var texts [][]byte
	for i := range 64 {
		texts = append(texts, []byte(strings.Repeat(string(rune('A'+i)), 20)))
	}
	s := NewSearch(texts)
	page := bytes.Repeat([]byte("some text that programs have in their memory\x00\x01\x02"), 1<<20/48)
	b.SetBytes(int64(len(page)))
	for at := int64(0); b.Loop(); at += int64(len(page)) {
		_, _ = s.WriteAt(page, at)
	}
}
