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
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/store"
)

// frameWindow bounds what decompressing a frame takes, as the frame of another writer may ask for.
const frameWindow = 8 << 20

// Sink receives the members of one pack. It is safe for concurrent use until Install.
type Sink struct {
	dir    string
	layers *layer.Store
	m      *Manifest

	checkers checkers

	mu      sync.Mutex
	have    map[name]bool
	fetched int64 // bytes that travelled
}

// NewSink prepares to receive what m describes in dir, a private directory on the home's file system. What dir holds
// already, of an earlier Sink for the same or another pack, counts as there if it is right, and so does what the layer
// store holds: it is given a second name in dir, so that it stays there whatever is removed meanwhile. m was checked, by
// Decode or Collect.
func NewSink(ctx context.Context, dir string, layers *layer.Store, m *Manifest) (*Sink, error) {
	s := &Sink{dir: dir, layers: layers, m: m, have: map[name]bool{}}
	if m.index == nil {
		return nil, errors.New("prepare to receive a pack: its manifest was not checked")
	}
	for _, d := range []string{s.dir, s.chunks()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("prepare to receive a pack: %w", err)
		}
	}
	if err := s.find(ctx); err != nil {
		return nil, fmt.Errorf("prepare to receive a pack: %w", err)
	}
	return s, nil
}

func (s *Sink) chunks() string { return filepath.Join(s.dir, "chunks") }

// path is where a member is kept: chunks as they travel, others as their content.
func (s *Sink) path(x Member) string {
	if x.Kind == Chunk {
		return filepath.Join(s.chunks(), x.Digest.String())
	}
	return memberPath(s.dir, x)
}

// find notes what is there.
func (s *Sink) find(ctx context.Context) error {
	k, err := layer.NewChecker()
	if err != nil {
		return err
	}
	defer k.Close()
	for _, x := range s.m.Members {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		ok, err := s.there(ctx, k, x)
		if err != nil {
			return err
		}
		if ok {
			s.have[name{x.Kind, x.Digest}] = true
		}
	}
	return nil
}

func (s *Sink) there(ctx context.Context, k *layer.Checker, x Member) (bool, error) {
	path := s.path(x)
	if ok, err := s.right(k, x, path); ok || err != nil {
		return ok, err
	}
	switch x.Kind {
	case Map:
		b, err := s.layers.MapBytes(ctx, x.Digest)
		if errors.Is(err, layer.ErrNotFound) || errors.Is(err, layer.ErrCorrupt) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		return true, writeFile(path, b)
	case Chunk:
		err := s.layers.LinkChunk(x.Digest, path)
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		return s.right(k, x, path)
	case State, KernelMember: // the home keeps them by snapshot, and with its downloads, not by digest
	}
	return false, nil
}

// right reports whether a file is what the member's is to be. One that is not is removed.
func (s *Sink) right(k *layer.Checker, x Member, path string) (bool, error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if info.Mode().IsRegular() && info.Size() <= max(x.Length, layer.MaxStoredBytes) {
		b, err := os.ReadFile(path)
		if err != nil {
			return false, err
		}
		if x.Kind == Chunk && k.Check(b, layer.Chunk{Digest: x.Digest, Length: x.Length}) == nil ||
			x.Kind != Chunk && sha256.Sum256(b) == x.Digest {
			return true, nil
		}
	}
	return false, os.Remove(path)
}

// writeFile puts a file in place of whatever is there, in one step.
func writeFile(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// Needed lists the members that are not there yet, in the manifest's order.
func (s *Sink) Needed() []Member {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.m.Members), func(x Member) bool { return s.have[name{x.Kind, x.Digest}] })
}

// Needs reports whether a member is not there yet.
func (s *Sink) Needs(x Member) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.have[name{x.Kind, x.Digest}]
}

// Fetched is how many bytes Put has taken.
func (s *Sink) Fetched() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fetched
}

