package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Sweep removes every layer and chunk that is not reachable from the roots, and what interrupted writes left, and
// returns the bytes freed. It waits until no Write or Hold is in progress and only then asks for the roots, so that a
// layer recorded before its Hold was released is among them. If a root or an ancestor cannot be read nothing is
// removed, for what it needs is unknown; the error names it.
func (s *Store) Sweep(ctx context.Context, roots func(context.Context) ([]Digest, error)) (freedBytes int64, err error) {
	release, err := s.exclude(ctx)
	if err != nil {
		return 0, fmt.Errorf("sweep layer store: %w", err)
	}
	defer release()
	digests, err := roots(ctx)
	if err != nil {
		return 0, fmt.Errorf("sweep layer store: list the layers in use: %w", err)
	}
	freedBytes, err = s.sweep(ctx, digests)
	if err != nil {
		return freedBytes, fmt.Errorf("sweep layer store: %w", err)
	}
	return freedBytes, nil
}

func (s *Store) sweep(ctx context.Context, roots []Digest) (freed int64, err error) {
	maps, chunks, err := s.reachable(ctx, roots)
	if err != nil {
		return 0, fmt.Errorf("nothing was removed: %w", err)
	}
	garbage, err := s.list("maps", maps)
	if err != nil {
		return 0, err
	}
	if err := removeFiles(ctx, garbage, &freed); err != nil {
		return freed, err
	}
	// A crash must not leave a map whose chunks are gone.
	if err := syncDir(filepath.Join(s.dir, "maps")); err != nil {
		return freed, err
	}
	shards, err := os.ReadDir(filepath.Join(s.dir, "chunks"))
	if err != nil {
		return freed, err
	}
	garbage, err = s.list("tmp", nil)
	for _, shard := range shards {
		if err != nil {
			return freed, err
		}
		var more []string
		more, err = s.list(filepath.Join("chunks", shard.Name()), chunks)
		garbage = append(garbage, more...)
	}
	if err != nil {
		return freed, err
	}
	err = removeFiles(ctx, garbage, &freed)
	return freed, err
}

// reachable finds the maps and chunks that the roots need.
func (s *Store) reachable(ctx context.Context, roots []Digest) (maps, chunks map[Digest]bool, err error) {
	maps, chunks = map[Digest]bool{}, map[Digest]bool{}
	for _, d := range roots {
		for !d.IsZero() && !maps[d] {
			if ctx.Err() != nil {
				return nil, nil, context.Cause(ctx)
			}
			m, err := s.readMap(d)
			if err != nil {
				return nil, nil, err
			}
			maps[d] = true
			for _, c := range m.chunks {
				chunks[c.digest] = true
			}
			d = m.parent
		}
	}
	return maps, chunks, nil
}

// list names the files of one directory of the store whose names are digests outside keep, or all of them without one.
// Files of other names are none of ours.
func (s *Store) list(dir string, keep map[Digest]bool) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, dir))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		d, err := ParseDigest(e.Name())
		if keep == nil || err == nil && !keep[d] {
			paths = append(paths, filepath.Join(s.dir, dir, e.Name()))
		}
	}
	return paths, nil
}

// removeFiles adds to freed what it removed.
func removeFiles(ctx context.Context, paths []string, freed *int64) error {
	for _, p := range paths {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		st, err := os.Lstat(p)
		if err == nil {
			err = os.Remove(p)
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		*freed += st.Size()
	}
	return nil
}
