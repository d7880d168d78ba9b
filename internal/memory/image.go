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

// Share is a second handle on the same memory, with a Close of its own.
func (i *Image) Share() (*Image, error) {
	f, err := i.Dup()
	if err != nil {
		return nil, err
	}
	return &Image{size: i.size, file: f}, nil
}

// Allocated lists the pages that hold something, maybe zeros; all others are holes, and zero.
func (i *Image) Allocated(ctx context.Context) ([]layer.Extent, error) {
	f, err := i.Dup()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return allocated(ctx, f, i.size)
}

func allocated(ctx context.Context, f *os.File, size int64) ([]layer.Extent, error) {
	var list []layer.Extent
	for off := int64(0); off < size; {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		data, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("find data of %s: %w", f.Name(), err)
		}
		hole, err := unix.Seek(int(f.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("find holes of %s: %w", f.Name(), err)
		}
		list = append(list, layer.Extent{Offset: data, Length: hole - data})
		off = hole
	}
	return list, nil
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
