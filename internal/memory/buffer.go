package memory

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Buffer is memory set apart for a copy that must be fast: it is there, and entered in our page table, before the
// copy begins.
type Buffer struct {
	mu     sync.Mutex
	file   *os.File // nil once closed or taken
	mapped []byte   // all of the file, shared and writable
}

// NewBuffer makes a buffer of at least so many bytes. Memory that the host does not have is an error.
func NewBuffer(bytes int64) (*Buffer, error) {
	b := &Buffer{}
	err := b.open(max(roundUp(bytes), PageSize))
	if err != nil {
		return nil, fmt.Errorf("reserve %d bytes for a copy of memory: %w", bytes, errors.Join(noRoom(err), b.Close()))
	}
	return b, nil
}

func (b *Buffer) open(size int64) error {
	f, err := createMemfd("forkd-pages", size)
	if err != nil {
		return err
	}
	b.file = f
	// Reserved by fallocate first, which answers with an error where a touch through the mapping would be a signal.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		return err
	}
	if b.mapped, err = mapFile(f, size, true, 0); err != nil {
		return err
	}
	return populate(b.mapped)
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
	if b.file == nil {
		return ErrClosed
	}
	have := int64(len(b.mapped))
	size = roundUp(size)
	if size <= have {
		return nil
	}
	if err := b.file.Truncate(size); err != nil {
		return err
	}
	if err := unix.Fallocate(int(b.file.Fd()), 0, have, size-have); err != nil {
		return noRoom(err)
	}
	mapped, err := growMapping(b.mapped, size)
	if err != nil {
		return err
	}
	b.mapped = mapped
	return populate(mapped[have:])
}

// take moves file and mapping to the caller.
func (b *Buffer) take() (*os.File, []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f, m := b.file, b.mapped
	b.file, b.mapped = nil, nil
	return f, m
}

// Close frees the memory. It is idempotent, and does nothing once the buffer has become Pages.
func (b *Buffer) Close() error {
	f, m := b.take()
	if f == nil {
		return nil
	}
	return errors.Join(unmap(&m), f.Close())
}

func roundUp(n int64) int64 { return (n + PageSize - 1) / PageSize * PageSize }

func noRoom(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("the host has no memory left for it; end some sandboxes, or give it memory: %w", err)
	}
	return err
}
