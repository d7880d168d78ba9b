package layer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Errors a Store may wrap.
var (
	// ErrCorrupt: a map or chunk is not what its digest says, or is missing under a map that names it. The message
	// names it and says what to do.
	ErrCorrupt = errors.New("stored layer data is damaged")
	// ErrNotFound: there is no layer of this digest.
	ErrNotFound = errors.New("layer not found")
)

// maxDepth bounds a chain of parents.
const maxDepth = 1024

// Store is one directory of layers, owned by one process at a time. All methods are safe for concurrent use.
type Store struct {
	dir    string
	syncfs func(fd int) error // unix.Syncfs, but for tests that write more than they must

	mu       sync.Mutex
	holds    int           // Writes and Holds in progress; Sweep waits until there are none
	sweeping bool          // no new hold may begin
	changed  chan struct{} // closed and replaced when one of the above changes
}

// Info describes a layer.
type Info struct {
	Digest   Digest // of the map file, which covers pages, content and parent
	Parent   Digest // zero: a root
	PageSize int64
	Size     int64 // of the memory or disk, not of the layer
	OwnBytes int64 // data pages of this layer alone, uncompressed
	// StoredBytes is what map and chunks take on disk. A chunk shared with other layers counts fully, a missing one
	// not at all.
	StoredBytes int64
}

// Open prepares dir, making it if need be.
func Open(dir string) (*Store, error) {
	for _, d := range []string{dir, filepath.Join(dir, "chunks"), filepath.Join(dir, "maps"), filepath.Join(dir, "tmp")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("open layer store: %w", err)
		}
	}
	return &Store{dir: dir, syncfs: unix.Syncfs, changed: make(chan struct{})}, nil
}

func (s *Store) mapPath(d Digest) string { return filepath.Join(s.dir, "maps", d.String()) }

func (s *Store) chunkPath(d Digest) string {
	hex := d.String()
	return filepath.Join(s.dir, "chunks", hex[:2], hex)
}

// Hold keeps Sweep from running until release is called (once or more often). Hold it from before a Write until what
// makes the layer a root is recorded; Sweep would take the layer for garbage otherwise. It waits while a Sweep runs.
func (s *Store) Hold(ctx context.Context) (release func(), err error) {
	s.mu.Lock()
	for s.sweeping {
		if err := s.wait(ctx); err != nil {
			return nil, err
		}
	}
	s.holds++
	s.mu.Unlock()
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.holds--
		s.notify()
	}), nil
}

// exclude waits until nothing is held and keeps new holds out until release is called.
func (s *Store) exclude(ctx context.Context) (release func(), err error) {
	s.mu.Lock()
	for s.sweeping || s.holds > 0 {
		if err := s.wait(ctx); err != nil {
			return nil, err
		}
	}
	s.sweeping = true
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.sweeping = false
		s.notify()
	}, nil
}

// wait is called with mu held, and returns with it held unless there is an error.
func (s *Store) wait(ctx context.Context) error {
	changed := s.changed
	s.mu.Unlock()
	select {
	case <-changed:
		s.mu.Lock()
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// notify is called with mu held.
func (s *Store) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Stat describes one layer. It verifies the map, not the chunks. The error wraps ErrNotFound or ErrCorrupt.
func (s *Store) Stat(ctx context.Context, d Digest) (Info, error) {
	if ctx.Err() != nil {
		return Info{}, context.Cause(ctx)
	}
	m, err := s.readMap(d)
	if err != nil {
		return Info{}, err
	}
	return s.info(d, m)
}

// Chain describes a layer and all it stands on, the root first. The error wraps ErrNotFound or ErrCorrupt.
func (s *Store) Chain(ctx context.Context, d Digest) ([]Info, error) {
	var chain []Info
	for !d.IsZero() {
		if len(chain) == maxDepth {
			return nil, fmt.Errorf("layer %s has more than %d ancestors: %w", chain[0].Digest, maxDepth, ErrCorrupt)
		}
		info, err := s.Stat(ctx, d)
		if err != nil && len(chain) > 0 {
			return nil, fmt.Errorf("layer %s stands on layer %s: %w", chain[0].Digest, d, err)
		}
		if err != nil {
			return nil, err
		}
		chain = append(chain, info)
		d = info.Parent
	}
	slices.Reverse(chain)
	return chain, nil
}

// Extents lists the pages a layer names, ascending. The error wraps ErrNotFound or ErrCorrupt.
func (s *Store) Extents(ctx context.Context, d Digest) ([]Extent, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	m, err := s.readMap(d)
	if err != nil {
		return nil, err
	}
	extents := make([]Extent, len(m.runs))
	for i, r := range m.runs {
		extents[i] = Extent{Offset: r.first * m.pageSize, Length: r.count * m.pageSize, Zero: r.zero}
	}
	return extents, nil
}

func (s *Store) info(d Digest, m *pageMap) (Info, error) {
	info := Info{
		Digest: d, Parent: m.parent, PageSize: m.pageSize, Size: m.size,
		OwnBytes: m.dataBytes(), StoredBytes: m.encodedBytes(),
	}
	seen := make(map[Digest]bool, len(m.chunks))
	for _, c := range m.chunks {
		if seen[c.digest] {
			continue
		}
		seen[c.digest] = true
		st, err := os.Stat(s.chunkPath(c.digest))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Info{}, fmt.Errorf("stat chunks of layer %s: %w", d, err)
		}
		info.StoredBytes += st.Size()
	}
	return info, nil
}

// readMap reads and verifies a map.
func (s *Store) readMap(d Digest) (*pageMap, error) {
	if d.IsZero() {
		return nil, fmt.Errorf("read layer: no digest given: %w", ErrNotFound)
	}
	b, err := readBounded(s.mapPath(d), maxMapBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read layer %s: %w", d, ErrNotFound)
	}
	if errors.Is(err, errTooLarge) {
		return nil, corrupt(d, "map of layer %s: %w", d, err)
	}
	if err != nil {
		return nil, fmt.Errorf("read layer %s: %w", d, err)
	}
	if sha256.Sum256(b) != d {
		return nil, corrupt(d, "map of layer %s does not match its digest", d)
	}
	m, err := decodeMap(b)
	if err != nil {
		// The digest is right, so the bytes are as they were written: by another version, or by somebody hostile.
		return nil, corrupt(d, "map of layer %s: %w", d, err)
	}
	return m, nil
}

// DamageError is what is wrapped with ErrCorrupt where one map or one chunk is the cause, and names it.
type DamageError struct {
	Digest Digest // of the map or the chunk
	what   error
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("%v: %v; put the file back from a backup, or remove the snapshots that use it and build them again", ErrCorrupt, e.what)
}

// Unwrap makes ErrCorrupt found, and what was wrong.
func (e *DamageError) Unwrap() []error { return []error{ErrCorrupt, e.what} }

// corrupt says what is damaged, and what a user can do about damage of any kind.
func corrupt(d Digest, format string, args ...any) error {
	return &DamageError{Digest: d, what: fmt.Errorf(format, args...)}
}

var errTooLarge = errors.New("file is larger than any of its kind")

// readBounded reads a file of at most limit bytes.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > limit {
		return nil, errTooLarge
	}
	b := make([]byte, st.Size())
	if _, err := io.ReadFull(f, b); err != nil {
		return nil, fmt.Errorf("read %s: %w", filepath.Base(path), err)
	}
	return b, nil
}
