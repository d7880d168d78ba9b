package network

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls of the path of data, of descriptors that never block. An ordinary call announces to Go's runtime that it may,
// which wakes the runtime's monitor thread in a process that was idle: with one packet to move that thread costs more than
// the packet, on CPUs that emulated machines want.

// readNow is read(2). It does not wait: the descriptor is not blocking.
func readNow(fd uintptr, p []byte) (int, error) { return transfer(unix.SYS_READ, fd, p) }

// writeNow is write(2), likewise.
func writeNow(fd uintptr, p []byte) (int, error) { return transfer(unix.SYS_WRITE, fd, p) }

func transfer(trap, fd uintptr, p []byte) (int, error) {
	for {
		// SAFETY: the kernel reads or writes at most len(p) bytes of p during the call and keeps no pointer; p is kept
		// alive by the conversion in the call's arguments.
		n, _, errno := unix.RawSyscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// maxParts is how many parts a frame of the stack's can have: what a reader wrote in more is copied together.
const maxParts = 64

// sendNow is sendmsg(2) of one datagram in parts, likewise.
func sendNow(fd uintptr, parts [][]byte) error {
	var iov [maxParts]unix.Iovec
	if len(parts) > maxParts {
		parts = [][]byte{join(parts)}
	}
	for i, part := range parts {
		iov[i].Base = unsafe.SliceData(part)
		iov[i].SetLen(len(part))
	}
	var message unix.Msghdr
	message.Iov = &iov[0]
	message.SetIovlen(len(parts))
	for {
		// SAFETY: the kernel reads the message, its vectors and the parts during the call, writes nothing and keeps no
		// pointer. message, and iov through it, are kept alive by the conversion in the call's arguments; their pointers to
		// parts are typed, so that the collector sees them, and parts themselves are kept alive below.
		_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&message)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		runtime.KeepAlive(parts)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

func join(parts [][]byte) []byte {
	var all []byte
	for _, part := range parts {
		all = append(all, part...)
	}
	return all
}
