package layer

import (
	"cmp"
	"slices"
)

// dataRange is a range of data pages of a layer that is being made: what a chunk has already, or what is to be stored.
type dataRange struct {
	sourceRun
	kept chunkPart // of length 0: to be stored
}

// piece is the content of a chunk that is to be stored: where its pages come from, in order.
type piece struct {
	window int64 // which one it lies in
	length int64
	parts  []sourceRun
}

// pieceSpan is a part of a piece, or of a chunk that is there.
type pieceSpan struct {
	piece int // -1: none
	part  chunkPart
}

// arrangement is what the data pages of a layer will be, end to end.
type arrangement struct {
	pieces []piece
	spans  []pieceSpan
}

// window makes a difference in one place of an image change the chunks near it only: no piece crosses a multiple of it,
// so cutting starts afresh there.
const window = 16 << 20

// arrange divides what is to be stored among pieces. With whole no piece goes on after a kept chunk, so that each is used as
// a whole where those are.
func arrange(ranges []dataRange, whole bool) *arrangement {
	a := &arrangement{}
	after := false
	for _, r := range ranges {
		if r.kept.length > 0 {
			a.add(pieceSpan{-1, r.kept})
			after = whole
			continue
		}
		for r.length > 0 {
			n := len(a.pieces)
			if n == 0 || after || a.pieces[n-1].length == maxChunk || a.pieces[n-1].window != r.offset/window {
				a.pieces = append(a.pieces, piece{window: r.offset / window})
				n++
				after = false
			}
			p, here := &a.pieces[n-1], r.sourceRun
			here.length = min(r.length, maxChunk-p.length, window-r.offset%window)
			a.add(pieceSpan{n - 1, chunkPart{in: p.length, length: here.length}})
			p.parts = append(p.parts, here)
			p.length += here.length
			r.sourceRun = r.from(here.end())
		}
	}
	return a
}

func (a *arrangement) add(s pieceSpan) {
	if n := len(a.spans); n > 0 {
		last := &a.spans[n-1]
		if last.piece == s.piece && last.part.chunk == s.part.chunk && last.part.in+last.part.length == s.part.in {
			last.part.length += s.part.length
			return
		}
	}
	a.spans = append(a.spans, s)
}

// encodedBytes is how long the map will be, at most.
func (a *arrangement) encodedBytes(m *pageMap) int64 {
	kept := map[Digest]bool{}
	for _, s := range a.spans {
		if s.piece < 0 {
			kept[s.part.chunk.digest] = true
		}
	}
	return headerBytes + countBytes + runBytes*int64(len(m.runs)) + chunkBytes*int64(len(a.pieces)+len(kept)) +
		spanBytes*int64(len(a.spans))
}

// parts are the data pages, when each piece is a chunk.
func (a *arrangement) parts(chunks []chunkRef) []chunkPart {
	parts := make([]chunkPart, len(a.spans))
	for i, s := range a.spans {
		parts[i] = s.part
		if s.piece >= 0 {
			parts[i].chunk = chunks[s.piece]
		}
	}
	return parts
}

// usage counts how many bytes of chunks a layer uses.
type usage map[chunkRef]int64

func (u usage) add(p chunkPart) { u[p.chunk] += p.length }

// keep chooses the chunks to name rather than to store their pages anew: those of which much is used first, none of which
// less than an eighth is, and all together no more than one and a half times what is used of them. So a layer is never much
// longer to read, nor keeps much more on the disk, than if it had chunks of its own.
func (u usage) keep(shortest int64) map[chunkRef]bool {
	var list []chunkRef
	for c, n := range u {
		if c.length >= shortest && n*8 >= c.length {
			list = append(list, c)
		}
	}
	slices.SortFunc(list, func(a, b chunkRef) int {
		return cmp.Or(cmp.Compare(u.of(b)*a.length, u.of(a)*b.length), compare(a.digest, b.digest))
	})
	kept := map[chunkRef]bool{}
	var whole, used int64
	for _, c := range list {
		whole, used = whole+c.length, used+u.of(c)
		if whole*2 > used*3 {
			break
		}
		kept[c] = true
	}
	return kept
}

// of is how much of a chunk is used: pages may be used again and again.
func (u usage) of(c chunkRef) int64 { return min(u[c], c.length) }
