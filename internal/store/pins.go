package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Pin notes, durably, that a tag is to be kept. It is on the name: a snapshot that replaces the one of that name has it too.
func (s *Store) Pin(tag string) error {
	if err := os.MkdirAll(s.home.Pins(), 0o700); err != nil {
		return fmt.Errorf("pin %s: %w", tag, err)
	}
	f, err := os.OpenFile(filepath.Join(s.home.Pins(), tag), os.O_WRONLY|os.O_CREATE, 0o600)
	if err == nil {
		err = errors.Join(f.Close(), syncDir(s.home.Pins()))
	}
	if err != nil {
		return fmt.Errorf("pin %s: %w", tag, err)
	}
	return nil
}

// Unpin removes the note.
func (s *Store) Unpin(tag string) error {
	err := os.Remove(filepath.Join(s.home.Pins(), tag))
	if err == nil {
		err = syncDir(s.home.Pins())
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unpin %s: %w", tag, err)
	}
	return nil
}

// Pinned reports whether a tag is.
func (s *Store) Pinned(tag string) bool {
	_, err := os.Lstat(filepath.Join(s.home.Pins(), tag))
	return err == nil
}

// Pins are the tags that are pinned.
func (s *Store) Pins() (map[string]bool, error) {
	entries, err := os.ReadDir(s.home.Pins())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read pins: %w", err)
	}
	pins := map[string]bool{}
	for _, e := range entries {
		pins[e.Name()] = true
	}
	return pins, nil
}
