package layer

import (
	"context"
	"fmt"
	"os"
	"slices"
)

// Merge stores, as one layer over onto, what d and the layers between the two hold together: where a chain grew long,
// or its middle shall go. A zero onto makes a root. The result is a layer like any other, durable when Merge returns;
// chunks that are in use as a whole are named again, not read. The error is like that of Write and Resolve.
//
// Zero pages are kept as such only where onto's chain may hold something else.
func (s *Store) Merge(ctx context.Context, d, onto Digest) (Info, error) {
	release, err := s.Hold(ctx)
	if err != nil {
		return Info{}, fmt.Errorf("merge layer %s: %w", d, err)
	}
	defer release()
	info, err := s.merge(ctx, d, onto)
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

func (s *Store) merge(ctx context.Context, d, onto Digest) (Info, error) {
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
	pieces := st.recut()
	m.chunks = make([]chunkRef, len(pieces))
	if m.encodedBytes() > maxMapBytes {
		return Info{}, fmt.Errorf("its pages are too scattered: %d runs", len(m.runs))
	}
	// Opened before the first chunk is written: see write.
	dir, err := os.Open(s.dir)
	if err != nil {
		return Info{}, err
	}
	defer dir.Close()
	if err := s.writeMerged(ctx, st, pieces, m.chunks); err != nil {
		return Info{}, err
	}
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

// newPiece is a chunk to be of a merged layer.
type newPiece struct {
	reuse  *chunkRef // that content is there already, as a whole
	window int64     // else: the number of its window,
	length int64
	parts  []sourceRun // and what it is made of
}

// minReuse keeps the chunks of a layer that is merged again and again from becoming ever smaller.
const minReuse = 128 << 10

// recut divides the data pages among chunks, like cut, and keeps chunks that are in use as a whole.
func (st *Stack) recut() []newPiece {
	var pieces []newPiece
	var p newPiece
	flush := func() {
		if p.length > 0 {
			pieces = append(pieces, p)
		}
		p = newPiece{}
	}
	data := make([]sourceRun, 0, len(st.runs))
	for _, r := range st.runs {
		if !r.zero {
			data = append(data, r)
		}
	}
	for i := 0; i < len(data); {
		l := &st.layers[data[i].layer]
		k := l.find(data[i].at)
		c := l.chunks[k]
		if l.starts[k] == data[i].at && c.length >= minReuse && st.whole(data[i:], c.length) {
			flush()
			pieces = append(pieces, newPiece{reuse: &c, length: c.length})
			for left := c.length; left > 0; {
				n := min(left, data[i].length)
				left -= n
				if data[i] = data[i].from(data[i].offset + n); data[i].length == 0 {
					i++
				}
			}
			continue
		}
		// Up to where the next chunk begins, which may be one to keep.
		r := data[i]
		if p.length > 0 && p.window != r.offset/window {
			flush()
		}
		p.window = r.offset / window
		n := min(r.length, l.starts[k]+c.length-r.at, maxChunk-p.length, window-r.offset%window)
		r.length = n
		p.parts = append(p.parts, r)
		p.length += n
		if p.length == maxChunk {
			flush()
		}
		if data[i] = data[i].from(r.offset + n); data[i].length == 0 {
			i++
		}
	}
	flush()
	return pieces
}

// whole reports whether the next so many bytes of data follow one another in one layer's data too.
func (st *Stack) whole(data []sourceRun, length int64) bool {
	at := data[0].at
	for _, r := range data {
		if r.layer != data[0].layer || r.at != at {
			return false
		}
		if length -= r.length; length <= 0 {
			return true
		}
		at += r.length
	}
	return false
}

// writeMerged stores the pieces that are new and fills in chunks. One window after another is gathered in memory, so
// that a chunk is read once although its pages may go to many pieces.
func (s *Store) writeMerged(ctx context.Context, st *Stack, pieces []newPiece, chunks []chunkRef) error {
	type group struct{ first, end int } // consecutive pieces of one window
	var groups []group
	for i, p := range pieces {
		if p.reuse != nil {
			chunks[i] = *p.reuse
			continue
		}
		if n := len(groups); n > 0 && pieces[groups[n-1].first].window == p.window {
			groups[n-1].end = i + 1
		} else {
			groups = append(groups, group{i, i + 1})
		}
	}
	return parallel(ctx, len(groups), func() (worker, error) {
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
				if pieces[k].reuse != nil {
					continue
				}
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
			info, err = s.merge(ctx, x, below)
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
