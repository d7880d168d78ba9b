package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/lineage"
)

const (
	// watchDelay keeps the watch of ports out of a fork's way to its first answers.
	watchDelay = 2 * time.Second
	// watchAgain is how long until it is tried again where the sandbox stands still.
	watchAgain = 5 * time.Second
	// maxPublic ports of a sandbox may be reached by everybody.
	maxPublic = 64
	// maxPortsTold is how many ports of one change are told of, and portsPace how long until the next is looked at: a guest may
	// open and close them as it likes, and the events that are kept are everybody's.
	maxPortsTold = 16
	portsPace    = 250 * time.Millisecond
)

// Port is one on which a service in a sandbox listens.
type Port struct {
	Port    int
	Address string // "": nobody listens, but it is public
	PID     int
	Process string
	Public  bool // everybody who reaches the daemon may connect, without a token
}

// DialPort connects to a service in a sandbox. Until ctx ends the sandbox counts as used; that bounds the attempt, too, but not
// the connection, which breaks when the machine ends.
func (h *Host) DialPort(ctx context.Context, id string, port int) (*call.PortConn, error) {
	conn, err := h.portGuest(ctx, id, h.Guest)
	if err != nil {
		return nil, err
	}
	c, err := call.DialPort(ctx, conn, port)
	if err != nil {
		return nil, portError(h.Because(id, err), id, port)
	}
	return c, nil
}

// ErrNoService means that nothing in a sandbox listens on a port.
var ErrNoService = errors.New("nothing listens there")

func portError(err error, id string, port int) error {
	if e, ok := errors.AsType[*wire.Error](err); ok && e.Code == wire.CodeNotFound {
		return hint(fmt.Errorf("port %d of sandbox %s: %w", port, id, ErrNoService), "see what listens: forkd ports %s", id)
	}
	return fmt.Errorf("port %d of sandbox %s: %w", port, id, err)
}

// portGuest is the way to an agent that knows ports.
func (h *Host) portGuest(ctx context.Context, id string, reach func(context.Context, string) (*guest.Conn, error)) (*guest.Conn, error) {
	conn, err := reach(ctx, id)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(conn.Hello().Features, wire.FeatureNetwork) {
		return nil, hint(fmt.Errorf("sandbox %s: %w: the agent in its snapshot is from before ports could be reached", id, ErrUnsupported),
			"build the snapshot again")
	}
	return conn, nil
}

// Ports are those on which services listen, and those that are public.
func (h *Host) Ports(ctx context.Context, id string) ([]Port, error) {
	s, err := h.find(id)
	if err != nil {
		return nil, err
	}
	conn, err := h.portGuest(ctx, s.id, h.Look)
	if err != nil {
		return nil, err
	}
	var reply wire.PortsReply
	if err := conn.Call(ctx, wire.MethodPorts, wire.PortsRequest{}, &reply); err != nil {
		return nil, h.Because(s.id, err)
	}
	return s.ports(&reply), nil
}

// WatchPorts calls each with the ports, and again whenever they change, until ctx or the sandbox ends or each returns an error,
// which is returned.
func (h *Host) WatchPorts(ctx context.Context, id string, each func([]Port) error) error {
	s, err := h.find(id)
	if err != nil {
		return err
	}
	conn, err := h.portGuest(ctx, s.id, h.Look)
	if err != nil {
		return err
	}
	err = followPorts(ctx, conn, func(reply *wire.PortsReply) error { return each(s.ports(reply)) })
	if err != nil && ctx.Err() == nil {
		return h.Because(s.id, err)
	}
	return err
}

func followPorts(ctx context.Context, conn *guest.Conn, each func(*wire.PortsReply) error) error {
	stream, err := conn.Open(ctx, wire.MethodPorts, wire.PortsRequest{Follow: true})
	if err != nil {
		return err
	}
	defer stream.Close()
	for {
		var reply wire.PortsReply
		if err := stream.RecvMessage(&reply); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return err
		}
		if err := each(&reply); err != nil {
			return err
		}
	}
}

// maxPorts is more than a service has; a guest may say what it likes.
const maxPorts = 1024

