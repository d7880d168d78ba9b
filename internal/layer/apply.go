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
	st := &Stack{store: s}
	if err := st.below(m); err != nil {
		return fmt.Errorf("apply layer %s: %w", d, err)
	}
	if err := st.Apply(ctx, sink); err != nil {
		return fmt.Errorf("apply layer %s: %w", d, err)
	}
	return nil
}
