package layer

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
)

// Relink makes a layer with the pages of d over another parent, whose memory or disk must hold the same as d's own: what
// a middle link's removal leaves to do for those above its children. Only the map is written. It returns when the new
// layer is durable.
func (s *Store) Relink(ctx context.Context, d, parent Digest) (Info, error) {
	release, err := s.Hold(ctx)
	if err != nil {
		return Info{}, fmt.Errorf("relink layer: %w", err)
	}
	defer release()
	info, err := s.relink(d, parent)
	if err != nil {
		return Info{}, fmt.Errorf("relink layer %s to %s: %w", d, parent, err)
	}
	return info, nil
}

func (s *Store) relink(d, parent Digest) (Info, error) {
	m, err := s.readMap(d)
	if err != nil {
		return Info{}, err
	}
	below, err := s.readMap(parent)
	if err != nil {
		return Info{}, fmt.Errorf("parent: %w", err)
	}
	if below.pageSize != m.pageSize || below.size != m.size {
		return Info{}, fmt.Errorf("the parent has %d bytes in pages of %d, the layer %d in pages of %d", below.size, below.pageSize,
			m.size, m.pageSize)
	}
	m.parent = parent
	b := m.encode()
	next := Digest(sha256.Sum256(b))
	if err := s.writeFile(s.mapPath(next), b, (*os.File).Sync); err != nil {
		return Info{}, err
	}
	if err := syncDir(filepath.Join(s.dir, "maps")); err != nil {
		return Info{}, s.writeError(err)
	}
	return s.info(next, m)
}
