package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Usage is what a store takes on disk.
type Usage struct {
	Total int64 // maps and chunks
	Kept  int64 // of those, what the roots need, each once however many layers name it
}

// Usage says how much of the store the roots need: the rest is what Sweep would free. The error wraps ErrNotFound or
// ErrCorrupt if a map that they need cannot be read.
func (s *Store) Usage(ctx context.Context, roots []Digest) (Usage, error) {
	maps, chunks, err := s.reachable(ctx, roots)
	if err != nil {
		return Usage{}, fmt.Errorf("measure layer store: %w", err)
	}
	var u Usage
	if err := s.measure(ctx, "maps", maps, &u); err != nil {
		return u, fmt.Errorf("measure layer store: %w", err)
	}
	shards, err := os.ReadDir(filepath.Join(s.dir, "chunks"))
	for _, shard := range shards {
		if err == nil {
			err = s.measure(ctx, filepath.Join("chunks", shard.Name()), chunks, &u)
		}
	}
	if err != nil {
		return u, fmt.Errorf("measure layer store: %w", err)
	}
	return u, nil
}

func (s *Store) measure(ctx context.Context, dir string, keep map[Digest]bool, u *Usage) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	entries, err := os.ReadDir(filepath.Join(s.dir, dir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		d, err := ParseDigest(e.Name())
		if err != nil {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return err
		}
		u.Total += info.Size()
		if keep[d] {
			u.Kept += info.Size()
		}
	}
	return nil
}
