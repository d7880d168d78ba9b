package layer

import (
	"context"
	"fmt"
	"os"
	"slices"
)

// Merge stores, as one layer over onto, what d and the layers between the two hold together: where a chain grew long,
// or its middle shall go. A zero onto makes a root. The result is a layer like any other, durable when Merge returns;
// chunks that are in use as a whole are named again, not read: it has no chunk with a page that it does not need. The error
// is like that of Write and Resolve.
//
// Zero pages are kept as such only where onto's chain may hold something else.
func (s *Store) Merge(ctx context.Context, d, onto Digest) (Info, error) {
	return s.hold(ctx, d, onto, false)
}

// MergeShared is Merge, but names pages in whatever chunk they are: it takes hardly more room than its map as long as the
// merged layers stay. Own makes of it what Merge does.
func (s *Store) MergeShared(ctx context.Context, d, onto Digest) (Info, error) {
	return s.hold(ctx, d, onto, true)
}

func (s *Store) hold(ctx context.Context, d, onto Digest, shared bool) (Info, error) {
	release, err := s.Hold(ctx)
	if err != nil {
		return Info{}, fmt.Errorf("merge layer %s: %w", d, err)
	}
	defer release()
	info, err := s.merge(ctx, d, onto, shared)
	if err != nil {
		return Info{}, fmt.Errorf("merge layer %s onto %s: %w", d, onto.orRoot(), err)
	}
	return info, nil
}

func (d Digest) orRoot() string {
	if d.IsZero() {
		return "nothing"
	}
	return d.String()
}

func (s *Store) merge(ctx context.Context, d, onto Digest, shared bool) (Info, error) {
	st, err := s.Resolve(ctx, d, onto)
	if err != nil {
		return Info{}, err
	}
	var below []sourceRun // where zeros must stay
	if !onto.IsZero() {
		base, err := s.Resolve(ctx, onto, Digest{})
		if err != nil {
			return Info{}, err
		}
		if base.pageSize != st.pageSize || base.size != st.size {
			return Info{}, fmt.Errorf("they are of different sizes: %w", ErrCorrupt)
		}
		below = base.runs
	}
	st.runs = dropZeros(st.runs, below)
	m := &pageMap{pageSize: st.pageSize, size: st.size, parent: onto}
	for _, r := range st.runs {
		next := run{first: r.offset / st.pageSize, count: r.length / st.pageSize, zero: r.zero}
		if n := len(m.runs); n > 0 && m.runs[n-1].zero == next.zero && m.runs[n-1].end() == next.first {
			m.runs[n-1].count += next.count
		} else {
			m.runs = append(m.runs, next)
		}
	}
	a := arrange(st.wholeRanges(), true)
	if shared {
		a = arrange(st.ranges(), false)
	}
	return s.arranged(ctx, st, m, a)
}

// arranged stores a layer of the pages of a stack.
func (s *Store) arranged(ctx context.Context, st *Stack, m *pageMap, a *arrangement) (Info, error) {
	if a.encodedBytes(m) > maxMapBytes {
		return Info{}, fmt.Errorf("its pages are too scattered: %d runs", len(m.runs))
	}
	// Opened before the first chunk is written: see write.
	dir, err := os.Open(s.dir)
	if err != nil {
		return Info{}, err
	}
	defer dir.Close()
	chunks, err := s.writeMerged(ctx, st, a.pieces)
	if err != nil {
		return Info{}, err
	}
	m.refer(a.parts(chunks))
	return s.finish(ctx, m, dir)
}

// dropZeros drops zero runs, or parts of them, where below has no data.
func dropZeros(runs, below []sourceRun) []sourceRun {
	var out []sourceRun
	next := 0
	for _, r := range runs {
		if !r.zero {
			out = append(out, r)
			continue
		}
		for next < len(below) && below[next].end() <= r.offset {
			next++
		}
		for i := next; i < len(below) && below[i].offset < r.end(); i++ {
			if below[i].zero {
				continue
			}
			from, to := max(r.offset, below[i].offset), min(r.end(), below[i].end())
			out = append(out, sourceRun{offset: from, length: to - from, zero: true})
		}
	}
	return out
}

// minKept keeps the chunks of a layer that is merged again and again from becoming ever smaller.
const minKept = 128 << 10

// ranges are the data pages of a merged layer: those in chunks of which it needs much stay there.
func (st *Stack) ranges() []dataRange {
	used := usage{}
	st.parts(func(_ sourceRun, p chunkPart) { used.add(p) })
	var list []dataRange
	kept := used.keep(minKept)
	st.parts(func(r sourceRun, p chunkPart) {
		if !kept[p.chunk] {
			p = chunkPart{}
		}
		list = append(list, dataRange{r, p})
	})
	return list
}

