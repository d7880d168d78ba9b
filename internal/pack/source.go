package pack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
)

// Spec is what to collect.
type Spec struct {
	// Dir is an empty private directory on the home's file system, which the Source fills with hard links and frames and
	// which whoever made it removes. The home's tmp is a place for it: a daemon that starts empties that.
	Dir    string
	Layers *layer.Store
	// State reads and verifies a snapshot's device state.
	State func(store.Snapshot) ([]byte, error)
	// Kernel encodes the kernel that a snapshot was made with; without content it is not here. May be nil.
	Kernel func(store.Snapshot) ([]byte, error)
	// Manifest has everything but members, kernels and its version.
	Manifest Manifest
	// Blobs: say of every member what a registry calls it. It reads all there is once more.
	Blobs bool
}

// Source is a pack before it travels. It is safe for concurrent use.
type Source struct {
	dir      string
	manifest *Manifest
	checkers checkers
}

// Collect finds all members of the snapshots and keeps hold of them: what the home removes afterwards is still there for
// the Source. Hold the layer store, and keep the snapshots from being removed, until it returns. Layers that are damaged
// are told by Collect or, chunks, by Open; the error wraps layer.ErrCorrupt.
func Collect(ctx context.Context, spec Spec) (*Source, error) {
	c := &collector{Spec: spec, src: &Source{dir: spec.Dir}, seen: map[name]bool{}}
	m := spec.Manifest
	c.src.manifest, m.Members, m.Kernels, m.FormatVersion = &m, nil, nil, 1
	if err := c.collect(ctx); err != nil {
		return nil, fmt.Errorf("collect %s: %w", m.Head().Tag, err)
	}
	return c.src, nil
}

type collector struct {
	Spec
	src  *Source
	seen map[name]bool
}

func (c *collector) collect(ctx context.Context) error {
	m := c.src.manifest
	for _, s := range m.Snapshots {
		state, err := c.State(s)
		if err != nil {
			return err
		}
		if err := c.frame(State, state); err != nil {
			return err
		}
	}
	var chunks []layer.Chunk
	for _, s := range m.Snapshots {
		for _, top := range []layer.Digest{s.ImageDisk, s.Disk, s.Memory} {
			more, err := c.chain(ctx, top)
			if err != nil {
				return err
			}
			chunks = append(chunks, more...)
		}
	}
	if err := c.kernels(); err != nil {
		return err
	}
	for _, x := range chunks {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := c.chunk(x); err != nil {
			return err
		}
	}
	return m.check()
}

// chain adds the maps of a layer and of all it stands on, as far as they are new, and returns their chunks.
func (c *collector) chain(ctx context.Context, d layer.Digest) (chunks []layer.Chunk, err error) {
	for !d.IsZero() && !c.seen[name{Map, d}] {
		b, err := c.Layers.MapBytes(ctx, d)
		if err != nil {
			return nil, err
		}
		m, err := layer.ParseMap(b)
		if err != nil {
			return nil, err
		}
		if m.Shares { // The rest of its chunks may be somebody else's secrets.
			return nil, fmt.Errorf("layer %s shares chunks with others", d)
		}
		if err := c.frame(Map, b); err != nil {
			return nil, err
		}
		chunks = append(m.Chunks, chunks...) // the root's first
		d = m.Parent
	}
	return chunks, nil
}

// kernels adds what the snapshots were made with, each once.
func (c *collector) kernels() error {
	m := c.src.manifest
	for _, s := range m.Snapshots {
		if !s.KernelContent.IsZero() { // a field that readers of version 1 do not know
			m.FormatVersion = FormatVersion
		}
		if _, ok := m.Kernel(s.Kernel); ok || s.Kernel == "" || c.Kernel == nil {
			continue
		}
		b, err := c.Kernel(s)
		if err != nil {
			return fmt.Errorf("kernel of %s: %w", s.Tag, err)
		}
		if len(b) == 0 {
			continue
		}
		if _, err := DecodeKernel(b); err != nil {
			return fmt.Errorf("kernel of %s: %w", s.Tag, err)
		}
		if err := c.frame(KernelMember, b); err != nil {
			return err
		}
		m.Kernels = append(m.Kernels, Kernel{Name: s.Kernel, Content: sha256.Sum256(b)})
		m.FormatVersion = FormatVersion
	}
	return nil
}

// frame adds a member that the home does not have as a frame.
func (c *collector) frame(kind Kind, plain []byte) error {
	x := Member{Kind: kind, Digest: sha256.Sum256(plain), Length: int64(len(plain))}
	if c.seen[name{kind, x.Digest}] {
		return nil
	}
	c.seen[name{kind, x.Digest}] = true
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false), zstd.WithWindowSize(frameWindow))
	if err != nil {
		return fmt.Errorf("prepare compression: %w", err)
	}
	defer e.Close()
	b := e.EncodeAll(plain, nil)
	x.Size = int64(len(b))
	if c.Blobs {
		x.Blob = sha256.Sum256(b)
	}
	c.src.manifest.Members = append(c.src.manifest.Members, x)
	if err := os.WriteFile(c.src.path(x), b, 0o600); err != nil {
		return fmt.Errorf("keep %s: %w", x, err)
	}
	return nil
}

func (c *collector) chunk(chunk layer.Chunk) error {
	x := Member{Kind: Chunk, Digest: chunk.Digest, Length: chunk.Length}
	if c.seen[name{Chunk, x.Digest}] {
		return nil
	}
	c.seen[name{Chunk, x.Digest}] = true
	err := c.Layers.LinkChunk(chunk.Digest, c.src.path(x))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: chunk %s is missing; remove the snapshots that use it and build them again", layer.ErrCorrupt, chunk.Digest)
	}
	if err != nil {
		return err
	}
	info, err := os.Stat(c.src.path(x))
	if err != nil {
		return err
	}
	x.Size = info.Size()
	if c.Blobs {
		b, err := os.ReadFile(c.src.path(x))
		if err != nil {
			return err
		}
		x.Blob = sha256.Sum256(b)
	}
	c.src.manifest.Members = append(c.src.manifest.Members, x)
	return nil
}

func (s *Source) path(x Member) string { return memberPath(s.dir, x) }

// memberPath is made of nothing that came from elsewhere but a digest.
func memberPath(dir string, x Member) string {
	return filepath.Join(dir, string(x.Kind)+"-"+x.Digest.String())
}

// Manifest describes what there is. It must not be changed.
func (s *Source) Manifest() *Manifest { return s.manifest }

// Open returns what travels of a member: Size bytes. It verifies them first; the error wraps layer.ErrCorrupt.
func (s *Source) Open(x Member) (io.ReadCloser, error) {
	b, err := os.ReadFile(s.path(x))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", x, err)
	}
	if x.Kind != Chunk { // they were made of what had been verified
		return io.NopCloser(bytes.NewReader(b)), nil
	}
	if err := s.checkers.check(x, b); err != nil {
		return nil, fmt.Errorf("%w: %w; remove the snapshots that use it and build them again", layer.ErrCorrupt, err)
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}
