package layer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"io"
	"maps"
)

// notWorth is how many times larger than a layer the one may be that it is to share chunks with: to read that takes time.
const notWorth = 16

// maxLike bounds the memory that looking for equal pages takes: of data, 60 bytes a page.
const maxLike = 4 << 30

// pageIndex says where the pages of some chunks are, by content.
type pageIndex struct {
	pageSize int64
	chunks   []chunkRef
	pages    [][]Digest           // of each chunk
	first    map[uint64]pagePlace // by the beginning of the digest
}

type pagePlace struct{ chunk, page int32 }

// unlike says which data pages of a layer are to be stored, and where those are that its Like has too.
func (s *Store) unlike(ctx context.Context, spec WriteSpec, m *pageMap) ([]dataRange, error) {
	var all []dataRange
	for _, r := range m.runs {
		if !r.zero {
			all = append(all, dataRange{sourceRun: sourceRun{offset: r.first * m.pageSize, length: r.count * m.pageSize}})
		}
	}
	if len(spec.Like) == 0 || m.dataBytes() > maxLike {
		return all, nil
	}
	index := s.index(ctx, spec.Like, m.pageSize, min(maxLike, m.dataBytes()*notWorth))
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if index == nil {
		return all, nil
	}
	digests, err := digestPages(ctx, spec.From, all, m.pageSize)
	if err != nil {
		return nil, err
	}
	return index.divide(all, digests), nil
}

// index reads the pages of layers and of what they stand on, but of none that cannot be read, is of another kind, or together
// with those before it larger than most. It is nil without any.
func (s *Store) index(ctx context.Context, layers []Digest, pageSize, most int64) *pageIndex {
	x := &pageIndex{pageSize: pageSize, first: map[uint64]pagePlace{}}
	used, bytes := usage{}, int64(0)
	for _, d := range layers {
		st, err := s.Resolve(ctx, d, Digest{})
		if err != nil || st.pageSize != pageSize {
			continue
		}
		more, n := usage{}, bytes
		chunks := x.chunks
		st.parts(func(_ sourceRun, p chunkPart) {
			if used[p.chunk] == 0 && more[p.chunk] == 0 {
				chunks = append(chunks, p.chunk)
				n += p.chunk.length
			}
			more.add(p)
		})
		if n <= most {
			x.chunks, bytes = chunks, n
			maps.Copy(used, more)
		}
	}
	if len(x.chunks) == 0 {
		return nil
	}
	x.pages = make([][]Digest, len(x.chunks))
	err := parallel(ctx, len(x.chunks), func() (worker, error) {
		r, err := s.newChunkReader()
		if err != nil {
			return worker{}, err
		}
		do := func(i int) error {
			plain, err := r.read(x.chunks[i])
			if err != nil {
				return err
			}
			for ; len(plain) > 0; plain = plain[pageSize:] {
				x.pages[i] = append(x.pages[i], sha256.Sum256(plain[:pageSize]))
			}
			return nil
		}
		return worker{do, r.close}, nil
	})
	if err != nil {
		return nil
	}
	for i, pages := range x.pages {
		for k, d := range pages {
			if _, ok := x.first[short(d)]; !ok {
				x.first[short(d)] = pagePlace{int32(i), int32(k)}
			}
		}
	}
	return x
}

func short(d Digest) uint64 { return binary.LittleEndian.Uint64(d[:]) }

// digestPages reads all pages of ranges.
func digestPages(ctx context.Context, from io.ReaderAt, ranges []dataRange, pageSize int64) ([]Digest, error) {
	type job struct{ offset, length, at int64 } // at: number of its first page
	var jobs []job
	pages := int64(0)
	for _, r := range ranges {
		for off := r.offset; off < r.end(); {
			n := min(maxChunk, r.end()-off)
			jobs = append(jobs, job{off, n, pages})
			off, pages = off+n, pages+n/pageSize
		}
	}
	digests := make([]Digest, pages)
	err := parallel(ctx, len(jobs), func() (worker, error) {
		buf := make([]byte, maxChunk)
		do := func(i int) error {
			plain := buf[:jobs[i].length]
			if err := readPart(from, plain, jobs[i].offset); err != nil {
				return err
			}
			for at := jobs[i].at; len(plain) > 0; at, plain = at+1, plain[pageSize:] {
				digests[at] = sha256.Sum256(plain[:pageSize])
			}
			return nil
		}
		return worker{do, func() {}}, nil
	})
	return digests, err
}

// find is where a page is; best right after the one before it.
func (x *pageIndex) find(d Digest, before pagePlace) (pagePlace, bool) {
	if before.chunk >= 0 {
		next := pagePlace{before.chunk, before.page + 1}
		if pages := x.pages[next.chunk]; int(next.page) < len(pages) && pages[next.page] == d {
			return next, true
		}
	}
	at, ok := x.first[short(d)]
	if !ok || x.pages[at.chunk][at.page] != d {
		return pagePlace{chunk: -1}, false
	}
	return at, true
}

// divide divides ranges, whose pages have these digests, into what is to be stored and what is there. Chunks that would
// be used for little are left alone.
func (x *pageIndex) divide(ranges []dataRange, digests []Digest) []dataRange {
	places := make([]pagePlace, len(digests))
	used := usage{}
	before := pagePlace{chunk: -1}
	for i, d := range digests {
		at, ok := x.find(d, before)
		places[i], before = at, at
		if ok {
			used.add(x.part(at))
		}
	}
	var out []dataRange
	kept, next := used.keep(0), 0
	for _, r := range ranges {
		for off := r.offset; off < r.end(); off += x.pageSize {
			at := places[next]
			next++
			page := dataRange{sourceRun: sourceRun{offset: off, length: x.pageSize}}
			if at.chunk >= 0 && kept[x.chunks[at.chunk]] {
				page.kept = x.part(at)
			}
			if n := len(out); n > 0 && out[n-1].join(page) {
				continue
			}
			out = append(out, page)
		}
	}
	return out
}

func (x *pageIndex) part(at pagePlace) chunkPart {
	return chunkPart{x.chunks[at.chunk], int64(at.page) * x.pageSize, x.pageSize}
}

// join makes what follows part of r, if it can be.
func (r *dataRange) join(next dataRange) bool {
	switch {
	case r.end() != next.offset:
		return false
	case r.kept.length == 0 && next.kept.length == 0:
	case r.kept.length > 0 && next.kept.length > 0 && r.kept.chunk == next.kept.chunk && r.kept.in+r.kept.length == next.kept.in:
		r.kept.length += next.kept.length
	default:
		return false
	}
	r.length += next.length
	return true
}
