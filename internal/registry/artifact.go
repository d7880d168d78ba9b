package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/pack"
)

// Media types of a snapshot in a registry.
const (
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	TypeSnapshot = "application/vnd.forkd.snapshot.v1"            // of the artifact
	TypeIndex    = "application/vnd.forkd.snapshot.index.v1+zstd" // of its config
	TypeMembers  = "application/vnd.forkd.snapshot.members.v1"    // of its blobs
)

// Bounds of what a registry may say.
const (
	maxManifest = 4 << 20 // what registries take
	maxIndex    = pack.MaxManifestBytes + 16<<20
	maxBlobs    = 16 << 10
	// Blobs are the unit in which an upload goes on after an interruption: cut at a chunk whose digest says so after
	// least bytes, about every 16 MiB, and at most bytes anyway.
	leastBlob = 8 << 20
	mostBlob  = 64 << 20
	cutMask   = 0x1f // of 32 chunks one, of about 300 KiB each
	// maxBlob bounds what others cut.
	maxBlob = 1 << 40
)

// indexVersion is that of the index. A reader refuses others.
const indexVersion = 1

// Source is what is pushed: a pack.Source.
type Source interface {
	Manifest() *pack.Manifest
	Open(x pack.Member) (io.ReadCloser, error)
}

// index is the config of an artifact, compressed.
type index struct {
	FormatVersion int             `json:"format_version"` // first, so that any reader finds it
	Pack          json.RawMessage `json:"pack"`
	Blobs         []indexBlob     `json:"blobs"`
}

// indexBlob says what a blob is made of: runs of members of the pack's manifest, each its first one's number and how many.
type indexBlob struct {
	Digest  string   `json:"digest"`
	Size    int64    `json:"size"`
	Members [][2]int `json:"members"`
}

type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int64  `json:"size"`
}

type ociManifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	ArtifactType  string            `json:"artifactType,omitempty"`
	Config        descriptor        `json:"config"`
	Layers        []descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

// Artifact is a snapshot as a registry has it.
type Artifact struct {
	Digest   string // of its manifest there: sha256:…
	Pack     *pack.Manifest
	manifest []byte
	config   []byte // the index, compressed
	blobs    []blob
}

// blob is members end to end.
type blob struct {
	digest  string
	size    int64
	members []pack.Member
}

// Bytes is what all of it takes in the registry.
func (a *Artifact) Bytes() int64 {
	n := int64(len(a.manifest) + len(a.config))
	for _, b := range a.blobs {
		n += b.size
	}
	return n
}

// Describe makes an artifact of a source. It reads all of it, to know the blobs' digests.
func Describe(ctx context.Context, src Source) (*Artifact, error) {
	a, err := describe(ctx, src)
	if err != nil {
		return nil, fmt.Errorf("prepare %s for a registry: %w", src.Manifest().Head().Tag, err)
	}
	return a, nil
}

func describe(ctx context.Context, src Source) (*Artifact, error) {
	m := src.Manifest()
	groups, err := group(src)
	if err != nil {
		return nil, err
	}
	a := &Artifact{Pack: m}
	place := make(map[pack.Member]int, len(m.Members))
	for i, x := range m.Members {
		place[x] = i
	}
	text, err := m.Encode()
	if err != nil {
		return nil, err
	}
	x := index{FormatVersion: indexVersion, Pack: text}
	for _, members := range groups {
		b, err := hash(ctx, src, members)
		if err != nil {
			return nil, err
		}
		a.blobs = append(a.blobs, b)
		x.Blobs = append(x.Blobs, indexBlob{b.digest, b.size, runs(members, place)})
	}
	return a, a.encode(x)
}

func (a *Artifact) encode(x index) error {
	text, err := json.Marshal(x)
	if err != nil {
		return err
	}
	if a.config, err = compress(text); err != nil {
		return err
	}
	head := a.Pack.Head()
	m := ociManifest{
		SchemaVersion: 2, MediaType: typeManifest, ArtifactType: TypeSnapshot,
		Config: descriptor{TypeIndex, Digest(a.config), int64(len(a.config))},
		Annotations: map[string]string{
			"org.opencontainers.image.created": head.CreatedAt.UTC().Format(time.RFC3339), "org.opencontainers.image.title": head.Tag,
		},
	}
	for _, b := range a.blobs {
		m.Layers = append(m.Layers, descriptor{TypeMembers, b.digest, b.size})
	}
	if a.manifest, err = json.Marshal(m); err != nil {
		return err
	}
	if len(a.blobs) > maxBlobs || len(a.manifest) > maxManifest {
		return fmt.Errorf("it would be %d blobs, more than registries take; pack it to a file", len(a.blobs))
	}
	a.Digest = Digest(a.manifest)
	return nil
}

