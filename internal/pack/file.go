package pack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"path"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"forkd.dev/forkd/internal/layer"
)

// The pack file is a tar stream of the plainest kind, so that anybody can look into one: manifest.json, then every member
// in the manifest's order as KIND/DIGEST. There is one encoding of a pack: a reader knows each header before it comes, and
// takes no other.

const (
	block        = 512
	manifestName = "manifest.json"
)

// header is the tar header of a regular file: format ustar, mode 0600, no owner and no time.
func header(name string, size int64) [block]byte {
	var h [block]byte
	copy(h[0:100], name)
	copy(h[100:], "0000600\x00")
	copy(h[108:], "0000000\x00")
	copy(h[116:], "0000000\x00")
	copy(h[124:], fmt.Sprintf("%011o\x00", size))
	copy(h[136:], "00000000000\x00")
	h[156] = '0'
	copy(h[257:], "ustar\x0000")
	copy(h[148:], fmt.Sprintf("%06o\x00 ", checksum(&h)))
	return h
}

// checksum is over the header with spaces in the checksum's place.
func checksum(h *[block]byte) int {
	sum := 0
	for i, b := range h {
		if i >= 148 && i < 156 {
			b = ' '
		}
		sum += int(b)
	}
	return sum
}

func (x Member) path() string { return path.Join(string(x.Kind), x.Digest.String()) }

func padded(n int64) int64 { return (n + block - 1) / block * block }

// Size is that of the pack file of a manifest, whose bytes are encoded.
func Size(m *Manifest, encoded []byte) int64 {
	n := block + padded(int64(len(encoded))) + 2*block
	for _, x := range m.Members {
		n += block + padded(x.Size)
	}
	return n
}

// Write writes the pack file: Size bytes.
func Write(ctx context.Context, w io.Writer, src *Source) error {
	b, err := src.manifest.Encode()
	if err != nil {
		return err
	}
	if err := writeMember(w, manifestName, bytes.NewReader(b), int64(len(b))); err != nil {
		return err
	}
	for _, x := range src.manifest.Members {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r, err := src.Open(x)
		if err != nil {
			return err
		}
		if err := errors.Join(writeMember(w, x.path(), r, x.Size), r.Close()); err != nil {
			return err
		}
	}
	_, err = w.Write(make([]byte, 2*block))
	return err
}

func writeMember(w io.Writer, name string, r io.Reader, size int64) error {
	h := header(name, size)
	if _, err := w.Write(h[:]); err != nil {
		return err
	}
	if _, err := io.CopyN(w, r, size); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err := w.Write(make([]byte, padded(size)-size))
	return err
}

// Reader reads a pack file. Its manifest has been read and checked.
type Reader struct {
	r        io.Reader
	at       int64 // in the file
	size     int64 // of the file; 0: not known yet
	manifest *Manifest
	digest   layer.Digest
}

// NewReader reads the beginning of a pack, up to the end of its manifest and no further. The error wraps ErrFormat,
// ErrVersion or ErrDamaged where the bytes are at fault.
func NewReader(r io.Reader) (*Reader, error) {
	p := &Reader{r: r}
	var h [block]byte
	if n, err := io.ReadFull(r, h[:]); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, fmt.Errorf("%w: it has %d bytes", ErrFormat, n)
		}
		return nil, fmt.Errorf("read pack: %w", err)
	}
	size := sizeOf(&h)
	if nameOf(&h) != manifestName || size < 0 || h != header(manifestName, size) {
		return nil, fmt.Errorf("%w: it does not begin with its manifest", ErrFormat)
	}
	p.at = block
	if size > MaxManifestBytes {
		return nil, fmt.Errorf("%w: its manifest has %d bytes, at most %d are allowed", ErrFormat, size, MaxManifestBytes)
	}
	var b bytes.Buffer // grows with what comes, whatever was announced
	if err := p.copy(&b, size); err != nil {
		return nil, fmt.Errorf("its manifest: %w", err)
	}
	if err := p.padding(size); err != nil {
		return nil, err
	}
	m, err := Decode(b.Bytes())
	if err != nil {
		return nil, err
	}
	p.manifest, p.digest, p.size = m, sha256.Sum256(b.Bytes()), Size(m, b.Bytes())
	return p, nil
}

