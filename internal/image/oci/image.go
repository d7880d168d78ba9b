package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/image/flatten"
)

// Image is an image found: everything is known of it, its layers are yet to be read.
type Image struct {
	Digest string // of what determines it: manifest, configuration or file
	Config Config
	Layers []flatten.Layer
	Notes  []string // what the user should be told

	close []func()
}

// Close frees what the image holds on to.
func (i *Image) Close() {
	for _, f := range slices.Backward(i.close) {
		f()
	}
}

// Config is what an image's configuration says of its programs. The names of the fields are the specification's.
type Config struct {
	User         string              `json:"User"`
	ExposedPorts map[string]struct{} `json:"ExposedPorts"`
	Env          []string            `json:"Env"`
	Entrypoint   []string            `json:"Entrypoint"`
	Cmd          []string            `json:"Cmd"`
	WorkingDir   string              `json:"WorkingDir"`
	Labels       map[string]string   `json:"Labels"`
}

// Errors.
var (
	// ErrNotFound is wrapped by errors about an image that is not where it was looked for.
	ErrNotFound = errors.New("no such image")
	// ErrFormat is wrapped by errors about manifests that make no sense, or that this program does not understand.
	ErrFormat = errors.New("not a usable image")
)

const (
	maxManifest = 4 << 20
	maxConfig   = 8 << 20
	maxDepth    = 3 // of indexes in indexes
	maxLayers   = 500
)

// Media types.
const (
	typeIndex          = "application/vnd.oci.image.index.v1+json"
	typeManifest       = "application/vnd.oci.image.manifest.v1+json"
	typeConfig         = "application/vnd.oci.image.config.v1+json"
	typeDockerIndex    = "application/vnd.docker.distribution.manifest.list.v2+json"
	typeDockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	typeDockerConfig   = "application/vnd.docker.container.image.v1+json"
	typeSchema1        = "application/vnd.docker.distribution.manifest.v1"
)

// refName is the annotation that names an image in a layout.
const refName = "org.opencontainers.image.ref.name"

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
	Variant      string `json:"variant"`
}

func (p platform) String() string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform"`
	Annotations map[string]string `json:"annotations"`
}

