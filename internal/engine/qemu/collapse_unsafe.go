package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is what the kernel calls a huge page on the machines we run on.
const hugePage = 2 << 20

// collapsePiece is what one worker collapses before it looks whether to go on.
const collapsePiece = 8 * hugePage

// collapse has the kernel put the memory file of an image together from huge pages. Write protection walks every page
// of the guest in the pause, and looks at the kernel's record of each: for the pages of a huge one that is one record
// instead of 512, which takes a fifth of the time. Nobody who maps the file notices. It is a matter of speed alone:
// where the kernel cannot (before Linux 6.2, or short of huge pages) nothing is lost. Done once it costs nothing again.
func collapse(ctx context.Context, image *os.File, size int64) error {
	// Aligned in our address space as in the file, or no huge page fits.
	// SAFETY: reserves addresses that nothing else uses; they are given back by the deferred call.
	area, err := unix.MmapPtr(-1, 0, nil, uintptr(size)+hugePage, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("reserve addresses: %w", err)
	}
	// SAFETY: exactly what was reserved above, including what is mapped over it; no pointer into it is left.
	defer func() { _ = unix.MunmapPtr(area, uintptr(size)+hugePage) }()
	skip := -uintptr(area) % hugePage
	// SAFETY: the result lies within the reserved area, which has a huge page to spare.
	start := unsafe.Add(area, skip)
	// SAFETY: replaces a part of the reservation; read-only, and used by address only.
	_, err = unix.MmapPtr(int(image.Fd()), 0, start, uintptr(size), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_FIXED)
	if err != nil {
		return fmt.Errorf("map memory image: %w", err)
	}
	pieces := make(chan int64)
	var (
		workers sync.WaitGroup
		short   atomic.Bool
	)
	for range collapseWorkers {
		workers.Go(func() {
			for off := range pieces {
				n := min(size-off, collapsePiece)
				// SAFETY: within the mapping made above, which stays until the workers have ended.
				b := unsafe.Slice((*byte)(unsafe.Add(start, off)), n)
				// Without the first call an empty huge page is refused and filled with small ones later.
				err := unix.Madvise(b, unix.MADV_POPULATE_READ)
				if err == nil {
					err = unix.Madvise(b, unix.MADV_COLLAPSE)
				}
				if errors.Is(err, unix.ENOMEM) {
					// No huge page could be made, though the kernel searched: it would search again for each that is left.
					short.Store(true)
				}
			}
		})
	}
	for off := int64(0); off < size && ctx.Err() == nil && !short.Load(); off += collapsePiece {
		pieces <- off
	}
	close(pieces)
	workers.Wait()
	return context.Cause(ctx)
}

// collapseWorkers is how many cores are kept busy: the guest needs one too.
const collapseWorkers = 2