// Manifest is that of the pack.
func (p *Reader) Manifest() *Manifest { return p.manifest }

// Digest is that of the manifest's bytes, and so of the pack: it has all others in it.
func (p *Reader) Digest() layer.Digest { return p.digest }

// Taker takes members; a Sink is one. Put is called for those alone that it needs, from several goroutines.
type Taker interface {
	Needs(x Member) bool
	Put(ctx context.Context, x Member, r io.Reader) error
}

// Receive reads the members and gives them to t, and makes sure that nothing else is in the file. The error wraps
// ErrDamaged where the file is at fault, and says where.
func (p *Reader) Receive(ctx context.Context, t Taker) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	room := make(chan struct{}, runtime.NumCPU()) // for members in hand
	for i, x := range p.manifest.Members {
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		b, err := p.member(i, x, t.Needs(x))
		if err != nil {
			cancel(err)
			break
		}
		wg.Go(func() {
			defer func() { <-room }()
			if b == nil {
				return
			}
			if err := t.Put(ctx, x, b); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return p.end()
}

// member reads the next member, nil if it is not needed.
func (p *Reader) member(i int, x Member, needed bool) (*bytes.Reader, error) {
	from := p.at
	var h [block]byte
	if err := p.full(h[:]); err != nil {
		return nil, fmt.Errorf("%s: %w", x, err)
	}
	if h != header(x.path(), x.Size) {
		return nil, fmt.Errorf("%w: at byte %d: %w", ErrDamaged, from, p.explain(i, &h))
	}
	var b bytes.Buffer
	to := io.Writer(&b)
	if !needed {
		to = io.Discard
	}
	if err := p.copy(to, x.Size); err != nil {
		return nil, fmt.Errorf("%s: %w", x, err)
	}
	if err := p.padding(x.Size); err != nil {
		return nil, fmt.Errorf("%s: %w", x, err)
	}
	if !needed {
		return nil, nil
	}
	return bytes.NewReader(b.Bytes()), nil
}

// end reads the end mark, and that nothing follows it.
func (p *Reader) end() error {
	from := p.at
	var h [2 * block]byte
	if err := p.full(h[:]); err != nil {
		return fmt.Errorf("the end mark: %w", err)
	}
	if h != [2 * block]byte{} {
		first := [block]byte(h[:block])
		return fmt.Errorf("%w: at byte %d: %w", ErrDamaged, from, p.explain(len(p.manifest.Members), &first))
	}
	var one [1]byte
	switch n, err := io.ReadFull(p.r, one[:]); {
	case n > 0:
		return fmt.Errorf("%w: something follows its end at byte %d", ErrDamaged, p.at)
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("read pack after its end: %w", err)
	}
	return nil
}

// explain says what is wrong with a header that is not the one of member i.
func (p *Reader) explain(i int, h *[block]byte) error {
	members := p.manifest.Members
	want := "its end"
	if i < len(members) {
		want = members[i].path()
	}
	if *h == [block]byte{} {
		return fmt.Errorf("the file ends where %s should be", want)
	}
	if string(h[148:156]) != fmt.Sprintf("%06o\x00 ", checksum(h)) {
		return fmt.Errorf("the header of %s is damaged", want)
	}
	is, size := nameOf(h), sizeOf(h)
	if what := kindOf(h[156]); what != "" {
		return fmt.Errorf("%.120q is %s; a pack has plain files only", is, what)
	}
	if strings.HasPrefix(is, "/") || strings.Contains("/"+is+"/", "/../") {
		return fmt.Errorf("%.120q names a place outside of the pack", is)
	}
	for k, x := range members {
		if x.path() != is {
			continue
		}
		switch {
		case k < i || is == manifestName:
			return fmt.Errorf("%s comes twice", is)
		case k > i:
			return fmt.Errorf("%s is missing; %s is in its place", want, is)
		case size != x.Size:
			return fmt.Errorf("%s has %d bytes, and %d by the manifest", is, size, x.Size)
		}
		return fmt.Errorf("the header of %s has an owner, a mode or a time of its own, which no pack has", is)
	}
	if is == manifestName {
		return fmt.Errorf("%s comes twice", is)
	}
	return fmt.Errorf("%.120q is not in the manifest, where %s should be", is, want)
}

// kindOf is what a tar header's type stands for, "" for a regular file.
func kindOf(flag byte) string {
	switch flag {
	case '0', 0:
		return ""
	case '1':
		return "a hard link"
	case '2':
		return "a symbolic link"
	case '3', '4':
		return "a device"
	case '5':
		return "a directory"
	case '6':
		return "a pipe"
	case 'x', 'g', 'L', 'K':
		return "an extended header"
	}
	return fmt.Sprintf("of an unknown type %q", flag)
}

func nameOf(h *[block]byte) string {
	name, _, _ := strings.Cut(string(h[0:100]), "\x00")
	if prefix, _, _ := strings.Cut(string(h[345:500]), "\x00"); prefix != "" {
		name = prefix + "/" + name
	}
	return name
}

// sizeOf is -1 for what cannot be read.
func sizeOf(h *[block]byte) int64 {
	text := strings.TrimRight(strings.TrimLeft(string(h[124:136]), " "), " \x00")
	n, err := strconv.ParseInt(text, 8, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// full reads len(b) bytes.
func (p *Reader) full(b []byte) error {
	n, err := io.ReadFull(p.r, b)
	p.at += int64(n)
	return p.cut(err)
}

func (p *Reader) copy(w io.Writer, n int64) error {
	got, err := io.CopyN(w, p.r, n)
	p.at += got
	return p.cut(err)
}

// cut tells a file that ends early from one that cannot be read.
func (p *Reader) cut(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		if p.size > 0 {
			return fmt.Errorf("%w: it is cut off after %d of %d bytes", ErrDamaged, p.at, p.size)
		}
		return fmt.Errorf("%w: it is cut off after %d bytes", ErrDamaged, p.at)
	}
	if err != nil {
		return fmt.Errorf("read pack at byte %d: %w", p.at, err)
	}
	return nil
}

func (p *Reader) padding(size int64) error {
	var b [block]byte
	pad := b[:padded(size)-size]
	if err := p.full(pad); err != nil {
		return err
	}
	if len(bytes.Trim(pad, "\x00")) > 0 {
		return fmt.Errorf("%w: there is something in the padding before byte %d", ErrDamaged, p.at)
	}
	return nil
}

// Inspect reads a whole pack and verifies everything that a home would, and keeps nothing. The Reader is nil if not even
// the manifest could be read.
func Inspect(ctx context.Context, r io.Reader) (*Reader, error) {
	p, err := NewReader(r)
	if err != nil {
		return nil, err
	}
	i := &inspector{kept: map[layer.Digest][]byte{}}
	if err := p.Receive(ctx, i); err != nil {
		return p, err
	}
	v := &verifier{m: p.manifest, read: func(x Member) ([]byte, error) { return i.kept[x.Digest], nil }}
	return p, v.run(ctx)
}

type inspector struct {
	checkers checkers
	mu       sync.Mutex
	kept     map[layer.Digest][]byte // maps
}

func (i *inspector) Needs(Member) bool { return true }

func (i *inspector) Put(_ context.Context, x Member, r io.Reader) error {
	b, err := receive(x, r)
	if err != nil {
		return err
	}
	if x.Kind == Chunk {
		err = i.checkers.check(x, b)
	} else if b, err = open(x, b); err == nil {
		err = sound(x, b)
	}
	if err == nil && x.Kind == Map {
		i.mu.Lock()
		i.kept[x.Digest] = b
		i.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}
