package pack

import (
	"bytes"
	"strings"
	"testing"
)

// TestSearch: every place is counted, and only what is looked for.
func TestSearch(t *testing.T) {
	texts := [][]byte{[]byte("the first secret"), []byte("the first secret of two"), []byte("short"), bytes.Repeat([]byte("x"), 40)}
	s := NewSearch(texts)
	page := make([]byte, 4096)
	copy(page[10:], "the first secret and the first secret of two, short")
	copy(page[4096-40:], texts[3])
	for _, p := range [][]byte{page, make([]byte, 4096), page[:20], []byte("the first secre")} {
		if n, err := s.WriteAt(p, 0); n != len(p) || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	}
	for i, want := range []int{2, 1, 0, 1} {
		if got := s.Left(i); got != want {
			t.Errorf("%q is at %d places, want %d", texts[i], got, want)
		}
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
	for b.Loop() {
		_, _ = s.WriteAt(page, 0)
	}
}
