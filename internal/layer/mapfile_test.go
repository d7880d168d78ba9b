package layer

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var unexported = cmp.AllowUnexported(pageMap{}, run{}, chunkRef{}, span{})

func sampleMap() *pageMap {
	return &pageMap{
		pageSize: 4096, size: 1 << 20, parent: Digest{0xaa, 1},
		runs:   []run{{first: 0, count: 2}, {first: 2, count: 1, zero: true}, {first: 10, count: 3}},
		chunks: []chunkRef{{digest: Digest{1}, length: 3 * 4096}, {digest: Digest{2}, length: 2 * 4096}},
	}
}

// The bytes of version 1. They must never change: snapshots on users' disks are in it.
const sampleHex = "666f726b646c6179" + "01000000" + "00100000" + "0000100000000000" +
	"aa01000000000000000000000000000000000000000000000000000000000000" + "03000000" + "02000000" +
	"0000000000000000" + "0102000000000000" +
	"0200000000000000" + "0201000000000000" +
	"0a00000000000000" + "0103000000000000" +
	"0100000000000000000000000000000000000000000000000000000000000000" + "00300000" +
	"0200000000000000000000000000000000000000000000000000000000000000" + "00200000"

// sampleSpans is a map of version 2 with the same pages.
func sampleSpans() *pageMap {
	m := sampleMap()
	first, second := chunkRef{Digest{1}, 8 * 4096}, chunkRef{Digest{2}, 2 * 4096}
	m.refer([]chunkPart{{first, 3 * 4096, 4096}, {first, 4 * 4096, 4096}, {second, 0, 2 * 4096}, {first, 0, 4096}})
	return m
}

const spansHex = "666f726b646c6179" + "02000000" + "00100000" + "0000100000000000" +
	"aa01000000000000000000000000000000000000000000000000000000000000" + "03000000" + "02000000" + "0300000000000000" +
	"0000000000000000" + "0102000000000000" +
	"0200000000000000" + "0201000000000000" +
	"0a00000000000000" + "0103000000000000" +
	"0100000000000000000000000000000000000000000000000000000000000000" + "00800000" +
	"0200000000000000000000000000000000000000000000000000000000000000" + "00200000" +
	"00000000" + "0300" + "0200" +
	"01000000" + "0000" + "0200" +
	"00000000" + "0000" + "0100"

func TestMapBytes(t *testing.T) {
	for want, m := range map[string]*pageMap{sampleHex: sampleMap(), spansHex: sampleSpans()} {
		b := m.encode()
		if got := hex.EncodeToString(b); got != want {
			t.Errorf("encode:\n%s, want\n%s", got, want)
		}
		if int64(len(b)) != m.encodedBytes() {
			t.Errorf("%d bytes, not %d", len(b), m.encodedBytes())
		}
		back, err := decodeMap(b)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(m, back, unexported); diff != "" {
			t.Error(diff)
		}
	}
}

// What version 1 can say is said in it: such layers keep their names.
func TestReferWhole(t *testing.T) {
	m := sampleMap()
	m.refer([]chunkPart{{m.chunks[0], 0, 4096}, {m.chunks[0], 4096, 2 * 4096}, {m.chunks[1], 0, 2 * 4096}})
	if diff := cmp.Diff(sampleMap(), m, unexported); diff != "" {
		t.Error(diff)
	}
}

