// Package store keeps the records of snapshots and images on disk: one directory each, written crash-safely, which
// are the truth a daemon starts from. It holds no page or block itself, only the digests of layers, and the device
// state of a snapshot. Package host is its user.
package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/cgroup"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/network/egress"
)

// FormatVersion of the manifests. A reader refuses what it does not know.
const FormatVersion = 1

// Errors.
var (
	ErrExists  = errors.New("already exists")
	ErrCorrupt = errors.New("corrupt record")
)

// Snapshot is the manifest of a frozen machine.
type Snapshot struct {
	FormatVersion int           `json:"format_version"` // first, so that any reader finds it
	Tag           string        `json:"tag"`
	CreatedAt     time.Time     `json:"created_at"`
	Parent        string        `json:"parent,omitempty"`    // tag
	ParentID      string        `json:"parent_id,omitempty"` // its id: another snapshot of that tag is no parent
	Formerly      []string      `json:"formerly,omitempty"`  // ids of earlier records of the same content, which children may still name
	Engine        engine.Format `json:"engine"`
	Image         string        `json:"image"` // id
	ImageDisk     layer.Digest  `json:"image_disk"`
	Memory        layer.Digest  `json:"memory"`
	Disk          layer.Digest  `json:"disk"`
	State         string        `json:"state"` // sha256 of the device state
	StateBytes    int64         `json:"state_bytes"`
	MemoryOwn     int64         `json:"memory_own_bytes"`
	DiskOwn       int64         `json:"disk_own_bytes"`
	Stored        int64         `json:"stored_bytes"`
	Kernel        string        `json:"kernel"`                  // version and digest
	KernelContent layer.Digest  `json:"kernel_content,omitzero"` // of the one that came with it, from elsewhere; what its name says is a claim then
	Agent         string        `json:"agent"`                   // digest
	Protocol      int           `json:"protocol"`
	Source        string        `json:"source"` // digest of all that determined it: recipe, image, kernel, agent, engine
	Recipe        string        `json:"recipe"` // name
	RecipeText    string        `json:"recipe_text"`
	Warm          []string      `json:"warm"`
	BootMS        float64       `json:"boot_ms"`
	WarmMS        float64       `json:"warm_ms"`
	Branch        *Branch       `json:"branch,omitempty"` // nil: built from a recipe
	Config        *Config       `json:"config,omitempty"` // nil: stored before there was one
	Limits        cgroup.Limits `json:"limits,omitzero"`  // of what is forked of it, unless others are asked for
	Egress        egress.Policy `json:"egress,omitzero"`  // what that may reach; a branch's is its source's
	Talked        bool          `json:"talked,omitempty"` // its guest may have connections that leave the machine
	Tool          string        `json:"tool,omitempty"`   // version of the forkd that made it; "": made before that was written down
}

// BuiltOf reports whether a snapshot was built here, of nothing but that recipe.
func (m Snapshot) BuiltOf(recipe string) bool {
	_, err := layer.ParseDigest(m.Source) // what came from elsewhere says so instead
	return err == nil && m.Branch == nil && m.Parent == "" && m.RecipeText == recipe
}

// Config is how an image's programs are started.
type Config struct {
	Env        map[string]string `json:"env,omitempty"`
	WorkDir    string            `json:"workdir,omitempty"` // "": the user's home
	User       string            `json:"user,omitempty"`    // "": root
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Ports      []string          `json:"ports,omitempty"` // "8080/tcp"
}

// Branch says how a running sandbox became a snapshot. Times are in milliseconds.
type Branch struct {
	From       string  `json:"from"`              // id of the sandbox
	Passing    bool    `json:"passing,omitempty"` // made for its children alone, and goes with the last of them
	Mode       string  `json:"mode"`              // "live", "diff" or "full"
	ModeReason string  `json:"mode_reason"`
	PauseMS    float64 `json:"pause_ms"`  // the machine stood still
	FrozenMS   float64 `json:"frozen_ms"` // its processes did
	SetupMS    float64 `json:"setup_ms"`  // prepared before, the machine running
	CopyMS     float64 `json:"copy_ms"`   // memory copied after it, the machine running
	WriteMS    float64 `json:"write_ms"`  // compared, compressed and made durable after that

	Ran *Ran `json:"ran,omitempty"` // nil: made before that was written down
}

