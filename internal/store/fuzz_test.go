package store

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"forkd.dev/forkd/internal/layout"
)

// FuzzRecords: a record that was damaged is told, or left alone, and hides no other; what is read is what would be written.
func FuzzRecords(f *testing.F) {
	m := Snapshot{FormatVersion: FormatVersion, Tag: "x", Image: "i", Branch: &Branch{From: "s", Mode: "live"}, Config: &Config{User: "u"}}
	for _, v := range []any{
		m,
		Image{FormatVersion: FormatVersion, ID: "x", Packages: []string{"a=1"}},
		Unfinished{Snapshot: m},
		Suspended{FormatVersion: FormatVersion, ID: "x", Sandbox: json.RawMessage(`{}`), Machine: m},
		Workspace{FormatVersion: FormatVersion, Name: "x"},
		Snapshot{FormatVersion: FormatVersion + 1, Tag: "x"},
		nil,
	} {
		text, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
		f.Add(text[:len(text)/2])
	}
	f.Add([]byte(`{"format_version":1,"tag":"../x","id":"../x","name":"../x"}`))
	run := f.TempDir() // not in the host's own directory for such things
	home, err := layout.Find(f.TempDir(), 1, func(string) string { return run })
	if err != nil {
		f.Fatal(err)
	}
	if err := home.Make(); err != nil {
		f.Fatal(err)
	}
	s := New(home)
	good := Snapshot{FormatVersion: FormatVersion, Tag: "good", State: digest(nil)}
	if err := s.AddSnapshot(f.Context(), good, nil); err != nil {
		f.Fatal(err)
	}
	files := []string{s.unfinished("x")}
	for _, dir := range []string{home.Snapshot("x"), home.Image("x"), home.SuspendedSandbox("x"), home.Workspace("x")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			f.Fatal(err)
		}
		files = append(files, filepath.Join(dir, manifestFile))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, file := range files {
			if err := os.WriteFile(file, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		snapshots := readOne(t, "x", 1, s.Snapshots, func(m Snapshot) string { return m.Tag })
		for _, m := range snapshots {
			if got := (Snapshot{}); json.Unmarshal(mustJSON(t, m), &got) != nil || got.ID() != m.ID() {
				t.Errorf("%+v is another snapshot once it was written", m)
			}
			if m.FormatVersion != FormatVersion {
				t.Errorf("a record of version %d was taken", m.FormatVersion)
			}
		}
		readOne(t, "x", 0, s.Images, func(m Image) string { return m.ID })
		readOne(t, "x", 0, s.SuspendedSandboxes, func(m Suspended) string { return m.ID })
		readOne(t, "x", 0, s.Workspaces, func(m Workspace) string { return m.Name })
		list, err := s.Unfinished()
		if err != nil || len(list) > 1 || len(list) == 1 && list[0].Tag != "x" {
			t.Errorf("unfinished: %+v, %v", list, err)
		}
	})
}

// readOne reads the records of a kind: that of name, or what is wrong with it, besides so many good ones.
func readOne[T any](t *testing.T, name string, good int, read func() ([]T, []error, error), nameOf func(T) string) []T {
	t.Helper()
	all, bad, err := read()
	if err != nil || len(all)+len(bad) != good+1 || len(all) < good {
		t.Fatalf("%v: %d records and %d faults, want %d in all: %v", reflect.TypeFor[T](), len(all), len(bad), good+1, err)
	}
	for _, err := range bad {
		if !errors.Is(err, ErrCorrupt) {
			t.Errorf("%v is no ErrCorrupt", err)
		}
	}
	for _, m := range all {
		if got := nameOf(m); got != name && (good == 0 || got != "good") {
			t.Errorf("the record of %q is %q's", name, got)
		}
	}
	return all
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
