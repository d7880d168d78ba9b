package httpapi

import (
	"context"
	"fmt"
	"net"
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

// Listener serves the API over TCP as well.
type Listener interface {
	// Listen begins to, unless it is done already.
	Listen(ctx context.Context, bind string) error
	// Where it is served, and the pin of the key if the certificate is the daemon's own; "": nowhere.
	Where() (address, fingerprint string)
}

func (s *Server) listenOperations() []operation {
	return []operation{{"POST /v1/listener", access.Admin, "Serve TCP as well", s.listenTCP}}
}

func listenDocuments() map[string]*document {
	return map[string]*document{
		"POST /v1/listener": {
			id: "listenTCP", body: api.ListenRequest{}, replies: ok(api.VersionInfo{}),
			about: "Until the daemon ends; one that is started with `--bind` always does. There must be a token. " +
				"A daemon that serves TCP already goes on where it does.",
		},
	}
}

func (s *Server) listenTCP(w http.ResponseWriter, r *http.Request) error {
	var req api.ListenRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if _, _, err := net.SplitHostPort(req.Bind); err != nil {
		return fmt.Errorf("%w: bind is %.80q: give HOST:PORT, such as 127.0.0.1:8889", host.ErrInvalid, req.Bind)
	}
	if s.TCP == nil {
		return &api.Error{Code: api.CodeUnsupported, Message: "this daemon opens no other listener", Hint: "forkd serve --bind HOST:PORT"}
	}
	if err := s.TCP.Listen(r.Context(), req.Bind); err != nil {
		return err
	}
	return s.version(w, r)
}
