package layer

import (
	"context"
	"fmt"
	"slices"
)

// Shares reports whether a layer, or one it stands on, uses parts of chunks: these may hold pages of other layers, which
// are nobody's business who gets the layer.
func (s *Store) Shares(ctx context.Context, d Digest) (bool, error) {
	for depth := 0; !d.IsZero(); depth++ {
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		if depth == maxDepth {
			return false, fmt.Errorf("layer %s has more than %d descendants: %w", d, maxDepth, ErrCorrupt)
		}
		m, err := s.readMap(d)
		if err != nil {
			return false, err
		}
		if m.spans != nil {
			return true, nil
		}
		d = m.parent
	}
	return false, nil
}

// Own stores a layer and those it stands on with chunks that hold nothing else, as far as they have others, and returns what
// replaces which. The old ones stay, and are garbage for Sweep when nobody names them any more. Hold the store until the
// replacements are recorded.
func (s *Store) Own(ctx context.Context, d Digest) (map[Digest]Info, error) {
	release, err := s.Hold(ctx)
	if err != nil {
		return nil, fmt.Errorf("give layer %s chunks of its own: %w", d, err)
	}
	defer release()
	chain, err := s.Chain(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("give layer %s chunks of its own: %w", d, err)
	}
	replaced := map[Digest]Info{}
	for _, l := range chain {
		info, err := s.own(ctx, l, replaced)
		if err != nil {
			return nil, fmt.Errorf("give layer %s chunks of its own: %w", l.Digest, err)
		}
		if info.Digest != l.Digest {
			replaced[l.Digest] = info
		}
	}
	return replaced, nil
}

func (s *Store) own(ctx context.Context, l Info, replaced map[Digest]Info) (Info, error) {
	m, err := s.readMap(l.Digest)
	if err != nil {
		return Info{}, err
	}
	below, moved := replaced[l.Parent]
	switch {
	case m.spans == nil && !moved:
		return l, nil
	case m.spans == nil:
		return s.reparent(ctx, l.Digest, below.Digest)
	}
	st := &Stack{store: s}
	if err := st.below(m); err != nil {
		return Info{}, err
	}
	next := &pageMap{pageSize: m.pageSize, size: m.size, parent: m.parent, runs: slices.Clone(m.runs)}
	if moved {
		next.parent = below.Digest
	}
	return s.arranged(ctx, st, next, arrange(st.wholeRanges(), true))
}
