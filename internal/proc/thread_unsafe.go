package proc

import "golang.org/x/sys/unix"

// becomeThread makes the calling thread, and no other, another user's. It must be about to end.
func becomeThread(id uint32) error {
	// SAFETY: no pointers are passed; the calls change the ids of this thread alone, which the caller gives up.
	for _, call := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} {
		if _, _, errno := unix.RawSyscall(call, uintptr(id), uintptr(id), uintptr(id)); errno != 0 {
			return errno
		}
	}
	return nil
}
