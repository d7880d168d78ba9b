package layer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Extent is a range of pages that a layer names.
type Extent struct {
	Offset, Length int64 // multiples of the page size
	Zero           bool  // these pages are zero, whatever the parent has there; nothing is read for them
}

// WriteSpec is what Write stores.
type WriteSpec struct {
	PageSize int64  // a power of two from 512 to 1 MiB, that of the parent
	Size     int64  // of the whole memory or disk, a multiple of PageSize
	Parent   Digest // zero: a root, whose unnamed pages are zero
	Extents  []Extent
	From     io.ReaderAt // content of the data extents, read concurrently; it must not change meanwhile
	// Like are layers that are to share their chunks with this one: pages that they have too, wherever, are not stored again.
	// They are but a hint: what cannot be read, or is too large, is not used. Of a page that several have the first's is taken.
	Like []Digest
}

// Write stores a layer and returns when it would survive a power cut. Equal specs give equal digests, and content that
// is stored already (and intact) is not stored again. An interrupted or failed Write leaves no layer; chunks it wrote
// are garbage for Sweep. The error names a full disk (it wraps ENOSPC or EDQUOT), and wraps ErrNotFound without the
// parent.
func (s *Store) Write(ctx context.Context, spec WriteSpec) (Info, error) {
	release, err := s.Hold(ctx)
	if err != nil {
		return Info{}, fmt.Errorf("write layer: %w", err)
	}
	defer release()
	info, err := s.write(ctx, spec)
	if err != nil {
		return Info{}, fmt.Errorf("write layer: %w", err)
	}
	return info, nil
}

func (s *Store) write(ctx context.Context, spec WriteSpec) (Info, error) {
	m, err := s.plan(spec)
	if err != nil {
		return Info{}, err
	}
	// Opened before the first chunk is written: syncfs reports the write-back errors since the open (Linux 5.8).
	dir, err := os.Open(s.dir)
	if err != nil {
		return Info{}, err
	}
	defer dir.Close()
	ranges, err := s.unlike(ctx, spec, m)
	if err != nil {
		return Info{}, err
	}
	a := arrange(ranges, false)
	if a.encodedBytes(m) > maxMapBytes {
		return Info{}, fmt.Errorf("its pages are too scattered: %d runs", len(m.runs))
	}
	chunks, err := s.writePieces(ctx, spec.From, a.pieces)
	if err != nil {
		return Info{}, err
	}
	m.refer(a.parts(chunks))
	return s.finish(ctx, m, dir)
}

// finish makes the chunks durable, and then the map that names them.
func (s *Store) finish(ctx context.Context, m *pageMap, dir *os.File) (Info, error) {
	if err := m.check(); err != nil {
		return Info{}, err
	}
	// One sync for all chunks and their directories, before the map can name them.
	if err := s.syncfs(int(dir.Fd())); err != nil {
		return Info{}, s.writeError(fmt.Errorf("syncfs: %w", err))
	}
	if ctx.Err() != nil {
		return Info{}, context.Cause(ctx)
	}
	b := m.encode()
	d := Digest(sha256.Sum256(b))
	if err := s.writeFile(s.mapPath(d), b, (*os.File).Sync); err != nil {
		return Info{}, err
	}
	if err := syncDir(filepath.Join(s.dir, "maps")); err != nil {
		return Info{}, s.writeError(err)
	}
	return s.info(d, m)
}

// plan checks the spec and turns its extents into runs.
func (s *Store) plan(spec WriteSpec) (*pageMap, error) {
	if spec.Size < 0 {
		return nil, fmt.Errorf("size %d is negative", spec.Size)
	}
	if err := checkGeometry(spec.PageSize, uint64(spec.Size)); err != nil {
		return nil, err
	}
	if !spec.Parent.IsZero() {
		parent, err := s.readMap(spec.Parent)
		if err != nil {
			return nil, fmt.Errorf("parent: %w", err)
		}
		if parent.pageSize != spec.PageSize {
			return nil, fmt.Errorf("page size %d is not that of the parent, %d", spec.PageSize, parent.pageSize)
		}
	}
	m := &pageMap{pageSize: spec.PageSize, size: spec.Size, parent: spec.Parent}
	var end int64
	for _, e := range spec.Extents {
		if e.Offset < end || e.Length <= 0 || e.Offset%spec.PageSize != 0 || e.Length%spec.PageSize != 0 ||
			e.Length > spec.Size-e.Offset {
			return nil, fmt.Errorf("extent of %d bytes at %d is not whole pages of a size of %d, in ascending order",
				e.Length, e.Offset, spec.Size)
		}
		r := run{first: e.Offset / spec.PageSize, count: e.Length / spec.PageSize, zero: e.Zero}
		if n := len(m.runs); n > 0 && m.runs[n-1].zero == r.zero && e.Offset == end {
			m.runs[n-1].count += r.count
		} else {
			m.runs = append(m.runs, r)
		}
		end = e.Offset + e.Length
	}
	return m, nil
}

// writePieces stores the content of every piece.
func (s *Store) writePieces(ctx context.Context, from io.ReaderAt, pieces []piece) ([]chunkRef, error) {
	chunks := make([]chunkRef, len(pieces))
	err := inBackground(ctx, len(pieces), func() (worker, error) {
		w, err := s.newChunkWriter()
		if err != nil {
			return worker{}, err
		}
		plain := make([]byte, maxChunk)
		do := func(i int) error {
			if err := pieces[i].readFrom(from, plain); err != nil {
				return err
			}
			c, err := w.write(plain[:pieces[i].length])
			chunks[i] = c
			return err
		}
		return worker{do, w.close}, nil
	})
	return chunks, err
}

func (p *piece) readFrom(from io.ReaderAt, plain []byte) error {
	for _, r := range p.parts {
		if err := readPart(from, plain[:r.length], r.offset); err != nil {
			return err
		}
		plain = plain[r.length:]
	}
	return nil
}

func readPart(from io.ReaderAt, plain []byte, offset int64) error {
	n, err := from.ReadAt(plain, offset)
	if n < len(plain) {
		return fmt.Errorf("read %d bytes at %d: %w", len(plain), offset, err)
	}
	return nil
}

// writeError makes a full disk recognizable to a person.
func (s *Store) writeError(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("the disk holding the layer store %s is full; free some space, or remove snapshots: %w", s.dir, err)
	case errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("the disk quota of the layer store %s is used up; free some space, or remove snapshots: %w", s.dir, err)
	}
	return err
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
