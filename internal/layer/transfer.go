package layer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// What carries layers from one store to another needs to know: maps as bytes, chunks as they are stored, and a way in
// that is as safe as Write.

// Bounds of what is carried.
const (
	MaxMapBytes    = maxMapBytes    // of a map
	MaxChunkBytes  = maxChunk       // of a chunk's content
	MaxStoredBytes = maxStoredChunk // of a chunk as it is stored
)

// Chunk names the content of a chunk.
type Chunk struct {
	Digest Digest
	Length int64 // uncompressed
}

// Map is what a map's bytes say.
type Map struct {
	Digest   Digest
	Parent   Digest // zero: a root
	PageSize int64
	Size     int64 // of the memory or disk
	OwnBytes int64 // of data pages, uncompressed
	Chunks   []Chunk
	Shares   bool // it uses parts of chunks only
}

// ParseMap reads a map, of which nothing is trusted. The error says what is wrong with it.
func ParseMap(b []byte) (Map, error) {
	if int64(len(b)) > maxMapBytes {
		return Map{}, errTooLarge
	}
	m, err := decodeMap(b)
	if err != nil {
		return Map{}, err
	}
	out := Map{
		Digest: sha256.Sum256(b), Parent: m.parent, PageSize: m.pageSize, Size: m.size, OwnBytes: m.dataBytes(), Shares: m.spans != nil,
		Chunks: make([]Chunk, len(m.chunks)),
	}
	for i, c := range m.chunks {
		out.Chunks[i] = Chunk{c.digest, c.length}
	}
	return out, nil
}

// MapBytes returns the map of a layer, verified. The error wraps ErrNotFound or ErrCorrupt.
func (s *Store) MapBytes(ctx context.Context, d Digest) ([]byte, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	m, err := s.readMap(d)
	if err != nil {
		return nil, err
	}
	return m.encode(), nil // one layer has one encoding
}

// LinkChunk gives the stored form of a chunk a second name, on the same file system: it stays there whatever a Sweep
// removes, and nothing ever writes to it. It is not verified. The error wraps fs.ErrNotExist if there is none.
func (s *Store) LinkChunk(d Digest, path string) error {
	if err := os.Link(s.chunkPath(d), path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("chunk %s: %w", d, fs.ErrNotExist)
		}
		return fmt.Errorf("link chunk %s: %w", d, err)
	}
	return nil
}

// Checker verifies chunks in their stored form. It has buffers of its own: one at a time.
type Checker struct{ r *chunkReader }

// NewChecker makes one; Close it.
func NewChecker() (*Checker, error) {
	r, err := (*Store)(nil).newChunkReader()
	if err != nil {
		return nil, err
	}
	return &Checker{r}, nil
}

// Check reports whether stored is a chunk of that content, and nothing else is. It never decompresses more than
// c.Length bytes.
func (k *Checker) Check(stored []byte, c Chunk) error {
	if c.Length <= 0 || c.Length > maxChunk || len(stored) > maxStoredChunk {
		return fmt.Errorf("chunk %s: impossible sizes: %d bytes that are to become %d", c.Digest, len(stored), c.Length)
	}
	plain, err := k.r.decoder.DecodeAll(stored, k.r.plain[:0:c.Length])
	if err != nil {
		return fmt.Errorf("chunk %s cannot be decompressed to %d bytes: %w", c.Digest, c.Length, err)
	}
	if int64(len(plain)) != c.Length || sha256.Sum256(plain) != c.Digest {
		return fmt.Errorf("chunk %s does not match its digest", c.Digest)
	}
	return nil
}

// Close frees its buffers.
func (k *Checker) Close() { k.r.close() }

// Install brings layers into the store: maps, each after the one it stands on, and a directory in which every chunk
// they name is a file with its digest as its name. Nothing of it is verified here: the caller has, and ParseMap was
// content with every map. Files are moved where the store has none of that name, and left otherwise. All is durable
// when Install returns, chunks before the maps that name them; what is there after an error is garbage for Sweep. Hold
// the store from before Install until what makes the layers roots is recorded.
func (s *Store) Install(ctx context.Context, maps [][]byte, chunks string) error {
	release, err := s.Hold(ctx)
	if err != nil {
		return fmt.Errorf("install layers: %w", err)
	}
	defer release()
	if err := s.install(ctx, maps, chunks); err != nil {
		return fmt.Errorf("install layers: %w", err)
	}
	return nil
}

func (s *Store) install(ctx context.Context, maps [][]byte, chunks string) error {
	dir, err := os.Open(s.dir) // before the first change: see write
	if err != nil {
		return err
	}
	defer dir.Close()
	done := map[Digest]bool{}
	for _, b := range maps {
		m, err := decodeMap(b)
		if err != nil {
			return err
		}
		for _, c := range m.chunks {
			if done[c.digest] {
				continue
			}
			done[c.digest] = true
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err := s.place(c.digest, filepath.Join(chunks, c.digest.String())); err != nil {
				return s.writeError(err)
			}
		}
	}
	if err := s.syncfs(int(dir.Fd())); err != nil {
		return s.writeError(fmt.Errorf("syncfs: %w", err))
	}
	for _, b := range maps {
		if err := s.writeFile(s.mapPath(sha256.Sum256(b)), b, (*os.File).Sync); err != nil {
			return err
		}
	}
	return s.writeError(syncDir(filepath.Join(s.dir, "maps")))
}

// place moves a chunk's file to its place. One that is there is replaced: it may be the damaged one for which this was
// fetched; where both names are of one file nothing happens.
func (s *Store) place(d Digest, from string) error {
	to := s.chunkPath(d)
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	return unix.Rename(from, to)
}
