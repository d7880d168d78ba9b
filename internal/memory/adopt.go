package memory

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ID names a memory file for as long as it exists; another made after it is gone may get the same.
type ID struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
}

// ID is the image's. It fails after Close.
func (i *Image) ID() (ID, error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if i.file == nil {
		return ID{}, ErrClosed
	}
	return fileID(i.file)
}

func fileID(f *os.File) (ID, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return ID{}, fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	return ID{Device: st.Dev, Inode: st.Ino}, nil
}

// OpenImage opens an image of size bytes that another process holds, by the path of its descriptor in /proc. It is one
// only if it is sealed like one: what it holds is what it held when it was sealed. Whether it is the one expected its
// ID tells: a process can seal what it likes.
func OpenImage(path string, size int64) (*Image, error) {
	// Not blocking: were it a pipe, opening it would wait for a writer, who need not come.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open memory image: %w", err)
	}
	if err := checkSealed(f, size); err != nil {
		return nil, errors.Join(fmt.Errorf("open memory image %s: %w", path, err), f.Close())
	}
	return &Image{size: size, file: f}, nil
}

func checkSealed(f *os.File, size int64) error {
	have, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("read its seals: %w", err)
	}
	if have&seals != seals {
		return fmt.Errorf("it is not sealed against change (seals %#x)", have)
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() != size {
		return fmt.Errorf("it has %d bytes, %d are expected", info.Size(), size)
	}
	return nil
}
