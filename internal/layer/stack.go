package layer

import (
	"context"
	"fmt"
	"io"
	"sort"
)

// Stack is the pages of a layer and of those below it down to some ancestor, seen as one layer over that ancestor: of
// every page only what the topmost of them says. It holds maps and no content.
type Stack struct {
	store    *Store
	pageSize int64
	size     int64
	layers   []stackLayer
	runs     []sourceRun // ascending, not overlapping
}

// stackLayer is a layer of a stack.
type stackLayer struct {
	chunks []chunkRef
	spans  []span
	starts []int64 // place of each span in the layer's data, end to end
}

// sourceRun is a run of pages that come from one layer.
type sourceRun struct {
	offset, length int64 // bytes
	zero           bool
	layer          int   // unless zero
	at             int64 // place in the layer's data, end to end
}

func (r sourceRun) end() int64 { return r.offset + r.length }

// Resolve finds out, from maps alone, where each page that d has over its ancestor over comes from. A zero over means
// all there is, from the root on. The error wraps ErrNotFound or ErrCorrupt; an over that d does not stand on is an
// error too.
func (s *Store) Resolve(ctx context.Context, d, over Digest) (*Stack, error) {
	st := &Stack{store: s}
	for at, depth := d, 0; at != over; depth++ {
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case at.IsZero():
			return nil, fmt.Errorf("layer %s does not stand on layer %s", d, over)
		case depth == maxDepth:
			return nil, fmt.Errorf("layer %s has more than %d ancestors: %w", d, maxDepth, ErrCorrupt)
		}
		m, err := s.readMap(at)
		if err != nil && depth > 0 {
			return nil, fmt.Errorf("layer %s stands on layer %s: %w", d, at, err)
		}
		if err != nil {
			return nil, err
		}
		if err := st.below(m); err != nil {
			return nil, fmt.Errorf("layer %s stands on layer %s: %w", d, at, err)
		}
		at = m.parent
	}
	if len(st.layers) == 0 && !d.IsZero() {
		// d itself: nothing, but of its size.
		m, err := s.readMap(d)
		if err != nil {
			return nil, err
		}
		st.pageSize, st.size = m.pageSize, m.size
	}
	if len(st.layers) == 0 && d.IsZero() {
		return nil, fmt.Errorf("read layer: no digest given: %w", ErrNotFound)
	}
	return st, nil
}

// below puts a layer under those that are there.
func (st *Stack) below(m *pageMap) error {
	if len(st.layers) == 0 {
		st.pageSize, st.size = m.pageSize, m.size
	}
	if m.pageSize != st.pageSize || m.size != st.size {
		return fmt.Errorf("it has %d bytes in pages of %d, which is not %d in pages of %d: %w",
			m.size, m.pageSize, st.size, st.pageSize, ErrCorrupt)
	}
	runs := make([]sourceRun, len(m.runs))
	at := int64(0)
	for i, r := range m.runs {
		runs[i] = sourceRun{offset: r.first * m.pageSize, length: r.count * m.pageSize, zero: r.zero, layer: len(st.layers)}
		if !r.zero {
			runs[i].at = at
			at += runs[i].length
		}
	}
	l := stackLayer{chunks: m.chunks, spans: m.spans}
	if l.spans == nil {
		l.spans = make([]span, len(m.chunks))
		for i, c := range m.chunks {
			l.spans[i] = span{chunk: uint32(i), length: uint32(c.length)}
		}
	}
	l.starts = make([]int64, len(l.spans))
	at = 0
	for i, p := range l.spans {
		l.starts[i] = at
		at += int64(p.length)
	}
	st.layers = append(st.layers, l)
	st.runs = overlay(st.runs, runs)
	return nil
}

// overlay is top with what below has where top names nothing.
func overlay(top, below []sourceRun) []sourceRun {
	if len(top) == 0 {
		return below
	}
	out := make([]sourceRun, 0, len(top)+len(below))
	next := 0
	for _, b := range below {
		for b.length > 0 {
			for next < len(top) && top[next].end() <= b.offset {
				out = append(out, top[next])
				next++
			}
			if next == len(top) || top[next].offset >= b.end() {
				out = append(out, b)
				break
			}
			t := top[next]
			if n := t.offset - b.offset; n > 0 {
				part := b
				part.length = n
				out = append(out, part)
			}
			b = b.from(t.end())
		}
	}
	return append(out, top[next:]...)
}

// from is what of r lies from an offset on; its length is not positive if there is nothing.
func (r sourceRun) from(off int64) sourceRun {
	n := off - r.offset
	if n <= 0 {
		return r
	}
	r.offset, r.length = off, r.length-n
	if !r.zero {
		r.at += n
	}
	return r
}

