package memory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"sync"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layer"
)

// Pages is a set of whole pages of a guest's memory that stand over an image: the pages of a layer, or those a machine
// has of its own. It names each explicitly, as data or as zero; what it does not name is the image's. It is immutable
// and safe for concurrent use.
type Pages struct {
	size  int64
	index []pageRun // ascending, not overlapping
	data  int64     // bytes of data pages

	mu     sync.Mutex
	users  int  // who reads the memory now
	closed bool // it goes when the last of them is done
	freed  bool
	// The data pages, end to end: one of the two.
	file   *os.File // a sealed memfd
	region []byte   // memory that a copy was made into, maybe with room to spare

	mapped []byte // the data, once it was asked for
}

// pageRun is a run of pages and the place of its data in the file.
type pageRun struct {
	offset, length int64
	zero           bool
	at             int64 // in the data, unless zero
}

// Size is the size of the guest's RAM in bytes.
func (p *Pages) Size() int64 { return p.size }

// Bytes is what the data pages take.
func (p *Pages) Bytes() int64 { return p.data }

// Extents lists the pages, ascending.
func (p *Pages) Extents() []layer.Extent {
	list := make([]layer.Extent, len(p.index))
	for i, r := range p.index {
		list[i] = layer.Extent{Offset: r.offset, Length: r.length, Zero: r.zero}
	}
	return list
}

// find returns the run that covers off, or else the next one; its index is len(p.index) when there is none.
func (p *Pages) find(off int64) int {
	return sort.Search(len(p.index), func(i int) bool { return p.index[i].offset+p.index[i].length > off })
}

// Close frees the memory, once nobody reads it any more. It is idempotent.
func (p *Pages) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	return p.free()
}

// free is called with mu held.
func (p *Pages) free() error {
	if !p.closed || p.users > 0 || p.freed {
		return nil
	}
	p.freed = true
	if p.file == nil {
		p.mapped = nil // a part of the region
		return unmapRegion(&p.region)
	}
	return errors.Join(unmap(&p.mapped), p.file.Close())
}

// Seal makes the memory immutable and frees what it does not need. Everything that reads the pages does it by itself;
// it is no part of a copy because it takes time, which a pause has not.
func (p *Pages) Seal() error {
	_, release, err := p.hold()
	if err != nil {
		return err
	}
	release()
	return nil
}

// hold returns the data pages, end to end, which stay until release is called.
func (p *Pages) hold() (data []byte, release func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, nil, ErrClosed
	}
	if err := p.settle(); err != nil {
		return nil, nil, err
	}
	p.users++
	return p.mapped, sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.users--
		_ = p.free() // of memory: there is nobody to tell, and nothing to do about it
	}), nil
}

// settle has the data in memory, which cannot be written any more. It is called with mu held.
func (p *Pages) settle() error {
	if p.mapped != nil || p.data == 0 {
		return nil
	}
	if p.file == nil {
		var err error
		if p.region, err = cutRegion(p.region, p.data); err != nil {
			return err
		}
		if err := unix.Mprotect(p.region, unix.PROT_READ); err != nil {
			return err
		}
		p.mapped = p.region
		return nil
	}
	m, err := mapFile(p.file, p.data, false, unix.MAP_POPULATE)
	if err != nil {
		return err
	}
	p.mapped = m
	return nil
}

// View is a guest's memory as an image with pages over it. It owns neither.
type View struct {
	Image *Image
	Pages *Pages // nil: none
}

// Size is the size of the guest's RAM in bytes.
func (v View) Size() int64 { return v.Image.Size() }

// ReadAt reads the memory like io.ReaderAt.
func (v View) ReadAt(b []byte, off int64) (int, error) {
	if v.Pages == nil {
		return v.Image.ReadAt(b, off)
	}
	if off < 0 || off > v.Size() {
		return 0, fmt.Errorf("read memory at %d: it has %d bytes", off, v.Size())
	}
	data, release, err := v.Pages.hold()
	if err != nil {
		return 0, err
	}
	defer release()
	done := 0
	for done < len(b) && off+int64(done) < v.Size() {
		n, err := v.readPart(b[done:], off+int64(done), data)
		done += n
		if err != nil {
			return done, err
		}
	}
	if done < len(b) {
		return done, io.EOF
	}
	return done, nil
}

// readPart reads as far as one run, or the gap before the next, reaches.
func (v View) readPart(b []byte, off int64, data []byte) (int, error) {
	i := v.Pages.find(off)
	if i == len(v.Pages.index) {
		return full(v.Image.ReadAt(b[:min(int64(len(b)), v.Size()-off)], off))
	}
	r := v.Pages.index[i]
	if off < r.offset {
		return full(v.Image.ReadAt(b[:min(int64(len(b)), r.offset-off)], off))
	}
	b = b[:min(int64(len(b)), r.offset+r.length-off)]
	if r.zero {
		clear(b)
		return len(b), nil
	}
	return copy(b, data[r.at+off-r.offset:]), nil
}

// full forgives an end of file that comes with everything asked for.
func full(n int, err error) (int, error) {
	if errors.Is(err, io.EOF) && n > 0 {
		err = nil
	}
	return n, err
}

// LoadPages builds the pages that layer d has over its ancestor over, from all layers between the two in one pass: each
// page comes from the topmost layer that names it, and each chunk is read once. Every chunk is verified; the error
// wraps layer.ErrCorrupt or layer.ErrNotFound. The caller owns the pages.
func LoadPages(ctx context.Context, store *layer.Store, d, over layer.Digest) (*Pages, error) {
	p, err := loadPages(ctx, store, d, over)
	if err != nil {
		return nil, fmt.Errorf("load memory pages %s: %w", d, err)
	}
	return p, nil
}

func loadPages(ctx context.Context, store *layer.Store, d, over layer.Digest) (*Pages, error) {
	st, err := resolve(ctx, store, d, over)
	if err != nil {
		return nil, err
	}
	p := &Pages{size: st.Size()}
	for _, e := range st.Extents() {
		r := pageRun{offset: e.Offset, length: e.Length, zero: e.Zero}
		if !e.Zero {
			r.at = p.data
			p.data += e.Length
		}
		p.index = append(p.index, r)
	}
	if p.file, err = createMemfd("forkd-pages", max(p.data, PageSize)); err != nil {
		return nil, err
	}
	err = st.Pack(ctx, p.file)
	if err == nil {
		err = seal(p.file)
	}
	if err != nil {
		return nil, errors.Join(NoRoom(err), p.Close())
	}
	return p, nil
}
