package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
)

// ErrClosed is returned for a Scratch or Image that was closed, or a Scratch already sealed.
var ErrClosed = errors.New("memory file is closed")

// Scratch is the RAM of a machine that boots: a writable memfd. It is safe for concurrent use.
type Scratch struct {
	size int64

	mu   sync.Mutex
	file *os.File // nil once sealed or closed
}

// NewScratch makes a Scratch of size bytes, all zero. It reserves nothing: the host may still lack the memory when the
// machine touches it, so admission is the caller's.
func NewScratch(size int64) (*Scratch, error) {
	f, err := createMemfd(scratchName, size)
	if err != nil {
		return nil, err
	}
	return &Scratch{size: size, file: f}, nil
}

// File is the memfd, owned by s: hand it to a child process, do not close it. It is nil after Seal or Close.
func (s *Scratch) File() *os.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.file
}

// Size is the size in bytes.
func (s *Scratch) Size() int64 { return s.size }

// Close frees the file. It is idempotent, and does nothing after a successful Seal.
func (s *Scratch) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return nil
	}
	f := s.file
	s.file = nil
	return f.Close()
}

// Seal turns s into an Image without copying; s is empty afterwards and the caller owns the image. Every writable
// shared mapping must be gone, i.e. the machine's process must have exited; otherwise the error says so and s is
// unchanged.
func (s *Scratch) Seal() (*Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return nil, ErrClosed
	}
	if err := seal(s.file); err != nil {
		return nil, err
	}
	img := &Image{size: s.size, file: s.file}
	s.file = nil
	return img, nil
}

// Reserve allocates these pages now, so that whoever writes them later neither waits for memory nor learns of its lack
// by a signal.
func (s *Scratch) Reserve(ctx context.Context, extents []layer.Extent) error {
	if err := s.reserve(ctx, extents); err != nil {
		return fmt.Errorf("reserve memory: %w", NoRoom(err))
	}
	return nil
}

func (s *Scratch) reserve(ctx context.Context, extents []layer.Extent) error {
	if err := checkExtents(extents, s.size); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return ErrClosed
	}
	const step = 64 << 20 // looks at ctx now and then
	for _, e := range extents {
		for ; e.Length > 0; e.Offset, e.Length = e.Offset+step, e.Length-step {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err := unix.Fallocate(int(s.file.Fd()), 0, e.Offset, min(e.Length, step)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Mapping is a Scratch in this process's address space.
type Mapping struct {
	mu    sync.Mutex
	bytes []byte // nil once closed
}

// Map maps all of it, shared and writable. Touching a page that was not reserved may find the host without memory, and
// that is a signal which ends the process: reserve, or write such pages through File.
func (s *Scratch) Map() (*Mapping, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return nil, ErrClosed
	}
	b, err := mapFile(s.file, s.size, true, 0)
	if err != nil {
		return nil, err
	}
	return &Mapping{bytes: b}, nil
}

// Bytes is the memory. It must not be touched after Close.
func (m *Mapping) Bytes() []byte { return m.bytes }

// Populate enters pages that were reserved into the page table, so that the first touch of each costs nothing.
func (m *Mapping) Populate(ctx context.Context, extents []layer.Extent) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bytes == nil {
		return ErrClosed
	}
	if err := checkExtents(extents, int64(len(m.bytes))); err != nil {
		return fmt.Errorf("populate memory: %w", err)
	}
	for _, e := range extents {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := populate(m.bytes[e.Offset : e.Offset+e.Length]); err != nil {
			return fmt.Errorf("populate memory: %w", NoRoom(err))
		}
	}
	return nil
}

// Close unmaps it: Seal needs that. It is idempotent.
func (m *Mapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return unmap(&m.bytes)
}
