package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"forkd.dev/forkd/internal/layer"
)

// Save stores an image as a layer. With a parent image, which must be that of the layer parent, only pages that differ
// from it are stored, and those that became zero are named as zero; without one all nonzero pages are. It returns when
// the layer is durable.
func Save(ctx context.Context, store *layer.Store, img *Image, parent layer.Digest, parentImage *Image) (layer.Info, error) {
	info, err := save(ctx, store, img, parent, parentImage)
	if err != nil {
		return layer.Info{}, fmt.Errorf("save memory image: %w", err)
	}
	return info, nil
}

func save(ctx context.Context, store *layer.Store, img *Image, parent layer.Digest, parentImage *Image) (layer.Info, error) {
	if parentImage == nil {
		return saveView(ctx, store, View{Image: img}, nil, parent, nil, nil)
	}
	return saveView(ctx, store, View{Image: img}, nil, parent, &View{Image: parentImage}, nil)
}

// SaveView stores a view as a layer over parent, whose memory parentView is; for a root, which has no parent, it is nil.
// Of the pages in named, or of all when it is nil, the layer holds those that differ from the parent's; those that are
// zero now it names as zero. Where named is given, the caller knows that all others are equal. Content is compared as
// it is, not by digest, and what both have of one image is not looked at. It returns when the layer is durable.
func SaveView(ctx context.Context, store *layer.Store, v View, named []layer.Extent, parent layer.Digest, parentView *View) (layer.Info, error) {
	return SaveLike(ctx, store, v, named, parent, parentView, nil)
}

// SaveLike is SaveView, but pages that one of like has too, other memories, are not stored again, wherever in it they are: for what
// has much in common with what it does not stand on.
func SaveLike(ctx context.Context, store *layer.Store, v View, named []layer.Extent, parent layer.Digest, parentView *View,
	like []layer.Digest,
) (layer.Info, error) {
	info, err := saveView(ctx, store, v, named, parent, parentView, like)
	if err != nil {
		return layer.Info{}, fmt.Errorf("save memory: %w", err)
	}
	return info, nil
}

func saveView(ctx context.Context, store *layer.Store, v View, named []layer.Extent, parent layer.Digest, parentView *View,
	like []layer.Digest,
) (_ layer.Info, err error) {
	if parent.IsZero() != (parentView == nil) {
		return layer.Info{}, errors.New("a parent layer and its memory must be given together")
	}
	if err := checkExtents(named, v.Size()); err != nil {
		return layer.Info{}, err
	}
	r, err := v.open(ctx)
	if err != nil {
		return layer.Info{}, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	base := &reader{size: r.size, release: func() {}}
	if parentView != nil {
		if parentView.Size() != v.Size() {
			return layer.Info{}, fmt.Errorf("its size is %d bytes, that of the parent %d", v.Size(), parentView.Size())
		}
		if base, err = parentView.open(ctx); err != nil {
			return layer.Info{}, fmt.Errorf("parent: %w", err)
		}
		defer func() { err = errors.Join(err, base.close()) }()
	}
	extents, err := r.differing(ctx, base, named)
	if err != nil {
		return layer.Info{}, err
	}
	return store.Write(ctx, layer.WriteSpec{PageSize: PageSize, Size: r.size, Parent: parent, Extents: extents, From: r, Like: like})
}

// differing lists those of the named pages, or of all, that are not as in base.
func (r *reader) differing(ctx context.Context, base *reader, named []layer.Extent) ([]layer.Extent, error) {
	if named == nil {
		named = []layer.Extent{{Length: r.size}}
	}
	// The cores share pieces of it; what they find is put together in order.
	const most = 4 << 20
	var pieces []layer.Extent
	for _, e := range named {
		for ; e.Length > 0; e.Offset, e.Length = e.Offset+most, e.Length-most {
			pieces = append(pieces, layer.Extent{Offset: e.Offset, Length: min(e.Length, most)})
		}
	}
	found := make([][]layer.Extent, len(pieces))
	err := inBackground(ctx, len(pieces), func(i int) error {
		found[i] = r.compare(base, pieces[i].Offset, pieces[i].Offset+pieces[i].Length)
		return nil
	})
	if err != nil {
		return nil, err
	}
	var extents []layer.Extent
	for _, list := range found {
		for _, e := range list {
			extents = appendExtent(extents, e)
		}
	}
	return extents, nil
}

// compare lists the pages from off to end that are not as in base.
func (r *reader) compare(base *reader, off, end int64) []layer.Extent {
	var list []layer.Extent
	var zero [PageSize]byte
	same := r.file != nil && base.file != nil && os.SameFile(r.file, base.file)
	for off < end {
		now, n, from := r.at(off, end-off)
		was, n, below := base.at(off, n)
		at := off
		off += n
		switch {
		case now == nil && was == nil:
			continue
		case now != nil && was != nil && same && !from.pages && !below.pages:
			continue
		case now == nil:
			for i := int64(0); i < n; i += PageSize {
				if !bytes.Equal(was[i:i+PageSize], zero[:]) {
					list = appendExtent(list, layer.Extent{Offset: at + i, Length: PageSize, Zero: true})
				}
			}
			continue
		}
		now = now[:n]
		for i := int64(0); i < n; i += PageSize {
			page, old := now[i:i+PageSize], zero[:]
			if was != nil {
				old = was[i : i+PageSize]
			}
			if !bytes.Equal(page, old) {
				list = appendExtent(list, layer.Extent{Offset: at + i, Length: PageSize, Zero: bytes.Equal(page, zero[:])})
			}
		}
	}
	return list
}

// Load builds the image of a layer from all it stands on, and seals it. Every chunk is verified on the way; the error
// wraps layer.ErrCorrupt or layer.ErrNotFound. Memory the host does not have is an error too, not a signal: pages are
// written by pwrite, never through a mapping. The caller owns the image.
func Load(ctx context.Context, store *layer.Store, d layer.Digest) (*Image, error) {
	img, err := load(ctx, store, d)
	if err != nil {
		return nil, fmt.Errorf("load memory image %s: %w", d, err)
	}
	return img, nil
}

func load(ctx context.Context, store *layer.Store, d layer.Digest) (*Image, error) {
	st, err := resolve(ctx, store, d, layer.Digest{})
	if err != nil {
		return nil, err
	}
	size := st.Size()
	f, err := createMemfd(imageName, size)
	if err != nil {
		return nil, err
	}
	if err := st.Apply(ctx, sink{f}); err != nil {
		return nil, errors.Join(noMemory(err, size), f.Close())
	}
	if err := seal(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Image{size: size, file: f}, nil
}

// resolve looks through a chain of layers, which must be of memory.
func resolve(ctx context.Context, store *layer.Store, d, over layer.Digest) (*layer.Stack, error) {
	st, err := store.Resolve(ctx, d, over)
	if err != nil {
		return nil, err
	}
	if st.PageSize() != PageSize {
		return nil, fmt.Errorf("layer %s has pages of %d bytes, so it is no memory", d, st.PageSize())
	}
	return st, nil
}

// noMemory names what there is no room for.
func noMemory(err error, size int64) error {
	if told := NoRoom(err); told != err { //nolint:errorlint // Whether it had something to tell.
		return fmt.Errorf("make an image of %d MiB: %w", size>>20, told)
	}
	return err
}

// sink writes layers into a new memfd.
type sink struct{ file *os.File }

// WriteAt implements layer.Sink.
func (s sink) WriteAt(p []byte, off int64) (int, error) { return s.file.WriteAt(p, off) }

// Zero implements layer.Sink. Every page is zero to begin with, and comes once.
func (sink) Zero(int64, int64) error { return nil }
