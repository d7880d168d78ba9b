package layer

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// The map file, all numbers little-endian; docs/formats.md has the table.
const (
	mapMagic   = "forkdlay"
	mapVersion = 1

	headerBytes = 64
	runBytes    = 16
	chunkBytes  = 36

	runData = 1
	runZero = 2

	minPageSize  = 512
	maxChunk     = 1 << 20 // also the largest page size
	maxLayerSize = 1 << 50
	// maxMapBytes bounds what reading a map allocates: enough for 64 GiB of memory of which every second page is
	// named.
	maxMapBytes = 256 << 20
)

// pageMap is a decoded map file.
type pageMap struct {
	pageSize int64
	size     int64
	parent   Digest
	runs     []run
	chunks   []chunkRef
}

// run is a range of pages of one kind. Runs ascend, do not overlap, and neighbours of one kind are one run.
type run struct {
	first, count int64 // pages
	zero         bool
}

// chunkRef names the content of the next length bytes of data pages, in the order of the data runs.
type chunkRef struct {
	digest Digest
	length int64
}

func (r run) end() int64 { return r.first + r.count }

// dataBytes is the uncompressed size of all data pages.
func (m *pageMap) dataBytes() int64 {
	var n int64
	for _, r := range m.runs {
		if !r.zero {
			n += r.count
		}
	}
	return n * m.pageSize
}

func (m *pageMap) encodedBytes() int64 {
	return headerBytes + runBytes*int64(len(m.runs)) + chunkBytes*int64(len(m.chunks))
}

func (m *pageMap) encode() []byte {
	b := make([]byte, 0, m.encodedBytes())
	b = append(b, mapMagic...)
	b = binary.LittleEndian.AppendUint32(b, mapVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(m.pageSize))
	b = binary.LittleEndian.AppendUint64(b, uint64(m.size))
	b = append(b, m.parent[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.runs)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.chunks)))
	for _, r := range m.runs {
		kind := uint64(runData)
		if r.zero {
			kind = runZero
		}
		b = binary.LittleEndian.AppendUint64(b, uint64(r.first))
		b = binary.LittleEndian.AppendUint64(b, uint64(r.count)<<8|kind)
	}
	for _, c := range m.chunks {
		b = append(b, c.digest[:]...)
		b = binary.LittleEndian.AppendUint32(b, uint32(c.length))
	}
	return b
}

// decodeMap accepts exactly what encode writes: for one set of pages and chunks there is one encoding, so equal layers
// have equal digests. It allocates in proportion to b only.
func decodeMap(b []byte) (*pageMap, error) {
	if len(b) < headerBytes {
		return nil, fmt.Errorf("%d bytes are too short for a layer map", len(b))
	}
	if string(b[:8]) != mapMagic {
		return nil, fmt.Errorf("not a layer map: it starts with %q", b[:8])
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != mapVersion {
		return nil, fmt.Errorf("layer map of format version %d, this forkd reads version %d", v, mapVersion)
	}
	pageSize, size := binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint64(b[16:])
	if err := checkGeometry(int64(pageSize), size); err != nil {
		return nil, err
	}
	m := &pageMap{pageSize: int64(pageSize), size: int64(size), parent: Digest(b[24:56])}
	runs, chunks := uint64(binary.LittleEndian.Uint32(b[56:])), uint64(binary.LittleEndian.Uint32(b[60:]))
	if want := headerBytes + runBytes*runs + chunkBytes*chunks; uint64(len(b)) != want {
		return nil, fmt.Errorf("layer map of %d bytes announces %d", len(b), want)
	}
	b = b[headerBytes:]
	m.runs = make([]run, runs)
	for i := range m.runs {
		m.runs[i] = run{
			first: int64(binary.LittleEndian.Uint64(b) & (1<<63 - 1)),
			count: int64(binary.LittleEndian.Uint64(b[8:]) >> 8),
			zero:  b[8] == runZero,
		}
		if b[8] != runData && b[8] != runZero || b[7]&0x80 != 0 {
			return nil, fmt.Errorf("run %d of the layer map is of unknown kind %d", i, b[8])
		}
		b = b[runBytes:]
	}
	m.chunks = make([]chunkRef, chunks)
	for i := range m.chunks {
		m.chunks[i] = chunkRef{digest: Digest(b[:32]), length: int64(binary.LittleEndian.Uint32(b[32:]))}
		b = b[chunkBytes:]
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	return m, nil
}

func checkGeometry(pageSize int64, size uint64) error {
	if pageSize < minPageSize || pageSize > maxChunk || bits.OnesCount64(uint64(pageSize)) != 1 {
		return fmt.Errorf("page size %d is not a power of two from %d to %d", pageSize, minPageSize, maxChunk)
	}
	if size == 0 || size > maxLayerSize || size%uint64(pageSize) != 0 {
		return fmt.Errorf("size %d is not a positive multiple of the page size %d up to %d", size, pageSize, int64(maxLayerSize))
	}
	return nil
}

// check holds for every map that was decoded or is about to be written.
func (m *pageMap) check() error {
	pages := m.size / m.pageSize
	for i, r := range m.runs {
		if r.first < 0 || r.count <= 0 || r.first > pages || r.count > pages-r.first {
			return fmt.Errorf("run %d of the layer map (page %d, %d pages) is not within its %d pages", i, r.first, r.count, pages)
		}
		if i == 0 {
			continue
		}
		prev := m.runs[i-1]
		if r.first < prev.end() {
			return fmt.Errorf("run %d of the layer map does not come after run %d", i, i-1)
		}
		if r.first == prev.end() && r.zero == prev.zero {
			return fmt.Errorf("runs %d and %d of the layer map should be one", i-1, i)
		}
	}
	left := m.dataBytes()
	for i, c := range m.chunks {
		if c.length <= 0 || c.length > maxChunk || c.length%m.pageSize != 0 || c.length > left {
			return fmt.Errorf("chunk %d of the layer map has an impossible length of %d bytes", i, c.length)
		}
		left -= c.length
	}
	if left != 0 {
		return fmt.Errorf("the chunks of the layer map lack %d bytes of its data pages", left)
	}
	return nil
}

// segment is a contiguous range of data pages within one piece.
type segment struct{ offset, length int64 }

// piece is the place in the layer of one chunk's content: its segments, in order.
type piece struct {
	segments []segment
	length   int64
}

// window makes a difference in one place of an image change the chunks near it only: no piece crosses a multiple of it,
// so cutting starts afresh there.
const window = 16 << 20

// cut divides the data pages among chunks.
func cut(runs []run, pageSize int64) []piece {
	var pieces []piece
	var p piece
	flush := func() {
		if p.length > 0 {
			pieces = append(pieces, p)
		}
		p = piece{}
	}
	for _, r := range runs {
		if r.zero {
			continue
		}
		off, end := r.first*pageSize, r.end()*pageSize
		for off < end {
			if n := len(p.segments); n > 0 && p.segments[n-1].offset/window != off/window {
				flush()
			}
			n := min(end-off, maxChunk-p.length, window-off%window)
			p.segments = append(p.segments, segment{off, n})
			p.length += n
			off += n
			if p.length == maxChunk {
				flush()
			}
		}
	}
	flush()
	return pieces
}