// Ran is what was run in a sandbox since it was forked, as far as the host kept it in mind.
type Ran struct {
	Commands [][]string `json:"commands,omitempty"` // the first, in order; "…" ends what was cut
	More     int        `json:"more,omitempty"`     // others
	Lost     bool       `json:"lost,omitempty"`     // what an earlier daemon saw may be missing
}

// Image is the manifest of a bootable root file system.
type Image struct {
	FormatVersion int          `json:"format_version"`
	ID            string       `json:"id"` // hex digest of everything that determined it
	Name          string       `json:"name"`
	Base          string       `json:"base"`
	Packages      []string     `json:"packages"` // name=version
	CreatedAt     time.Time    `json:"created_at"`
	Disk          layer.Digest `json:"disk"`
	DiskBytes     int64        `json:"disk_bytes"`
	OwnBytes      int64        `json:"own_bytes"`
	StoredBytes   int64        `json:"stored_bytes"`
	Config        *Config      `json:"config,omitempty"` // nil: stored before there was one
}

// Store reads and writes them. Its methods may be called concurrently; two writers of one name are the caller's to
// keep apart, the loser gets ErrExists.
type Store struct {
	home layout.Home
	sync func(dir string) error // makes the names in a directory durable
}

// New wraps a home whose directories exist.
func New(home layout.Home) *Store { return &Store{home: home, sync: syncDir} }

const (
	manifestFile = "manifest.json"
	stateFile    = "state"
)

// Snapshots reads all manifests. What cannot be read is reported beside the rest, each with its directory, and left
// where it is: one damaged snapshot must not hide the others.
func (s *Store) Snapshots() ([]Snapshot, []error, error) {
	return readAll(s.home.Snapshots(), func(name string, m Snapshot) error {
		if m.Tag != name {
			return fmt.Errorf("%w: directory %q holds the manifest of %q", ErrCorrupt, name, m.Tag)
		}
		return checkVersion(m.FormatVersion)
	})
}

// Images reads all image manifests, likewise.
func (s *Store) Images() ([]Image, []error, error) {
	return readAll(s.home.Images(), func(name string, m Image) error {
		if m.ID != name {
			return fmt.Errorf("%w: directory %q holds the manifest of %q", ErrCorrupt, name, m.ID)
		}
		return checkVersion(m.FormatVersion)
	})
}

func checkVersion(v int) error {
	if v != FormatVersion {
		return fmt.Errorf("%w: format version %d, this forkd reads %d", ErrCorrupt, v, FormatVersion)
	}
	return nil
}

func readAll[T any](dir string, check func(name string, m T) error) ([]T, []error, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("read records: %w", err)
	}
	var good []T
	var bad []error
	for _, e := range entries {
		m, err := readManifest[T](filepath.Join(dir, e.Name(), manifestFile))
		if err == nil {
			err = check(e.Name(), m)
		}
		if err != nil {
			bad = append(bad, fmt.Errorf("read record %s: %w", e.Name(), err))
			continue
		}
		good = append(good, m)
	}
	return good, bad, nil
}

func readManifest[T any](path string) (T, error) {
	var m T
	data, err := os.ReadFile(path)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return m, nil
}

// AddSnapshot writes a snapshot under its tag. All or nothing: the directory appears complete and durable, or not
// at all. ErrExists if the tag is taken.
func (s *Store) AddSnapshot(ctx context.Context, m Snapshot, state []byte) error {
	if m.FormatVersion != FormatVersion || m.State != digest(state) {
		return fmt.Errorf("store snapshot %s: %w: manifest and state do not belong together", m.Tag, ErrCorrupt)
	}
	if err := s.add(ctx, s.home.Snapshot(m.Tag), m, map[string][]byte{stateFile: state}); err != nil {
		return fmt.Errorf("store snapshot %s: %w", m.Tag, err)
	}
	return nil
}

