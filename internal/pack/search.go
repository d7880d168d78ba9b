package pack

import (
	"bytes"
	"strings"
	"sync"
)

// MostSought is how many texts a Search looks for.
const MostSought = 256

// Bounds of what is searched for.
const (
	minSought = 12 // bytes: shorter ones are everywhere
	maxSought = 256
	mostLines = 16 // of one file
)

// Search counts where texts are left in pages. It is a layer.Sink: it is given pages in any order, from several goroutines. What
// lies in two pieces it does not find, as memory has it when it goes over the edge of a page.
type Search struct {
	texts [][]byte
	first map[[2]byte][]int // of texts that begin so
	may   [1 << 16]bool     // whether there are any

	mu    sync.Mutex
	found []int
}

// NewSearch is for texts that are worth it; Left is asked by their numbers in the list.
func NewSearch(texts [][]byte) *Search {
	s := &Search{texts: texts, first: map[[2]byte][]int{}, found: make([]int, len(texts))}
	for i, t := range texts {
		if len(t) < minSought || i >= MostSought {
			continue
		}
		k := [2]byte(t)
		s.first[k] = append(s.first[k], i)
		s.may[int(k[0])<<8|int(k[1])] = true
	}
	return s
}

// WriteAt looks through pages.
func (s *Search) WriteAt(p []byte, _ int64) (int, error) {
	var found []int
	for i := 0; i+minSought <= len(p); i++ {
		if !s.may[int(p[i])<<8|int(p[i+1])] {
			continue
		}
		for _, n := range s.first[[2]byte(p[i:])] {
			if bytes.HasPrefix(p[i:], s.texts[n]) {
				found = append(found, n)
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range found {
		s.found[n]++
	}
	return len(p), nil
}

// Zero has nothing to find.
func (s *Search) Zero(int64, int64) error { return nil }

// Left is at how many places the text of a number was found.
func (s *Search) Left(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.found[n]
}

// All lists the tokens in a text, as they are to be searched for.
func (t *Tokens) All(text []byte) (all [][]byte) {
	for _, x := range t.all {
		for _, m := range x.form.FindAll(text, mostLines) {
			if x.what == "private key" { // its first line is in every program that knows keys
				all = append(all, Lines(m)...)
				continue
			}
			all = append(all, bytes.Clone(m[:min(len(m), maxSought)]))
		}
	}
	return all
}

// Lines lists the lines of a file that are worth being searched for.
func Lines(text []byte) (all [][]byte) {
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if len(line) >= minSought && !strings.HasPrefix(line, "-----") && len(all) < mostLines {
			all = append(all, []byte(line[:min(len(line), maxSought)]))
		}
	}
	return all
}
