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
	"strings"

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
	return SaveOverlays(ctx, store, []string{path}, parent)
}

// SaveOverlays stores, as one layer over parent, what several overlays hold together, given from the lowest, which
// stands on the disk of parent, to the topmost. See Merge for what may have them open. Clusters that are zero now and
// were so in the parent are left out.
func SaveOverlays(ctx context.Context, store *layer.Store, tops []string, parent layer.Digest) (layer.Info, error) {
	info, err := saveOverlays(ctx, store, tops, parent)
	if err != nil {
		return layer.Info{}, fmt.Errorf("save disk %s: %w", strings.Join(tops, ", "), err)
	}
	return info, nil
}

func saveOverlays(ctx context.Context, store *layer.Store, tops []string, parent layer.Digest) (layer.Info, error) {
	below, err := store.Resolve(ctx, parent, layer.Digest{})
	if err != nil {
		return layer.Info{}, fmt.Errorf("parent: %w", err)
	}
	st, err := openStack(ctx, tops)
	if err != nil {
		return layer.Info{}, err
	}
	defer st.close()
	if st.size != below.Size() {
		return layer.Info{}, fmt.Errorf("its size is %d bytes, that of the disk below %d", st.size, below.Size())
	}
	return store.Write(ctx, layer.WriteSpec{
		PageSize: ClusterSize, Size: st.size, Parent: parent, Extents: dropZeros(st.extents, below.Extents()), From: st,
	})
}

// dropZeros drops zero clusters where below has no data.
func dropZeros(list, below []layer.Extent) []layer.Extent {
	var out []layer.Extent
	for _, e := range list {
		if !e.Zero {
			out = append(out, e)
			continue
		}
		for len(below) > 0 && below[0].Offset+below[0].Length <= e.Offset {
			below = below[1:]
		}
		for _, b := range below {
			if b.Offset >= e.Offset+e.Length {
				break
			}
			if b.Zero {
				continue
			}
			from, to := max(e.Offset, b.Offset), min(e.Offset+e.Length, b.Offset+b.Length)
			out = append(out, layer.Extent{Offset: from, Length: to - from, Zero: true})
		}
	}
	return out
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
// there. The file appears when it is complete, and is read-only; it is not synced: it can be loaded again. The error may
// wrap layer.ErrCorrupt or layer.ErrNotFound.
func LoadBase(ctx context.Context, store *layer.Store, d layer.Digest, path string) error {
	err := writeWhole(path, func(f *os.File) error { return loadBase(ctx, store, d, f) })
	if err != nil {
		return fmt.Errorf("load disk %s: %w", d, err)
	}
	return nil
}

func loadBase(ctx context.Context, store *layer.Store, d layer.Digest, f *os.File) error {
	st, err := store.Resolve(ctx, d, layer.Digest{})
	if err != nil {
		return err
	}
	if st.PageSize() != ClusterSize {
		return fmt.Errorf("layer %s has pages of %d bytes, so it is no disk", d, st.PageSize())
	}
	if err := f.Truncate(st.Size()); err != nil {
		return err
	}
	return st.Apply(ctx, rawSink{f})
}

// rawSink writes layers into a new raw disk.
type rawSink struct{ file *os.File }

func (s rawSink) WriteAt(p []byte, off int64) (int, error) { return s.file.WriteAt(p, off) }

// Zero has nothing to do: everything is zero to begin with, and comes once.
func (rawSink) Zero(int64, int64) error { return nil }

// LoadChain writes what layer d has over its ancestor over, all layers between them in one, as a qcow2 file over backing
// at path, which it replaces if it is there. Backing must hold the disk of over; its name is stored as given, as with
// CreateOverlay. The file appears when it is complete, and is read-only; it is not synced: it can be loaded again. The
// error may wrap layer.ErrCorrupt or layer.ErrNotFound.
func LoadChain(ctx context.Context, store *layer.Store, d, over layer.Digest, path, backing, backingFormat string) error {
	var err error
	if over.IsZero() {
		err = errors.New("a backing file stands for some layer, and none is given")
	} else {
		err = loadChain(ctx, store, d, over, path, backing, backingFormat)
	}
	if err != nil {
		return fmt.Errorf("load disk %s over %s: %w", d, backing, err)
	}
	return nil
}

func loadChain(ctx context.Context, store *layer.Store, d, over layer.Digest, path, backing, backingFormat string) error {
	st, err := store.Resolve(ctx, d, over)
	if err != nil {
		return err
	}
	h, err := overlayHeader(path, backing, backingFormat)
	if err != nil {
		return err
	}
	if st.PageSize() != ClusterSize || st.Size() != h.size {
		return fmt.Errorf("the layer has %d bytes in pages of %d, the backing file %d bytes", st.Size(), st.PageSize(), h.size)
	}
	return writeWhole(path, func(f *os.File) error {
		s, err := newOverlaySink(f, h, st.Extents())
		if err != nil {
			return err
		}
		return st.Apply(ctx, s)
	})
}

// overlaySink writes cluster data into a new qcow2 file whose tables are complete.
type overlaySink struct {
	file  *os.File
	spans []span // ascending
}

// span is a data extent and the place of its data in the file.
type span struct{ off, length, host int64 }

func (s *overlaySink) WriteAt(p []byte, off int64) (int, error) {
	at, err := s.place(off, int64(len(p)))
	if err != nil {
		return 0, err
	}
	return s.file.WriteAt(p, at)
}

// place is where in the file n bytes of the disk go.
func (s *overlaySink) place(off, n int64) (int64, error) {
	i := sort.Search(len(s.spans), func(i int) bool { return s.spans[i].off > off }) - 1
	if i < 0 || off+n > s.spans[i].off+s.spans[i].length {
		return 0, fmt.Errorf("no clusters for %d bytes at %d", n, off)
	}
	return s.spans[i].host + off - s.spans[i].off, nil
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

// writeWhole lets fill write a file that replaces path when it is complete and read-only. On error path is as it was.
// Root is not stopped by a mode; a VM process is, by its own confinement.
func writeWhole(path string, fill func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return fullDisk(err)
	}
	err = fill(f)
	if err == nil {
		err = f.Chmod(0o400)
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(fullDisk(err), os.Remove(f.Name()))
	}
	return nil
}
