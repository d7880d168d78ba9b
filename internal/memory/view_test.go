package memory

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
)

// pagesOf makes pages of runs of b: page numbers, counts, and whether they are marked zero.
func pagesOf(tb testing.TB, b []byte, runs []layer.Extent) *Pages {
	tb.Helper()
	p := &Pages{size: int64(len(b))}
	var data []byte
	for _, e := range runs {
		r := pageRun{offset: e.Offset, length: e.Length, zero: e.Zero}
		if !e.Zero {
			r.at = int64(len(data))
			data = append(data, b[e.Offset:e.Offset+e.Length]...)
		}
		p.index = append(p.index, r)
	}
	p.data = int64(len(data))
	f, err := createMemfd("forkd-pages", max(p.data, PageSize))
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := f.WriteAt(data, 0); err != nil {
		tb.Fatal(err)
	}
	p.file = f
	tb.Cleanup(func() { _ = p.Close() })
	return p
}

// change rewrites some pages of b, some with zeros, some with what they hold, and says which.
func change(r *rand.Rand, b []byte) []layer.Extent {
	pages := int64(len(b) / PageSize)
	var touched []layer.Extent
	for i := r.Int64N(8); i < pages; {
		n := min(1+r.Int64N(12), pages-i)
		e := layer.Extent{Offset: i * PageSize, Length: n * PageSize}
		part := b[e.Offset : e.Offset+e.Length]
		switch r.IntN(4) {
		case 0:
			clear(part)
			e.Zero = r.IntN(2) == 0
		case 1: // written, with what was there
		default:
			for j := 0; j < len(part); j += PageSize {
				part[j+r.IntN(PageSize)] = byte(r.Uint32())
			}
		}
		touched = append(touched, e)
		i += n + r.Int64N(40)
	}
	return touched
}

func mustSaveView(tb testing.TB, s *layer.Store, v View, named []layer.Extent, parent layer.Digest, pv *View) layer.Info {
	tb.Helper()
	info, err := SaveView(tb.Context(), s, v, named, parent, pv)
	if err != nil {
		tb.Fatal(err)
	}
	return info
}

// A chain of branches, each taken as own pages over the root's image and as a flat image: both give the same layer, and
// every way to read it gives what it was.
func TestChainOfViews(t *testing.T) {
	const size = 24 << 20
	r := rand.New(rand.NewPCG(5, 5))
	s := openStore(t)
	now := content(9, size)
	root := imageOf(t, now)
	filled := root.AllocatedBytes()
	d := []layer.Digest{mustSaveView(t, s, View{Image: root}, nil, layer.Digest{}, nil).Digest}
	parent := View{Image: root}
	var own []bool = make([]bool, size/PageSize)
	for depth := range 5 {
		before := bytes.Clone(now)
		for _, e := range change(r, now) {
			for i := e.Offset; i < e.Offset+e.Length; i += PageSize {
				own[i/PageSize] = true
			}
		}
		var runs, zeroMarked []layer.Extent
		for i, is := range own {
			if !is {
				continue
			}
			e := layer.Extent{Offset: int64(i) * PageSize, Length: PageSize}
			runs = appendExtent(runs, e)
			e.Zero = r.IntN(2) == 0 && bytes.Equal(now[e.Offset:e.Offset+PageSize], make([]byte, PageSize))
			zeroMarked = appendExtent(zeroMarked, e)
		}
		v := View{root, pagesOf(t, now, zeroMarked)}
		if !bytes.Equal(readView(t, v), now) {
			t.Fatal("the view is not what it was made of")
		}
		info := mustSaveView(t, s, v, runs, d[depth], &parent)
		if again := mustSaveView(t, s, v, nil, d[depth], &parent); again != info {
			t.Errorf("without names %+v, with %+v", again, info)
		}
		flat := imageOf(t, now)
		if again := mustSaveView(t, s, View{Image: flat}, nil, d[depth], &parent); again != info {
			t.Errorf("flat %+v, as a view %+v", again, info)
		}
		flatParent := View{Image: imageOf(t, before)}
		if again := mustSaveView(t, s, v, runs, d[depth], &flatParent); again != info {
			t.Errorf("over a flat parent %+v, over its view %+v", again, info)
		}
		extents, err := s.Extents(t.Context(), info.Digest)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range extents {
			for i := e.Offset; i < e.Offset+e.Length; i += PageSize {
				page := now[i : i+PageSize]
				if bytes.Equal(page, before[i:i+PageSize]) {
					t.Fatalf("the page at %d did not change", i)
				}
				if zero := bytes.Equal(page, make([]byte, PageSize)); zero != e.Zero {
					t.Fatalf("the page at %d is zero: %t, named so: %t", i, zero, e.Zero)
				}
			}
		}
		d = append(d, info.Digest)
		if !bytes.Equal(read(t, mustLoad(t, s, info.Digest)), now) {
			t.Fatal("loaded, it is something else")
		}
		for i, over := range d {
			pages, err := LoadPages(t.Context(), s, info.Digest, over)
			if err != nil {
				t.Fatal(err)
			}
			defer pages.Close()
			base := mustLoad(t, s, over)
			if !bytes.Equal(readView(t, View{base, pages}), now) {
				t.Fatalf("pages over layer %d are something else", i)
			}
		}
		img, err := Flatten(t.Context(), v)
		if err != nil {
			t.Fatal(err)
		}
		defer img.Close()
		if !bytes.Equal(read(t, img), now) {
			t.Fatal("flattened, it is something else")
		}
		wantImmutable(t, img)
		merged, err := s.Merge(t.Context(), info.Digest, d[0])
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(read(t, mustLoad(t, s, merged.Digest)), now) {
			t.Fatal("merged, it is something else")
		}
		parent = v
	}
	if n := root.AllocatedBytes(); n != filled {
		t.Errorf("reading the image filled its holes: it had %d bytes, now %d", filled, n)
	}
}

