package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// scanBytes is how much Diff reads at once. Holes are skipped in steps of it.
const scanBytes = 256 << 10

// Diff lists the pages in which the first size bytes of f differ from those of parent, as the extents of a layer over
// it; a page that became zero is named as such. A nil parent is all zero. What is a hole in both files is not read.
// Neither file may change meanwhile; their file offsets are moved.
func Diff(ctx context.Context, f, parent *os.File, pageSize, size int64) ([]Extent, error) {
	buf, old, zero := make([]byte, scanBytes), make([]byte, scanBytes), make([]byte, pageSize)
	if pageSize <= 0 || scanBytes%pageSize != 0 || size%pageSize != 0 {
		return nil, fmt.Errorf("compare %s: pages of %d bytes do not divide %d and %d", f.Name(), pageSize, scanBytes, size)
	}
	var extents []Extent
	for off := int64(0); ; {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		next, err := nextData(f, off, size)
		if err == nil && parent != nil {
			var other int64
			other, err = nextData(parent, off, size)
			next = min(next, other)
		}
		if err != nil {
			return nil, fmt.Errorf("compare %s: %w", f.Name(), err)
		}
		if next >= size {
			return extents, nil
		}
		off = next - next%pageSize
		n := min(scanBytes, size-off)
		if err := readFull(f, buf[:n], off); err != nil {
			return nil, err
		}
		if parent != nil {
			if err := readFull(parent, old[:n], off); err != nil {
				return nil, err
			}
		}
		for i := int64(0); i < n; i += pageSize {
			if page := buf[i : i+pageSize]; !bytes.Equal(page, old[i:i+pageSize]) {
				extents = appendPage(extents, off+i, pageSize, bytes.Equal(page, zero))
			}
		}
		off += n
	}
}

// appendPage adds a page, which comes after all others.
func appendPage(extents []Extent, off, pageSize int64, zero bool) []Extent {
	if n := len(extents); n > 0 {
		last := &extents[n-1]
		if last.Zero == zero && last.Offset+last.Length == off {
			last.Length += pageSize
			return extents
		}
	}
	return append(extents, Extent{Offset: off, Length: pageSize, Zero: zero})
}

// nextData is the first offset from off on that is not in a hole, or size.
func nextData(f *os.File, off, size int64) (int64, error) {
	if off >= size {
		return size, nil
	}
	next, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO): // only holes up to the end
		return size, nil
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP): // the file system knows no holes
		return off, nil
	case err != nil:
		return 0, fmt.Errorf("find data after %d: %w", off, err)
	}
	return min(next, size), nil
}

func readFull(f *os.File, p []byte, off int64) error {
	n, err := f.ReadAt(p, off)
	if n < len(p) {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read %s at %d: %w", f.Name(), off, err)
	}
	return nil
}
