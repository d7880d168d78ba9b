package agent

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// credit adds entropy to the kernel's generator, credited at 8 bits a byte, and makes the generator use it at once.
// Writing to /dev/urandom would do neither. The order matters: reseeding fails before the first credit (ENODATA).
func credit(entropy []byte) error {
	fd, err := unix.Open("/dev/urandom", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the kernel's generator: %w", err)
	}
	err = addEntropy(fd, entropy)
	return errors.Join(err, unix.Close(fd))
}

func addEntropy(fd int, entropy []byte) error {
	// struct rand_pool_info { int entropy_count; int buf_size; __u32 buf[]; }
	var info struct {
		bits, size int32
		buf        [512]byte
	}
	n := copy(info.buf[:], entropy)
	info.size = int32(n)
	info.bits = int32(n * 8)
	// SAFETY: the kernel reads two integers and buf_size <= len(buf) bytes during the call and keeps no pointer.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info)))
	clear(info.buf[:])
	if errno != 0 {
		return fmt.Errorf("credit entropy: %w", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), rndReseedCRNG, 0); errno != 0 {
		return fmt.Errorf("reseed the kernel's generator: %w", errno)
	}
	return nil
}

// rndReseedCRNG is RNDRESEEDCRNG, _IO('R', 7).
const rndReseedCRNG = 0x5207
