package proc

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// refuseCalls has the kernel refuse calls to the calling thread and to what it starts. It cannot be undone.
func refuseCalls(program []unix.SockFilter) error {
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	// SAFETY: the kernel copies the program before the call returns; p and what it points to are alive until then.
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&p)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return fmt.Errorf("restrict system calls: %w", errno)
	}
	return nil
}