// ports are what a guest says, fit to be shown, and those that are public.
func (s *sandbox) ports(reply *wire.PortsReply) []Port {
	s.mu.Lock()
	public := slices.Clone(s.public)
	s.mu.Unlock()
	var list []Port
	for _, p := range reply.Ports[:min(len(reply.Ports), maxPorts)] {
		if p.Port < 1 || p.Port > 65535 {
			continue
		}
		list = append(list, Port{
			Port: p.Port, Address: wire.Cut(p.Address, 64), PID: p.PID, Process: wire.Cut(p.Process, 256), Public: slices.Contains(public, p.Port),
		})
	}
	for _, port := range public {
		if !slices.ContainsFunc(list, func(p Port) bool { return p.Port == port }) {
			list = append(list, Port{Port: port, Public: true})
		}
	}
	slices.SortStableFunc(list, func(a, b Port) int { return a.Port - b.Port })
	return list
}

// SetPublic says whether everybody may connect to a port of a sandbox that runs or is paused. Its children and branches begin with
// none.
func (h *Host) SetPublic(id string, port int, public bool) error {
	if port < 1 || port > 65535 {
		return invalid("port %d; allowed are 1 to 65535", port)
	}
	s, err := h.find(id)
	if err != nil {
		return err
	}
	err = s.change(func() error {
		i, has := slices.BinarySearch(s.public, port)
		switch {
		case public && !has && len(s.public) >= maxPublic:
			return fmt.Errorf("%w: %d ports are public", ErrExhausted, maxPublic)
		case public && !has:
			s.public = slices.Insert(slices.Clone(s.public), i, port)
		case !public && has:
			s.public = slices.Delete(slices.Clone(s.public), i, i+1)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("port %d of sandbox %s: %w", port, s.id, err)
	}
	return h.remember(s) // One that was hidden must not be public again after the next start.
}

// IsPublic reports whether everybody may connect to a port of the sandbox that has exactly that id.
func (h *Host) IsPublic(id string, port int) bool {
	s, err := h.find(id)
	if err != nil || s.id != id {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, public := slices.BinarySearch(s.public, port)
	return public
}

// watchPorts tells of ports that are opened and closed, as long as the machine lives.
func (h *Host) watchPorts(s *sandbox, machine engine.Machine) {
	if s.builder {
		return
	}
	ctx, stop := untilDead(h.life, machine)
	defer stop()
	var known []wire.Port
	for wait := watchDelay; ; wait = watchAgain {
		if passed(ctx, wait) != nil {
			return
		}
		watched, done, err := h.audience.wait(ctx)
		if err != nil {
			return
		}
		again := h.watchPortsOnce(watched, s, &known)
		done()
		if !again {
			return
		}
	}
}

// passed waits until so long has passed.
func passed(ctx context.Context, wait time.Duration) error {
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// watchPortsOnce tells of ports until the connection to the agent, or ctx, ends. It returns whether there is any sense in
// another try.
func (h *Host) watchPortsOnce(ctx context.Context, s *sandbox, known *[]wire.Port) (again bool) {
	conn, err := s.guest(ctx)
	if errors.Is(err, ErrNotFound) || s.gone() {
		return false
	}
	if err != nil {
		return true // it stands still
	}
	if !slices.Contains(conn.Hello().Features, wire.FeatureNetwork) {
		return false
	}
	_ = followPorts(ctx, conn, func(reply *wire.PortsReply) error {
		return h.changedPorts(ctx, s, known, reply)
	}) // the connection has ended, or nobody listens any more
	return true
}

// changedPorts tells what a guest says that has changed. A guest that says more meanwhile waits.
func (h *Host) changedPorts(ctx context.Context, s *sandbox, known *[]wire.Port, reply *wire.PortsReply) error {
	now := reply.Ports[:min(len(reply.Ports), maxPorts)]
	h.tellPorts(s, *known, now)
	*known = now
	return passed(ctx, portsPace)
}

func (s *sandbox) gone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended || s.state == lineage.Failed
}

// tellPorts tells what has changed.
func (h *Host) tellPorts(s *sandbox, before, now []wire.Port) {
	told := 0
	tell := func(what events.Type, in, notIn []wire.Port) {
		last := 0
		for _, p := range in {
			other := slices.ContainsFunc(notIn, func(q wire.Port) bool { return q.Port == p.Port })
			if other || p.Port == last || p.Port < 1 || p.Port > 65535 || told >= maxPortsTold {
				continue
			}
			last = p.Port
			told++
			h.events.Emit(events.Event{
				Type: what, Sandbox: s.id, Snapshot: s.tag, Labels: s.labels, Port: p.Port, Reason: wire.Cut(p.Process, 256),
			})
		}
	}
	tell(events.PortOpened, now, before)
	tell(events.PortClosed, before, now)
}
