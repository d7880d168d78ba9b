package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"forkd.dev/forkd/internal/pack"
)

// Held is a source that is kept until Close.
type Held struct {
	Source
	Close func()
}

// Shelf is what a registry of one home has: the artifacts that were asked for lately, each with hold of its members, so
// that what is removed meanwhile can be pulled to its end. It is safe for concurrent use.
type Shelf struct {
	// Collect takes hold of a snapshot as it is now; the same snapshot gives the same manifest. ID says which it is.
	Collect func(ctx context.Context, tag string) (*Held, error)
	ID      func(tag string) (string, error)
	// Idle is how long an artifact stays after it was asked for last; Most is how many stay.
	Idle time.Duration
	Most int

	mu      sync.Mutex
	entries map[string]*entry // by the id of the snapshot
}

// entry is an artifact on the shelf, or on its way there.
type entry struct {
	ready chan struct{} // closed when the rest is known
	art   *Artifact
	held  *Held
	err   error

	used  time.Time
	users int
}

// Get returns a snapshot's artifact and its members, which stay until release is called.
func (s *Shelf) Get(ctx context.Context, tag string) (a *Artifact, src Source, release func(), err error) {
	id, err := s.ID(tag)
	if err != nil {
		return nil, nil, nil, err
	}
	e, ours := s.enter(id)
	if ours {
		held, a, err := s.collect(context.WithoutCancel(ctx), tag)
		s.mu.Lock()
		if e.held, e.art, e.err = held, a, err; err != nil {
			delete(s.entries, id)
		}
		s.mu.Unlock()
		close(e.ready)
	}
	select {
	case <-e.ready:
	case <-ctx.Done():
		s.leave(e)
		return nil, nil, nil, context.Cause(ctx)
	}
	if e.err != nil {
		s.leave(e)
		return nil, nil, nil, e.err
	}
	return e.art, e.held, sync.OnceFunc(func() { s.leave(e) }), nil
}

func (s *Shelf) collect(ctx context.Context, tag string) (*Held, *Artifact, error) {
	held, err := s.Collect(ctx, tag)
	if err != nil {
		return nil, nil, err
	}
	a, err := Describe(ctx, held)
	if err != nil {
		held.Close()
		return nil, nil, err
	}
	return held, a, nil
}

func (s *Shelf) enter(id string) (e *entry, ours bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.entries == nil {
		s.entries = map[string]*entry{}
	}
	s.trim()
	e, ok := s.entries[id]
	if !ok {
		e = &entry{ready: make(chan struct{})}
		s.entries[id] = e
	}
	e.users++
	e.used = time.Now()
	return e, !ok
}

func (s *Shelf) leave(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.users--
	e.used = time.Now()
	if e.users == 0 {
		time.AfterFunc(s.Idle+time.Second, s.Trim)
	}
}

// Trim lets go of what nobody has asked for lately.
func (s *Shelf) Trim() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trim()
}

func (s *Shelf) trim() {
	for {
		oldest, n := "", 0
		for id, e := range s.entries {
			if e.users > 0 || e.held == nil {
				continue
			}
			n++
			if oldest == "" || e.used.Before(s.entries[oldest].used) {
				oldest = id
			}
		}
		if oldest == "" || n < s.Most && time.Since(s.entries[oldest].used) < s.Idle {
			return
		}
		s.entries[oldest].held.Close()
		delete(s.entries, oldest)
	}
}

// Close lets go of everything. Nothing may be asked for any more.
func (s *Shelf) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, e := range s.entries {
		if e.held != nil {
			e.held.Close()
		}
		delete(s.entries, id)
	}
}

// byDigest finds an artifact that is on the shelf.
func (s *Shelf) byDigest(has func(*Artifact) bool) (*entry, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		if e.held != nil && e.art != nil && has(e.art) {
			e.users++
			return e, true
		}
	}
	return nil, false
}

// ErrUnknown is wrapped where the shelf has no such thing, or not any more.
var ErrUnknown = errors.New("not on this registry's shelf")

// ServeManifest answers with a manifest, by the tag of a snapshot or by the digest of what was asked for by its tag
// before.
func (s *Shelf) ServeManifest(w http.ResponseWriter, r *http.Request, ref string) error {
	var a *Artifact
	e, ok := s.byDigest(func(a *Artifact) bool { return a.Digest == ref })
	if ok {
		a = e.art
		s.leave(e)
	} else {
		var release func()
		var err error
		if a, _, release, err = s.Get(r.Context(), ref); err != nil {
			return err
		}
		release()
	}
	w.Header().Set("Content-Type", typeManifest)
	w.Header().Set("Docker-Content-Digest", a.Digest)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(a.manifest))
	return nil
}

// ServeBlob answers with a blob, or a range of it.
func (s *Shelf) ServeBlob(w http.ResponseWriter, r *http.Request, digest string) error {
	var found blob
	index := false
	e, ok := s.byDigest(func(a *Artifact) bool {
		if index = Digest(a.config) == digest; index {
			return true
		}
		for _, b := range a.blobs {
			if b.digest == digest {
				found = b
				return true
			}
		}
		return false
	})
	if !ok {
		return fmt.Errorf("blob %.80q: %w; ask for its snapshot first", digest, ErrUnknown)
	}
	defer s.leave(e)
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Docker-Content-Digest", digest)
	var content io.ReadSeeker = bytes.NewReader(e.art.config)
	if !index {
		b := newBlobReader(e.held, found)
		defer b.Close()
		content = b
	}
	http.ServeContent(w, r, "", time.Time{}, content)
	return nil
}

var _ Source = (*pack.Source)(nil)
