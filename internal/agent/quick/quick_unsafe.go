// Package quick makes short system calls without telling Go's runtime of them. An ordinary call announces that it may
// block: the runtime's monitor thread, asleep in an idle program, is woken to watch over it, and from then on looks
// every 20 µs whether somebody has to be preempted. In a fork all of that is code that runs for the first time, between
// the request and the answer. So what is on that way and cannot block is called here; nothing else should be. Only the
// agent's packages import it.
package quick

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bytes makes a call with a descriptor and a buffer.
func bytes(trap uintptr, fd int, p []byte, offset int64) (int, error) {
	for {
		// SAFETY: the kernel reads or writes at most len(p) bytes of p during the call and keeps no pointer; p is kept
		// alive by the conversion in the call's arguments.
		n, _, errno := syscall.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
			uintptr(offset), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// Read reads from a descriptor that does not block.
func Read(fd int, p []byte) (int, error) { return bytes(unix.SYS_READ, fd, p, 0) }

// Write writes to a descriptor that does not block.
func Write(fd int, p []byte) (int, error) { return bytes(unix.SYS_WRITE, fd, p, 0) }

// Pwrite writes to a file of the kernel's, or one in memory.
func Pwrite(fd int, p []byte, offset int64) (int, error) {
	return bytes(unix.SYS_PWRITE64, fd, p, offset)
}

// Random fills p from the kernel's generator, which must have been seeded. Short says that it did not.
func Random(p []byte) error {
	for len(p) > 0 {
		// SAFETY: as in bytes.
		n, _, errno := syscall.RawSyscall(unix.SYS_GETRANDOM, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), unix.GRND_NONBLOCK)
		if errno != 0 && errno != unix.EINTR {
			return errno
		}
		if errno == 0 {
			p = p[n:]
		}
	}
	return nil
}

// Ioctl makes a request whose argument the kernel reads or writes during the call; nil for none.
func Ioctl(fd int, request uintptr, argument unsafe.Pointer) error {
	// SAFETY: the caller's argument is what the request takes; the kernel keeps no pointer.
	if _, _, errno := syscall.RawSyscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(argument)); errno != 0 {
		return errno
	}
	return nil
}

// SetRealtime sets the wall clock.
func SetRealtime(ts unix.Timespec) error {
	// SAFETY: the kernel reads one timespec during the call.
	if _, _, errno := syscall.RawSyscall(unix.SYS_CLOCK_SETTIME, unix.CLOCK_REALTIME, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return errno
	}
	return nil
}

// SetHostname sets the host's name.
func SetHostname(name string) error {
	// SAFETY: the kernel reads len(name) bytes during the call.
	_, _, errno := syscall.RawSyscall(unix.SYS_SETHOSTNAME, uintptr(unsafe.Pointer(unsafe.StringData(name))), uintptr(len(name)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