func TestSaveViewWritesNothingForNothing(t *testing.T) {
	s := openStore(t)
	img := imageOf(t, content(1, 8<<20))
	root := mustSaveView(t, s, View{Image: img}, nil, layer.Digest{}, nil)
	info := mustSaveView(t, s, View{Image: img}, nil, root.Digest, &View{Image: img})
	if extents, err := s.Extents(t.Context(), info.Digest); err != nil || len(extents) != 0 {
		t.Errorf("got %v, %v", extents, err)
	}
	pages, err := LoadPages(t.Context(), s, info.Digest, root.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer pages.Close()
	if pages.Bytes() != 0 || !bytes.Equal(readView(t, View{img, pages}), read(t, img)) {
		t.Error("no pages are something")
	}
	if _, err := LoadPages(t.Context(), s, root.Digest, info.Digest); err == nil {
		t.Error("over a descendant")
	}
	if _, err := LoadPages(t.Context(), s, layer.Digest{1}, root.Digest); !errors.Is(err, layer.ErrNotFound) {
		t.Errorf("unknown: %v", err)
	}
	other := imageOf(t, make([]byte, 1<<20))
	if _, err := SaveView(t.Context(), s, View{Image: other}, nil, root.Digest, &View{Image: img}); err == nil {
		t.Error("a parent of another size")
	}
	if _, err := SaveView(t.Context(), s, View{Image: img}, nil, root.Digest, nil); err == nil {
		t.Error("a parent without its memory")
	}
	if _, err := SaveView(t.Context(), s, View{img, pagesOf(t, make([]byte, 1<<20), nil)}, nil, layer.Digest{}, nil); err == nil {
		t.Error("pages of another size")
	}
	if _, err := SaveView(t.Context(), s, View{Image: img}, []layer.Extent{{Offset: 1, Length: 1}}, layer.Digest{}, nil); err == nil {
		t.Error("no whole pages")
	}
}

// Whoever reads pages may go on when they are closed, as with an image.
func TestPagesCloseWhileRead(t *testing.T) {
	b := content(4, 1<<20)
	p := pagesOf(t, b, []layer.Extent{{Length: 1 << 20}})
	data, release, err := p.hold()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(data, b) {
		t.Error("the data is gone")
	}
	if _, err := (View{imageOf(t, b), p}).ReadAt(make([]byte, 1), 0); !errors.Is(err, ErrClosed) {
		t.Errorf("closed pages were read: %v", err)
	}
	release()
	release()
	if !p.freed || p.mapped != nil {
		t.Error("the memory was not freed")
	}
}

// FuzzLayout: pages over the allocated parts of an image, against an array.
func FuzzLayout(f *testing.F) {
	f.Add([]byte{0, 3, 2, 4}, []byte{1, 2, 0, 2, 1, 1})
	f.Add([]byte{}, []byte{0, 1, 1})
	f.Fuzz(func(t *testing.T, image, pages []byte) {
		var model [512]int64 // 0: zero, -1: the image's, else 1 + place in the pages
		var list []layer.Extent
		end := int64(0)
		for ; len(image) >= 2; image = image[2:] {
			first, n := end+int64(image[0]%16), int64(image[1]%16)+1
			if end = first + n; end > 512 {
				break
			}
			list = append(list, layer.Extent{Offset: first * PageSize, Length: n * PageSize})
			for i := first; i < end; i++ {
				model[i] = -1
			}
			end++
		}
		var index []pageRun
		end = 0
		at := int64(0)
		for ; len(pages) >= 3; pages = pages[3:] {
			first, n := end+int64(pages[0]%16), int64(pages[1]%16)+1
			if end = first + n; end > 512 {
				break
			}
			zero := pages[2]%2 == 1
			index = append(index, pageRun{offset: first * PageSize, length: n * PageSize, zero: zero, at: at})
			for i := first; i < end; i++ {
				model[i] = 0
				if !zero {
					model[i] = 1 + at
					at += PageSize
				}
			}
		}
		var got [512]int64
		last := int64(0)
		for _, p := range layout(list, index) {
			if p.offset < last || p.length <= 0 {
				t.Fatalf("part %+v after %d", p, last)
			}
			last = p.offset + p.length
			for i := int64(0); i < p.length; i += PageSize {
				got[(p.offset+i)/PageSize] = -1
				if p.pages {
					got[(p.offset+i)/PageSize] = 1 + p.at + i
				}
			}
		}
		if d := cmp.Diff(model, got); d != "" {
			t.Error(d)
		}
	})
}

func BenchmarkFlatten(b *testing.B) {
	img := imageOf(b, benchContent())
	b.SetBytes(img.AllocatedBytes())
	for b.Loop() {
		flat, err := Flatten(b.Context(), View{Image: img})
		if err != nil {
			b.Fatal(err)
		}
		if err := flat.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// filled is an image of random data of which every page is allocated, and another with some of it changed.
func filled(b *testing.B, size, changed int64) (img, other *Image) {
	b.Helper()
	list := make([]*Image, 2)
	for i := range list {
		s, err := NewScratch(size)
		if err != nil {
			b.Fatal(err)
		}
		r := rand.NewChaCha8([32]byte{1})
		buf := make([]byte, 1<<20)
		_, _ = r.Read(buf)
		for off := int64(0); off < size; off += int64(len(buf)) {
			buf[0] = byte(off >> 20)
			if _, err := s.File().WriteAt(buf, off); err != nil {
				b.Fatal(err)
			}
			if i == 1 && off < 2*changed {
				if _, err := s.File().WriteAt(bytes.Repeat([]byte{3}, len(buf)/2), off); err != nil {
					b.Fatal(err)
				}
			}
		}
		if list[i], err = s.Seal(); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = list[i].Close() })
	}
	return list[0], list[1]
}

// What a live capture needs: 1.5 GiB, all in use, 64 MiB changed.
func BenchmarkDiffering(b *testing.B) {
	img, other := filled(b, 1536<<20, 64<<20)
	for b.Loop() {
		now, err := View{Image: other}.open(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		was, err := View{Image: img}.open(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		list, err := now.differing(b.Context(), was, nil)
		if err != nil {
			b.Fatal(err)
		}
		if n := extentBytes(list); n != 64<<20 {
			b.Fatalf("%d bytes differ", n)
		}
		if err := errors.Join(now.close(), was.close()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSaveView(b *testing.B) {
	img, other := filled(b, 1536<<20, 64<<20)
	s := openStore(b)
	rootInfo, err := s.Write(b.Context(), layer.WriteSpec{PageSize: PageSize, Size: img.Size()}) // stands for img's
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := SaveView(b.Context(), s, View{Image: other}, nil, rootInfo.Digest, &View{Image: img}); err != nil {
			b.Fatal(err)
		}
	}
}

// Ten links that each rewrote the same 16 MiB and 2 MiB of others, or one with as much.
func BenchmarkLoadPages(b *testing.B) {
	const size = 512 << 20
	s := openStore(b)
	root, err := s.Write(b.Context(), layer.WriteSpec{PageSize: PageSize, Size: size})
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 36<<20)
	r := rand.NewChaCha8([32]byte{3})
	write := func(parent layer.Digest, extents []layer.Extent) layer.Digest {
		_, _ = r.Read(buf[:len(buf)/2])
		info, err := s.Write(b.Context(), layer.WriteSpec{
			PageSize: PageSize, Size: size, Parent: parent, Extents: extents, From: repeated(buf),
		})
		if err != nil {
			b.Fatal(err)
		}
		return info.Digest
	}
	top := root.Digest
	for i := range int64(10) {
		top = write(top, []layer.Extent{{Length: 16 << 20}, {Offset: 32<<20 + i*2<<20, Length: 2 << 20}})
	}
	one := write(root.Digest, []layer.Extent{{Length: 16 << 20}, {Offset: 32 << 20, Length: 20 << 20}})
	for _, tc := range []struct {
		name string
		d    layer.Digest
	}{{"10", top}, {"1", one}} {
		b.Run(tc.name, func(b *testing.B) {
			for b.Loop() {
				p, err := LoadPages(b.Context(), s, tc.d, root.Digest)
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(p.Bytes())
				if err := p.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

type repeated []byte

func (r repeated) ReadAt(p []byte, off int64) (int, error) {
	for n := 0; n < len(p); {
		n += copy(p[n:], r[(off+int64(n))%int64(len(r)):])
	}
	return len(p), nil
}

// Writing 64 MiB of pages into a child that has not run.
func BenchmarkWrite(b *testing.B) {
	const size = 512 << 20
	img := imageOf(b, make([]byte, size))
	data := make([]byte, size)
	pages := pagesOf(b, data, []layer.Extent{{Length: 32 << 20}, {Offset: 64 << 20, Length: 32 << 20}})
	var spent time.Duration
	for b.Loop() {
		m, err := unix.Mmap(int(img.File().Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			b.Fatal(err)
		}
		p := openSelf(b, size)
		start := time.Now()
		if err := p.Write(b.Context(), pages); err != nil {
			b.Fatal(err)
		}
		spent += time.Since(start)
		if err := unix.Munmap(m); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(spent.Seconds()*1e3/float64(b.N), "ms/write")
}
