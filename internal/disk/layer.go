package disk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
)

// SaveBase stores a raw disk, which must not change meanwhile, as a root layer. Its size must be a multiple of 64 KiB.
func SaveBase(ctx context.Context, store *layer.Store, path string) (layer.Info, error) {
	info, err := saveBase(ctx, store, path)
	if err != nil {
		return layer.Info{}, fmt.Errorf("save disk %s: %w", path, err)
	}
	return info, nil
}

func saveBase(ctx context.Context, store *layer.Store, path string) (layer.Info, error) {
	f, err := os.Open(path)
	if err != nil {
		return layer.Info{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return layer.Info{}, err
	}
	if st.Size() == 0 || st.Size()%ClusterSize != 0 {
		return layer.Info{}, fmt.Errorf("its size of %d bytes is not a positive multiple of 64 KiB", st.Size())
	}
	extents, err := layer.Diff(ctx, f, nil, ClusterSize, st.Size())
	if err != nil {
		return layer.Info{}, err
	}
	return store.Write(ctx, layer.WriteSpec{PageSize: ClusterSize, Size: st.Size(), Extents: extents, From: f})
}

// SaveOverlay stores the clusters one qcow2 file holds itself, without those of its backing files, as a layer over
// parent, which must be the layer of its backing file. No machine may be writing it. Whatever the qcow2 has that
// forkd's own never have (compression, encryption, internal snapshots, an external data file) is refused.
func SaveOverlay(ctx context.Context, store *layer.Store, path string, parent layer.Digest) (layer.Info, error) {
	info, err := saveOverlay(ctx, store, path, parent)
	if err != nil {
		return layer.Info{}, fmt.Errorf("save disk %s: %w", path, err)
	}
	return info, nil
}

func saveOverlay(ctx context.Context, store *layer.Store, path string, parent layer.Digest) (layer.Info, error) {
	// The parent first: its size bounds what the file may make us allocate.
	below, err := store.Stat(ctx, parent)
	if err != nil {
		return layer.Info{}, fmt.Errorf("parent: %w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return layer.Info{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return layer.Info{}, err
	}
	o, err := newOverlay(f, st.Size())
	if err != nil {
		return layer.Info{}, err
	}
	if o.header.size != below.Size {
		return layer.Info{}, fmt.Errorf("its size is %d bytes, that of the disk below %d", o.header.size, below.Size)
	}
	extents, err := o.extents(ctx)
	if err != nil {
		return layer.Info{}, err
	}
	return store.Write(ctx, layer.WriteSpec{
		PageSize: ClusterSize, Size: o.header.size, Parent: parent, Extents: extents, From: o,
	})
}

// extents lists the clusters the overlay holds itself.
func (o *overlay) extents(ctx context.Context) ([]layer.Extent, error) {
	if o.header.size%ClusterSize != 0 {
		return nil, fmt.Errorf("its size of %d bytes is not a multiple of 64 KiB", o.header.size)
	}
	var extents []layer.Extent
	left := ceilDiv(o.size, ClusterSize)
	for n := int64(0); n < o.header.size/ClusterSize; n++ {
		if n%l2Entries == 0 && ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if o.tables[n/l2Entries] == nil {
			n += l2Entries - 1
			continue
		}
		c, err := o.cluster(n)
		if err != nil {
			return nil, err
		}
		if c.host == 0 && !c.zero {
			continue
		}
		if c.host != 0 {
			if left--; left < 0 {
				return nil, errors.New("it uses clusters of the file more than once")
			}
		}
		extents = appendCluster(extents, n*ClusterSize, c.zero)
	}
	return extents, nil
}

// appendCluster adds a cluster, which comes after all others.
func appendCluster(extents []layer.Extent, off int64, zero bool) []layer.Extent {
	if n := len(extents); n > 0 {
		last := &extents[n-1]
		if last.Zero == zero && last.Offset+last.Length == off {
			last.Length += ClusterSize
			return extents
		}
	}
	return append(extents, layer.Extent{Offset: off, Length: ClusterSize, Zero: zero})
}

// LoadBase writes the disk of a layer, with all it stands on, as a sparse raw file at path, which it replaces if it is
// there. The file appears when it is complete and durable, and is read-only. The error may wrap layer.ErrCorrupt or
// layer.ErrNotFound.
func LoadBase(ctx context.Context, store *layer.Store, d layer.Digest, path string) error {
	err := writeWhole(path, func(f *os.File) error { return loadBase(ctx, store, d, f) })
	if err != nil {
		return fmt.Errorf("load disk %s: %w", d, err)
	}
	return nil
}

func loadBase(ctx context.Context, store *layer.Store, d layer.Digest, f *os.File) error {
	chain, err := store.Chain(ctx, d)
	if err != nil {
		return err
	}
	if len(chain) == 0 {
		return layer.ErrNotFound
	}
	size := chain[len(chain)-1].Size
	for _, l := range chain {
		if l.PageSize != ClusterSize || l.Size != size {
			return fmt.Errorf("layer %s has %d bytes in pages of %d, so it is not of this disk", l.Digest, l.Size, l.PageSize)
		}
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	for i, l := range chain {
		if err := store.Apply(ctx, l.Digest, rawSink{file: f, fresh: i == 0}); err != nil {
			return err
		}
	}
	return nil
}

// rawSink writes layers into a raw disk.
type rawSink struct {
	file  *os.File
	fresh bool // nothing was written yet: everything is zero
}

func (s rawSink) WriteAt(p []byte, off int64) (int, error) { return s.file.WriteAt(p, off) }

func (s rawSink) Zero(off, n int64) error {
	if s.fresh {
		return nil
	}
	err := unix.Fallocate(int(s.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	zeros := make([]byte, ClusterSize)
	for ; n > 0; off, n = off+ClusterSize, n-ClusterSize {
		if _, err := s.file.WriteAt(zeros, off); err != nil {
			return err
		}
	}
	return nil
}

// LoadOverlay writes the clusters of one layer, without those of its ancestors, as a qcow2 file over backing at path,
// which it replaces if it is there. Backing must hold the disk of the layer's parent; its name is stored as given, as
// with CreateOverlay. The file appears when it is complete and durable, and is read-only. The error may wrap
// layer.ErrCorrupt or layer.ErrNotFound.
func LoadOverlay(ctx context.Context, store *layer.Store, d layer.Digest, path, backing, backingFormat string) error {
	err := writeWhole(path, func(f *os.File) error {
		h, err := overlayHeader(path, backing, backingFormat)
		if err != nil {
			return err
		}
		return loadOverlay(ctx, store, d, f, h)
	})
	if err != nil {
		return fmt.Errorf("load disk %s over %s: %w", d, backing, err)
	}
	return nil
}

func loadOverlay(ctx context.Context, store *layer.Store, d layer.Digest, f *os.File, h *qcowHeader) error {
	info, err := store.Stat(ctx, d)
	if err != nil {
		return err
	}
	if info.PageSize != ClusterSize || info.Size != h.size {
		return fmt.Errorf("the layer has %d bytes in pages of %d, the backing file %d bytes", info.Size, info.PageSize, h.size)
	}
	extents, err := store.Extents(ctx, d)
	if err != nil {
		return err
	}
	s, err := newOverlaySink(f, h, extents)
	if err != nil {
		return err
	}
	return store.Apply(ctx, d, s)
}

// overlaySink writes cluster data into a new qcow2 file whose tables are complete.
type overlaySink struct {
	file  *os.File
	spans []span // ascending
}

// span is a data extent and the place of its data in the file.
type span struct{ off, length, host int64 }

func (s *overlaySink) WriteAt(p []byte, off int64) (int, error) {
	i := sort.Search(len(s.spans), func(i int) bool { return s.spans[i].off > off }) - 1
	if i < 0 || off+int64(len(p)) > s.spans[i].off+s.spans[i].length {
		return 0, fmt.Errorf("no clusters for %d bytes at %d", len(p), off)
	}
	return s.file.WriteAt(p, s.spans[i].host+off-s.spans[i].off)
}

// Zero has nothing to do: the tables say it.
func (*overlaySink) Zero(int64, int64) error { return nil }

// newOverlaySink writes a qcow2 file's header and tables for the extents.
func newOverlaySink(f *os.File, h *qcowHeader, extents []layer.Extent) (*overlaySink, error) {
	var tables []int64 // the L1 entries in use, ascending
	var data int64
	for _, e := range extents {
		for t := e.Offset / l2Bytes; t <= (e.Offset+e.Length-1)/l2Bytes; t++ {
			if len(tables) == 0 || tables[len(tables)-1] != t {
				tables = append(tables, t)
			}
		}
		if !e.Zero {
			data += e.Length / ClusterSize
		}
	}
	l := newLayout(h, int64(len(tables)), data)
	if err := l.write(f); err != nil {
		return nil, err
	}
	s := &overlaySink{file: f}
	l1 := make([]byte, h.l1Entries*8)
	for i, t := range tables {
		binary.BigEndian.PutUint64(l1[t*8:], uint64(l.l2Offset()+int64(i)*ClusterSize)|entryCopied)
	}
	if _, err := f.WriteAt(l1, h.l1Offset); err != nil {
		return nil, err
	}
	l2 := make([]byte, int64(len(tables))*ClusterSize)
	host := l.dataOffset()
	for _, e := range extents {
		if !e.Zero {
			s.spans = append(s.spans, span{e.Offset, e.Length, host})
		}
		for off := e.Offset; off < e.Offset+e.Length; off += ClusterSize {
			entry := uint64(entryZero)
			if !e.Zero {
				entry = uint64(host) | entryCopied
				host += ClusterSize
			}
			i, _ := slices.BinarySearch(tables, off/l2Bytes)
			binary.BigEndian.PutUint64(l2[int64(i)*ClusterSize+off/ClusterSize%l2Entries*8:], entry)
		}
	}
	if _, err := f.WriteAt(l2, l.l2Offset()); err != nil {
		return nil, err
	}
	return s, nil
}

// writeWhole lets fill write a file that replaces path when it is complete, durable and read-only. On error path is as
// it was.
func writeWhole(path string, fill func(*os.File) error) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".tmp-*")
	if err != nil {
		return fullDisk(err)
	}
	err = fill(f)
	if err == nil {
		err = f.Chmod(0o444)
	}
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fullDisk(err), os.Remove(f.Name()))
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
