package agent

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/quick"
)

// generator is the kernel's, kept open: in a fork opening it would cost more than what is done with it.
type generator struct {
	fd  int
	err error
}

func openGenerator() *generator {
	fd, err := unix.Open("/dev/urandom", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		err = fmt.Errorf("open the kernel's generator: %w", err)
	}
	return &generator{fd, err}
}

// credit adds entropy, credited at 8 bits a byte, and makes the generator use it at once. Writing to /dev/urandom would
// do neither. The order matters: reseeding fails before the first credit (ENODATA).
func (g *generator) credit(entropy []byte) error {
	if g.err != nil {
		return g.err
	}
	// struct rand_pool_info { int entropy_count; int buf_size; __u32 buf[]; }
	var info struct {
		bits, size int32
		buf        [512]byte
	}
	n := copy(info.buf[:], entropy)
	info.size = int32(n)
	info.bits = int32(n * 8)
	// SAFETY: the kernel reads two integers and buf_size <= len(buf) bytes during the call and keeps no pointer.
	err := quick.Ioctl(g.fd, unix.RNDADDENTROPY, unsafe.Pointer(&info))
	clear(info.buf[:])
	if err != nil {
		return fmt.Errorf("credit entropy: %w", err)
	}
	if err := quick.Ioctl(g.fd, rndReseedCRNG, nil); err != nil {
		return fmt.Errorf("reseed the kernel's generator: %w", err)
	}
	return nil
}

// rndReseedCRNG is RNDRESEEDCRNG, _IO('R', 7).
const rndReseedCRNG = 0x5207
