package layer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
)

// Damage is a map or a chunk that is not what its digest says, or is missing.
type Damage struct {
	Digest Digest
	Layers []Digest // that name it; it may be one of them itself, ascending
	Err    error    // wraps ErrCorrupt
}

// Report is what Verify has found.
type Report struct {
	Layers  int
	Chunks  int   // each once, however many layers name it
	Bytes   int64 // of their content
	Damages []Damage
}

// Verify reads every map and every chunk that the roots need, each once, and says what is damaged and which layers that
// breaks. Damage is no error; one that is returned says why the rest was not read. It takes as long as reading all of it.
func (s *Store) Verify(ctx context.Context, roots []Digest) (Report, error) {
	release, err := s.Hold(ctx)
	if err != nil {
		return Report{}, fmt.Errorf("verify layers: %w", err)
	}
	defer release()
	var rep Report
	users, err := s.survey(ctx, roots, &rep)
	if err != nil {
		return rep, fmt.Errorf("verify layers: %w", err)
	}
	chunks := slices.Collect(maps.Keys(users))
	rep.Chunks = len(chunks)
	var mu sync.Mutex
	err = parallel(ctx, len(chunks), func() (worker, error) {
		r, err := s.newChunkReader()
		if err != nil {
			return worker{}, err
		}
		do := func(i int) error {
			_, err := r.read(chunks[i])
			if err != nil && !errors.Is(err, ErrCorrupt) {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			rep.Bytes += chunks[i].length
			if err != nil {
				rep.Damages = append(rep.Damages, Damage{Digest: chunks[i].digest, Layers: users[chunks[i]], Err: err})
			}
			return nil
		}
		return worker{do, r.close}, nil
	})
	if err != nil {
		return rep, fmt.Errorf("verify layers: %w", err)
	}
	for _, d := range rep.Damages {
		slices.SortFunc(d.Layers, compare)
	}
	slices.SortFunc(rep.Damages, func(a, b Damage) int { return compare(a.Digest, b.Digest) })
	return rep, nil
}

func compare(a, b Digest) int { return slices.Compare(a[:], b[:]) }

// survey reads the maps that the roots need and says of every chunk which layers name it.
func (s *Store) survey(ctx context.Context, roots []Digest, rep *Report) (map[chunkRef][]Digest, error) {
	users := map[chunkRef][]Digest{}
	seen := map[Digest]bool{}
	for _, d := range roots {
		for !d.IsZero() && !seen[d] {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			seen[d] = true
			m, err := s.readMap(d)
			if errors.Is(err, ErrNotFound) {
				err = corrupt(d, "map of layer %s is missing", d)
			}
			if errors.Is(err, ErrCorrupt) {
				// What stands below it is unknown: nobody can use it either.
				rep.Damages = append(rep.Damages, Damage{Digest: d, Layers: []Digest{d}, Err: err})
				break
			}
			if err != nil {
				return nil, err
			}
			rep.Layers++
			for _, c := range m.chunks {
				if l := users[c]; len(l) == 0 || l[len(l)-1] != d {
					users[c] = append(l, d)
				}
			}
			d = m.parent
		}
	}
	return users, nil
}

// Needs reports whether a layer, or one that it stands on, is d or names the chunk d. A map that cannot be read ends the
// search there.
func (s *Store) Needs(ctx context.Context, head, d Digest) bool {
	for at, depth := head, 0; !at.IsZero() && depth < maxDepth && ctx.Err() == nil; depth++ {
		if at == d {
			return true
		}
		m, err := s.readMap(at)
		if err != nil {
			return false
		}
		if slices.ContainsFunc(m.chunks, func(c chunkRef) bool { return c.digest == d }) {
			return true
		}
		at = m.parent
	}
	return false
}
