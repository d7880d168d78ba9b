package host

import (
	"context"
	"sync"
)

// audience are those who want to be told of ports. While there is nobody, sandboxes are not asked about them: a guest pays for
// an answer with memory that it shared with its siblings until then.
type audience struct {
	mu      sync.Mutex
	n       int
	some    chan struct{} // closed while there is somebody
	nobody  chan struct{} // closed while there is not
	started bool
}

// start makes the channels. The caller holds mu.
func (a *audience) start() {
	if !a.started {
		a.started, a.some, a.nobody = true, make(chan struct{}), make(chan struct{})
		close(a.nobody)
	}
}

// join counts somebody until leave is called.
func (a *audience) join() (leave func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.start()
	if a.n++; a.n == 1 {
		close(a.some)
		a.nobody = make(chan struct{})
	}
	return sync.OnceFunc(func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.n--; a.n == 0 {
			close(a.nobody)
			a.some = make(chan struct{})
		}
	})
}

// wait waits for somebody. The context that it returns ends when nobody is left.
func (a *audience) wait(ctx context.Context) (context.Context, context.CancelFunc, error) {
	a.mu.Lock()
	a.start()
	some := a.some
	a.mu.Unlock()
	select {
	case <-some:
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	a.mu.Lock()
	nobody := a.nobody
	a.mu.Unlock()
	watched, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-nobody:
			cancel()
		case <-watched.Done():
		}
	}()
	return watched, cancel, nil
}

// ListenForPorts has ports that are opened and closed told as events until leave is called. What is open then is told first.
func (h *Host) ListenForPorts() (leave func()) { return h.audience.join() }
