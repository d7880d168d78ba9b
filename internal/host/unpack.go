package host

import (
	"context"
	"errors"
	"fmt"
	"os"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/layer"
)

// readOnly is the mode of disks that running machines back on. Root is not stopped by a mode; the VM process is, by
// its own confinement.
const readOnly = 0o400

// unpackBase writes an image's disk to path, appearing there only when complete.
func (h *Host) unpackBase(ctx context.Context, id, path string) error {
	h.mu.Lock()
	img, ok := h.images[id]
	h.mu.Unlock()
	if !ok {
		return fmt.Errorf("unpack image %s: %w", short(id), ErrNotFound)
	}
	if err := disk.LoadBase(ctx, h.layers, img.Disk, path); err != nil {
		return hint(fmt.Errorf("unpack image %s: %w", short(id), err), "remove it with: forkd images rm %s, then build again", short(id))
	}
	return nil
}

// unpackOverlay writes a snapshot's disk, all layers above its image's, as one overlay over base.
func (h *Host) unpackOverlay(ctx context.Context, id, image layer.Digest, path, base string) error {
	return disk.LoadChain(ctx, h.layers, id, image, path, base, disk.Raw)
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// short is the beginning of an id, for people.
func short(id string) string {
	if len(id) > 12 {
		return id[:12]
	}
	return id
}
