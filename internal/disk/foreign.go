package disk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNoFileSystem is of a file that is none which a machine can have as its root.
var ErrNoFileSystem = errors.New("not an ext4 file system")

// Foreign is a file system that somebody else has made, copied.
type Foreign struct {
	Digest string // hex; equal for equal content, wherever a file has holes
	Size   int64  // of the copy: a multiple of 64 KiB
}

// CopyForeign copies the ext2, ext3 or ext4 file system in the file at from into a new sparse file at to, padded to a disk's
// size. It only reads from, which must not change meanwhile. The error wraps ErrNoFileSystem when from is something else. The
// content is checked no further than that it is all there: a machine that mounts it is where its faults belong.
func CopyForeign(ctx context.Context, from, to string) (Foreign, error) {
	f, err := copyForeign(ctx, from, to)
	if err != nil {
		return Foreign{}, fmt.Errorf("read file system %s: %w", from, err)
	}
	return f, nil
}

func copyForeign(ctx context.Context, from, to string) (_ Foreign, err error) {
	// Not to wait for somebody who writes, should it be a pipe.
	in, err := os.OpenFile(from, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return Foreign{}, err
	}
	defer in.Close()
	before, err := in.Stat()
	if err != nil {
		return Foreign{}, err
	}
	if !before.Mode().IsRegular() {
		return Foreign{}, fmt.Errorf("%w: it is no regular file", ErrNoFileSystem)
	}
	head := make([]byte, headSize)
	n, err := in.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return Foreign{}, err
	}
	if err := checkForeign(head[:n], before.Size()); err != nil {
		return Foreign{}, err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return Foreign{}, err
	}
	defer func() {
		if err = fullDisk(errors.Join(err, out.Close())); err != nil {
			err = errors.Join(err, os.Remove(to))
		}
	}()
	size := ceilDiv(before.Size(), ClusterSize) * ClusterSize
	if err := out.Truncate(size); err != nil {
		return Foreign{}, err
	}
	digest, err := copyClusters(ctx, in, out, before.Size())
	if err != nil {
		return Foreign{}, err
	}
	after, err := in.Stat()
	if err != nil {
		return Foreign{}, err
	}
	if after.Size() != before.Size() || !after.ModTime().Equal(before.ModTime()) {
		return Foreign{}, errors.New("it changed while it was read: is something using it?")
	}
	return Foreign{Digest: digest, Size: size}, nil
}

// copyClusters copies what is not zero, and digests it.
func copyClusters(ctx context.Context, in, out *os.File, size int64) (digest string, err error) {
	h := sha256.New()
	h.Write(binary.LittleEndian.AppendUint64([]byte("forkd disk\x00"), uint64(size)))
	buf, zeros := make([]byte, ClusterSize), make([]byte, ClusterSize)
	for off := int64(0); off < size; off += ClusterSize {
		if err := ctx.Err(); err != nil {
			return "", context.Cause(ctx)
		}
		data, err := unix.Seek(int(in.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err == nil { // else a file system that knows no holes
			off = data / ClusterSize * ClusterSize
		}
		n, err := in.ReadAt(buf, off)
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		if bytes.Equal(buf[:n], zeros[:n]) {
			continue
		}
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(off)))
		h.Write(buf[:n])
		h.Write(zeros[n:])
		if _, err := out.WriteAt(buf[:n], off); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Of ext4 (Documentation/filesystems/ext4/super.rst): where its superblock is, and what of it is looked at.
const (
	superAt         = 1024
	superMagic      = superAt + 0x38
	superBlocksLow  = superAt + 0x4
	superBlockSize  = superAt + 0x18 // 2 ^ (10 + this)
	superIncompat   = superAt + 0x60
	superBlocksHigh = superAt + 0x150
	incompat64Bit   = 0x80
	incompatJournal = 0x8 // it is another's journal and no file system
	headSize        = superAt + 1024
)

// checkForeign says what a file is that begins with head and is no file system of that kind, as far as that is known.
func checkForeign(head []byte, size int64) error {
	if len(head) < headSize || binary.LittleEndian.Uint16(head[superMagic:]) != 0xEF53 {
		return fmt.Errorf("%w%s", ErrNoFileSystem, kindOf(head))
	}
	le := binary.LittleEndian
	log := le.Uint32(head[superBlockSize:])
	if log > 6 { // 64 KiB
		return fmt.Errorf("%w: its superblock is damaged", ErrNoFileSystem)
	}
	blocks := uint64(le.Uint32(head[superBlocksLow:]))
	incompat := le.Uint32(head[superIncompat:])
	if incompat&incompat64Bit != 0 {
		blocks |= uint64(le.Uint32(head[superBlocksHigh:])) << 32
	}
	if incompat&incompatJournal != 0 {
		return fmt.Errorf("%w: it is the journal of one", ErrNoFileSystem)
	}
	if blocks == 0 || blocks > qcowMaxSize>>(10+log) {
		return fmt.Errorf("%w: its superblock tells of %d blocks", ErrNoFileSystem, blocks)
	}
	if size > qcowMaxSize { // most of it holes, which cost nothing until they are looked for one by one
		return fmt.Errorf("%w: the file has %d bytes, and a disk at most %d; cut it to the size of the file system", ErrNoFileSystem, size, int64(qcowMaxSize))
	}
	if want := int64(blocks) << (10 + log); size < want {
		return fmt.Errorf("%w: it is cut off: %d bytes of %d", ErrNoFileSystem, size, want)
	}
	return nil
}

// kindOf names what people have instead.
func kindOf(head []byte) string {
	for _, k := range []struct {
		at          int
		magic, what string
	}{
		{0, "QFI\xfb", "a qcow2 disk; make it raw with: qemu-img convert -O raw"},
		{0, "hsqs", "a squashfs; make it one with: unsquashfs, then mke2fs -d"},
		{0, "XFSB", "an XFS file system"},
		{0, "\x1f\x8b", "compressed by gzip; unpack it first"},
		{0, "\x28\xb5\x2f\xfd", "compressed by zstd; unpack it first"},
		{0, "\xfd7zXZ\x00", "compressed by xz; unpack it first"},
		{0, "\x7fELF", "a program or a kernel"},
		{257, "ustar", `a tar file, which a recipe takes with "base: tar:FILE"`},
		{512, "EFI PART", "a whole disk with partitions; copy the one with the root file system out of it"},
		{510, "\x55\xaa", "a whole disk with partitions; copy the one with the root file system out of it"},
	} {
		if len(head) >= k.at+len(k.magic) && string(head[k.at:k.at+len(k.magic)]) == k.magic {
			return ": it looks like " + k.what
		}
	}
	return ""
}