// Put takes a member: exactly Size bytes of r, of which no more are read. It counts as there when they are right; nothing
// is kept of what is not. The error wraps ErrDamaged if the bytes are at fault.
func (s *Sink) Put(ctx context.Context, x Member, r io.Reader) error {
	if known, ok := s.m.member(x.Kind, x.Digest); !ok || known != x {
		return fmt.Errorf("%w: %s is not in its manifest", ErrDamaged, x)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	b, err := receive(x, r)
	if err != nil {
		return err
	}
	keep := b
	if x.Kind == Chunk {
		err = s.checkers.check(x, b)
	} else {
		keep, err = open(x, b)
	}
	if err == nil {
		err = sound(x, keep)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if err := writeFile(s.path(x), keep); err != nil {
		return fmt.Errorf("keep %s: %w", x, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.have[name{x.Kind, x.Digest}] = true
	s.fetched += x.Size
	return nil
}

// sound looks at the content of a member, as far as it can be judged alone.
func sound(x Member, plain []byte) (err error) {
	switch x.Kind {
	case Map:
		_, err = layer.ParseMap(plain)
	case KernelMember:
		_, err = DecodeKernel(plain)
	case Chunk, State:
	}
	return err
}

// Offer takes the content of a member that the home has elsewhere, unless it is another: it does not travel then.
func (s *Sink) Offer(x Member, plain []byte) error {
	if _, ok := s.m.member(x.Kind, x.Digest); !ok || x.Kind == Chunk || sha256.Sum256(plain) != x.Digest || sound(x, plain) != nil {
		return nil
	}
	if err := writeFile(s.path(x), plain); err != nil {
		return fmt.Errorf("keep %s: %w", x, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.have[name{x.Kind, x.Digest}] = true
	return nil
}

// receive reads what travels of a member. What it allocates grows with what has come.
func receive(x Member, r io.Reader) ([]byte, error) {
	var b bytes.Buffer
	n, err := io.Copy(&b, io.LimitReader(r, x.Size))
	if err != nil {
		return nil, fmt.Errorf("receive %s after %d of %d bytes: %w", x, n, x.Size, err)
	}
	if n < x.Size {
		return nil, fmt.Errorf("%w: %s ends after %d of %d bytes", ErrDamaged, x, n, x.Size)
	}
	return b.Bytes(), nil
}

// checkers are kept for the next chunk: each has buffers of megabytes.
type checkers struct{ free sync.Pool }

func (c *checkers) check(x Member, b []byte) error {
	k, ok := c.free.Get().(*layer.Checker)
	if !ok {
		var err error
		if k, err = layer.NewChecker(); err != nil {
			return err
		}
	}
	defer c.free.Put(k)
	return k.Check(b, layer.Chunk{Digest: x.Digest, Length: x.Length})
}

// open decompresses a frame to what its member has announced and no further.
func open(x Member, b []byte) ([]byte, error) {
	d, err := zstd.NewReader(bytes.NewReader(b), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(frameWindow))
	if err != nil {
		return nil, fmt.Errorf("%s cannot be decompressed: %w", x, err)
	}
	defer d.Close()
	var plain bytes.Buffer
	n, err := io.Copy(&plain, io.LimitReader(d, x.Length+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s cannot be decompressed: %w", x, err)
	case n > x.Length:
		return nil, fmt.Errorf("%s becomes more than the %d bytes that it announces", x, x.Length)
	case n < x.Length || sha256.Sum256(plain.Bytes()) != x.Digest:
		return nil, fmt.Errorf("%s does not match its digest", x)
	}
	return plain.Bytes(), nil
}

// Verify checks what only all members together say, once none is needed any more: that the layers are whole, stand on
// one another, and are the machines' that the records name; that nothing is there for nothing. The error wraps ErrDamaged.
func (s *Sink) Verify(ctx context.Context) error {
	_, err := s.verify(ctx)
	return err
}

// Install verifies and puts the layers into the store, durably. Hold the store from before it until the records that name
// them are written. What there was stays.
func (s *Sink) Install(ctx context.Context) error {
	maps, err := s.verify(ctx)
	if err != nil {
		return err
	}
	return s.layers.Install(ctx, maps, s.chunks())
}

// State reads a device state.
func (s *Sink) State(m store.Snapshot) ([]byte, error) {
	d, err := layer.ParseDigest(m.State)
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile(memberPath(s.dir, Member{Kind: State, Digest: d}))
	if err != nil {
		return nil, fmt.Errorf("read device state of %s: %w", m.Tag, err)
	}
	if sha256.Sum256(b) != d {
		return nil, fmt.Errorf("%w: device state of %s was changed after it came", ErrDamaged, m.Tag)
	}
	return b, nil
}

// Kernel reads the content of a kernel.
func (s *Sink) Kernel(d layer.Digest) ([]byte, error) {
	b, err := os.ReadFile(memberPath(s.dir, Member{Kind: KernelMember, Digest: d}))
	if err != nil {
		return nil, fmt.Errorf("read kernel %s: %w", d, err)
	}
	if sha256.Sum256(b) != d {
		return nil, fmt.Errorf("%w: kernel %s was changed after it came", ErrDamaged, d)
	}
	return b, nil
}

// Close removes what was received and is not installed.
func (s *Sink) Close() error { return os.RemoveAll(s.dir) }

// verify returns the maps, each after the one it stands on.
func (s *Sink) verify(ctx context.Context) ([][]byte, error) {
	if left := s.Needed(); len(left) > 0 {
		return nil, fmt.Errorf("%w: %d of its members are missing, the first is %s", ErrDamaged, len(left), left[0])
	}
	v := &verifier{m: s.m, read: func(x Member) ([]byte, error) { return os.ReadFile(s.path(x)) }}
	if err := v.run(ctx); err != nil {
		return nil, err
	}
	return v.bytes, nil
}
