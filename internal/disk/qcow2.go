package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"strings"
)

// The subset of qcow2 version 3 that forkd writes and reads; docs/formats.md has the table. All numbers are
// big-endian.
const (
	qcowMagic        = 0x514649fb
	qcowVersion      = 3
	qcowClusterBits  = 16
	qcowHeaderBytes  = 104
	qcowExtBacking   = 0xe2792aca // header extension: the backing file's format
	qcowMaxBacking   = 1023       // QEMU's bound for the backing file's name
	qcowMaxSize      = 16 << 40   // 32 Ki second-level tables; their table takes 256 KiB
	l2Entries        = ClusterSize / 8
	l2Bytes          = l2Entries * ClusterSize // guest bytes one second-level table covers
	refBlockEntries  = ClusterSize / 2         // 16-bit reference counts
	entryCopied      = 1 << 63                 // reference count is one: QEMU may write in place
	entryCompressed  = 1 << 62
	entryZero        = 1
	entryOffset      = 1<<56 - 1<<9
	entryReservedL2  = 1<<62 - 1<<56 | (1<<9 - 1 - entryZero)
	entryReservedL1  = 1<<63 - 1<<56 | (1<<9 - 1)
	maxBackingFormat = 64
)

// qcowHeader is what a reader needs of a header.
type qcowHeader struct {
	size          int64
	l1Offset      int64
	l1Entries     int64
	backing       string
	backingFormat string
}

// l1Need is how many first-level entries a disk of size bytes has.
func l1Need(size int64) int64 { return ceilDiv(size, l2Bytes) }

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

// encode lays out the header cluster's beginning: header, extension, end of extensions, name.
func (h *qcowHeader) encode(refTable, refTableClusters int64) []byte {
	ext := make([]byte, 0, 96)
	if h.backingFormat != "" {
		ext = binary.BigEndian.AppendUint32(ext, qcowExtBacking)
		ext = binary.BigEndian.AppendUint32(ext, uint32(len(h.backingFormat)))
		ext = append(ext, h.backingFormat...)
		ext = append(ext, make([]byte, -len(h.backingFormat)&7)...)
	}
	ext = append(ext, make([]byte, 8)...) // end of extensions
	b := make([]byte, qcowHeaderBytes, qcowHeaderBytes+len(ext)+len(h.backing))
	be := binary.BigEndian
	be.PutUint32(b[0:], qcowMagic)
	be.PutUint32(b[4:], qcowVersion)
	if h.backing != "" {
		be.PutUint64(b[8:], uint64(qcowHeaderBytes+len(ext)))
		be.PutUint32(b[16:], uint32(len(h.backing)))
	}
	be.PutUint32(b[20:], qcowClusterBits)
	be.PutUint64(b[24:], uint64(h.size))
	be.PutUint32(b[36:], uint32(h.l1Entries))
	be.PutUint64(b[40:], uint64(h.l1Offset))
	be.PutUint64(b[48:], uint64(refTable))
	be.PutUint32(b[56:], uint32(refTableClusters))
	be.PutUint32(b[96:], 4) // reference counts of 1<<4 bits
	be.PutUint32(b[100:], qcowHeaderBytes)
	return append(append(b, ext...), h.backing...)
}

// incompatible names the feature bits of qcow2 that change how the rest is read.
var incompatible = []string{"dirty", "corrupt", "external data file", "compression type", "extended L2 entries"}

