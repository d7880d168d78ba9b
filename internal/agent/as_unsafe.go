package agent

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/account"
)

// asUser runs f with the file system rights of u, or the agent's own for nil.
func asUser(u *account.User, f func() error) error {
	if u == nil || int(u.UID) == os.Geteuid() {
		return f()
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

// become gives the calling thread the file system rights of u; leaving uid 0 drops its file capabilities, too.
func become(u *account.User) error {
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