// PageSize is that of its layers.
func (st *Stack) PageSize() int64 { return st.pageSize }

// Size is that of the memory or disk.
func (st *Stack) Size() int64 { return st.size }

// Extents lists the pages, ascending, neighbours of one kind as one.
func (st *Stack) Extents() []Extent {
	var list []Extent
	for _, r := range st.runs {
		list = appendExtent(list, Extent{Offset: r.offset, Length: r.length, Zero: r.zero})
	}
	return list
}

// appendExtent adds an extent that comes after all others.
func appendExtent(list []Extent, e Extent) []Extent {
	if n := len(list); n > 0 {
		last := &list[n-1]
		if last.Zero == e.Zero && last.Offset+last.Length == e.Offset {
			last.Length += e.Length
			return list
		}
	}
	return append(list, e)
}

// Apply hands the pages to sink, as Store.Apply does for one layer. Every chunk that is needed is read once, however
// many layers use it, and none that is not.
func (st *Stack) Apply(ctx context.Context, sink Sink) error {
	for _, r := range st.runs {
		if !r.zero {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := sink.Zero(r.offset, r.length); err != nil {
			return fmt.Errorf("zero %d bytes at %d: %w", r.length, r.offset, err)
		}
	}
	return st.each(ctx, sink, func(r sourceRun) int64 { return r.offset })
}

// Pack writes the data pages into w end to end, in ascending order, as Extents lists them.
func (st *Stack) Pack(ctx context.Context, w io.WriterAt) error {
	next := int64(0)
	return st.each(ctx, w, func(r sourceRun) int64 {
		at := next
		next += r.length
		return at
	})
}

// each writes every data run to where place, called in ascending order, says.
func (st *Stack) each(ctx context.Context, w io.WriterAt, place func(sourceRun) int64) error {
	var p plan
	for _, r := range st.runs {
		if !r.zero {
			p.add(st, r, place(r))
		}
	}
	return st.store.fetch(ctx, p.chunks, w)
}

// plan collects what is needed of which chunks.
type plan struct {
	chunks []chunkUse
	index  map[chunkRef]int // the same content may be in several chunks
}

// chunkUse is a chunk, and the places of its parts.
type chunkUse struct {
	chunk chunkRef
	parts []part
}

// part is a range of a chunk's content, and where it goes.
type part struct{ in, length, to int64 }

// add plans to put a run of data at an offset.
func (p *plan) add(st *Stack, r sourceRun, to int64) {
	if p.index == nil {
		p.index = map[chunkRef]int{}
	}
	l := &st.layers[r.layer]
	for at, end, i := r.at, r.at+r.length, l.find(r.at); at < end; i++ {
		c := l.part(i, at, end-at)
		k, ok := p.index[c.chunk]
		if !ok {
			k = len(p.chunks)
			p.index[c.chunk] = k
			p.chunks = append(p.chunks, chunkUse{chunk: c.chunk})
		}
		p.chunks[k].add(part{c.in, c.length, to})
		at, to = at+c.length, to+c.length
	}
}

// part is what of span i lies from a place of the layer's data on, at most so many bytes.
func (l *stackLayer) part(i int, at, most int64) chunkPart {
	p, skip := l.spans[i], at-l.starts[i]
	return chunkPart{l.chunks[p.chunk], int64(p.in) + skip, min(int64(p.length)-skip, most)}
}

func (u *chunkUse) add(p part) {
	if n := len(u.parts); n > 0 {
		last := &u.parts[n-1]
		if last.in+last.length == p.in && last.to+last.length == p.to {
			last.length += p.length
			return
		}
	}
	u.parts = append(u.parts, p)
}

// find is the span that holds a place of the layer's data.
func (l *stackLayer) find(at int64) int {
	return sort.Search(len(l.starts), func(i int) bool { return l.starts[i] > at }) - 1
}

// fetch reads chunks and writes their parts.
func (s *Store) fetch(ctx context.Context, uses []chunkUse, w io.WriterAt) error {
	return parallel(ctx, len(uses), func() (worker, error) {
		r, err := s.newChunkReader()
		if err != nil {
			return worker{}, err
		}
		do := func(i int) error {
			plain, err := r.read(uses[i].chunk)
			if err != nil {
				return err
			}
			for _, p := range uses[i].parts {
				if _, err := w.WriteAt(plain[p.in:p.in+p.length], p.to); err != nil {
					return fmt.Errorf("write %d bytes at %d: %w", p.length, p.to, err)
				}
			}
			return nil
		}
		return worker{do, r.close}, nil
	})
}