// group puts members together to blobs: those of a layer that none below it has, its map first; each state and kernel alone. What a
// blob is made of depends on its layer and those below alone, so that another snapshot on them has the same.
func group(src Source) ([][]pack.Member, error) {
	m := src.Manifest()
	members := map[layer.Digest]pack.Member{} // chunks and maps: digests of different things never meet
	for _, x := range m.Members {
		if x.Kind == pack.Chunk || x.Kind == pack.Map {
			members[x.Digest] = x
		}
	}
	var groups [][]pack.Member
	maps := map[layer.Digest]layer.Map{}
	for _, x := range m.Members {
		if x.Kind == pack.State || x.Kind == pack.KernelMember {
			groups = append(groups, []pack.Member{x})
		}
		if x.Kind == pack.Map {
			l, err := readMap(src, x)
			if err != nil {
				return nil, err
			}
			maps[x.Digest] = l
		}
	}
	for _, x := range m.Members {
		if x.Kind != pack.Map {
			continue
		}
		below := map[layer.Digest]bool{}
		for at, depth := maps[x.Digest].Parent, 0; !at.IsZero() && depth < len(maps); depth++ {
			for _, c := range maps[at].Chunks {
				below[c.Digest] = true
			}
			at = maps[at].Parent
		}
		own := []pack.Member{x}
		for _, c := range maps[x.Digest].Chunks {
			if below[c.Digest] {
				continue
			}
			below[c.Digest] = true
			own = append(own, members[c.Digest])
		}
		groups = append(groups, cut(own)...)
	}
	return groups, nil
}

// cut divides a layer's members among blobs.
func cut(members []pack.Member) (groups [][]pack.Member) {
	first, size := 0, int64(0)
	for i, x := range members {
		size += x.Size
		if size >= mostBlob || size >= leastBlob && x.Digest[0]&cutMask == 0 {
			groups, first, size = append(groups, members[first:i+1]), i+1, 0
		}
	}
	if first < len(members) {
		groups = append(groups, members[first:])
	}
	return groups
}

func readMap(src Source, x pack.Member) (layer.Map, error) {
	r, err := src.Open(x)
	if err != nil {
		return layer.Map{}, err
	}
	defer r.Close()
	plain, err := decompress(r, x.Length)
	if err != nil {
		return layer.Map{}, fmt.Errorf("read %s: %w", x, err)
	}
	return layer.ParseMap(plain)
}

func hash(ctx context.Context, src Source, members []pack.Member) (blob, error) {
	h := sha256.New()
	b := blob{members: members}
	for _, x := range members {
		if ctx.Err() != nil {
			return blob{}, context.Cause(ctx)
		}
		r, err := src.Open(x)
		if err != nil {
			return blob{}, err
		}
		n, err := io.Copy(h, r)
		if err := errors.Join(err, r.Close()); err != nil {
			return blob{}, fmt.Errorf("read %s: %w", x, err)
		}
		b.size += n
	}
	b.digest = "sha256:" + hex.EncodeToString(h.Sum(nil))
	return b, nil
}

// runs says which members by their numbers.
func runs(members []pack.Member, place map[pack.Member]int) (out [][2]int) {
	for _, x := range members {
		at := place[x]
		if n := len(out); n > 0 && out[n-1][0]+out[n-1][1] == at {
			out[n-1][1]++
			continue
		}
		out = append(out, [2]int{at, 1})
	}
	return out
}

// ErrForeign is wrapped where a reference names something that is no snapshot.
var ErrForeign = errors.New("not a snapshot of forkd")

// parseManifest reads a manifest, as far as it can be understood without the index.
func parseManifest(text []byte) (ociManifest, error) {
	var m ociManifest
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("%w: its manifest cannot be read: %w", pack.ErrFormat, err)
	}
	if m.Config.MediaType != TypeIndex {
		what := m.Config.MediaType
		if m.ArtifactType != "" {
			what = m.ArtifactType
		}
		if len(m.Layers) > 0 && strings.Contains(what, "image") || what == "" {
			return m, fmt.Errorf("%w: it is a container image (%.80q); build a snapshot of it with: forkd build oci:NAME -t TAG", ErrForeign, what)
		}
		return m, fmt.Errorf("%w: it is %.80q, this forkd reads %s", ErrForeign, what, TypeIndex)
	}
	if len(m.Layers) > maxBlobs {
		return m, fmt.Errorf("%w: it has %d blobs", pack.ErrFormat, len(m.Layers))
	}
	if err := m.Config.check(maxIndex); err != nil {
		return m, err
	}
	for _, l := range m.Layers {
		if err := l.check(maxBlob); err != nil {
			return m, err
		}
		if l.MediaType != TypeMembers {
			return m, fmt.Errorf("%w: it has a blob of media type %.80q", pack.ErrFormat, l.MediaType)
		}
	}
	return m, nil
}