func TestDecodeSpansRefuses(t *testing.T) {
	const chunks = 72 + 3*16
	const spans = chunks + 2*36
	swap := func(b []byte, at, with, n int) []byte {
		for i := range n {
			b[at+i], b[with+i] = b[with+i], b[at+i]
		}
		return b
	}
	for name, tc := range map[string]struct {
		change func(b []byte) []byte
		want   string
	}{
		"version 3":         {func(b []byte) []byte { b[8] = 3; return b }, "version 3"},
		"version 1":         {func(b []byte) []byte { b[8] = 1; return b }, "announces"},
		"no count":          {func(b []byte) []byte { return b[:70] }, "announces"},
		"truncated":         {func(b []byte) []byte { return b[:len(b)-1] }, "announces"},
		"no spans":          {func(b []byte) []byte { b[64] = 0; return b[:spans] }, "version 1"},
		"many spans":        {func(b []byte) []byte { b[71] = 0xff; return b }, "announces"},
		"spans overflow":    {func(b []byte) []byte { b[71], b[64] = 0x20, 3; return b }, "announces"},
		"unknown chunk":     {func(b []byte) []byte { b[spans+8] = 2; return b }, "is of chunk 2"},
		"not first used":    {func(b []byte) []byte { return swap(b, spans, spans+8, 8) }, "is of chunk 1"},
		"empty":             {func(b []byte) []byte { b[spans+6] = 0; return b }, "not within its chunk"},
		"beyond its chunk":  {func(b []byte) []byte { b[spans+4] = 7; return b }, "not within its chunk"},
		"beyond any":        {func(b []byte) []byte { b[spans+5] = 1; return b }, "not within any chunk"},
		"too long":          {func(b []byte) []byte { b[spans+16+6] = 2; return b }, "not within its chunk"},
		"too short":         {func(b []byte) []byte { b[spans+6] = 1; return b }, "lack"},
		"unused chunk":      {func(b []byte) []byte { b[spans+8] = 0; return b }, "uses 1 of its 2"},
		"chunk twice":       {func(b []byte) []byte { b[chunks+36] = 1; return b }, "there twice"},
		"chunk empty":       {func(b []byte) []byte { putU32(b[chunks+32:], 0); return b }, "impossible length"},
		"chunk huge":        {func(b []byte) []byte { putU32(b[chunks+32:], 1<<31); return b }, "impossible length"},
		"chunk odd":         {func(b []byte) []byte { putU32(b[chunks+32:], 8*4096+1); return b }, "impossible length"},
		"all as a whole":    {func(b []byte) []byte { return wholeSpans() }, "version 1"},
		"spans should join": {func(b []byte) []byte { return splitSpans(b) }, "should be one"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := decodeMap(tc.change(sampleSpans().encode()))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}

// wholeSpans says in version 2 what version 1 can.
func wholeSpans() []byte {
	m := sampleMap()
	m.spans = []span{{0, 0, 3 * 4096}, {1, 0, 2 * 4096}}
	return m.encode()
}

func splitSpans([]byte) []byte {
	m := sampleSpans()
	first := m.spans[0]
	m.spans = append([]span{{0, first.in, 4096}, {0, first.in + 4096, 4096}}, m.spans[1:]...)
	return m.encode()
}

func TestDecodeMapRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(b []byte) []byte
		want   string
	}{
		"empty":            {func([]byte) []byte { return nil }, "too short"},
		"magic":            {func(b []byte) []byte { b[0] = 'x'; return b }, "not a layer map"},
		"version":          {func(b []byte) []byte { b[8] = 3; return b }, "version 3"},
		"page size":        {func(b []byte) []byte { b[12] = 1; return b }, "page size"},
		"page size 0":      {func(b []byte) []byte { b[13] = 0; return b }, "page size"},
		"size 0":           {func(b []byte) []byte { clear(b[16:24]); return b }, "size 0"},
		"size huge":        {func(b []byte) []byte { b[23] = 0xff; return b }, "size"},
		"size odd":         {func(b []byte) []byte { b[16] = 1; return b }, "size"},
		"truncated":        {func(b []byte) []byte { return b[:len(b)-1] }, "announces"},
		"longer":           {func(b []byte) []byte { return append(b, 0) }, "announces"},
		"runs overflow":    {func(b []byte) []byte { putU32(b[56:], 1<<32-1); putU32(b[60:], 1<<32-1); return b }, "announces"},
		"run kind":         {func(b []byte) []byte { b[64+8] = 3; return b }, "unknown kind"},
		"run first sign":   {func(b []byte) []byte { b[64+7] = 0x80; return b }, "unknown kind"},
		"run empty":        {func(b []byte) []byte { b[64+9] = 0; return b }, "not within"},
		"run beyond":       {func(b []byte) []byte { b[64+32+1] = 1; return b }, "not within"},
		"run count huge":   {func(b []byte) []byte { b[64+15] = 0xff; return b }, "not within"},
		"runs overlap":     {func(b []byte) []byte { b[64+16] = 1; return b }, "come after"},
		"runs should join": {func(b []byte) []byte { b[64+16+8] = 1; return b }, "should be one"},
		"chunk empty":      {func(b []byte) []byte { putU32(b[64+48+32:], 0); return b }, "impossible length"},
		"chunk huge":       {func(b []byte) []byte { putU32(b[64+48+32:], 1<<31); return b }, "impossible length"},
		"chunk odd":        {func(b []byte) []byte { putU32(b[64+48+32:], 4097); return b }, "impossible length"},
		"chunks too long":  {func(b []byte) []byte { putU32(b[64+48+32:], 4*4096); return b }, "impossible length"},
		"chunks too short": {func(b []byte) []byte { putU32(b[64+48+32:], 4096); return b }, "lack"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := decodeMap(tc.change(sampleMap().encode()))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
		})
	}
}

func putU32(b []byte, v uint32) { binary.LittleEndian.PutUint32(b, v) }

