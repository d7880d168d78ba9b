package memory

import (
	"fmt"
	"os"

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

// growMapping makes a mapping cover more of its file. The old slice is dead.
func growMapping(m []byte, size int64) ([]byte, error) {
	// SAFETY: as above; the caller puts the new slice where the old one was.
	m, err := unix.Mremap(m, int(size), unix.MREMAP_MAYMOVE)
	if err != nil {
		return nil, fmt.Errorf("map more: %w", err)
	}
	return m, nil
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
