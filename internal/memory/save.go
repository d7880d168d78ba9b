package memory

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

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
	if parent.IsZero() != (parentImage == nil) {
		return layer.Info{}, errors.New("a parent layer and its image must be given together")
	}
	f, err := img.Dup()
	if err != nil {
		return layer.Info{}, err
	}
	defer f.Close()
	var base *os.File
	if parentImage != nil {
		if base, err = parentImage.Dup(); err != nil {
			return layer.Info{}, fmt.Errorf("parent: %w", err)
		}
		defer base.Close()
		if parentImage.Size() != img.Size() {
			return layer.Info{}, fmt.Errorf("its size is %d bytes, that of the parent %d", img.Size(), parentImage.Size())
		}
	}
	extents, err := layer.Diff(ctx, f, base, PageSize, img.Size())
	if err != nil {
		return layer.Info{}, err
	}
	return store.Write(ctx, layer.WriteSpec{
		PageSize: PageSize, Size: img.Size(), Parent: parent, Extents: extents, From: f,
	})
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
	chain, err := store.Chain(ctx, d)
	if err != nil {
		return nil, err
	}
	if len(chain) == 0 {
		return nil, layer.ErrNotFound
	}
	size := chain[len(chain)-1].Size
	for _, l := range chain {
		if l.PageSize != PageSize {
			return nil, fmt.Errorf("layer %s has pages of %d bytes, so it is no memory", l.Digest, l.PageSize)
		}
		if l.Size != size {
			return nil, fmt.Errorf("layer %s is of a memory of %d bytes, not %d", l.Digest, l.Size, size)
		}
	}
	f, err := createMemfd(imageName, size)
	if err != nil {
		return nil, err
	}
	for i, l := range chain {
		if err := store.Apply(ctx, l.Digest, sink{file: f, fresh: i == 0}); err != nil {
			return nil, errors.Join(noMemory(err, size), f.Close())
		}
	}
	if err := seal(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Image{size: size, file: f}, nil
}

// noMemory tells a person what errors of a memfd mean.
func noMemory(err error, size int64) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("the host has no memory left for an image of %d MiB; end some sandboxes, or give it memory: %w",
			size>>20, err)
	}
	return err
}

// sink writes layers into a memfd that is not sealed yet.
type sink struct {
	file  *os.File
	fresh bool // nothing was written yet: every page is zero
}

// WriteAt implements layer.Sink.
func (s sink) WriteAt(p []byte, off int64) (int, error) { return s.file.WriteAt(p, off) }

// Zero implements layer.Sink. It frees the pages rather than filling them.
func (s sink) Zero(off, n int64) error {
	if s.fresh {
		return nil
	}
	return unix.Fallocate(int(s.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
}
