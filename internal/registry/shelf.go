package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
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
	// Tags are those of the snapshots that may be asked for by digest.
	Tags func(ctx context.Context) []string
	// Idle is how long an artifact stays after it was asked for last; Most is how many stay.
	Idle time.Duration
	Most int

	mu      sync.Mutex
	entries map[string]*entry // by the id of the snapshot
	digests map[string]string // of the manifests of snapshots that were described, by their id
	looking chan struct{}     // holds one thing while somebody looks for a digest
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
		} else {
			s.digests[id] = a.Digest
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

// find is the tag of the snapshot whose manifest has a digest. Nothing but the content says which that is: what has not been
// described since the shelf was made is, one after the other, and told from then on.
func (s *Shelf) find(ctx context.Context, digest string) (tag string, err error) {
	s.mu.Lock()
	if s.looking == nil {
		s.looking = make(chan struct{}, 1)
	}
	if s.digests == nil {
		s.digests = map[string]string{}
	}
	looking := s.looking
	s.mu.Unlock()
	select {
	case looking <- struct{}{}: // two would read the same
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	defer func() { <-looking }()
	var unknown []string
	here := map[string]bool{}
	for _, tag := range s.Tags(ctx) {
		id, err := s.ID(tag)
		if err != nil {
			continue // it has just been removed
		}
		here[id] = true
		switch s.digestOf(id) {
		case digest:
			return tag, nil
		case "":
			unknown = append(unknown, tag)
		}
	}
	s.mu.Lock()
	maps.DeleteFunc(s.digests, func(id, _ string) bool { return !here[id] })
	s.mu.Unlock()
	var errs []error
	for _, tag := range unknown {
		got, err := s.describe(ctx, tag)
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		if err != nil { // it is being written, or damaged
			errs = append(errs, err)
		} else if got == digest {
			return tag, nil
		}
	}
	err = fmt.Errorf("manifest %.80q: %w", digest, ErrUnknown)
	if len(errs) > 0 {
		err = fmt.Errorf("%w; of %d snapshots it is not known what they are called, the first because: %w", err, len(errs), errs[0])
	}
	return "", err
}

func (s *Shelf) digestOf(id string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.digests[id]
}

// describe says what digest the manifest of a snapshot has. It is put on no shelf: what somebody pulls just now stays there.
func (s *Shelf) describe(ctx context.Context, tag string) (digest string, err error) {
	id, err := s.ID(tag)
	if err != nil {
		return "", err
	}
	held, a, err := s.collect(ctx, tag)
	if err != nil {
		return "", err
	}
	held.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.digests[id] = a.Digest
	return a.Digest, nil
}

func (s *Shelf) enter(id string) (e *entry, ours bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.entries == nil {
		s.entries = map[string]*entry{}
	}
	if s.digests == nil {
		s.digests = map[string]string{}
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

// ServeManifest answers with a manifest, by the tag of a snapshot or by its digest.
func (s *Shelf) ServeManifest(w http.ResponseWriter, r *http.Request, ref string) error {
	var a *Artifact
	e, ok := s.byDigest(func(a *Artifact) bool { return a.Digest == ref })
	if ok {
		a = e.art
		s.leave(e)
	} else {
		tag := ref
		var err error
		if strings.HasPrefix(ref, "sha256:") {
			if tag, err = s.find(r.Context(), ref); err != nil {
				return err
			}
		}
		var release func()
		if a, _, release, err = s.Get(r.Context(), tag); err != nil {
			return err
		}
		release()
		if tag != ref && a.Digest != ref {
			return fmt.Errorf("manifest %.80q: %w: its snapshot was replaced meanwhile", ref, ErrUnknown)
		}
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
