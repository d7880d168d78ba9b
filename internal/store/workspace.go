package store

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Workspace is a name for one sandbox: what it was made of, and which sandbox it is.
type Workspace struct {
	FormatVersion int       `json:"format_version"`
	Name          string    `json:"name"`
	Source        string    `json:"source"`            // tag of the snapshot it was made of
	Sandbox       string    `json:"sandbox,omitempty"` // id; empty: it is being made
	CreatedAt     time.Time `json:"created_at"`
	LastActive    time.Time `json:"last_active"` // when it was made, suspended or resumed last
}

// Workspaces reads all, like Snapshots.
func (s *Store) Workspaces() ([]Workspace, []error, error) {
	return readAll(s.home.Workspaces(), func(name string, m Workspace) error {
		if m.Name != name {
			return fmt.Errorf("%w: directory %q holds the workspace %q", ErrCorrupt, name, m.Name)
		}
		return checkVersion(m.FormatVersion)
	})
}

// AddWorkspace writes a new one, all or nothing and durable. ErrExists if the name is taken.
func (s *Store) AddWorkspace(ctx context.Context, m Workspace) error {
	return s.putWorkspace(m, s.add(ctx, s.home.Workspace(m.Name), m, nil))
}

// ReplaceWorkspace puts a new record in the place of the one of its name, in one step.
func (s *Store) ReplaceWorkspace(ctx context.Context, m Workspace) error {
	return s.putWorkspace(m, s.replace(ctx, s.home.Workspace(m.Name), m, nil))
}

func (s *Store) putWorkspace(m Workspace, err error) error {
	if err != nil && !errors.Is(err, ErrExists) {
		return fmt.Errorf("store workspace %s: %w", m.Name, err)
	}
	return err
}

// RemoveWorkspace removes one; it disappears in one step.
func (s *Store) RemoveWorkspace(name string) error { return s.remove(s.home.Workspace(name)) }
