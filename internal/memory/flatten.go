package memory

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Flatten makes an image of its own of a view: sealed, sparse where the view is known to be zero. It needs the whole
// size as memory, at worst; its lack is an error.
func Flatten(ctx context.Context, v View) (*Image, error) {
	img, err := flatten(ctx, v)
	if err != nil {
		return nil, fmt.Errorf("flatten memory: %w", err)
	}
	return img, nil
}

func flatten(ctx context.Context, v View) (_ *Image, err error) {
	r, err := v.open(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	f, err := createMemfd(imageName, r.size)
	if err != nil {
		return nil, err
	}
	const most = 1 << 20
	var parts []viewPart
	for _, p := range r.parts {
		for ; p.length > 0; p.offset, p.at, p.length = p.offset+most, p.at+most, p.length-most {
			part := p
			part.length = min(p.length, most)
			parts = append(parts, part)
		}
	}
	// Written, not mapped: the kernel then need not clear a page first, and the lack of one is an error and no signal.
	err = each(ctx, len(parts), func(i int) error {
		b, _, p := r.at(parts[i].offset, parts[i].length)
		if !p.pages && len(b) >= 128<<10 {
			// Entered into the page table at once: the kernel's copy would stop at every page that is not. It is advice.
			_ = unix.Madvise(b, unix.MADV_POPULATE_READ)
		}
		_, err := f.WriteAt(b, parts[i].offset)
		return err
	})
	if err == nil {
		err = seal(f)
	}
	if err != nil {
		return nil, errors.Join(noMemory(err, r.size), f.Close())
	}
	return &Image{size: r.size, file: f}, nil
}
