package memory

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapFile maps the beginning of a memory file, shared. With write it may be written, and then F_SEAL_WRITE is refused.
func mapFile(f *os.File, size int64, write bool, flags int) ([]byte, error) {
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	// SAFETY: the slice covers exactly the mapping, is kept by the one who unmaps it, and is not used after that. The file
	// never shrinks below it: it is sealed, or nobody else has it.
	m, err := unix.Mmap(int(f.Fd()), 0, int(size), prot, unix.MAP_SHARED|flags)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	return m, nil
}

// mapRegion reserves memory that belongs to no file. It asks for no huge pages: where they are free at once a copy of
// 146 MiB is ready in 13 ms instead of 55, but in a VM that gives free memory back to its host whole free ones are just
// what the host has taken, and fetching them took 300 ms.
func mapRegion(size int64) ([]byte, error) {
	// SAFETY: a new mapping at an address of the kernel's choice; nothing else lies there.
	at, err := unix.MmapPtr(-1, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("reserve memory: %w", err)
	}
	// SAFETY: covers exactly what the kernel has just mapped.
	return unsafe.Slice((*byte)(at), size), nil
}

func unmapPart(at unsafe.Pointer, length uintptr) error {
	if length == 0 {
		return nil
	}
	// SAFETY: the callers name a part of a mapping of theirs that nothing points into.
	return unix.MunmapPtr(at, length)
}

// growRegion makes a region larger. The old slice is dead.
func growRegion(m []byte, size int64) ([]byte, error) {
	// SAFETY: the region is exactly m; the caller puts the new slice where the old one was.
	at, err := unix.MremapPtr(unsafe.Pointer(&m[0]), uintptr(len(m)), nil, uintptr(size), unix.MREMAP_MAYMOVE)
	if err != nil {
		return nil, fmt.Errorf("reserve more memory: %w", err)
	}
	// SAFETY: covers exactly what the kernel has just mapped.
	return unsafe.Slice((*byte)(at), size), nil
}

// cutRegion gives back what is beyond size, which is not zero. The old slice is dead.
func cutRegion(m []byte, size int64) ([]byte, error) {
	if size == int64(len(m)) {
		return m, nil
	}
	// SAFETY: the end of the region; the slice returned does not reach it.
	if err := unmapPart(unsafe.Pointer(&m[size]), uintptr(int64(len(m))-size)); err != nil {
		return m, err
	}
	return m[:size:size], nil
}

// unmapRegion gives back all of it and forgets the slice; it does nothing the second time.
func unmapRegion(m *[]byte) error {
	b := *m
	*m = nil
	if len(b) == 0 {
		return nil
	}
	// SAFETY: the only slice that is left of the region was just forgotten.
	return unmapPart(unsafe.Pointer(&b[0]), uintptr(len(b)))
}

// unmap undoes mapFile and forgets the slice; it does nothing the second time.
func unmap(m *[]byte) error {
	b := *m
	*m = nil
	if b == nil {
		return nil
	}
	// SAFETY: the only slice that is left of the mapping was just forgotten.
	return unix.Munmap(b)
}
