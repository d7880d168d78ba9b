package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

func (s *Server) portOperations() []operation {
	const one = " /v1/sandboxes/{id}"
	return []operation{
		{"GET" + one + "/ports", access.Use, "List the ports that services listen on", s.ports},
		{"PUT" + one + "/ports/{port}", access.Manage, "Say who may connect to a port", s.setPort},
		{ingressPattern, access.Use, "Reach a service", s.ingress},
	}
}

func portDocuments() map[string]*document {
	const one = " /v1/sandboxes/{id}"
	return map[string]*document{
		"GET" + one + "/ports": {
			id: "listPorts", query: []parameter{
				{name: "follow", kind: boolean, about: "Go on with the whole list whenever it changes, until the client leaves or the sandbox stands still."},
			},
			about: "TCP ports, and those that are public though nobody listens. One object; followed one a line, or server-sent events with " +
				"`Accept: text/event-stream`.",
			replies: []response{
				{status: http.StatusOK, of: api.PortList{}},
				{status: http.StatusOK, of: api.PortList{}, media: jsonLines},
				{status: http.StatusOK, of: api.PortList{}, media: eventStream},
			},
		},
		"PUT" + one + "/ports/{port}": {
			id: "setPort", body: api.PortChange{}, replies: noContent(),
			about: "A public port can be reached by everybody who reaches the daemon, without a token. Children and branches begin with none.",
		},
		ingressPattern: {
			id: "port", raw: true, replies: []response{{status: http.StatusOK, media: "*/*", about: "What the service answers."}},
			about: "Any method, with any body, headers, WebSocket and server-sent events is passed on to the service that listens on a TCP port of " +
				"the sandbox, over HTTP/1.1, or HTTP/2 for gRPC. A token is taken from `X-Forkd-Token`, or from `Authorization` if it has a token's form, and " +
				"never passed on. A refusal or failure of the daemon's own has the header `X-Forkd-Error`.",
		},
	}
}

func portNumber(r *http.Request) (int, error) {
	text := r.PathValue("port")
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || text != strconv.FormatUint(n, 10) {
		return 0, fmt.Errorf("%w: port %.20q; give a number from 1 to 65535", host.ErrInvalid, text)
	}
	return int(n), nil
}

func (s *Server) portList(id string, ports []host.Port) api.PortList {
	list := api.PortList{Ports: []api.Port{}}
	for _, p := range ports {
		out := api.Port{
			Port: p.Port, Address: p.Address, PID: p.PID, Process: p.Process, Public: p.Public,
			Path: fmt.Sprintf("/v1/sandboxes/%s/ports/%d/", id, p.Port),
		}
		if s.Domain != "" {
			out.Host = fmt.Sprintf("%d-%s.%s", p.Port, id, s.Domain)
		}
		list.Ports = append(list.Ports, out)
	}
	return list
}

// ports lists ports, or follows them.
func (s *Server) ports(w http.ResponseWriter, r *http.Request) error {
	follow, err := flag(r, "follow")
	if err != nil {
		return err
	}
	id, err := s.findSandbox(r.PathValue("id"))
	if err != nil {
		return err
	}
	if !follow {
		list, err := s.Host.Ports(r.Context(), id)
		if err != nil {
			return err
		}
		return Reply(w, http.StatusOK, s.portList(id, list))
	}
	out := &events{w: w, kind: wantsEvents(r)}
	if out.kind == "" {
		out.kind = jsonLines
	}
	return s.followPorts(r, id, out)
}

func (s *Server) followPorts(r *http.Request, id string, out *events) error {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	lists := make(chan []host.Port)
	ended := make(chan error, 1)
	go func() {
		ended <- s.Host.WatchPorts(ctx, id, func(list []host.Port) error {
			select {
			case lists <- list:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	}()
	tick := time.NewTicker(keepAlive)
	defer tick.Stop()
	for n := 0; ; {
		select {
		case list := <-lists:
			if err := out.begin(); err != nil {
				return err
			}
			n++
			if err := out.write(strconv.Itoa(n), "ports", s.portList(id, list)); err != nil {
				return err
			}
		case <-tick.C:
			if err := out.keepAlive(); err != nil {
				return err
			}
		case err := <-ended:
			return followed(r.Context(), err)
		}
	}
}

func (s *Server) setPort(w http.ResponseWriter, r *http.Request) error {
	var req api.PortChange
	if err := decode(w, r, &req); err != nil {
		return err
	}
	port, err := portNumber(r)
	if err != nil {
		return err
	}
	if err := s.Host.SetPublic(r.PathValue("id"), port, req.Public); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
