package agent

import (
	"fmt"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// maxMapping is more than any file that names a machine should have.
const maxMapping = 64 << 10

// mapFile maps a file to be overwritten in place later, with its pages dirty already: then writing is a copy in memory,
// where pwrite would be a thousand blocks of file system code. Nil when it cannot be.
func mapFile(fd, size int) []byte {
	if size <= 0 || size > maxMapping {
		return nil
	}
	// SAFETY: the mapping is this slot's alone, and is not used after unmap. A file that somebody cuts short meanwhile
	// makes touching it fault, which poke turns into an error.
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil
	}
	content := make([]byte, size)
	if n, err := unix.Pread(fd, content, 0); err != nil || n != size || poke(mem, content) != nil {
		unmap(mem)
		return nil
	}
	return mem
}

// poke copies content into a mapping. A fault, as of a disk without room, is an error.
func poke(mem, content []byte) (err error) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		if r := recover(); r != nil {
			err = fmt.Errorf("write mapped file: %v", r)
		}
	}()
	copy(mem, content)
	return nil
}

func unmap(mem []byte) {
	if mem != nil {
		_ = unix.Munmap(mem)
	}
}
