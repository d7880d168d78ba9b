package qemu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/memory"
)

// Of linux/userfaultfd.h.
const (
	uffdAPI          = 0xAA
	uffdNew          = 0xaa00
	uffdioAPI        = 0xc018aa3f
	uffdioRegister   = 0xc020aa00
	uffdioUnregister = 0x8010aa01
	uffdioWake       = 0x8010aa02
	uffdioProtect    = 0xc018aa06

	uffdFeatureWP  = 1 << 0
	uffdRegisterWP = 1 << 1
	uffdProtectWP  = 1 << 0
	uffdCanProtect = 1 << 6 // in the answer to uffdioRegister

	uffdMessage = 32   // size of struct uffd_msg
	uffdFault   = 0x12 // its event for a page fault
	uffdAddress = 16   // where the address of one is
)

type uffdAPIArg struct{ api, features, ioctls uint64 }

type uffdRegisterArg struct {
	at           addresses
	mode, ioctls uint64
}

type uffdProtectArg struct {
	at   addresses
	mode uint64
}

// uffdIoctl makes one request of a userfaultfd, also of another process's: the kernel knows whose memory it is.
func uffdIoctl(fd int, request uintptr, arg unsafe.Pointer) error {
	return insistOn(func() unix.Errno {
		// SAFETY: arg points to the struct the request takes, which is alive until the call returns: the callers pass
		// the address of a variable of theirs. Addresses within it are the other process's and are not followed here.
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
		return errno
	})
}

// release takes the protection from the ranges and wakes who waits, then ends their registration. Ending it alone wakes
// nobody. A range of another userfaultfd, or one that is gone meanwhile, is left alone.
func release(uffd int, ranges []addresses) error {
	var errs []error
	for _, r := range ranges {
		protect := uffdProtectArg{at: r}
		if err := uffdIoctl(uffd, uffdioProtect, unsafe.Pointer(&protect)); err != nil {
			if errors.Is(err, unix.EAGAIN) {
				return fmt.Errorf("unprotect: the process changes its mappings all the time: %w", err)
			}
			if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
				errs = append(errs, fmt.Errorf("unprotect: %w", err))
			}
			continue
		}
		register := r
		if err := uffdIoctl(uffd, uffdioUnregister, unsafe.Pointer(&register)); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unregister: %w", err))
		}
	}
	return errors.Join(errs...)
}

// unregister ends the registration of a range in which nothing is protected and nobody waits.
func unregister(uffd int, r addresses) error {
	if err := uffdIoctl(uffd, uffdioUnregister, unsafe.Pointer(&r)); err != nil {
		return fmt.Errorf("unregister: %w", err)
	}
	return nil
}

// unprotect takes the protection from the ranges and wakes who waits.
func unprotect(uffd int, ranges []addresses) error {
	for _, r := range ranges {
		protect := uffdProtectArg{at: r}
		if err := uffdIoctl(uffd, uffdioProtect, unsafe.Pointer(&protect)); err != nil {
			return fmt.Errorf("unprotect: %w", err)
		}
	}
	return nil
}

// awaited are addresses that threads wait to write to, of whom nobody has been told yet: whoever asks has to see to them.
// It waits for the first as long as it is told, in whole milliseconds.
func awaited(uffd int, wait time.Duration) ([]uint64, error) {
	// QEMU's do not block; it must not depend on that.
	poll := []unix.PollFd{{Fd: int32(uffd), Events: unix.POLLIN}}
	if n, err := unix.Poll(poll, int((wait+time.Millisecond-1)/time.Millisecond)); n == 0 || errors.Is(err, unix.EINTR) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("wait for faults: %w", err)
	}
	var messages [16 * uffdMessage]byte
	n, err := unix.Read(uffd, messages[:])
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read faults: %w", err)
	}
	var at []uint64
	for m := messages[:max(n, 0)]; len(m) >= uffdMessage; m = m[uffdMessage:] {
		if m[0] == uffdFault {
			at = append(at, binary.NativeEndian.Uint64(m[uffdAddress:]))
		}
	}
	return at, nil
}

