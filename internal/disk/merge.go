package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sort"
	"sync"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
)

// Merge makes path one qcow2 file over backing that holds what several overlays hold together, given from the lowest
// to the topmost: of every cluster what the topmost of them has. They are read only. Path is replaced if it is there;
// the file appears when it is complete, and is read-only. It is not synced, for what a running machine stands on need
// not outlive it.
//
// A machine may still have them open as long as none is its top. QEMU writes a qcow2's tables late, but when
// blockdev-snapshot puts a new top over the old one it flushes the old one first, tables included: also with
// cache.no-flush=on, which spares the sync and not the writing. It then opens it read-only. So once the command has
// returned the file is complete for every reader on this host (TestFrozenOverlayIsComplete watches a QEMU do it).
func Merge(ctx context.Context, path string, tops []string, backing, backingFormat string) error {
	if err := merge(ctx, path, tops, backing, backingFormat); err != nil {
		return fmt.Errorf("merge %d overlays into disk %s: %w", len(tops), path, err)
	}
	return nil
}

func merge(ctx context.Context, path string, tops []string, backing, backingFormat string) error {
	st, err := openStack(ctx, tops)
	if err != nil {
		return err
	}
	defer st.close()
	h, err := overlayHeader(path, backing, backingFormat)
	if err != nil {
		return err
	}
	if h.size != st.size {
		return fmt.Errorf("the backing file has %d bytes, the overlays %d", h.size, st.size)
	}
	return writeWhole(path, func(f *os.File) error {
		sink, err := newOverlaySink(f, h, st.extents)
		if err != nil {
			return err
		}
		return st.copyTo(ctx, sink)
	})
}

// stack is several overlays, one upon the other, seen as one.
type stack struct {
	size    int64 // of the disk
	files   []*os.File
	extents []layer.Extent // ascending
	spans   []stackSpan    // the data, ascending
}

// stackSpan is a range of the disk that is contiguous in one of the files.
type stackSpan struct {
	off, length int64
	file        io.ReaderAt
	host        int64
}

// openStack reads the tables of overlays, the lowest first.
func openStack(ctx context.Context, paths []string) (*stack, error) {
	if len(paths) == 0 {
		return nil, errors.New("no overlays are given")
	}
	st := &stack{}
	if err := st.open(ctx, paths); err != nil {
		st.close()
		return nil, err
	}
	return st, nil
}

func (st *stack) open(ctx context.Context, paths []string) error {
	overlays := make([]*overlay, len(paths))
	for i, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		st.files = append(st.files, f)
		info, err := f.Stat()
		if err != nil {
			return err
		}
		if overlays[i], err = newOverlay(f, info.Size()); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return st.combine(ctx, paths, overlays)
}

// combine finds what is topmost in overlays of these names.
func (st *stack) combine(ctx context.Context, names []string, overlays []*overlay) error {
	left := make([]int64, len(overlays)) // how many clusters of each can be data: a bound for hostile tables
	for i, o := range overlays {
		switch {
		case o.header.size%ClusterSize != 0:
			return fmt.Errorf("%s: its size of %d bytes is not a multiple of 64 KiB", names[i], o.header.size)
		case i > 0 && o.header.size != st.size:
			return fmt.Errorf("%s: its size is %d bytes, that of the one below %d", names[i], o.header.size, st.size)
		}
		st.size, left[i] = o.header.size, ceilDiv(o.size, ClusterSize)
	}
	for n := int64(0); n < st.size/ClusterSize; n++ {
		if n%l2Entries == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if n%l2Entries == 0 && !anyTable(overlays, n/l2Entries) {
			n += l2Entries - 1
			continue
		}
		for i := len(overlays) - 1; i >= 0; i-- {
			c, err := overlays[i].cluster(n)
			if err != nil {
				return fmt.Errorf("%s: %w", names[i], err)
			}
			if c.host == 0 && !c.zero {
				continue
			}
			if c.host != 0 {
				if left[i]--; left[i] < 0 {
					return fmt.Errorf("%s: it uses clusters of the file more than once", names[i])
				}
				st.addSpan(n*ClusterSize, overlays[i].file, c.host)
			}
			st.extents = appendCluster(st.extents, n*ClusterSize, c.zero)
			break
		}
	}
	return nil
}

