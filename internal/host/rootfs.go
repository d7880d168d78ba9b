package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// RootfsSpec is a root file system that somebody else has made. Both paths are of files on this host, which are read and
// never changed.
type RootfsSpec struct {
	Path        string // of an ext4 file system; absolute
	CPUs        int    // 0: one
	MemoryBytes int64  // 0: as of a recipe that does not say
}

// rootfsRecipe is the machine for one. It looks at what can be known before anything is done.
func rootfsRecipe(spec *BuildSpec) (*image.Recipe, error) {
	if err := hostFile("rootfs", spec.Rootfs.Path); err != nil {
		return nil, err
	}
	if spec.Kernel != "" {
		if err := hostFile("kernel", spec.Kernel); err != nil {
			return nil, err
		}
	}
	machine, err := image.MachineOf(spec.Rootfs.CPUs, spec.Rootfs.MemoryBytes)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return &image.Recipe{Name: spec.Tag, Base: "rootfs:" + filepath.Base(spec.Rootfs.Path), Machine: machine}, nil
}

// hostFile refuses what cannot be read as a file.
func hostFile(field, path string) error {
	if !filepath.IsAbs(path) {
		return invalid("%s is %.200q; give an absolute path on the daemon's host", field, path)
	}
	info, err := os.Stat(path)
	if err != nil {
		if p, ok := errors.AsType[*os.PathError](err); ok {
			err = p.Err
		}
		return hint(invalid("%s %.200q: %s", field, path, err),
			"the daemon looks it up on its own host, and a hardened service sees no files below /home and /tmp")
	}
	if !info.Mode().IsRegular() {
		return invalid("%s %.200q is no regular file", field, path)
	}
	return nil
}

// rootfs makes the snapshot of a root file system: its copy becomes an image, which is booted and frozen.
func (b *build) rootfs(ctx context.Context) (store.Snapshot, error) {
	if err := b.h.tagFree(b.spec.Tag); err != nil {
		return store.Snapshot{}, err
	}
	if err := b.findKernel(ctx); err != nil {
		return store.Snapshot{}, err
	}
	img, err := b.rootfsImage(ctx)
	if err != nil {
		return store.Snapshot{}, err
	}
	b.source = stepKey("rootfs", img.ID, b.kernel.Digest, b.agent, b.features.Format, b.recipe.Machine.CPUs, b.recipe.Machine.MemoryBytes)
	m, err := b.snapshot(ctx, img)
	if _, spoke := errors.AsType[*ConsoleError](err); spoke || errors.Is(err, engine.ErrDead) { // what does not boot is what was given
		err = hint(fmt.Errorf("%w: it does not boot: %w", ErrInvalid, err), "%s", b.bootAdvice())
	}
	return m, err
}

// bootAdvice is what to try with a root file system that does not boot: the console says where it got stuck.
func (b *build) bootAdvice() string {
	if b.spec.Kernel == "" {
		return "the console says how far it came; a root file system needs room to write, and no device of its own"
	}
	return "the console says how far it came; a kernel needs PCI, virtio (block, console, random) and ext4, built in or in a directory \"modules\" beside " +
		"it with modules.order; without \"kernel\" forkd's own is taken"
}

// rootfsImage copies the file system. One that is here already is found when it was read.
func (b *build) rootfsImage(ctx context.Context) (store.Image, error) {
	var u undo.Stack
	defer u.Run()
	dir, err := b.h.machineDir()
	if err != nil {
		return store.Image{}, err
	}
	u.Add(func() { _ = os.RemoveAll(dir) })
	raw := filepath.Join(dir, "disk.raw")
	b.say("image", "copying %s", b.spec.Rootfs.Path)
	copied, err := disk.CopyForeign(ctx, b.spec.Rootfs.Path, raw)
	switch {
	case errors.Is(err, disk.ErrNoFileSystem):
		return store.Image{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	case err != nil:
		return store.Image{}, b.h.explainFull(err)
	}
	id := stepKey("rootfs", copied.Digest, runtime.GOARCH)
	release, err := b.h.hold(id, "build image")
	if err != nil {
		return store.Image{}, err
	}
	defer release()
	b.plan = &image.Plan{Digest: id, Recipe: b.recipe}
	b.h.mu.Lock()
	img, ok := b.h.images[id]
	b.h.mu.Unlock()
	if ok {
		b.cached("image", "image %s is in the cache", short(id))
		return img, nil
	}
	if img, err = b.keepImage(ctx, raw); err != nil {
		return store.Image{}, b.h.explainFull(err)
	}
	u.Keep()
	return img, os.RemoveAll(dir)
}