// wake lets those who wait for these addresses try again.
func wake(uffd int, at []uint64) error {
	var errs []error
	for _, a := range at {
		page := addresses{a &^ (memory.PageSize - 1), memory.PageSize}
		if err := uffdIoctl(uffd, uffdioWake, unsafe.Pointer(&page)); err != nil {
			errs = append(errs, fmt.Errorf("wake: %w", err))
		}
	}
	return errors.Join(errs...)
}

// protectionUnavailable tries what a live capture does, on the real kind of memory: it write-protects a private mapping
// of a sealed memory file. It returns why that does not work here, with a remedy, or "".
// It takes the userfaultfd from the device instead of the system call if it is told to.
func protectionUnavailable(ctx context.Context, device bool) (string, error) {
	const size = 4 * memory.PageSize
	scratch, err := memory.NewScratch(size)
	if err != nil {
		return "", err
	}
	image, err := scratch.Seal()
	if err != nil {
		return "", errors.Join(err, scratch.Close())
	}
	defer func() { _ = image.Close() }()
	if err := ctx.Err(); err != nil {
		return "", context.Cause(ctx)
	}
	// SAFETY: a new mapping, used by address only and unmapped below; nothing points into it.
	m, err := unix.Mmap(int(image.File().Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		return "", fmt.Errorf("map a memory file: %w", err)
	}
	defer func() { _ = unix.Munmap(m) }()
	fd, errno := newUserfaultfd(device)
	switch errno {
	case 0:
	case unix.EPERM:
		return "the kernel refuses userfaultfd to this user; run the daemon as root, or set sysctl vm.unprivileged_userfaultfd=1", nil
	default:
		return fmt.Sprintf("the kernel has no userfaultfd (%s); use one built with CONFIG_USERFAULTFD", errno), nil
	}
	uffd := os.NewFile(fd, "userfaultfd")
	defer func() { _ = uffd.Close() }()
	return protectOnce(int(fd), m), nil
}

// newUserfaultfd opens one.
func newUserfaultfd(device bool) (uintptr, unix.Errno) {
	const flags = unix.O_CLOEXEC | unix.O_NONBLOCK
	if !device {
		// SAFETY: no pointer is passed.
		fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, flags, 0, 0)
		return fd, errno
	}
	dev, err := unix.Open(userfaultDevice, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, unix.EPERM
	}
	defer func() { _ = unix.Close(dev) }()
	// SAFETY: no pointer is passed; the argument are flags.
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(dev), uffdNew, flags)
	return fd, errno
}

func protectOnce(uffd int, m []byte) string {
	api := uffdAPIArg{api: uffdAPI, features: uffdFeatureWP}
	if err := uffdIoctl(uffd, uffdioAPI, unsafe.Pointer(&api)); err != nil || api.features&uffdFeatureWP == 0 {
		return fmt.Sprintf("the kernel's userfaultfd cannot write-protect (%v); use Linux 5.19 or newer", err)
	}
	at := addresses{uint64(uintptr(unsafe.Pointer(&m[0]))), uint64(len(m))}
	register := uffdRegisterArg{at: at, mode: uffdRegisterWP}
	if err := uffdIoctl(uffd, uffdioRegister, unsafe.Pointer(&register)); err != nil || register.ioctls&uffdCanProtect == 0 {
		return fmt.Sprintf("the kernel cannot write-protect mappings of memory files (%v); use Linux 5.19 or newer", err)
	}
	protect := uffdProtectArg{at: at, mode: uffdProtectWP}
	if err := uffdIoctl(uffd, uffdioProtect, unsafe.Pointer(&protect)); err != nil {
		return fmt.Sprintf("write-protecting a mapping of a memory file: %v; use Linux 5.19 or newer", err)
	}
	return ""
}