func FuzzDecodeMap(f *testing.F) {
	f.Add(sampleMap().encode())
	f.Add(sampleSpans().encode())
	f.Add((&pageMap{pageSize: 65536, size: 65536}).encode())
	f.Add([]byte(mapMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMap(b)
		if err != nil {
			return
		}
		if !bytes.Equal(m.encode(), b) {
			t.Fatal("one map has two encodings")
		}
		st := &Stack{}
		if err := st.below(m); err != nil {
			t.Fatal(err)
		}
		var p plan
		var sum int64
		for _, r := range st.runs {
			if r.offset < 0 || r.length <= 0 || r.end() > m.size {
				t.Fatalf("run %+v outside of %d bytes", r, m.size)
			}
			if !r.zero {
				p.add(st, r, r.offset)
			}
		}
		for _, u := range p.chunks {
			for _, part := range u.parts {
				if part.in < 0 || part.length <= 0 || part.in+part.length > u.chunk.length || part.to+part.length > m.size {
					t.Fatalf("part %+v of a chunk of %d bytes", part, u.chunk.length)
				}
				sum += part.length
			}
		}
		if sum != m.dataBytes() {
			t.Fatalf("parts hold %d bytes, runs %d", sum, m.dataBytes())
		}
	})
}

func TestCutAgreesWithPlan(t *testing.T) {
	const page = 4096
	m := &pageMap{pageSize: page, size: 64 << 20}
	for first := int64(0); first < m.size/page-700; {
		count := 1 + first*7%600
		m.runs = append(m.runs, run{first: first, count: count, zero: first%5 == 3})
		first += count + 1 + first%3
	}
	var ranges []dataRange
	for _, r := range m.runs {
		if !r.zero {
			ranges = append(ranges, dataRange{sourceRun: sourceRun{offset: r.first * page, length: r.count * page}})
		}
	}
	a := arrange(ranges, true)
	chunks := make([]chunkRef, len(a.pieces))
	for i, p := range a.pieces {
		if p.length > maxChunk {
			t.Errorf("a piece of %d bytes", p.length)
		}
		if first, last := p.parts[0], p.parts[len(p.parts)-1]; first.offset/window != last.offset/window {
			t.Errorf("a piece from %d to %d crosses a window", first.offset, last.offset)
		}
		chunks[i] = chunkRef{Digest{byte(i), byte(i >> 8)}, p.length} // all different
	}
	m.refer(a.parts(chunks))
	if m.spans != nil {
		t.Error("pieces are not used as a whole")
	}
	if most := a.encodedBytes(m); most < m.encodedBytes() {
		t.Errorf("%d bytes were foreseen, it has %d", most, m.encodedBytes())
	}
	if err := m.check(); err != nil {
		t.Fatal(err)
	}
	st := &Stack{}
	if err := st.below(m); err != nil {
		t.Fatal(err)
	}
	var p plan
	for _, r := range st.runs {
		if !r.zero {
			p.add(st, r, r.offset)
		}
	}
	for i, u := range p.chunks {
		want := a.pieces[i].parts
		if u.chunk != chunks[i] || len(u.parts) != len(want) {
			t.Fatalf("chunk %d is read in %d parts, cut in %d", i, len(u.parts), len(want))
		}
		for k, part := range u.parts {
			if part.to != want[k].offset || part.length != want[k].length {
				t.Errorf("chunk %d: part %+v was cut as %+v", i, part, want[k])
			}
		}
	}
	// A layer that stands alone is cut anew as it was.
	again := arrange(st.wholeRanges(), true)
	for _, s := range again.spans {
		if s.piece >= 0 && again.pieces[s.piece].length >= minKept || s.piece < 0 && s.part.length != s.part.chunk.length {
			t.Errorf("it is cut anew: %+v", s)
		}
	}
}

func TestParseDigest(t *testing.T) {
	d := Digest{1, 2, 0xfe}
	got, err := ParseDigest(d.String())
	if err != nil || got != d {
		t.Errorf("ParseDigest(%s) = %s, %v", d, got, err)
	}
	for _, s := range []string{"", "00", strings.Repeat("A", 64), strings.Repeat("g", 64), "../" + strings.Repeat("0", 61)} {
		if _, err := ParseDigest(s); err == nil {
			t.Errorf("ParseDigest(%q) was accepted", s)
		}
	}
	for _, d := range []Digest{{}, d} {
		text, err := d.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		back := Digest{9}
		if err := back.UnmarshalText(text); err != nil || back != d {
			t.Errorf("text %q of %s reads as %s, %v", text, d, back, err)
		}
	}
}
