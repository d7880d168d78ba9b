package account

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// As runs f with the file system rights of u: the kernel checks and owns as it would for a process of u. Root, and an
// agent that is that user already, run f directly.
func As(u *User, f func() error) error {
	uid := os.Geteuid()
	if int(u.UID) == uid {
		return f()
	}
	if uid != 0 {
		return wire.Errorf(wire.CodeDenied, "act as %s: the agent is not root (uid %d) and has its own rights only", u.Name, uid)
	}
	result := make(chan error, 1)
	go func() {
		// Never unlocked: the thread carries foreign rights and ends with the goroutine.
		runtime.LockOSThread()
		if err := become(u); err != nil {
			result <- fmt.Errorf("act as %s: %w", u.Name, err)
			return
		}
		result <- f()
	}()
	return <-result
}

// become gives the calling thread the file system rights of u. Leaving uid 0 drops the thread's file capabilities too.
func become(u *User) error {
	groups := append([]uint32{u.GID}, u.Groups...)
	// SAFETY: the raw call changes this thread alone (the wrappers of package syscall change all of them); the kernel
	// copies len(groups) 32-bit numbers from a slice that is alive during the call.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&groups[0])), 0); errno != 0 {
		return fmt.Errorf("set groups: %w", errno)
	}
	if err := unix.Setfsgid(int(u.GID)); err != nil {
		return fmt.Errorf("set group: %w", err)
	}
	if err := unix.Setfsuid(int(u.UID)); err != nil {
		return fmt.Errorf("set user: %w", err)
	}
	return nil
}
