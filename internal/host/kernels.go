package host

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
)

// Kernels of snapshots. A machine that was frozen has its own in its memory; what needs one again is a build on an image, which
// boots that. So a kernel travels with the snapshots that were made with it, and stays in the cache as long as a record names it.
// One that came from elsewhere boots images that came from elsewhere, where no kernel can be fetched, and nothing else.

// kernelFor loads the kernel that a snapshot was made with from the cache. Without one the error wraps fs.ErrNotExist.
func (h *Host) kernelFor(m store.Snapshot) (*image.Kernel, error) {
	if !m.KernelContent.IsZero() {
		k, err := image.CachedKernel(h.cfg.Home.Cache(), m.KernelContent.String())
		if !errors.Is(err, fs.ErrNotExist) {
			return k, err
		}
		// It may be one that was fetched here; whoever wants to be sure compares the content.
	}
	return image.CachedKernel(h.cfg.Home.Cache(), kernelDigest(m.Kernel))
}

// kernelDigest is that of a kernel's name in a record: version and digest.
func kernelDigest(name string) string { return name[strings.LastIndexByte(name, ' ')+1:] }

// kernelOf is what travels of the kernel that a snapshot was made with; nothing if it is not here any more, or is too large.
func (h *Host) kernelOf(m store.Snapshot) ([]byte, error) {
	k, err := h.kernelFor(m)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, hint(err, "remove its directory below %s, and it is packed without; a build fetches it again", filepath.Join(h.cfg.Home.Cache(), "kernels"))
	}
	b, err := kernelContent(k)
	if errors.Is(err, pack.ErrKernelSize) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !m.KernelContent.IsZero() && sha256.Sum256(b) != m.KernelContent {
		return nil, nil // another of the same name
	}
	return b, nil
}

func kernelContent(k *image.Kernel) ([]byte, error) {
	f := pack.KernelFile{Version: k.Version, Release: k.Release}
	var err error
	if f.Image, err = os.ReadFile(k.Path); err != nil {
		return nil, fmt.Errorf("read kernel: %w", err)
	}
	for _, m := range k.Modules {
		data, err := os.ReadFile(m.Path)
		if err != nil {
			return nil, fmt.Errorf("read kernel: %w", err)
		}
		f.Modules = append(f.Modules, pack.KernelModule{Name: m.Name, Data: data})
	}
	return f.Encode()
}

// verifyKernel says what is wrong with the kernel that a snapshot was made with. That it is not here any more is no damage: no machine
// needs it.
func (h *Host) verifyKernel(m store.Snapshot) error {
	k, err := h.kernelFor(m)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || k.Digest != m.KernelContent.String() {
		return err
	}
	b, err := kernelContent(k)
	if err == nil && sha256.Sum256(b) != m.KernelContent {
		err = fmt.Errorf("kernel %.12s: it does not match its digest", k.Digest)
	}
	return err
}

// contentOf is the digest of what would travel of the kernel of a snapshot; zero if nothing would.
func (h *Host) contentOf(m store.Snapshot) layer.Digest {
	if !m.KernelContent.IsZero() {
		return m.KernelContent
	}
	b, err := h.kernelOf(m)
	if err != nil || b == nil {
		return layer.Digest{}
	}
	return sha256.Sum256(b)
}

// offerKernels gives a sink those kernels of a pack that are here: they need not travel.
func (h *Host) offerKernels(m *pack.Manifest, sink *pack.Sink) error {
	for _, x := range m.Members {
		if x.Kind != pack.KernelMember || !sink.Needs(x) {
			continue
		}
		for _, k := range m.Kernels {
			if k.Content != x.Digest {
				continue
			}
			b, err := h.kernelOf(store.Snapshot{Kernel: k.Name, KernelContent: k.Content})
			if err != nil || b == nil {
				continue // one that is damaged comes anew
			}
			if err := sink.Offer(x, b); err != nil {
				return err
			}
		}
	}
	return nil
}

