package registry

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
)

// shelfOf serves the snapshots of m, each as the head of a line of its own; collected counts.
func (h *home) shelfOf(m pack.Manifest, collected *[]string) *Shelf {
	at := func(tag string) int {
		return slices.IndexFunc(m.Snapshots, func(s store.Snapshot) bool { return s.Tag == tag })
	}
	errNone := errors.New("there is none")
	return &Shelf{
		Idle: time.Minute, Most: 2,
		Tags: func(context.Context) []string { return []string{"a", "b", "c", "gone"} },
		ID: func(tag string) (string, error) {
			if at(tag) < 0 {
				return "", errNone
			}
			return m.Snapshots[at(tag)].ID(), nil
		},
		Collect: func(_ context.Context, tag string) (*Held, error) {
			*collected = append(*collected, tag)
			if tag == "a" {
				return nil, errors.New("it is damaged")
			}
			return &Held{Source: h.collect(m, at(tag)+1), Close: func() {}}, nil
		},
	}
}

// TestShelfByDigest: a shelf knows by its digest also what nobody has asked for by its tag, and reads each snapshot once to
// find that out.
func TestShelfByDigest(t *testing.T) {
	h := newHome(t)
	m := h.chain(3)
	want, err := Describe(t.Context(), h.collect(m, 3))
	if err != nil {
		t.Fatal(err)
	}
	var collected []string
	s := h.shelfOf(m, &collected)
	defer s.Close()
	ask := func(digest string) (string, error) {
		w := httptest.NewRecorder()
		err := s.ServeManifest(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil), digest)
		return w.Body.String(), err
	}
	if body, err := ask(want.Digest); err != nil || Digest([]byte(body)) != want.Digest {
		t.Fatalf("the manifest of c: %q, %v", body, err)
	}
	none := "sha256:" + strings.Repeat("0", 64)
	for range 3 {
		if _, err := ask(none); !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), "it is damaged") {
			t.Errorf("a digest that there is not: %v", err)
		}
	}
	collected = slices.DeleteFunc(collected, func(tag string) bool { return tag == "a" }) // which is tried again
	if got := strings.Join(collected, " "); got != "b c c" {
		t.Errorf("read were %s, want each once, and what is served once more", got)
	}
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	if err := s.ServeBlob(w, r, want.blobs[0].digest); err != nil || Digest(w.Body.Bytes()) != want.blobs[0].digest {
		t.Errorf("a blob of what was asked for: %v", err)
	}
}