func anyTable(overlays []*overlay, i int64) bool {
	for _, o := range overlays {
		if o.tables[i] != nil {
			return true
		}
	}
	return false
}

// addSpan adds a cluster's data, which comes after all others.
func (st *stack) addSpan(off int64, f io.ReaderAt, host int64) {
	if n := len(st.spans); n > 0 {
		last := &st.spans[n-1]
		if last.file == f && last.off+last.length == off && last.host+last.length == host {
			last.length += ClusterSize
			return
		}
	}
	st.spans = append(st.spans, stackSpan{off, ClusterSize, f, host})
}

func (st *stack) close() {
	for _, f := range st.files {
		_ = f.Close() // they were only read
	}
}

// ReadAt reads data clusters at the disk's offset off; elsewhere it is an error.
func (st *stack) ReadAt(p []byte, off int64) (int, error) {
	i := sort.Search(len(st.spans), func(i int) bool { return st.spans[i].off+st.spans[i].length > off })
	done := 0
	for ; done < len(p); i++ {
		at := off + int64(done)
		if i == len(st.spans) || st.spans[i].off > at {
			return done, fmt.Errorf("cluster %d is not allocated", at/ClusterSize)
		}
		s := st.spans[i]
		part := p[done:min(int64(len(p)), int64(done)+s.off+s.length-at)]
		n, err := s.file.ReadAt(part, s.host+at-s.off)
		if err != nil && !errors.Is(err, io.EOF) {
			return done, err
		}
		// The last cluster of a file may be short; QEMU reads zeros there.
		clear(part[n:])
		done += len(part)
	}
	return done, nil
}

// copyTo copies all data into a new overlay whose tables are complete.
func (st *stack) copyTo(ctx context.Context, sink *overlaySink) error {
	const most = 4 << 20
	var parts []stackSpan
	for _, s := range st.spans {
		for ; s.length > 0; s.off, s.host, s.length = s.off+most, s.host+most, s.length-most {
			part := s
			part.length = min(s.length, most)
			parts = append(parts, part)
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range min(len(parts), runtime.NumCPU()) {
		wg.Go(func() {
			for ctx.Err() == nil {
				mu.Lock()
				if len(parts) == 0 {
					mu.Unlock()
					return
				}
				s := parts[0]
				parts = parts[1:]
				mu.Unlock()
				to, err := sink.place(s.off, s.length)
				if err == nil {
					err = copyRange(s.file, s.host, sink.file, to, s.length)
				}
				if err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// copyRange copies between files, in the kernel where it can; some file systems then share the blocks. Past the end of
// from there is nothing to copy: it reads as zeros, and so does what is not written in to.
func copyRange(from io.ReaderAt, at int64, to *os.File, off, n int64) error {
	f, ok := from.(*os.File)
	if !ok {
		return copyRangeHere(from, at, to, off, n)
	}
	for n > 0 {
		done, err := unix.CopyFileRange(int(f.Fd()), &at, int(to.Fd()), &off, int(n), 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EXDEV), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return copyRangeHere(from, at, to, off, n)
		case err != nil:
			return fmt.Errorf("copy %d bytes at %d: %w", n, at, err)
		case done == 0:
			return nil
		}
		n -= int64(done)
	}
	return nil
}

func copyRangeHere(from io.ReaderAt, at int64, to *os.File, off, n int64) error {
	buf := make([]byte, min(n, 1<<20))
	for n > 0 {
		k, err := from.ReadAt(buf[:min(n, int64(len(buf)))], at)
		if _, err := to.WriteAt(buf[:k], off); err != nil {
			return err
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		at, off, n = at+int64(k), off+int64(k), n-int64(k)
	}
	return nil
}

func readHeaderOf(path string) (*qcowHeader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	h, err := readQcowHeader(f, st.Size())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return h, nil
}
