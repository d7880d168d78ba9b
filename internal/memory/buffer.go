package memory

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// Buffer is memory set apart for a copy that must be fast: it is there, and entered in our page table, before the
// copy begins. It belongs to no file: a memory file takes half as long again to fill.
type Buffer struct {
	mu     sync.Mutex
	mapped []byte // nil once closed or taken
}

// NewBuffer makes a buffer of at least so many bytes. Memory that the host does not have is an error.
func NewBuffer(bytes int64) (*Buffer, error) {
	m, err := mapRegion(max(roundUp(bytes), PageSize))
	if err == nil {
		err = populate(m)
	}
	if err != nil {
		return nil, fmt.Errorf("reserve %d bytes for a copy of memory: %w", bytes, errors.Join(NoRoom(err), unmapRegion(&m)))
	}
	return &Buffer{mapped: m}, nil
}

// populate enters memory that was allocated into the page table.
func populate(b []byte) error {
	err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	// Before Linux 5.14.
	for i := 0; i < len(b); i += PageSize {
		b[i] = 0
	}
	return nil
}

// Size is how many bytes it holds without growing.
func (b *Buffer) Size() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return int64(len(b.mapped))
}

// grow makes room for so many bytes.
func (b *Buffer) grow(size int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mapped == nil {
		return ErrClosed
	}
	have := int64(len(b.mapped))
	size = roundUp(size)
	if size <= have {
		return nil
	}
	mapped, err := growRegion(b.mapped, size)
	if err != nil {
		return NoRoom(err)
	}
	b.mapped = mapped
	return NoRoom(populate(mapped[have:]))
}

// take moves the memory to the caller.
func (b *Buffer) take() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.mapped
	b.mapped = nil
	return m
}

// Close frees the memory. It is idempotent, and does nothing once the buffer has become Pages.
func (b *Buffer) Close() error {
	m := b.take()
	return unmapRegion(&m)
}

func roundUp(n int64) int64 { return (n + PageSize - 1) / PageSize * PageSize }

// NoRoom tells a person what errors of memory and of files in memory mean. It wraps err, and returns others as they are.
func NoRoom(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("the host has no memory left for it; end some sandboxes, or give it memory: %w", err)
	case errors.Is(err, unix.EFBIG): // Files in memory are files to the kernel.
		return fmt.Errorf("the daemon may make no files of that size; start it with a larger limit (ulimit -f): %w", err)
	}
	return err
}
