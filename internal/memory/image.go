package memory

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Image is a "hot" memory image: a memfd sealed against every change, which children map privately. Nothing can write
// it, whatever descriptor it holds. It is safe for concurrent use.
type Image struct {
	size int64

	mu   sync.RWMutex
	file *os.File // nil once closed
}

// File is the memfd, owned by the image: hand it to child processes, do not close it. A mapping made from it outlives
// Close. It is nil after Close.
func (i *Image) File() *os.File {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.file
}

// Dup is another descriptor of the memfd, owned by the caller: it stays good when the image is closed meanwhile.
func (i *Image) Dup() (*os.File, error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if i.file == nil {
		return nil, ErrClosed
	}
	fd, err := unix.FcntlInt(i.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", i.file.Name(), err)
	}
	return os.NewFile(uintptr(fd), i.file.Name()), nil
}

// Size is the size of the guest's RAM in bytes.
func (i *Image) Size() int64 { return i.size }

// AllocatedBytes is the host memory the image occupies now, 0 after Close. It grows when holes are read through a
// mapping, so admission must count Size.
func (i *Image) AllocatedBytes() int64 {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if i.file == nil {
		return 0
	}
	n, err := allocatedBytes(i.file)
	if err != nil {
		return 0
	}
	return n
}

// ReadAt reads the image like io.ReaderAt.
func (i *Image) ReadAt(p []byte, off int64) (int, error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if i.file == nil {
		return 0, ErrClosed
	}
	return i.file.ReadAt(p, off)
}

// Close drops this process's hold; mappings and descriptors of children keep the memory alive. It is idempotent.
func (i *Image) Close() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.file == nil {
		return nil
	}
	f := i.file
	i.file = nil
	return f.Close()
}