// AddImage writes an image under its id, likewise.
func (s *Store) AddImage(ctx context.Context, m Image) error {
	if err := s.add(ctx, s.home.Image(m.ID), m, nil); err != nil {
		return fmt.Errorf("store image %s: %w", m.ID, err)
	}
	return nil
}

// State reads a snapshot's device state and checks it against the manifest.
func (s *Store) State(m Snapshot) ([]byte, error) {
	state, err := os.ReadFile(filepath.Join(s.home.Snapshot(m.Tag), stateFile))
	if err != nil {
		return nil, fmt.Errorf("read device state of %s: %w", m.Tag, err)
	}
	if got := digest(state); got != m.State {
		return nil, fmt.Errorf("read device state of %s: %w: digest is %s, the manifest says %s; "+
			"remove the snapshot and build it again from its recipe", m.Tag, ErrCorrupt, got, m.State)
	}
	return state, nil
}

// RemoveSnapshot removes a tag's directory. It disappears under its name in one step, so a crash in the middle
// leaves no half of it.
func (s *Store) RemoveSnapshot(tag string) error { return s.remove(s.home.Snapshot(tag)) }

// RemoveImage removes an image's directory, likewise.
func (s *Store) RemoveImage(id string) error { return s.remove(s.home.Image(id)) }

func (s *Store) remove(dir string) error {
	grave, err := os.MkdirTemp(s.home.Temp(), "removed-")
	if err != nil {
		return fmt.Errorf("remove %s: %w", filepath.Base(dir), err)
	}
	if err := os.Rename(dir, filepath.Join(grave, "record")); err != nil {
		_ = os.RemoveAll(grave)
		return fmt.Errorf("remove %s: %w", filepath.Base(dir), err)
	}
	if err := os.RemoveAll(grave); err != nil {
		return fmt.Errorf("remove %s: %w", filepath.Base(dir), err)
	}
	return syncDir(filepath.Dir(dir))
}

func (s *Store) add(ctx context.Context, dir string, manifest any, files map[string][]byte) error {
	// RENAME_NOREPLACE: an empty directory of that name must not be replaced either.
	_, err := s.place(ctx, dir, manifest, files, unix.RENAME_NOREPLACE)
	return err
}

func (s *Store) replace(ctx context.Context, dir string, manifest any, files map[string][]byte) error {
	old, err := s.place(ctx, dir, manifest, files, unix.RENAME_EXCHANGE)
	if err != nil {
		return err
	}
	return os.RemoveAll(old)
}

// place writes a record's directory and renames it to dir, durably; it returns the path it was written at.
func (s *Store) place(ctx context.Context, dir string, manifest any, files map[string][]byte, flags uint) (writtenAt string, err error) {
	if err := ctx.Err(); err != nil {
		return "", context.Cause(ctx)
	}
	text, err := json.MarshalIndent(manifest, "", "  ")
	if err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(s.home.Temp(), "record-")
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	for name, data := range files {
		if err := writeSynced(filepath.Join(tmp, name), data); err != nil {
			return "", err
		}
	}
	if err := writeSynced(filepath.Join(tmp, manifestFile), append(text, '\n')); err != nil {
		return "", err
	}
	if err := syncDir(tmp); err != nil {
		return "", err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, dir, flags); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return "", ErrExists
		}
		return "", fmt.Errorf("rename into place: %w", err)
	}
	if err := s.sync(filepath.Dir(dir)); err != nil {
		// The caller will believe that nothing has changed: the record goes back to where it was written.
		return "", errors.Join(err, unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, tmp, flags))
	}
	return tmp, nil
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Sync(); err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// WithState is the manifest with the device state that belongs to it.
func (m Snapshot) WithState(state []byte) Snapshot {
	m.State, m.StateBytes = digest(state), int64(len(state))
	return m
}

// Is reports whether id is the snapshot's, or was that of an earlier record of it.
func (m Snapshot) Is(id string) bool { return m.ID() == id || slices.Contains(m.Formerly, id) }

// ID of a snapshot is the digest of its manifest.
func (m Snapshot) ID() string {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // a plain struct of strings and numbers always encodes
	}
	return digest(text)
}
