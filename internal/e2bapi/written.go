package e2bapi

import (
	"context"
	"path"
	"sync"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/httpapi"
)

// written are names of files that clients have written not long ago. The guest's agent gives a file its name when it is
// complete, so that who watches is told of a file that was made, and of none that was written to; envd tells of both.
type written struct {
	mu    sync.Mutex
	names map[writtenName]time.Time
}

type writtenName struct{ sandbox, base string }

const (
	// writtenFor is how long after its upload began a file's event may come: it comes when the last byte has.
	writtenFor = 10 * time.Minute
	maxWritten = 10_000
)

func (w *written) note(sandbox, name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if w.names == nil || len(w.names) >= maxWritten {
		kept := map[writtenName]time.Time{}
		for n, at := range w.names {
			if now.Sub(at) < writtenFor && len(kept) < maxWritten/2 {
				kept[n] = at
			}
		}
		w.names = kept
	}
	w.names[writtenName{sandbox, path.Base(name)}] = now
}

func (w *written) recently(sandbox, name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	at, ok := w.names[writtenName{sandbox, path.Base(name)}]
	return ok && time.Since(at) < writtenFor
}

// events are a guest's as envd tells them.
func (w *written) events(sandbox string, told []wire.FileEvent) []wire.FileEvent {
	out := make([]wire.FileEvent, 0, len(told))
	for _, e := range told {
		if e.Entry != nil {
			described := entry(*e.Entry)
			e.Entry = &described
		}
		out = append(out, e)
		if e.Type == wire.EventCreate && w.recently(sandbox, e.Name) {
			e.Type = wire.EventWrite
			out = append(out, e)
		}
	}
	return out
}

// noting is a guest of which it is noted what files are written in it.
type noting struct {
	httpapi.FileGuest

	note func(path string)
}

// Open implements httpapi.FileGuest.
func (n noting) Open(ctx context.Context, method string, in any) (*wire.Stream, error) {
	if req, ok := in.(wire.WriteRequest); ok && method == wire.MethodFileWrite {
		n.note(req.Path)
	}
	return n.FileGuest.Open(ctx, method, in)
}
