package layer

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
)

// Damage is named with every layer that it breaks, and with no other.
func TestVerifyNamesWhatBreaks(t *testing.T) {
	s := openStore(t)
	base := image(1, 64*page)
	root := put(t, s, base, nil, Digest{})
	changed := slices.Clone(base)
	copy(changed[5*page:], "something else")
	child := put(t, s, changed, base, root.Digest)
	other := put(t, s, image(2, 64*page), nil, Digest{})
	roots := []Digest{child.Digest, other.Digest}

	rep, err := s.Verify(t.Context(), roots)
	if err != nil || len(rep.Damages) != 0 || rep.Layers != 3 || rep.Chunks != 3 {
		t.Fatalf("a sound store: %+v, %v", rep, err)
	}
	m, err := s.readMap(root.Digest)
	if err != nil {
		t.Fatal(err)
	}
	chunk := m.chunks[0].digest
	damage := func(path string) {
		t.Helper()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b[len(b)/2] ^= 1
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	damage(s.chunkPath(chunk))
	rep, err = s.Verify(t.Context(), roots)
	if err != nil || len(rep.Damages) != 1 {
		t.Fatalf("a flipped bit: %+v, %v", rep, err)
	}
	d := rep.Damages[0]
	if d.Digest != chunk || !slices.Equal(d.Layers, []Digest{root.Digest}) || !errors.Is(d.Err, ErrCorrupt) {
		t.Errorf("damage is %+v, want chunk %s of layer %s", d, chunk, root.Digest)
	}
	for head, want := range map[Digest]bool{root.Digest: true, child.Digest: true, other.Digest: false} {
		if got := s.Needs(t.Context(), head, chunk); got != want {
			t.Errorf("layer %s needs the damaged chunk: %v, want %v", head, got, want)
		}
	}
	// What finds it on the way to a guest says which it is, too.
	err = s.Apply(t.Context(), root.Digest, &buffer{make([]byte, len(base))})
	if named, ok := errors.AsType[*DamageError](err); !ok || named.Digest != chunk || !strings.Contains(err.Error(), "backup") {
		t.Errorf("applying it: %v", err)
	}

	if err := os.Remove(s.chunkPath(chunk)); err != nil {
		t.Fatal(err)
	}
	damage(s.mapPath(other.Digest))
	rep, err = s.Verify(t.Context(), roots)
	if err != nil || len(rep.Damages) != 2 {
		t.Errorf("a missing chunk and a damaged map: %+v, %v", rep, err)
	}
	if err := os.Remove(s.mapPath(other.Digest)); err != nil {
		t.Fatal(err)
	}
	if rep, err = s.Verify(t.Context(), []Digest{other.Digest}); err != nil || len(rep.Damages) != 1 || !errors.Is(rep.Damages[0].Err, ErrCorrupt) {
		t.Errorf("a missing map: %+v, %v", rep, err)
	}
}