// manifest is an index or an image's manifest, whichever it turns out to be.
type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type configFile struct {
	platform

	Config Config `json:"config"`
	RootFS struct {
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// blobs is where an image's parts are. What it hands out need not be verified yet.
type blobs interface {
	// small returns a manifest or configuration whole.
	small(ctx context.Context, d descriptor) ([]byte, error)
	// layer makes a layer available.
	layer(ctx context.Context, d descriptor) (flatten.Opener, error)
}

var digestPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// Digest is the digest of some bytes.
func Digest(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// check refuses a descriptor that nothing can be looked up by.
func (d *descriptor) check(most int64) error {
	if !digestPattern.MatchString(d.Digest) {
		return fmt.Errorf("%w: digest %.80q; only sha256 is supported", ErrFormat, d.Digest)
	}
	if d.Size < 0 || most > 0 && d.Size > most {
		return fmt.Errorf("%w: %s has %d bytes; at most %d are read", ErrFormat, d.Digest, d.Size, most)
	}
	return nil
}

// read returns a small blob, verified.
func read(ctx context.Context, b blobs, d descriptor, most int64) ([]byte, error) {
	if err := d.check(most); err != nil {
		return nil, err
	}
	data, err := b.small(ctx, d)
	if err != nil {
		return nil, err
	}
	if got := Digest(data); got != d.Digest {
		return nil, fmt.Errorf("%w: what is there as %s has the digest %s", ErrFormat, d.Digest, got)
	}
	return data, nil
}

// open reads what a manifest, or an index of some, describes.
func open(ctx context.Context, b blobs, d descriptor, arch string) (*Image, error) {
	want := platform{OS: "linux", Architecture: arch}
	for range maxDepth {
		data, err := read(ctx, b, d, maxManifest)
		if err != nil {
			return nil, err
		}
		m, err := parseManifest(data, d.MediaType)
		if err != nil {
			return nil, err
		}
		if m.Manifests == nil {
			return m.image(ctx, b, d.Digest, want)
		}
		next, err := choose(m.Manifests, want)
		if err != nil {
			return nil, err
		}
		d = *next
	}
	return nil, fmt.Errorf("%w: indexes in indexes", ErrFormat)
}

func parseManifest(data []byte, mediaType string) (*manifest, error) {
	m := &manifest{}
	if err := json.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("%w: its manifest is no JSON: %w", ErrFormat, err)
	}
	if m.MediaType != "" {
		mediaType = m.MediaType
	}
	switch {
	case strings.HasPrefix(mediaType, typeSchema1) || m.SchemaVersion == 1:
		return nil, fmt.Errorf("%w: its manifest is of Docker's schema 1, which nothing writes any more; push the image again", ErrFormat)
	case mediaType == typeIndex || mediaType == typeDockerIndex:
		if m.Manifests == nil {
			m.Manifests = []descriptor{}
		}
	case mediaType == typeManifest || mediaType == typeDockerManifest:
		m.Manifests = nil
	case mediaType == "" && m.SchemaVersion == 2: // the layout's own index may leave it out
	default:
		return nil, fmt.Errorf("%w: a manifest of the type %.120q", ErrFormat, mediaType)
	}
	return m, nil
}

// choose picks the image for a platform. One without a platform is what an index of one image has.
func choose(list []descriptor, want platform) (*descriptor, error) {
	var there []string
	for i := range list {
		d := &list[i]
		if d.Platform == nil {
			if len(list) == 1 {
				return d, nil
			}
			continue
		}
		if d.Platform.OS == want.OS && d.Platform.Architecture == want.Architecture {
			return d, nil
		}
		if d.Platform.OS != "unknown" { // attestations call themselves so
			there = append(there, d.Platform.String())
		}
	}
	if len(there) == 0 {
		return nil, fmt.Errorf("%w: it names no image for any platform", ErrFormat)
	}
	return nil, fmt.Errorf("%w for %s; there are: %s", ErrNotFound, want, strings.Join(there, ", "))
}

// image reads the configuration and makes the layers available.
func (m *manifest) image(ctx context.Context, b blobs, digest string, want platform) (*Image, error) {
	if t := m.Config.MediaType; t != typeConfig && t != typeDockerConfig {
		return nil, fmt.Errorf("%w: it is no container image, its configuration has the type %.120q", ErrFormat, t)
	}
	if len(m.Layers) > maxLayers {
		return nil, fmt.Errorf("%w: %d layers; at most %d are read", ErrFormat, len(m.Layers), maxLayers)
	}
	data, err := read(ctx, b, m.Config, maxConfig)
	if err != nil {
		return nil, fmt.Errorf("its configuration: %w", err)
	}
	cfg, err := parseConfig(data, want)
	if err != nil {
		return nil, err
	}
	img := &Image{Digest: digest, Config: cfg.Config}
	if len(cfg.RootFS.DiffIDs) != len(m.Layers) {
		return nil, fmt.Errorf("%w: %d layers, of which its configuration knows %d", ErrFormat, len(m.Layers), len(cfg.RootFS.DiffIDs))
	}
	for i, d := range m.Layers {
		if err := checkLayerType(d.MediaType); err != nil {
			return nil, err
		}
		if err := d.check(0); err != nil {
			return nil, err
		}
		name := fmt.Sprintf("layer %d of %d", i+1, len(m.Layers))
		opener, err := b.layer(ctx, d)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		img.Layers = append(img.Layers, flatten.Layer{Name: name, Digest: d.Digest, DiffID: cfg.RootFS.DiffIDs[i], Open: opener})
	}
	return img, nil
}

// checkLayerType knows what is no tar file. How it is compressed is seen when it is read.
func checkLayerType(t string) error {
	known := strings.HasPrefix(t, "application/vnd.oci.image.layer.") || strings.HasPrefix(t, "application/vnd.docker.image.rootfs.")
	if !known || strings.Contains(t, "encrypted") {
		return fmt.Errorf("%w: a layer of the type %.120q", ErrFormat, t)
	}
	return nil
}

func parseConfig(data []byte, want platform) (*configFile, error) {
	cfg := &configFile{}
	if err := json.Unmarshal(data, cfg); err != nil {
		return nil, fmt.Errorf("%w: its configuration is no JSON: %w", ErrFormat, err)
	}
	if cfg.OS != "" && cfg.OS != want.OS || cfg.Architecture != "" && cfg.Architecture != want.Architecture {
		return nil, fmt.Errorf("%w for %s; this one is for %s", ErrNotFound, want, cfg.platform)
	}
	for _, id := range cfg.RootFS.DiffIDs {
		if !digestPattern.MatchString(id) {
			return nil, fmt.Errorf("%w: its configuration calls a layer %.80q", ErrFormat, id)
		}
	}
	return cfg, nil
}

// readAll reads at most so many bytes, and says when there are more.
func readAll(r io.Reader, most int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("%w: more than %d bytes", ErrFormat, most)
	}
	return data, err
}
