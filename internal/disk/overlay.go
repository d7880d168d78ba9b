package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// CreateOverlay makes path, which must not exist, an empty qcow2 disk over backing, of its size: every cluster is the
// backing file's until the machine writes it. The name backing is stored as given, absolute or relative to path's
// directory; backingFormat is Raw or Qcow2. On error nothing is left. The file is not synced: it is a running
// machine's.
func CreateOverlay(path, backing, backingFormat string) error {
	if err := createOverlay(path, backing, backingFormat); err != nil {
		return fmt.Errorf("create overlay %s over %s: %w", path, backing, err)
	}
	return nil
}

func createOverlay(path, backing, format string) error {
	h, err := overlayHeader(path, backing, format)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fullDisk(err)
	}
	if err := errors.Join(newLayout(h, 0, 0).write(f), f.Close()); err != nil {
		return errors.Join(fullDisk(err), os.Remove(path))
	}
	return nil
}

// overlayHeader checks the backing file and describes an overlay at path over it.
func overlayHeader(path, backing, format string) (*qcowHeader, error) {
	if err := checkBacking(backing, format); err != nil {
		return nil, err
	}
	where := backing
	if !filepath.IsAbs(where) {
		where = filepath.Join(filepath.Dir(path), where)
	}
	size, err := backingSize(where, format)
	if err != nil {
		return nil, fmt.Errorf("backing file: %w", err)
	}
	if size <= 0 || size > qcowMaxSize || size%ClusterSize != 0 {
		return nil, fmt.Errorf("backing file's size of %d bytes is not a positive multiple of 64 KiB up to 16 TiB", size)
	}
	return &qcowHeader{size: size, l1Entries: l1Need(size), backing: backing, backingFormat: format}, nil
}

// layout is a new qcow2 file: header, reference count table and blocks, L1 table, L2 tables, data, without gaps.
type layout struct {
	header    *qcowHeader
	refTable  int64 // clusters of each part
	refBlocks int64
	l1        int64
	l2        int64
	data      int64
}

func newLayout(h *qcowHeader, l2, data int64) *layout {
	l := &layout{header: h, l1: ceilDiv(h.l1Entries*8, ClusterSize), l2: l2, data: data}
	// The counts cover the clusters that hold them: a few rounds reach the fixed point.
	for {
		blocks := ceilDiv(l.clusters(), refBlockEntries)
		table := ceilDiv(blocks, ClusterSize/8)
		if blocks == l.refBlocks && table == l.refTable {
			break
		}
		l.refBlocks, l.refTable = blocks, table
	}
	h.l1Offset = (1 + l.refTable + l.refBlocks) * ClusterSize
	return l
}

func (l *layout) clusters() int64   { return 1 + l.refTable + l.refBlocks + l.l1 + l.l2 + l.data }
func (l *layout) l2Offset() int64   { return l.header.l1Offset + l.l1*ClusterSize }
func (l *layout) dataOffset() int64 { return l.l2Offset() + l.l2*ClusterSize }

// write writes everything but L1, L2 and data, which read as holes: nothing allocated.
func (l *layout) write(f *os.File) error {
	table := make([]byte, 0, l.refBlocks*8)
	for i := range l.refBlocks {
		table = binary.BigEndian.AppendUint64(table, uint64((1+l.refTable+i)*ClusterSize))
	}
	counts := bytes.Repeat([]byte{0, 1}, int(l.clusters()))
	for _, part := range []struct {
		off int64
		b   []byte
	}{
		{0, l.header.encode(ClusterSize, l.refTable)},
		{ClusterSize, table},
		{(1 + l.refTable) * ClusterSize, counts},
	} {
		if _, err := f.WriteAt(part.b, part.off); err != nil {
			return err
		}
	}
	return f.Truncate(l.clusters() * ClusterSize)
}

// fullDisk tells a person what ENOSPC and EDQUOT mean.
func fullDisk(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("the disk is full; free some space, or end some sandboxes: %w", err)
	}
	return err
}

// overlay is the tables of a qcow2 file of the subset: its own clusters, not those of its backing file.
type overlay struct {
	file   io.ReaderAt
	size   int64 // of the file
	header *qcowHeader
	tables [][]byte // L2 tables as on disk; nil: nothing allocated there
}

// newOverlay reads header and tables of a qcow2 file of size bytes.
func newOverlay(file io.ReaderAt, size int64) (*overlay, error) {
	o := &overlay{file: file, size: size}
	if err := o.readTables(); err != nil {
		return nil, err
	}
	return o, nil
}

func (o *overlay) readTables() (err error) {
	if o.header, err = readQcowHeader(o.file, o.size); err != nil {
		return err
	}
	l1 := make([]byte, l1Need(o.header.size)*8)
	if _, err := o.file.ReadAt(l1, o.header.l1Offset); err != nil {
		return fmt.Errorf("first-level table: %w", err)
	}
	o.tables = make([][]byte, len(l1)/8)
	left := o.size / ClusterSize // no more tables than the file has clusters, whatever the entries say
	for i := range o.tables {
		entry := binary.BigEndian.Uint64(l1[i*8:])
		if entry&entryReservedL1 != 0 {
			return fmt.Errorf("first-level entry %d is %#x, which means nothing", i, entry)
		}
		if entry&entryOffset == 0 {
			continue
		}
		off, err := tableOffset(entry&entryOffset, ClusterSize, o.size)
		if left--; left < 0 {
			err = errors.New("there are more of them than clusters in the file")
		}
		if err != nil {
			return fmt.Errorf("second-level table %d: %w", i, err)
		}
		o.tables[i] = make([]byte, ClusterSize)
		if _, err := o.file.ReadAt(o.tables[i], off); err != nil {
			return fmt.Errorf("second-level table %d: %w", i, err)
		}
	}
	return nil
}

// cluster is what one second-level entry says.
type cluster struct {
	host int64 // offset of its data, 0 without
	zero bool
}

// cluster looks up the guest's cluster of number n, within the disk.
func (o *overlay) cluster(n int64) (cluster, error) {
	table := o.tables[n/l2Entries]
	if table == nil {
		return cluster{}, nil
	}
	entry := binary.BigEndian.Uint64(table[n%l2Entries*8:])
	switch off := entry & entryOffset; {
	case entry&entryCompressed != 0:
		return cluster{}, fmt.Errorf("cluster %d is compressed, which is not supported", n)
	case entry&entryReservedL2 != 0 || off%ClusterSize != 0:
		return cluster{}, fmt.Errorf("second-level entry of cluster %d is %#x, which means nothing", n, entry)
	case entry&entryZero != 0:
		// It may have a place reserved (qcow2's "zero, allocated"); what is there does not count.
		return cluster{zero: true}, nil
	case off >= uint64(o.size):
		return cluster{}, fmt.Errorf("cluster %d is at %d, beyond the file's %d bytes", n, off, o.size)
	default:
		return cluster{host: int64(off)}, nil
	}
}
