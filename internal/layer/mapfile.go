package layer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
)

// The map file, all numbers little-endian; docs/formats.md has the table.
const (
	mapMagic = "forkdlay"
	// mapWhole: every chunk is used as a whole, in the table's order. What can be written so is.
	mapWhole = 1
	// mapSpans: a list of spans says which part of which chunk comes where.
	mapSpans = 2

	headerBytes = 64
	countBytes  = 8 // that version 2 has more
	runBytes    = 16
	chunkBytes  = 36
	spanBytes   = 8

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
	spans    []span // nil: each chunk as a whole, one after another
}

// run is a range of pages of one kind. Runs ascend, do not overlap, and neighbours of one kind are one run.
type run struct {
	first, count int64 // pages
	zero         bool
}

// chunkRef names the content of a chunk.
type chunkRef struct {
	digest Digest
	length int64
}

// span is the content of the next length bytes of data pages, in the order of the data runs: a part of a chunk.
type span struct {
	chunk      uint32 // its place in the table
	in, length uint32 // bytes
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
	n := headerBytes + runBytes*int64(len(m.runs)) + chunkBytes*int64(len(m.chunks))
	if m.spans != nil {
		n += countBytes + spanBytes*int64(len(m.spans))
	}
	return n
}

// refer makes a map's chunks and spans of what its data pages are, end to end: parts of chunks.
func (m *pageMap) refer(parts []chunkPart) {
	m.chunks, m.spans = nil, nil
	whole := true
	joined := parts[:0:0]
	for _, p := range parts {
		if n := len(joined); n > 0 && joined[n-1].chunk == p.chunk && joined[n-1].in+joined[n-1].length == p.in {
			joined[n-1].length += p.length
			continue
		}
		joined = append(joined, p)
	}
	for _, p := range joined {
		m.chunks = append(m.chunks, p.chunk)
		whole = whole && p.length == p.chunk.length
	}
	if whole {
		return
	}
	m.chunks = m.chunks[:0]
	place := map[Digest]uint32{}
	for _, p := range joined {
		k, ok := place[p.chunk.digest]
		if !ok {
			k = uint32(len(m.chunks))
			place[p.chunk.digest] = k
			m.chunks = append(m.chunks, p.chunk)
		}
		m.spans = append(m.spans, span{k, uint32(p.in), uint32(p.length)})
	}
}

// chunkPart is a part of a chunk's content.
type chunkPart struct {
	chunk      chunkRef
	in, length int64
}

func (m *pageMap) encode() []byte {
	b := make([]byte, 0, m.encodedBytes())
	b = append(b, mapMagic...)
	version := uint32(mapWhole)
	if m.spans != nil {
		version = mapSpans
	}
	b = binary.LittleEndian.AppendUint32(b, version)
	b = binary.LittleEndian.AppendUint32(b, uint32(m.pageSize))
	b = binary.LittleEndian.AppendUint64(b, uint64(m.size))
	b = append(b, m.parent[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.runs)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.chunks)))
	if m.spans != nil {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(m.spans)))
	}
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
	for _, p := range m.spans {
		b = binary.LittleEndian.AppendUint32(b, p.chunk)
		b = binary.LittleEndian.AppendUint16(b, uint16(int64(p.in)/m.pageSize))
		b = binary.LittleEndian.AppendUint16(b, uint16(int64(p.length)/m.pageSize))
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
	version := binary.LittleEndian.Uint32(b[8:])
	if version != mapWhole && version != mapSpans {
		return nil, fmt.Errorf("layer map of format version %d, this forkd reads versions %d and %d", version, mapWhole, mapSpans)
	}
	pageSize, size := binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint64(b[16:])
	if err := checkGeometry(int64(pageSize), size); err != nil {
		return nil, err
	}
	m := &pageMap{pageSize: int64(pageSize), size: int64(size), parent: Digest(b[24:56])}
	runs, chunks := uint64(binary.LittleEndian.Uint32(b[56:])), uint64(binary.LittleEndian.Uint32(b[60:]))
	want, spans := headerBytes+runBytes*runs+chunkBytes*chunks, uint64(0)
	if version == mapSpans && len(b) >= headerBytes+countBytes {
		spans = binary.LittleEndian.Uint64(b[headerBytes:])
		want += countBytes + spanBytes*spans
	}
	if uint64(len(b)) != want || spans > uint64(len(b)) {
		return nil, fmt.Errorf("layer map of %d bytes announces %d", len(b), want)
	}
	b = b[headerBytes:]
	if version == mapSpans {
		if spans == 0 {
			return nil, errors.New("layer map without spans is not written as one of version 1")
		}
		b = b[countBytes:]
	}
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
	for i := range spans {
		in, length := m.pageSize*int64(binary.LittleEndian.Uint16(b[4:])), m.pageSize*int64(binary.LittleEndian.Uint16(b[6:]))
		if in+length > maxChunk {
			return nil, fmt.Errorf("span %d of the layer map (%d bytes at %d) is not within any chunk", i, length, in)
		}
		m.spans = append(m.spans, span{binary.LittleEndian.Uint32(b), uint32(in), uint32(length)})
		b = b[spanBytes:]
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
		if c.length <= 0 || c.length > maxChunk || c.length%m.pageSize != 0 || m.spans == nil && c.length > left {
			return fmt.Errorf("chunk %d of the layer map has an impossible length of %d bytes", i, c.length)
		}
		left -= c.length
	}
	if m.spans != nil {
		return m.checkSpans()
	}
	if left != 0 {
		return fmt.Errorf("the chunks of the layer map lack %d bytes of its data pages", left)
	}
	return nil
}

// checkSpans: chunks are in the order of their first use, each once and none for nothing.
func (m *pageMap) checkSpans() error {
	left, used, whole := m.dataBytes(), 0, true
	for i, p := range m.spans {
		if int64(p.chunk) > int64(used) || int(p.chunk) >= len(m.chunks) {
			return fmt.Errorf("span %d of the layer map is of chunk %d, and %d are known", i, p.chunk, min(used, len(m.chunks)))
		}
		if int(p.chunk) == used {
			used++
		}
		c := m.chunks[p.chunk]
		if p.length == 0 || int64(p.in)+int64(p.length) > c.length || int64(p.length) > left {
			return fmt.Errorf("span %d of the layer map (%d bytes at %d) is not within its chunk of %d", i, p.length, p.in, c.length)
		}
		left -= int64(p.length)
		whole = whole && int64(p.length) == c.length
		if i > 0 && m.spans[i-1].chunk == p.chunk && m.spans[i-1].in+m.spans[i-1].length == p.in {
			return fmt.Errorf("spans %d and %d of the layer map should be one", i-1, i)
		}
	}
	if left != 0 {
		return fmt.Errorf("the spans of the layer map lack %d bytes of its data pages", left)
	}
	if used != len(m.chunks) {
		return fmt.Errorf("the layer map uses %d of its %d chunks", used, len(m.chunks))
	}
	if whole {
		return errors.New("layer map whose chunks are all used as a whole is not written as one of version 1")
	}
	seen := make(map[Digest]bool, len(m.chunks))
	for i, c := range m.chunks {
		if seen[c.digest] {
			return fmt.Errorf("chunk %d of the layer map is there twice", i)
		}
		seen[c.digest] = true
	}
	return nil
}