// keepKernels puts those of the pack into the cache that are not there.
func (e *entering) keepKernels() error {
	h, kept := e.h, map[layer.Digest]bool{}
	for _, s := range e.records {
		content := s.KernelContent
		if content.IsZero() || kept[content] {
			continue
		}
		kept[content] = true
		if b, err := h.kernelOf(s); err == nil && b != nil {
			continue
		}
		b, err := e.sink.Kernel(content)
		if err != nil {
			return err
		}
		k, err := pack.DecodeKernel(b)
		if err != nil {
			return err
		}
		// What does not become a snapshot leaves it to trimKernels.
		if _, err := image.KeepKernel(h.cfg.Home.Cache(), content.String(), k.Version, k.Release, k.Image, moduleFiles(k)); err != nil {
			return err
		}
	}
	return nil
}

// trimKernels removes the kernels that were kept for records of which none is left. Nobody must be writing one.
func (h *Host) trimKernels() {
	named := map[string]bool{}
	add := func(m *store.Snapshot) {
		named[kernelDigest(m.Kernel)] = true
		named[m.KernelContent.String()] = true
	}
	h.mu.Lock()
	for _, m := range h.snapshots {
		add(&m)
	}
	for _, w := range h.writing {
		add(&w.m)
	}
	for _, s := range h.sandboxes {
		s.mu.Lock()
		if s.suspended != nil {
			add(&s.suspended.Machine)
		}
		s.mu.Unlock()
	}
	h.mu.Unlock()
	if err := image.TrimKernels(h.cfg.Home.Cache(), func(digest string) bool { return named[digest] }); err != nil {
		h.log.Warn("unused kernels not removed", "error", err)
	}
}

// keepKernel keeps what the user has given by path: the file need not stay where it is.
func (b *build) keepKernel() error {
	if b.spec.Kernel == "" {
		return nil
	}
	k, err := image.KernelAt(b.spec.Kernel, "")
	if err != nil || k.Digest != b.kernel.Digest {
		b.say("store", "the kernel was changed meanwhile; packs of the snapshot will be without it")
		return nil //nolint:nilerr // it has booted, which is what was asked for.
	}
	content, err := kernelContent(k)
	if err != nil {
		b.say("store", "packs of the snapshot will be without its kernel: %s", err)
		return nil
	}
	f, err := pack.DecodeKernel(content)
	if err != nil {
		return err
	}
	_, err = image.KeepKernel(b.h.cfg.Home.Cache(), k.Digest, k.Version, k.Release, f.Image, moduleFiles(f))
	return err
}

func moduleFiles(k *pack.KernelFile) (files []image.ModuleFile) {
	for _, m := range k.Modules {
		files = append(files, image.ModuleFile{Name: m.Name, Data: m.Data})
	}
	return files
}

// findKernelOf finds what boots an image that is here: the kernel that builds take, or, where that cannot be asked for, the one that
// a snapshot on the image was made with. One from elsewhere boots what came from elsewhere only.
func (b *build) findKernelOf(ctx context.Context, img store.Image) error {
	err := b.findKernel(ctx)
	if err == nil || b.spec.Kernel != "" || ctx.Err() != nil {
		return err
	}
	k, of := b.h.kernelOn(img)
	if k == nil {
		return err
	}
	b.say("boot", "no kernel can be fetched (%s); booting with %s, which %s was made with", firstLine(err), k.Release, of.Tag)
	b.kernel = k
	return nil
}

// kernelOn is the kernel of the newest snapshot on an image that has one here.
func (h *Host) kernelOn(img store.Image) (found *image.Kernel, of store.Snapshot) {
	for _, m := range h.madeOn(img.ID) {
		if !m.KernelContent.IsZero() && img.ID != foreignImage(img.Disk) || found != nil && m.CreatedAt.Before(of.CreatedAt) {
			continue
		}
		if k, err := h.kernelFor(m); err == nil {
			found, of = k, m
		}
	}
	return found, of
}

// madeOn are the snapshots on an image.
func (h *Host) madeOn(id string) (all []store.Snapshot) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range h.snapshots {
		if m.Image == id {
			all = append(all, m)
		}
	}
	return all
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
