package store

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/layout"
)

// TestFailedRecordChangesNothing: a caller that is told of an error believes that what was there is there still.
func TestFailedRecordChangesNothing(t *testing.T) {
	root := t.TempDir()
	home := layout.Home{Root: root, Runtime: root, Socket: filepath.Join(root, "forkd.sock")}
	if err := home.Make(); err != nil {
		t.Fatal(err)
	}
	s := New(home)
	boom := errors.New("boom")
	failing := func(string) error { return boom }
	state := []byte("state")
	one := Snapshot{FormatVersion: FormatVersion, Tag: "x", Recipe: "one"}.WithState(state)
	two := Snapshot{FormatVersion: FormatVersion, Tag: "x", Recipe: "two"}.WithState(state)

	s.sync = failing
	if err := s.AddSnapshot(t.Context(), one, state); !errors.Is(err, boom) {
		t.Errorf("AddSnapshot: %v", err)
	}
	if all, bad, err := s.Snapshots(); len(all)+len(bad) != 0 || err != nil {
		t.Errorf("after a record that failed: %v, %v, %v", all, bad, err)
	}
	s.sync = syncDir
	if err := s.AddSnapshot(t.Context(), one, state); err != nil {
		t.Fatal(err)
	}
	s.sync = failing
	if err := s.ReplaceSnapshot(t.Context(), two, state); !errors.Is(err, boom) {
		t.Errorf("ReplaceSnapshot: %v", err)
	}
	all, _, err := s.Snapshots()
	if err != nil || len(all) != 1 || all[0].Recipe != "one" {
		t.Errorf("after a replacement that failed: %v, %v", all, err)
	}
	left, err := os.ReadDir(home.Temp())
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestIs(t *testing.T) {
	old := Snapshot{Tag: "x"}
	next := Snapshot{Tag: "x", Recipe: "same", Formerly: []string{old.ID()}}
	if !next.Is(old.ID()) || !next.Is(next.ID()) || old.Is(next.ID()) {
		t.Error("a record does not know what it was called")
	}
}
