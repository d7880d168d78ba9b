package pack

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// Encode is the manifest's bytes, which it is signed and named by: those of one manifest are always the same.
func (m *Manifest) Encode() ([]byte, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode manifest of a pack: %w", err)
	}
	if len(b) > MaxManifestBytes {
		return nil, fmt.Errorf("encode manifest of a pack: it has %d bytes, at most %d are allowed", len(b), MaxManifestBytes)
	}
	return append(b, '\n'), nil
}

// Decode reads a manifest and checks all that can be known without the members. The error wraps ErrFormat or ErrVersion.
func Decode(b []byte) (*Manifest, error) {
	if len(b) > MaxManifestBytes {
		return nil, fmt.Errorf("%w: its manifest has more than %d bytes", ErrFormat, MaxManifestBytes)
	}
	var v struct {
		FormatVersion *int `json:"format_version"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return nil, fmt.Errorf("%w: its manifest cannot be read: %w", ErrFormat, err)
	}
	if v.FormatVersion == nil {
		return nil, fmt.Errorf("%w: its manifest has no format version", ErrFormat)
	}
	if *v.FormatVersion < 1 || *v.FormatVersion > FormatVersion {
		return nil, fmt.Errorf("%w: it has version %d, this forkd reads 1 to %d; use the forkd that made it, or have it packed by this one",
			ErrVersion, *v.FormatVersion, FormatVersion)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	// What is not known would be lost in the record, and with it the id that others know the snapshot by.
	d.DisallowUnknownFields()
	m := &Manifest{}
	if err := d.Decode(m); err != nil {
		return nil, fmt.Errorf("%w: its manifest cannot be read: %w; a newer forkd may have made it", ErrFormat, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: something follows its manifest", ErrFormat)
	}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	return m, nil
}

func (m *Manifest) check() error {
	for _, f := range []func() error{m.checkMembers, m.checkSnapshots, m.checkImages, m.checkTexts, m.checkKernels} {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

type name struct {
	kind   Kind
	digest layer.Digest
}

func (m *Manifest) checkMembers() error {
	if len(m.Members) > MaxMembers {
		return fmt.Errorf("its manifest lists %d members, at most %d are allowed", len(m.Members), MaxMembers)
	}
	var unpacked int64
	m.index = make(map[name]int, len(m.Members))
	for i, x := range m.Members {
		var most int64
		switch x.Kind {
		case Chunk:
			most = layer.MaxChunkBytes
		case Map:
			most = layer.MaxMapBytes
		case State:
			most = maxStateBytes
		case KernelMember:
			most = MaxKernelBytes
		default:
			return fmt.Errorf("its manifest lists a member of unknown kind %.20q", x.Kind)
		}
		// What cannot be compressed grows by a few bytes of framing.
		room := x.Length + x.Length>>10 + 64<<10
		switch {
		case x.Digest.IsZero():
			return fmt.Errorf("its manifest lists a %s without a digest", x.Kind)
		case x.Length <= 0 || x.Length > most:
			return fmt.Errorf("%s: its length is %d; one of this kind has 1 to %d bytes", x, x.Length, most)
		case x.Size <= 0 || x.Size > room:
			return fmt.Errorf("%s: it is to travel as %d bytes and to become %d; that cannot be", x, x.Size, x.Length)
		}
		if _, twice := m.index[name{x.Kind, x.Digest}]; twice {
			return fmt.Errorf("its manifest lists %s twice", x)
		}
		m.index[name{x.Kind, x.Digest}] = i
		if x.Kind != Chunk {
			unpacked += x.Length
		}
		if unpacked > maxUnpacked {
			return fmt.Errorf("its maps, device states and kernels would take more than %d bytes", int64(maxUnpacked))
		}
	}
	return nil
}

func (x Member) String() string { return fmt.Sprintf("%s %s", x.Kind, x.Digest) }

func (m *Manifest) member(kind Kind, d layer.Digest) (Member, bool) {
	i, ok := m.index[name{kind, d}]
	if !ok {
		return Member{}, false
	}
	return m.Members[i], true
}

const (
	maxCPUs   = 1024
	maxMemory = 1 << 46
)

// checkSnapshots is about each record by itself, and about how they stand on one another.
func (m *Manifest) checkSnapshots() error {
	if len(m.Snapshots) == 0 || len(m.Snapshots) > MaxSnapshots {
		return fmt.Errorf("its manifest has %d snapshots; a pack has 1 to %d", len(m.Snapshots), MaxSnapshots)
	}
	tags := map[string]bool{}
	for _, s := range m.Snapshots {
		if err := lineage.CheckTag(s.Tag); err != nil {
			return fmt.Errorf("a snapshot of its manifest: %w", err)
		}
		if tags[s.Tag] {
			return fmt.Errorf("its manifest has two snapshots %s", s.Tag)
		}
		tags[s.Tag] = true
		if err := m.checkSnapshot(s); err != nil {
			return fmt.Errorf("snapshot %s: %w", s.Tag, err)
		}
	}
	return nil
}

func (m *Manifest) checkSnapshot(s store.Snapshot) error {
	if s.FormatVersion != store.FormatVersion {
		return fmt.Errorf("its record has format version %d, this forkd reads %d", s.FormatVersion, store.FormatVersion)
	}
	if s.Engine.CPUs < 1 || s.Engine.CPUs > maxCPUs || s.Engine.MemoryBytes <= 0 || s.Engine.MemoryBytes > maxMemory {
		return fmt.Errorf("a machine with %d CPUs and %d bytes of memory", s.Engine.CPUs, s.Engine.MemoryBytes)
	}
	state, err := layer.ParseDigest(s.State)
	if err != nil {
		return fmt.Errorf("device state: %w", err)
	}
	if x, ok := m.member(State, state); !ok || x.Length != s.StateBytes {
		return fmt.Errorf("its device state %s of %d bytes is no member of the pack", state, s.StateBytes)
	}
	for _, d := range []layer.Digest{s.Memory, s.Disk, s.ImageDisk} {
		if _, ok := m.member(Map, d); !ok {
			return fmt.Errorf("its layer %s is no member of the pack", d)
		}
	}
	i := slices.IndexFunc(m.Images, func(i store.Image) bool { return i.ID == s.Image })
	if i < 0 {
		return fmt.Errorf("its image %.80q is not in the manifest", s.Image)
	}
	if m.Images[i].Disk != s.ImageDisk {
		return fmt.Errorf("its disk stands on %s, which is not that of its image", s.ImageDisk)
	}
	return nil
}

func (m *Manifest) checkImages() error {
	if len(m.Images) > len(m.Snapshots) {
		return fmt.Errorf("its manifest has %d images for %d snapshots", len(m.Images), len(m.Snapshots))
	}
	seen := map[string]bool{}
	for _, i := range m.Images {
		if i.FormatVersion != store.FormatVersion {
			return fmt.Errorf("image %.80q: its record has format version %d, this forkd reads %d", i.ID, i.FormatVersion, store.FormatVersion)
		}
		if _, err := layer.ParseDigest(i.ID); err != nil {
			return fmt.Errorf("id of an image: %w", err)
		}
		if seen[i.ID] {
			return fmt.Errorf("its manifest has image %s twice", i.ID)
		}
		seen[i.ID] = true
		if !slices.ContainsFunc(m.Snapshots, func(s store.Snapshot) bool { return s.Image == i.ID }) {
			return fmt.Errorf("no snapshot of its manifest stands on image %s", i.ID)
		}
	}
	return nil
}

// checkTexts keeps from terminals what is not text: records are shown to people.
func (m *Manifest) checkTexts() error {
	bad := func(what string, texts ...string) error {
		for _, t := range texts {
			if !utf8.ValidString(t) || strings.ContainsFunc(t, unicode.IsControl) {
				return fmt.Errorf("its %s is %.60q, which is not text of one line", what, t)
			}
		}
		return nil
	}
	errs := []error{bad("tool", m.Tool)}
	for _, s := range m.Snapshots {
		errs = append(errs,
			bad("kernel", s.Kernel), bad("agent", s.Agent), bad("recipe's name", s.Recipe), bad("source", s.Source), bad("warm-up", lines(s.Warm...)...),
			bad("parent", s.Parent, s.ParentID), bad("earlier ids", s.Formerly...),
			bad("engine", s.Engine.Engine, s.Engine.Version, s.Engine.Arch, s.Engine.Accelerator, s.Engine.Machine, s.Engine.CPUModel))
		if s.Branch != nil {
			errs = append(errs, bad("branch", append(lines(s.Branch.ModeReason), s.Branch.From, s.Branch.Mode)...))
		}
		if !utf8.ValidString(s.RecipeText) {
			errs = append(errs, errors.New("its recipe is no text"))
		}
		errs = append(errs, badConfig(bad, s.Config))
	}
	for _, i := range m.Images {
		errs = append(errs, bad("image", i.Name, i.Base), bad("list of packages", i.Packages...), badConfig(bad, i.Config))
	}
	if m.Scrub != nil {
		errs = append(errs, bad("report", m.Scrub.Looked...), bad("report", m.Scrub.Limits...), bad("report", m.Scrub.Skipped))
		for _, f := range m.Scrub.Found {
			errs = append(errs, bad("report", f.Snapshot, f.Path, f.What))
		}
	}
	for _, err := range errs { // one clear error, not all of them
		if err != nil {
			return err
		}
	}
	return nil
}

// lines are those of texts that may have several.
func lines(texts ...string) []string {
	var all []string
	for _, t := range texts {
		all = append(all, strings.FieldsFunc(t, func(r rune) bool { return r == '\n' || r == '\t' || r == '\r' })...)
	}
	return all
}

// badConfig checks what is shown of a configuration as names; values may be anything that a program takes.
func badConfig(bad func(string, ...string) error, c *store.Config) error {
	if c == nil {
		return nil
	}
	for k := range c.Env {
		if err := bad("environment", k); err != nil {
			return err
		}
	}
	for k, v := range c.Labels {
		if err := bad("labels", append(lines(v), k)...); err != nil {
			return err
		}
	}
	return bad("configuration", append(slices.Clone(c.Ports), c.User, c.WorkDir)...)
}