// readQcowHeader reads the header of a qcow2 file of fileSize bytes, and refuses everything outside the subset.
func readQcowHeader(r io.ReaderAt, fileSize int64) (*qcowHeader, error) {
	b := make([]byte, ClusterSize)
	n, err := r.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	b = b[:n]
	be := binary.BigEndian
	if len(b) < qcowHeaderBytes || be.Uint32(b) != qcowMagic {
		return nil, errors.New("not a qcow2 file")
	}
	if v := be.Uint32(b[4:]); v != qcowVersion {
		return nil, fmt.Errorf("qcow2 version %d, only %d is supported", v, qcowVersion)
	}
	if err := checkFeatures(be.Uint64(b[72:])); err != nil {
		return nil, err
	}
	switch {
	case be.Uint32(b[20:]) != qcowClusterBits:
		return nil, fmt.Errorf("clusters of 1<<%d bytes, only 64 KiB are supported", be.Uint32(b[20:]))
	case be.Uint32(b[32:]) != 0:
		return nil, errors.New("it is encrypted, which is not supported")
	case be.Uint32(b[60:]) != 0:
		return nil, errors.New("it has internal snapshots, which are not supported")
	case be.Uint32(b[100:]) < qcowHeaderBytes || int(be.Uint32(b[100:])) > len(b):
		return nil, fmt.Errorf("impossible header length %d", be.Uint32(b[100:]))
	}
	size := be.Uint64(b[24:])
	if size == 0 || size > qcowMaxSize || size%512 != 0 {
		return nil, fmt.Errorf("impossible size %d", size)
	}
	h := &qcowHeader{size: int64(size), l1Entries: int64(be.Uint32(b[36:]))}
	if h.l1Entries < l1Need(h.size) {
		return nil, fmt.Errorf("%d first-level entries are too few for a size of %d", h.l1Entries, h.size)
	}
	if h.l1Offset, err = tableOffset(be.Uint64(b[40:]), l1Need(h.size)*8, fileSize); err != nil {
		return nil, fmt.Errorf("first-level table: %w", err)
	}
	if err := h.readBacking(b); err != nil {
		return nil, err
	}
	return h, nil
}

func checkFeatures(set uint64) error {
	if set == 0 {
		return nil
	}
	bit := bits.TrailingZeros64(set)
	if bit < len(incompatible) {
		return fmt.Errorf("it has the feature %q, which is not supported", incompatible[bit])
	}
	return fmt.Errorf("it has an unknown incompatible feature (bit %d)", bit)
}

// readBacking finds name and format of the backing file in the header cluster b, whose fixed part was checked.
func (h *qcowHeader) readBacking(b []byte) error {
	be := binary.BigEndian
	off, n := be.Uint64(b[8:]), uint64(be.Uint32(b[16:]))
	if off == 0 {
		return nil
	}
	if n == 0 || n > qcowMaxBacking || off < uint64(be.Uint32(b[100:])) || off > uint64(len(b)) || n > uint64(len(b))-off {
		return fmt.Errorf("impossible backing file name of %d bytes at %d", n, off)
	}
	h.backing = string(b[off : off+n])
	for ext := b[be.Uint32(b[100:]):off]; len(ext) >= 8; {
		kind, length := be.Uint32(ext), uint64(be.Uint32(ext[4:]))
		ext = ext[8:]
		if kind == 0 {
			return nil
		}
		if length > uint64(len(ext)) {
			return fmt.Errorf("header extension %#x of %d bytes leaves the header", kind, length)
		}
		if kind == qcowExtBacking {
			h.backingFormat = string(ext[:length])
		}
		ext = ext[min(uint64(len(ext)), (length+7)&^7):]
	}
	return nil
}

// tableOffset checks the place of a table of n bytes.
func tableOffset(off uint64, n, fileSize int64) (int64, error) {
	if off == 0 || off%ClusterSize != 0 || off > uint64(fileSize) || n > fileSize-int64(off) {
		return 0, fmt.Errorf("%d bytes at %d are not within the file's %d", n, off, fileSize)
	}
	return int64(off), nil
}

// checkBacking refuses what QEMU would take for something else than a file.
func checkBacking(backing, format string) error {
	switch {
	case backing == "" || len(backing) > qcowMaxBacking || strings.ContainsRune(backing, 0):
		return fmt.Errorf("backing file name of %d bytes, want 1 to %d without NUL", len(backing), qcowMaxBacking)
	case format != Raw && format != Qcow2:
		return fmt.Errorf("backing format %q, want %q or %q", format, Raw, Qcow2)
	}
	if first, _, _ := strings.Cut(backing, "/"); strings.Contains(first, ":") {
		return fmt.Errorf("backing file name %q looks like a protocol to QEMU; give it as an absolute path", backing)
	}
	return nil
}

// backingSize finds the size of the disk that a file holds.
func backingSize(path, format string) (int64, error) {
	if format != Raw {
		h, err := readHeaderOf(path)
		if err != nil {
			return 0, err
		}
		return h.size, nil
	}
	st, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}
