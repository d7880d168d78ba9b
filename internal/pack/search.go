package pack

import (
	"bytes"
	"slices"
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

// Search counts where texts are left in pages. It is a layer.Sink: it is given pages in any order, from several goroutines, in
// pieces that do not overlap; a text may go over the edges between them. What lies in pages that are not neighbours, as a program's
// memory may, it does not find.
type Search struct {
	texts [][]byte
	first map[[2]byte][]int // of texts that begin so
	may   [1 << 16]bool     // whether there are any

	mu     sync.Mutex
	found  []int
	starts map[int64]stretch // by where they begin
	ends   map[int64]stretch // by where they end
}

// stretch is pages that were given, end to end: what a text could begin or end with that goes over its edges. Of a short one that is
// all of it.
type stretch struct {
	from, to   int64
	head, tail []byte
}

// edge is the most of a text that may lie on one side of an edge.
const edge = maxSought - 1

// NewSearch is for texts that are worth it; Left is asked by their numbers in the list.
func NewSearch(texts [][]byte) *Search {
	s := &Search{texts: texts, first: map[[2]byte][]int{}, found: make([]int, len(texts)), starts: map[int64]stretch{}, ends: map[int64]stretch{}}
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
func (s *Search) WriteAt(p []byte, off int64) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	var found []int
	s.scan(p, func(n, _ int) { found = append(found, n) })
	k := min(edge, len(p))
	x := stretch{off, off + int64(len(p)), bytes.Clone(p[:k]), bytes.Clone(p[len(p)-k:])}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range found {
		s.found[n]++
	}
	if before, ok := s.ends[x.from]; ok {
		x = s.join(before, x)
	}
	if after, ok := s.starts[x.to]; ok {
		x = s.join(x, after)
	}
	s.starts[x.from], s.ends[x.to] = x, x
	return len(p), nil
}

// scan calls hit for every text in p, with its number and where it begins.
func (s *Search) scan(p []byte, hit func(n, at int)) {
	for i := 0; i+minSought <= len(p); i++ {
		if !s.may[int(p[i])<<8|int(p[i+1])] {
			continue
		}
		for _, n := range s.first[[2]byte(p[i:])] {
			if bytes.HasPrefix(p[i:], s.texts[n]) {
				hit(n, i)
			}
		}
	}
}

// join makes one of two stretches, and counts what goes over the edge between them. The caller holds mu.
func (s *Search) join(a, b stretch) stretch {
	s.scan(slices.Concat(a.tail, b.head), func(n, at int) {
		if at < len(a.tail) && at+len(s.texts[n]) > len(a.tail) {
			s.found[n]++
		}
	})
	delete(s.ends, a.to)
	delete(s.starts, b.from)
	x := stretch{a.from, b.to, a.head, b.tail}
	if len(a.head) < edge {
		x.head = slices.Concat(a.head, b.head)
		x.head = x.head[:min(edge, len(x.head))]
	}
	if len(b.tail) < edge {
		x.tail = slices.Concat(a.tail, b.tail)
		x.tail = x.tail[max(0, len(x.tail)-edge):]
	}
	return x
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
