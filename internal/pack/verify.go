package pack

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
)

// maxDepth bounds a chain of layers, as the layer store does.
const maxDepth = 1024

// Pages of memory and disks, in bytes.
const (
	memoryPage = 4 << 10
	diskPage   = 64 << 10
)

// verifier looks at the maps of a pack whose members are all right by themselves.
type verifier struct {
	m    *Manifest
	read func(Member) ([]byte, error) // a map's content

	maps  map[layer.Digest]*layerInfo
	order []layer.Digest // parents first
	bytes [][]byte       // in that order
	used  map[name]bool
}

type layerInfo struct {
	parent         layer.Digest
	pageSize, size int64
	depth          int
}

func (v *verifier) run(ctx context.Context) error {
	v.maps, v.used = map[layer.Digest]*layerInfo{}, map[name]bool{}
	for _, s := range v.m.Snapshots {
		if err := v.snapshot(ctx, s); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("%w: snapshot %s: %w", ErrDamaged, s.Tag, err)
		}
	}
	for _, i := range v.m.Images {
		if err := v.image(i); err != nil {
			return fmt.Errorf("%w: image %s: %w", ErrDamaged, i.ID, err)
		}
	}
	for _, k := range v.m.Kernels {
		v.used[name{KernelMember, k.Content}] = true
	}
	for _, x := range v.m.Members {
		if !v.used[name{x.Kind, x.Digest}] {
			return fmt.Errorf("%w: nothing needs its member %s", ErrDamaged, x)
		}
	}
	return nil
}

func (v *verifier) snapshot(ctx context.Context, s store.Snapshot) error {
	state, err := layer.ParseDigest(s.State)
	if err != nil {
		return err
	}
	v.used[name{State, state}] = true
	for _, d := range []layer.Digest{s.ImageDisk, s.Disk, s.Memory} {
		if err := v.chain(ctx, d); err != nil {
			return err
		}
	}
	if m := v.maps[s.Memory]; m.pageSize != memoryPage || m.size != s.Engine.MemoryBytes {
		return fmt.Errorf("its memory layer has %d bytes in pages of %d, its machine %d in pages of %d", m.size, m.pageSize,
			s.Engine.MemoryBytes, memoryPage)
	}
	if m := v.maps[s.Disk]; m.pageSize != diskPage {
		return fmt.Errorf("its disk layer has pages of %d bytes, not %d", m.pageSize, diskPage)
	}
	for d := s.Disk; d != s.ImageDisk; d = v.maps[d].parent {
		if d.IsZero() {
			return fmt.Errorf("its disk layer %s does not stand on its image's, %s", s.Disk, s.ImageDisk)
		}
	}
	return nil
}

func (v *verifier) image(i store.Image) error {
	m := v.maps[i.Disk]
	if m == nil || !m.parent.IsZero() || m.pageSize != diskPage || m.size != i.DiskBytes {
		return fmt.Errorf("its disk layer %s is not a whole disk of %d bytes", i.Disk, i.DiskBytes)
	}
	return nil
}

// chain reads the maps from the first one that is known up to d.
func (v *verifier) chain(ctx context.Context, d layer.Digest) error {
	type found struct {
		m layer.Map
		b []byte
	}
	var above []found
	var below *layerInfo
	for at := d; !at.IsZero(); {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if below = v.maps[at]; below != nil {
			break
		}
		if len(above) == maxDepth {
			return fmt.Errorf("layer %s has more than %d ancestors", d, maxDepth)
		}
		x, ok := v.m.member(Map, at)
		if !ok {
			return fmt.Errorf("layer %s stands on layer %s, which is no member of the pack", d, at)
		}
		v.used[name{Map, at}] = true
		b, err := v.read(x)
		if err != nil {
			return err
		}
		m, err := layer.ParseMap(b)
		if err != nil {
			return fmt.Errorf("layer %s: %w", at, err)
		}
		if err := v.chunks(m); err != nil {
			return fmt.Errorf("layer %s: %w", at, err)
		}
		above = append(above, found{m, b})
		at = m.Parent
	}
	for _, f := range slices.Backward(above) {
		m := f.m
		info := &layerInfo{parent: m.Parent, pageSize: m.PageSize, size: m.Size}
		if below != nil {
			if info.depth = below.depth + 1; info.depth >= maxDepth {
				return fmt.Errorf("layer %s has more than %d ancestors", m.Digest, maxDepth)
			}
			if below.pageSize != m.PageSize || below.size != m.Size {
				return fmt.Errorf("layer %s is of another size than the one it stands on", m.Digest)
			}
		}
		v.maps[m.Digest], below = info, info
		v.order, v.bytes = append(v.order, m.Digest), append(v.bytes, f.b)
	}
	return nil
}

func (v *verifier) chunks(m layer.Map) error {
	if m.Shares {
		return errors.New("it uses parts of chunks: a pack has nothing that is not needed")
	}
	for _, c := range m.Chunks {
		x, ok := v.m.member(Chunk, c.Digest)
		if !ok {
			return fmt.Errorf("its chunk %s is no member of the pack", c.Digest)
		}
		if x.Length != c.Length {
			return fmt.Errorf("its chunk %s is to have %d bytes and has %d", c.Digest, c.Length, x.Length)
		}
		v.used[name{Chunk, c.Digest}] = true
	}
	return nil
}
