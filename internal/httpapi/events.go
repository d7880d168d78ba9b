package httpapi

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	bus "forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/host"
)

// keepAlive is how often a reader of server-sent events that has nothing to read is told that the line still stands.
const keepAlive = 15 * time.Second

// listen tells what has happened and what happens: one JSON object a line, or server-sent events.
func (s *Server) listen(w http.ResponseWriter, r *http.Request) error {
	wanted, err := eventFilter(r)
	if err != nil {
		return err
	}
	follow, from, err := s.subscribe(r)
	if err != nil {
		return err
	}
	if follow && wantsPorts(r, wanted) {
		defer s.Host.ListenForPorts()()
	}
	kind := wantsEvents(r)
	if kind == "" {
		kind = jsonLines
	}
	out := &events{w: w, kind: kind}
	if err := out.begin(); err != nil {
		return err
	}
	for {
		// A daemon that stops cancels; who may not read on is told why.
		if err := context.Cause(r.Context()); err != nil && !errors.Is(err, context.Canceled) {
			return err
		}
		e, ok := from.Now() // when the daemon stops, up to the last
		if !ok && (!follow || r.Context().Err() != nil) {
			return nil // That is how a client, or the daemon, ends it.
		}
		if !ok {
			if e, err = s.await(r.Context(), out, from); err != nil && r.Context().Err() != nil {
				continue
			}
			if err != nil {
				return err
			}
		}
		if !wanted(e) {
			continue
		}
		if err := out.write(strconv.FormatUint(e.Sequence, 10), string(e.Type), told(e)); err != nil {
			return err
		}
	}
}

// await is the next event; meanwhile a reader of server-sent events hears that the line stands.
func (s *Server) await(ctx context.Context, out *events, from *bus.Subscription) (bus.Event, error) {
	for {
		wait, cancel := context.WithTimeout(ctx, keepAlive)
		e, err := from.Next(wait)
		cancel()
		if err == nil || ctx.Err() != nil {
			return e, err
		}
		if err := out.keepAlive(); err != nil {
			return e, err
		}
	}
}

// subscribe reads where to begin and whether to go on: since=SEQUENCE (as a reader of server-sent events that comes back says
// it in a header), tail=N of what is kept, follow. By default what comes from now on, without follow all that is kept.
func (s *Server) subscribe(r *http.Request) (follow bool, from *bus.Subscription, err error) {
	q := r.URL.Query()
	follow = true
	if q.Has("follow") {
		if follow, err = flag(r, "follow"); err != nil {
			return false, nil, err
		}
	}
	since := q.Get("since")
	if last := r.Header.Values("Last-Event-ID"); len(last) > 0 {
		if _, err := strconv.ParseUint(last[0], 10, 64); err != nil {
			return false, nil, fmt.Errorf("%w: Last-Event-ID is %.40q; give the sequence of an event", host.ErrInvalid, last[0])
		}
		if since == "" {
			since = last[0]
		}
	}
	tail := q.Get("tail")
	switch {
	case since != "" && tail != "":
		return false, nil, fmt.Errorf("%w: since and tail are both given; give one of them", host.ErrInvalid)
	case since != "":
		n, err := strconv.ParseUint(since, 10, 64)
		if err != nil || n == math.MaxUint64 {
			return false, nil, fmt.Errorf("%w: since is %.40q; give the sequence of an event", host.ErrInvalid, since)
		}
		return follow, s.Host.Events().After(n), nil
	case tail != "":
		n, err := strconv.ParseUint(tail, 10, 31)
		if err != nil {
			return false, nil, fmt.Errorf("%w: tail is %.40q; give a number of events", host.ErrInvalid, tail)
		}
		return follow, s.Host.Events().Kept(int(n)), nil
	case follow:
		return follow, s.Host.Events().Kept(0), nil
	}
	return follow, s.Host.Events().Kept(math.MaxInt), nil
}

// eventFilter reads which events are wanted: type=sandbox or type=sandbox.failed, sandbox=ID, snapshot=TAG, each as often as
// one likes. What is lost is told in any case.
func eventFilter(r *http.Request) (wanted func(bus.Event) bool, err error) {
	q := r.URL.Query()
	types, sandboxes, snapshots := q["type"], q["sandbox"], q["snapshot"]
	for _, t := range types {
		if !slices.ContainsFunc(bus.Types(), func(have bus.Type) bool { return isOf(have, t) }) {
			return nil, fmt.Errorf("%w: type is %.40q; give one of %s, or the part before the dot", host.ErrInvalid, t, typeNames())
		}
	}
	return func(e bus.Event) bool {
		if e.Type == bus.Lost {
			return true
		}
		return (len(types) == 0 || slices.ContainsFunc(types, func(t string) bool { return isOf(e.Type, t) })) &&
			(len(sandboxes) == 0 || slices.Contains(sandboxes, e.Sandbox)) && (len(snapshots) == 0 || slices.Contains(snapshots, e.Snapshot))
	}, nil
}

// wantsPorts reports whether a listener wants to hear of ports.
func wantsPorts(r *http.Request, wanted func(bus.Event) bool) bool {
	e := bus.Event{Type: bus.PortOpened}
	if ids := r.URL.Query()["sandbox"]; len(ids) > 0 {
		e.Sandbox = ids[0]
	}
	if tags := r.URL.Query()["snapshot"]; len(tags) > 0 {
		e.Snapshot = tags[0]
	}
	if wanted(e) {
		return true
	}
	e.Type = bus.PortClosed
	return wanted(e)
}

func isOf(have bus.Type, asked string) bool {
	kind, _, _ := strings.Cut(string(have), ".")
	return asked == string(have) || asked == kind
}

func typeNames() string {
	var names []string
	for _, t := range bus.Types() {
		names = append(names, string(t))
	}
	return strings.Join(names, ", ")
}

func told(e bus.Event) api.Event {
	return api.Event{
		Sequence: e.Sequence, Time: e.Time.UTC(), Type: string(e.Type), SandboxID: e.Sandbox, SnapshotTag: e.Snapshot, Labels: e.Labels,
		Port: e.Port, Reason: e.Reason, Lost: e.Lost,
	}
}

// begin sends the headers, so that a reader knows that it is listened to before anything happens.
func (e *events) begin() error {
	if e.begun {
		return nil
	}
	e.begun = true
	e.w.Header().Set("Content-Type", e.kind)
	e.w.Header().Set("Cache-Control", "no-store")
	e.w.WriteHeader(http.StatusOK)
	return e.flush()
}

// keepAlive is a comment, which readers skip; lines of JSON have none.
func (e *events) keepAlive() error {
	if e.kind != eventStream {
		return nil
	}
	if _, err := e.w.Write([]byte(": \n\n")); err != nil {
		return err
	}
	return e.flush()
}

// flush hands on what is written. A writer that cannot has no reader who waits.
func (e *events) flush() error {
	if err := http.NewResponseController(e.w).Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}

// followed is the end of what was followed until the request's context ended, or for a reason of its own.
func followed(ctx context.Context, err error) error {
	switch cause := context.Cause(ctx); {
	case cause == nil:
		return err
	case errors.Is(cause, context.Canceled):
		return nil // That is how a client, or the daemon, ends it.
	default:
		return cause
	}
}
