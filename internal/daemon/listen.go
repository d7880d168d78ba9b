package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/layout"
)

// tcpListener is where a daemon serves TCP: from its start, or since somebody asked for it.
type tcpListener struct {
	home   layout.Home
	tokens *access.Store
	log    *slog.Logger

	mu     sync.Mutex
	server *http.Server // nil: not up yet, or no more
	open   *public      // nil: there is none
	failed chan error   // told once, when what was opened after the start ends; nil: nothing was
}

// Where says where it is.
func (t *tcpListener) Where() (address, fingerprint string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil {
		return "", ""
	}
	return t.open.url, t.open.pin
}

// Listen opens it, unless it is open.
func (t *tcpListener) Listen(ctx context.Context, bind string) error {
	n := Network{Bind: bind}
	if err := n.check(); err != nil {
		return &api.Error{Code: api.CodeInvalid, Message: err.Error()}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.open != nil:
		return nil
	case t.server == nil:
		return &api.Error{Code: api.CodeUnavailable, Message: "the daemon is stopping"}
	case !t.tokens.Usable():
		return &api.Error{Code: api.CodeInvalid, Message: "there is no token that would let anybody in over TCP", Hint: "forkd token create"}
	}
	p, err := listenTCP(ctx, n, t.home, t.tokens)
	if err != nil {
		return &api.Error{Code: api.CodeUnavailable, Message: fmt.Sprintf("serve TCP at %.80q: %v", bind, err), Hint: "another port, or 0 for any"}
	}
	t.serve(p)
	t.log.Info("serving TCP", "address", p.url, "fingerprint", p.pin)
	return nil
}

// serve is called with mu held.
func (t *tcpListener) serve(p *public) {
	t.open, t.failed = p, make(chan error, 1)
	server, failed := t.server, t.failed
	go func() {
		err := server.Serve(p)
		if !errors.Is(err, http.ErrServerClosed) { // the unix socket goes on; what failed is an error of the daemon's at its end
			t.log.Error("TCP is not served any more", "address", p.url, "error", err)
		}
		failed <- err
	}()
}

// begin says who serves what is opened.
func (t *tcpListener) begin(server *http.Server) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.server = server
}

// end waits for the end of what was opened after the daemon's start. The server has been shut down.
func (t *tcpListener) end() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.server = nil
	if t.failed == nil {
		return nil
	}
	return <-t.failed
}