// wholeRanges are the same, but only chunks that are used as a whole, from begin to end, stay.
func (st *Stack) wholeRanges() []dataRange {
	var list []dataRange
	first, length := 0, int64(0) // of those that follow one another in a chunk
	end := func() {
		if n := len(list); n > 0 && (length < list[n-1].kept.chunk.length || length < minKept) {
			for i := first; i < n; i++ {
				list[i].kept = chunkPart{}
			}
		}
		first, length = len(list), 0
	}
	st.parts(func(r sourceRun, p chunkPart) {
		if n := len(list); n > 0 && (list[n-1].kept.chunk != p.chunk || list[n-1].kept.in+list[n-1].kept.length != p.in) {
			end()
		}
		list = append(list, dataRange{r, p})
		length += p.length
	})
	end()
	return list
}

// parts calls do for each part of a chunk that the data pages are, in order.
func (st *Stack) parts(do func(sourceRun, chunkPart)) {
	for _, r := range st.runs {
		if r.zero {
			continue
		}
		l := &st.layers[r.layer]
		for i := l.find(r.at); r.length > 0; i++ {
			p, here := l.part(i, r.at, r.length), r
			here.length = p.length
			do(here, p)
			r = r.from(r.offset + p.length)
		}
	}
}

// writeMerged stores pieces. One window after another is gathered in memory, so that a chunk is read once although its
// pages may go to many pieces.
func (s *Store) writeMerged(ctx context.Context, st *Stack, pieces []piece) ([]chunkRef, error) {
	type group struct{ first, end int } // consecutive pieces of one window
	var groups []group
	for i, p := range pieces {
		if n := len(groups); n > 0 && pieces[groups[n-1].first].window == p.window {
			groups[n-1].end = i + 1
		} else {
			groups = append(groups, group{i, i + 1})
		}
	}
	chunks := make([]chunkRef, len(pieces))
	err := parallel(ctx, len(groups), func() (worker, error) {
		w, err := s.newChunkWriter()
		if err != nil {
			return worker{}, err
		}
		var buf []byte
		do := func(i int) error {
			var need plan
			length := int64(0)
			for _, p := range pieces[groups[i].first:groups[i].end] {
				for _, r := range p.parts {
					need.add(st, r, length)
					length += r.length
				}
			}
			if int64(len(buf)) < length {
				buf = make([]byte, length)
			}
			for _, u := range need.chunks {
				plain, err := w.reader.read(u.chunk)
				if err != nil {
					return err
				}
				for _, p := range u.parts {
					copy(buf[p.to:], plain[p.in:p.in+p.length])
				}
			}
			at := int64(0)
			for k := groups[i].first; k < groups[i].end; k++ {
				c, err := w.write(buf[at : at+pieces[k].length])
				if err != nil {
					return err
				}
				chunks[k] = c
				at += pieces[k].length
			}
			return nil
		}
		return worker{do, w.close}, nil
	})
	return chunks, err
}

// Unlink takes a layer out of the chains of heads: what stood on it directly is merged with it, what stands on that is
// stored with its new parent, nothing of it being read. It returns the replacement of every layer above d; the old ones
// stay, and are garbage for Sweep when nobody names them any more. Hold the store until the replacements are recorded.
func (s *Store) Unlink(ctx context.Context, d Digest, heads []Digest) (map[Digest]Info, error) {
	release, err := s.Hold(ctx)
	if err != nil {
		return nil, fmt.Errorf("unlink layer %s: %w", d, err)
	}
	defer release()
	replaced := map[Digest]Info{}
	for _, head := range heads {
		if err := s.unlink(ctx, d, head, replaced); err != nil {
			return nil, fmt.Errorf("unlink layer %s from %s: %w", d, head, err)
		}
	}
	return replaced, nil
}

func (s *Store) unlink(ctx context.Context, d, head Digest, replaced map[Digest]Info) error {
	gone, err := s.readMap(d)
	if err != nil {
		return err
	}
	var above []Digest // from the head down
	for at := head; at != d; {
		if len(above) == maxDepth {
			return fmt.Errorf("it has more than %d ancestors: %w", maxDepth, ErrCorrupt)
		}
		m, err := s.readMap(at)
		if err != nil {
			return err
		}
		above = append(above, at)
		if m.parent.IsZero() {
			return nil // it does not stand on d
		}
		at = m.parent
	}
	below := gone.parent
	for i, x := range slices.Backward(above) {
		info, ok := replaced[x]
		switch {
		case ok:
		case i == len(above)-1:
			info, err = s.merge(ctx, x, below, false)
		default:
			info, err = s.reparent(ctx, x, below)
		}
		if err != nil {
			return err
		}
		replaced[x], below = info, info.Digest
	}
	return nil
}

// reparent stores a layer over another that holds what its parent does.
func (s *Store) reparent(ctx context.Context, d, parent Digest) (Info, error) {
	m, err := s.readMap(d)
	if err != nil {
		return Info{}, err
	}
	dir, err := os.Open(s.dir)
	if err != nil {
		return Info{}, err
	}
	defer dir.Close()
	m.parent = parent
	return s.finish(ctx, m, dir)
}
