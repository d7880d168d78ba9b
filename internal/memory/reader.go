package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sort"

	"forkd.dev/forkd/internal/layer"
)

// reader is a View opened for reading much of it, without copying: the image and the pages are mapped. Holes of the
// image are known and never touched, because a touch would fill them.
type reader struct {
	size    int64
	image   []byte
	file    os.FileInfo // which image it is
	pages   []byte
	release func()
	parts   []viewPart // ascending; what no part covers is zero
}

// viewPart is a range of memory that lies in one place.
type viewPart struct {
	offset, length int64
	pages          bool
	at             int64 // in pages; in the image it is the offset
}

func (v View) open(ctx context.Context) (*reader, error) {
	r := &reader{size: v.Size(), release: func() {}}
	if err := r.open(ctx, v); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

func (r *reader) open(ctx context.Context, v View) error {
	f, err := v.Image.Dup()
	if err != nil {
		return err
	}
	defer f.Close()
	if r.file, err = f.Stat(); err != nil {
		return err
	}
	if r.image, err = mapFile(f, r.size, false, 0); err != nil {
		return err
	}
	list, err := allocated(ctx, f, r.size)
	if err != nil {
		return err
	}
	var index []pageRun
	if v.Pages != nil {
		if v.Pages.size != r.size {
			return fmt.Errorf("pages of a memory of %d bytes over an image of %d", v.Pages.size, r.size)
		}
		if r.pages, r.release, err = v.Pages.hold(); err != nil {
			r.release = func() {}
			return err
		}
		index = v.Pages.index
	}
	r.parts = layout(list, index)
	return nil
}

// layout puts pages over the allocated parts of an image.
func layout(image []layer.Extent, index []pageRun) []viewPart {
	parts := make([]viewPart, 0, len(image)+2*len(index))
	below := func(end int64) { // what of the image comes before end
		for len(image) > 0 && image[0].Offset < end {
			n := min(image[0].Length, end-image[0].Offset)
			parts = append(parts, viewPart{offset: image[0].Offset, length: n})
			if image[0].Length -= n; image[0].Length == 0 {
				image = image[1:]
			} else {
				image[0].Offset += n
			}
		}
	}
	for _, p := range index {
		below(p.offset)
		for len(image) > 0 && image[0].Offset < p.offset+p.length {
			n := min(image[0].Length, p.offset+p.length-image[0].Offset)
			image[0].Offset += n
			if image[0].Length -= n; image[0].Length == 0 {
				image = image[1:]
			}
		}
		if !p.zero {
			parts = append(parts, viewPart{offset: p.offset, length: p.length, pages: true, at: p.at})
		}
	}
	below(1 << 62)
	return parts
}

func (r *reader) close() error {
	r.release()
	return unmap(&r.image)
}

// at returns the memory from off on, as far as it lies in one place but at most n bytes, and which part that is: both
// nil where there is nothing, and so zeros.
func (r *reader) at(off, n int64) (b []byte, length int64, from *viewPart) {
	i := sort.Search(len(r.parts), func(i int) bool { return r.parts[i].offset+r.parts[i].length > off })
	if i == len(r.parts) {
		return nil, n, nil
	}
	p := &r.parts[i]
	if p.offset > off {
		return nil, min(n, p.offset-off), nil
	}
	n = min(n, p.offset+p.length-off)
	if p.pages {
		at := p.at + off - p.offset
		return r.pages[at : at+n], n, p
	}
	return r.image[off : off+n], n, p
}

// ReadAt reads within the memory.
func (r *reader) ReadAt(b []byte, off int64) (int, error) {
	if off < 0 || int64(len(b)) > r.size-off {
		return 0, fmt.Errorf("read memory at %d: it has %d bytes", off, r.size)
	}
	for done := int64(0); done < int64(len(b)); {
		part, n, _ := r.at(off+done, int64(len(b))-done)
		if part == nil {
			clear(b[done : done+n])
		} else {
			copy(b[done:], part)
		}
		done += n
	}
	return len(b), nil
}
