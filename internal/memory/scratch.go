package memory

import (
	"errors"
	"os"
	"sync"
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
	f, err := createMemfd("forkd-scratch", size)
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