func (d descriptor) check(most int64) error {
	hex, ok := strings.CutPrefix(d.Digest, "sha256:")
	if !ok {
		return fmt.Errorf("%w: the digest %.80q of a blob is not sha256:…", pack.ErrFormat, d.Digest)
	}
	if _, err := layer.ParseDigest(hex); err != nil {
		return fmt.Errorf("%w: a blob: %w", pack.ErrFormat, err)
	}
	if d.Size <= 0 || d.Size > most {
		return fmt.Errorf("%w: blob %s is said to have %d bytes", pack.ErrFormat, d.Digest, d.Size)
	}
	return nil
}

// parse reads an artifact of its manifest and its index, whose digests are right. Nothing else of it is believed.
func parse(manifest, config []byte) (*Artifact, error) {
	m, err := parseManifest(manifest)
	if err != nil {
		return nil, err
	}
	text, err := decompress(bytes.NewReader(config), maxIndex)
	if err != nil {
		return nil, fmt.Errorf("%w: its index: %w", pack.ErrFormat, err)
	}
	a := &Artifact{Digest: Digest(manifest), manifest: manifest, config: config}
	if err := a.read(m, text); err != nil {
		return nil, err
	}
	return a, nil
}

// read takes what the index says.
func (a *Artifact) read(m ociManifest, text []byte) error {
	var v struct {
		FormatVersion int `json:"format_version"`
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return fmt.Errorf("%w: its index cannot be read: %w", pack.ErrFormat, err)
	}
	if v.FormatVersion != indexVersion {
		return fmt.Errorf("%w: its index has version %d, this forkd reads %d; use the forkd that pushed it", pack.ErrVersion, v.FormatVersion, indexVersion)
	}
	var x index
	if err := json.Unmarshal(text, &x); err != nil {
		return fmt.Errorf("%w: its index cannot be read: %w", pack.ErrFormat, err)
	}
	var err error
	if a.Pack, err = pack.Decode(x.Pack); err != nil {
		return err
	}
	return a.take(m, x)
}

// take checks that the index's blobs are those of the manifest, and have every member.
func (a *Artifact) take(m ociManifest, x index) error {
	if len(x.Blobs) != len(m.Layers) {
		return fmt.Errorf("%w: its index lists %d blobs, its manifest %d", pack.ErrFormat, len(x.Blobs), len(m.Layers))
	}
	members := a.Pack.Members
	seen := make([]bool, len(members))
	left, total := len(members), 0
	for i, ib := range x.Blobs {
		if ib.Digest != m.Layers[i].Digest || ib.Size != m.Layers[i].Size {
			return fmt.Errorf("%w: blob %d of its index is another than that of its manifest", pack.ErrFormat, i)
		}
		b := blob{digest: ib.Digest, size: ib.Size}
		size := int64(0)
		for _, run := range ib.Members {
			if run[0] < 0 || run[1] < 1 || run[0] > len(members) || run[1] > len(members)-run[0] {
				return fmt.Errorf("%w: blob %s of its index has members that there are not", pack.ErrFormat, ib.Digest)
			}
			if total += run[1]; total > 4*len(members) {
				return fmt.Errorf("%w: its index lists members again and again", pack.ErrFormat)
			}
			for k := run[0]; k < run[0]+run[1]; k++ {
				b.members = append(b.members, members[k])
				if size += members[k].Size; size > ib.Size {
					break
				}
				if !seen[k] {
					seen[k] = true
					left--
				}
			}
		}
		if size != ib.Size {
			return fmt.Errorf("%w: blob %s has %d bytes, and its members others", pack.ErrFormat, ib.Digest, ib.Size)
		}
		a.blobs = append(a.blobs, b)
	}
	if left > 0 {
		return fmt.Errorf("%w: %d members are in no blob of its index", pack.ErrFormat, left)
	}
	return nil
}

// Digest is what a registry calls bytes.
func Digest(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func compress(plain []byte) ([]byte, error) {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(window))
	if err != nil {
		return nil, fmt.Errorf("prepare compression: %w", err)
	}
	return e.EncodeAll(plain, nil), e.Close()
}

// window bounds what decompression takes, as the frame may ask for it.
const window = 8 << 20

// decompress reads a frame that has most bytes at most.
func decompress(r io.Reader, most int64) ([]byte, error) {
	d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(window))
	if err != nil {
		return nil, fmt.Errorf("prepare decompression: %w", err)
	}
	defer d.Close()
	plain, err := io.ReadAll(io.LimitReader(d, most+1))
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	if int64(len(plain)) > most {
		return nil, fmt.Errorf("it becomes more than %d bytes", most)
	}
	return plain, nil
}
