package memory

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// PageSize is the unit in which memory is saved and compared.
const PageSize = 4096

// Names of memfds, by which the guest's RAM is found in a process.
const (
	imageName   = "forkd-image"
	scratchName = "forkd-scratch"
)

// createMemfd makes an empty memfd of the given size that can be sealed later. No page is allocated yet: memory is
// refused where it is first written, as an error of that write.
func createMemfd(name string, size int64) (*os.File, error) {
	if size <= 0 || size%PageSize != 0 {
		return nil, fmt.Errorf("create %s: size %d is not a positive multiple of %d", name, size, PageSize)
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		// MFD_NOEXEC_SEAL is Linux 6.3; hosts that set vm.memfd_noexec=2 refuse a memfd without it.
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("create %s: memfd_create: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), "memfd:"+name)
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(fmt.Errorf("create %s of %d bytes: %w", name, size, NoRoom(err)), f.Close())
	}
	return f, nil
}

// seals make a memfd immutable for every holder of a descriptor, also a VMM that opened it for writing.
const seals = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// sealTries is how often a file is sealed whose pages somebody in the kernel holds for a moment: one that moves them, say. It
// waits for those itself, for a tenth of a second, which is not enough on a host with much more to do than it has processors.
const sealTries = 20

func seal(f *os.File) (err error) {
	for range sealTries {
		if _, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("seal %s: some process still maps it shared and writable: %w", f.Name(), err)
	}
	if err != nil {
		return fmt.Errorf("seal %s: %w", f.Name(), err)
	}
	return nil
}

// allocatedBytes is what the file really occupies.
func allocatedBytes(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	return st.Blocks * 512, nil
}
