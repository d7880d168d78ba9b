package layer

import (
	"context"
	"fmt"
)

// Sink receives the pages of a layer. Its methods are called concurrently, for ranges that do not overlap.
type Sink interface {
	// WriteAt stores page data, like io.WriterAt.
	WriteAt(p []byte, off int64) (int, error)
	// Zero makes a range of pages zero.
	Zero(off, n int64) error
}

// Apply hands the pages of one layer, without those of its ancestors, to sink. Nothing reaches sink that was not
// verified by digest; on error some pages may have reached it. The error wraps ErrNotFound or ErrCorrupt, or is the
// sink's own.
func (s *Store) Apply(ctx context.Context, d Digest, sink Sink) error {
	m, err := s.readMap(d)
	if err != nil {
		return err
	}
	for _, r := range m.runs {
		if !r.zero {
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := sink.Zero(r.first*m.pageSize, r.count*m.pageSize); err != nil {
			return fmt.Errorf("apply layer %s: zero %d bytes at %d: %w", d, r.count*m.pageSize, r.first*m.pageSize, err)
		}
	}
	pieces, err := m.pieces()
	if err != nil {
		return corrupt("map of layer %s: %w", d, err)
	}
	if err := s.applyChunks(ctx, m.chunks, pieces, sink); err != nil {
		return fmt.Errorf("apply layer %s: %w", d, err)
	}
	return nil
}

func (s *Store) applyChunks(ctx context.Context, chunks []chunkRef, pieces []piece, sink Sink) error {
	return parallel(ctx, len(chunks), func() (worker, error) {
		r, err := s.newChunkReader()
		if err != nil {
			return worker{}, err
		}
		do := func(i int) error {
			plain, err := r.read(chunks[i])
			if err != nil {
				return err
			}
			return pieces[i].writeTo(sink, plain)
		}
		return worker{do, r.close}, nil
	})
}

func (p piece) writeTo(sink Sink, plain []byte) error {
	for _, seg := range p.segments {
		if _, err := sink.WriteAt(plain[:seg.length], seg.offset); err != nil {
			return fmt.Errorf("write %d bytes at %d: %w", seg.length, seg.offset, err)
		}
		plain = plain[seg.length:]
	}
	return nil
}
