package files

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"sync"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// maxWatchers is below the kernel's limit of inotify instances, 128 a user.
	maxWatchers = 64
	// maxPending and maxPendingBytes bound what waits for a caller of GetWatcherEvents.
	maxPending      = 8192
	maxPendingBytes = 1 << 20
	// abandoned is when a watcher that nobody asks makes room for a new one, if there is no other.
	abandoned = 10 * time.Minute
)

// watchers are those that CreateWatcher made. In a fork of the machine they go on, under the same names.
type watchers struct {
	mu     sync.Mutex
	active int // watches of both kinds
	byID   map[string]*watcher
}

// watcher collects events until they are asked for.
type watcher struct {
	stop context.CancelCauseFunc

	mu      sync.Mutex
	asked   time.Time
	pending []wire.FileEvent
	bytes   int
	err     error // after pending
}

var errRemoved = errors.New("watcher was removed")

// watchDir streams events until the caller leaves.
func (s *Service) watchDir(ctx context.Context, st *wire.Stream, req *wire.WatchRequest) error {
	n, err := s.watch(req)
	if err != nil {
		return err
	}
	defer s.watchers.leave()
	if err := st.SendMessage(wire.WatchEvent{Start: &struct{}{}}); err != nil {
		n.close()
		return err
	}
	return n.run(ctx, func(events []wire.FileEvent) error {
		for i := range events {
			if err := st.SendMessage(wire.WatchEvent{Filesystem: &events[i]}); err != nil {
				return err
			}
		}
		return nil
	})
}

// watch begins a watch; whoever gets it calls leave when it has ended.
func (s *Service) watch(req *wire.WatchRequest) (*notifier, error) {
	u, path, err := s.locateOrWorkdir(req.User, req.Path)
	if err != nil {
		return nil, err
	}
	if err := s.watchers.enter(path); err != nil {
		return nil, err
	}
	n, err := s.newNotifier(u, req, path)
	if err != nil {
		s.watchers.leave()
	}
	return n, err
}

func (s *Service) createWatcher(ctx context.Context, st *wire.Stream, req *wire.WatchRequest) error {
	n, err := s.watch(req)
	if err != nil {
		return err
	}
	var b [8]byte
	_, _ = rand.Read(b[:])
	id := "w" + hex.EncodeToString(b[:])
	ctx, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	w := &watcher{stop: stop, asked: time.Now()}
	s.watchers.put(id, w)
	go func() {
		defer s.watchers.leave()
		w.end(n.run(ctx, w.add))
	}()
	return st.SendMessage(wire.WatcherReply{WatcherID: id})
}

func (s *Service) watcherEvents(_ context.Context, st *wire.Stream, req *wire.WatcherReply) error {
	w, err := s.watchers.get(req.WatcherID)
	if err != nil {
		return err
	}
	events, err := w.drain()
	if err != nil {
		return err
	}
	return st.SendMessage(wire.WatcherEvents{Events: events})
}

func (s *Service) removeWatcher(_ context.Context, st *wire.Stream, req *wire.WatcherReply) error {
	w, err := s.watchers.get(req.WatcherID)
	if err != nil {
		return err
	}
	s.watchers.remove(req.WatcherID)
	w.stop(errRemoved)
	return st.SendMessage(struct{}{})
}

// add keeps events for the next call.
func (w *watcher) add(events []wire.FileEvent) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range events {
		if last := len(w.pending) - 1; last >= 0 && e.Type == wire.EventWrite && w.pending[last].Type == e.Type && w.pending[last].Name == e.Name {
			w.pending[last] = e
			continue
		}
		w.bytes += len(e.Name) + 64
		if e.Entry != nil {
			w.bytes += 2*len(e.Entry.Path) + 256
		}
		if len(w.pending) >= maxPending || w.bytes > maxPendingBytes {
			return errLost
		}
		w.pending = append(w.pending, e)
	}
	return nil
}

func (w *watcher) end(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// drain takes what is pending; an error comes after it.
func (w *watcher) drain() ([]wire.FileEvent, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = time.Now()
	events := w.pending
	if len(events) == 0 {
		return []wire.FileEvent{}, w.err
	}
	w.pending, w.bytes = nil, 0
	return events, nil
}

// enter makes room for a watch.
func (ws *watchers) enter(path string) error {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.active >= maxWatchers && !ws.evict() {
		return wire.Errorf(wire.CodeExhausted, "watch %s: this sandbox has %d watchers; remove one", path, maxWatchers)
	}
	ws.active++
	return nil
}

// evict ends a watcher that nobody has asked for long. Its place is free a moment later; one watch more for that long does
// no harm.
func (ws *watchers) evict() bool {
	oldest, when := "", time.Now().Add(-abandoned)
	for id, w := range ws.byID {
		w.mu.Lock()
		asked := w.asked
		w.mu.Unlock()
		if asked.Before(when) {
			oldest, when = id, asked
		}
	}
	if oldest == "" {
		return false
	}
	ws.byID[oldest].stop(errRemoved)
	delete(ws.byID, oldest)
	return true
}

func (ws *watchers) leave() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.active--
}

func (ws *watchers) put(id string, w *watcher) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.byID == nil {
		ws.byID = map[string]*watcher{}
	}
	ws.byID[id] = w
}

func (ws *watchers) get(id string) (*watcher, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w, ok := ws.byID[id]
	if !ok {
		return nil, wire.Errorf(wire.CodeNotFound, "no watcher %.60q; it was removed, or never made in this sandbox", id)
	}
	return w, nil
}

func (ws *watchers) remove(id string) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	delete(ws.byID, id)
}
