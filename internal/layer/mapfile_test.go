package layer

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var unexported = cmp.AllowUnexported(pageMap{}, run{}, chunkRef{}, piece{}, segment{})

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

func TestMapBytes(t *testing.T) {
	b := sampleMap().encode()
	if got := hex.EncodeToString(b); got != sampleHex {
		t.Errorf("encode:\n%s, want\n%s", got, sampleHex)
	}
	m, err := decodeMap(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sampleMap(), m, unexported); diff != "" {
		t.Error(diff)
	}
}

func TestDecodeMapRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(b []byte) []byte
		want   string
	}{
		"empty":            {func([]byte) []byte { return nil }, "too short"},
		"magic":            {func(b []byte) []byte { b[0] = 'x'; return b }, "not a layer map"},
		"version":          {func(b []byte) []byte { b[8] = 2; return b }, "version 2"},
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
	cuts := cut(m.runs, page)
	for _, p := range cuts {
		if p.length > maxChunk {
			t.Errorf("a piece of %d bytes", p.length)
		}
		if first, last := p.segments[0], p.segments[len(p.segments)-1]; first.offset/window != last.offset/window {
			t.Errorf("a piece from %d to %d crosses a window", first.offset, last.offset)
		}
		m.chunks = append(m.chunks, chunkRef{length: p.length})
	}
	if err := m.check(); err != nil {
		t.Fatal(err)
	}
	st := &Stack{}
	if err := st.below(m); err != nil {
		t.Fatal(err)
	}
	var p plan
	for i := range m.chunks {
		m.chunks[i].digest[0], m.chunks[i].digest[1] = byte(i), byte(i>>8) // all different
	}
	for _, r := range st.runs {
		if !r.zero {
			p.add(st, r, r.offset)
		}
	}
	var planned []piece
	for _, u := range p.chunks {
		planned = append(planned, piece{length: u.chunk.length})
		for _, part := range u.parts {
			last := &planned[len(planned)-1]
			last.segments = append(last.segments, segment{part.to, part.length})
		}
	}
	if diff := cmp.Diff(cuts, planned, unexported); diff != "" {
		t.Error(diff)
	}
	// A layer that stands alone is cut anew as it was.
	for i, p := range st.recut() {
		if p.reuse == nil && p.length >= minReuse || p.length != cuts[i].length {
			t.Errorf("piece %d of %d bytes is cut anew: %+v", i, cuts[i].length, p)
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
