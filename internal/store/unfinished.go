package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const unfinishedSuffix = ".json"

// Unfinished is a snapshot that was begun and is none.
type Unfinished struct {
	Snapshot
	Failure string `json:"failure,omitempty"` // empty: it was being written, or still is
	// Unpacking: it comes from elsewhere, with these. None of them is to stay without it.
	Unpacking *Unpacking `json:"unpacking,omitempty"`
}

// Unpacking are the records that are written before that of a snapshot which comes from elsewhere.
type Unpacking struct {
	Snapshots []string `json:"snapshots"` // tags, parents first
	Images    []string `json:"images"`    // ids
}

// BeginUnpacking notes them, durably, before the first of them is written. EndSnapshot removes the note.
func (s *Store) BeginUnpacking(m Snapshot, with Unpacking) error {
	err := s.note(Unfinished{Snapshot: m, Unpacking: &with})
	if err == nil {
		err = s.sync(s.home.Unfinished())
	}
	if err != nil {
		return fmt.Errorf("note what is unpacked with %s: %w", m.Tag, err)
	}
	return nil
}

// BeginSnapshot notes that a snapshot of that tag is being written, so that a later daemon can say what became of it.
// The note is not synced: after a power cut nobody asks for it.
func (s *Store) BeginSnapshot(m Snapshot) error { return s.note(Unfinished{Snapshot: m}) }

// FailSnapshot notes why it could not be.
func (s *Store) FailSnapshot(m Snapshot, reason error) error {
	return s.note(Unfinished{Snapshot: m, Failure: reason.Error()})
}

func (s *Store) note(m Unfinished) error {
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	// In one step: a full disk must not cost the note that is there.
	tmp := s.unfinished(m.Tag) + ".tmp"
	if m.Unpacking == nil {
		err = os.WriteFile(tmp, append(text, '\n'), 0o600)
	} else if err = os.Remove(tmp); err == nil || errors.Is(err, fs.ErrNotExist) {
		err = writeSynced(tmp, append(text, '\n'))
	}
	if err == nil {
		err = os.Rename(tmp, s.unfinished(m.Tag))
	}
	if err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("note that snapshot %s is not ready: %w", m.Tag, err)
	}
	return nil
}

// EndSnapshot removes the note.
func (s *Store) EndSnapshot(tag string) error {
	if err := os.Remove(s.unfinished(tag)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget that snapshot %s was being written: %w", tag, err)
	}
	return nil
}

// Unfinished lists the notes of snapshots that an earlier daemon did not finish. One that cannot be read is skipped and
// removed: it says nothing that anybody could use.
func (s *Store) Unfinished() ([]Unfinished, error) {
	entries, err := os.ReadDir(s.home.Unfinished())
	if err != nil {
		return nil, fmt.Errorf("read notes of unfinished snapshots: %w", err)
	}
	var list []Unfinished
	for _, e := range entries {
		tag, ok := strings.CutSuffix(e.Name(), unfinishedSuffix)
		m, err := readManifest[Unfinished](filepath.Join(s.home.Unfinished(), e.Name()))
		if !ok || err != nil || m.Tag != tag {
			_ = os.Remove(filepath.Join(s.home.Unfinished(), e.Name()))
			continue
		}
		list = append(list, m)
	}
	return list, nil
}

func (s *Store) unfinished(tag string) string {
	return filepath.Join(s.home.Unfinished(), tag+unfinishedSuffix)
}

// Suspended is a sandbox whose machine is on disk: what it was (for the host to read), and its machine as a snapshot
// without a tag.
type Suspended struct {
	FormatVersion int             `json:"format_version"`
	ID            string          `json:"id"` // of the sandbox
	Sandbox       json.RawMessage `json:"sandbox"`
	Machine       Snapshot        `json:"machine"`
}

// AddSuspended writes a suspended sandbox, all or nothing and durable. ErrExists if it is there.
func (s *Store) AddSuspended(ctx context.Context, m Suspended, state []byte) error {
	if m.FormatVersion != FormatVersion || m.Machine.State != digest(state) {
		return fmt.Errorf("store suspended sandbox %s: %w: manifest and state do not belong together", m.ID, ErrCorrupt)
	}
	if err := s.add(ctx, s.home.SuspendedSandbox(m.ID), m, map[string][]byte{stateFile: state}); err != nil {
		return fmt.Errorf("store suspended sandbox %s: %w", m.ID, err)
	}
	return nil
}

// SuspendedSandboxes reads all, like Snapshots.
func (s *Store) SuspendedSandboxes() ([]Suspended, []error, error) {
	return readAll(s.home.Suspended(), func(name string, m Suspended) error {
		if m.ID != name {
			return fmt.Errorf("%w: directory %q holds the sandbox %q", ErrCorrupt, name, m.ID)
		}
		return checkVersion(m.FormatVersion)
	})
}

// SuspendedState reads a suspended sandbox's device state and checks it.
func (s *Store) SuspendedState(m Suspended) ([]byte, error) {
	state, err := os.ReadFile(filepath.Join(s.home.SuspendedSandbox(m.ID), stateFile))
	if err != nil {
		return nil, fmt.Errorf("read device state of suspended sandbox %s: %w", m.ID, err)
	}
	if got := digest(state); got != m.Machine.State {
		return nil, fmt.Errorf("read device state of suspended sandbox %s: %w: digest is %s, the record says %s", m.ID,
			ErrCorrupt, got, m.Machine.State)
	}
	return state, nil
}

// RemoveSuspended removes one; it disappears in one step.
func (s *Store) RemoveSuspended(id string) error { return s.remove(s.home.SuspendedSandbox(id)) }

// ReplaceSnapshot puts a new record in the place of the one of its tag, in one step: either is complete at any instant.
func (s *Store) ReplaceSnapshot(ctx context.Context, m Snapshot, state []byte) error {
	if m.FormatVersion != FormatVersion || m.State != digest(state) {
		return fmt.Errorf("store snapshot %s: %w: manifest and state do not belong together", m.Tag, ErrCorrupt)
	}
	if err := s.replace(ctx, s.home.Snapshot(m.Tag), m, map[string][]byte{stateFile: state}); err != nil {
		return fmt.Errorf("store snapshot %s: %w", m.Tag, err)
	}
	return nil
}
