package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
)

// sandbox is a running (or failed) child. What the host table needs is immutable; mu guards the rest and is never
// held across a call into the guest or the machine.
type sandbox struct {
	id           string
	tag          string
	index, count int
	hostname     string
	labels       map[string]string
	created      time.Time
	expires      time.Time // zero: never
	format       engine.Format
	machine      engine.Machine
	dir          string
	report       *wire.AwakenReport
	ready        time.Duration
	release      func() // of the hot image
	onEnd        *time.Timer

	mu         sync.Mutex
	conn       *guest.Conn
	dialing    chan struct{} // closed when a dial in progress has ended
	generation uint64
	state      lineage.State
	reason     string
	console    []byte // kept after the machine's death
	ended      bool
}

// View is what the edges see of a sandbox.
type View struct {
	ID, SnapshotTag, Hostname string
	Index, Count              int
	State                     lineage.State
	Reason                    string
	Labels                    map[string]string
	Created, Expires          time.Time
	PID                       int
	Format                    engine.Format
	Usage                     memory.Usage // zero when it cannot be read
	Report                    *wire.AwakenReport
	Ready                     time.Duration
	DiskOwn                   int64
	Branches                  int    // made of it
	LatestBranch              string // tag of the latest that is ready and still there
}

func (s *sandbox) view() View {
	s.mu.Lock()
	state, reason := s.state, s.reason
	s.mu.Unlock()
	v := View{
		ID: s.id, SnapshotTag: s.tag, Hostname: s.hostname, Index: s.index, Count: s.count, State: state, Reason: reason,
		Labels: s.labels, Created: s.created, Expires: s.expires, Format: s.format, Report: s.report, Ready: s.ready,
	}
	if state == lineage.Running {
		v.PID = s.machine.Ref().PID
	}
	return v
}

// withUsage adds the sandbox's own memory; the kernel walks its page tables for that, so lists ask for it only when
// somebody looks.
func (v View) withUsage() View {
	if v.PID == 0 {
		return v
	}
	if u, err := memory.Measure(v.PID); err == nil {
		v.Usage = u
	}
	return v
}

// guest returns the connection to the agent, dialling anew if the last one broke. Only an awakened sandbox is in the
// table, so whoever gets a connection here talks to a machine of its own.
func (s *sandbox) guest(ctx context.Context) (*guest.Conn, error) {
	for {
		s.mu.Lock()
		if s.state != lineage.Running {
			reason := s.reason
			s.mu.Unlock()
			return nil, hint(fmt.Errorf("sandbox %s: %w: it has %s: %s", s.id, lineage.ErrState, lineage.Failed, reason),
				"see its console with: forkd logs %s", s.id)
		}
		if s.conn != nil && !isClosed(s.conn.Closed()) {
			conn := s.conn
			s.mu.Unlock()
			return conn, nil
		}
		if s.dialing != nil {
			wait := s.dialing
			s.mu.Unlock()
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		s.generation++
		generation, done := s.generation, make(chan struct{})
		s.dialing = done
		s.mu.Unlock()

		conn, err := guest.Dial(ctx, s.machine.DialGuest, generation)
		s.mu.Lock()
		s.dialing = nil
		close(done)
		if err != nil {
			s.mu.Unlock()
			return nil, fmt.Errorf("reach the agent of sandbox %s: %w", s.id, err)
		}
		if s.state != lineage.Running || s.ended {
			s.mu.Unlock()
			_ = conn.Close()
			continue
		}
		s.conn = conn
		s.mu.Unlock()
		return conn, nil
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// watch turns the machine's death into the state failed, at once, and frees what the machine held.
func (h *Host) watch(s *sandbox) {
	<-s.machine.Done()
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return
	}
	s.state, s.reason = lineage.Failed, deathReason(s.machine)
	s.console = s.machine.Console()
	conn := s.conn
	s.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
	}
	if err := s.free(); err != nil {
		h.log.Warn("free a dead sandbox", "sandbox", s.id, "error", err)
	}
	h.log.Info("sandbox failed", "sandbox", s.id, "snapshot", s.tag, "reason", s.reason)
}

func deathReason(m engine.Machine) string {
	if err := m.Err(); err != nil {
		return err.Error()
	}
	return "the machine powered off"
}

// end kills the machine and frees everything. It is idempotent and waits.
func (s *sandbox) end() error {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return nil
	}
	s.ended = true
	conn := s.conn
	failed := s.state == lineage.Failed
	s.mu.Unlock()
	if s.onEnd != nil {
		s.onEnd.Stop()
	}
	if conn != nil {
		_ = conn.Close()
	}
	err := s.machine.Close()
	if failed { // freed when it failed
		return err
	}
	return errors.Join(err, s.free())
}

// free gives back what the machine held. Called once, after the machine's end.
func (s *sandbox) free() error {
	err := s.machine.Close()
	s.release()
	return errors.Join(err, os.RemoveAll(s.dir))
}
