package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/cgroup"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/proc"
	"forkd.dev/forkd/internal/store"
)

// sandbox is a machine a user owns, running or not. What is set before it enters the table is immutable; mu guards the
// rest and is never held across a call into the guest or the machine.
type sandbox struct {
	id           string
	tag          string  // of the snapshot it was forked from
	from         *origin // that snapshot
	index, count int
	hostname     string
	labels       map[string]string
	env          map[string]string // that it was forked with
	created      time.Time
	report       *wire.AwakenReport
	ready        time.Duration
	recording    sync.Mutex // held while its record is written
	builder      bool       // a build's machine, which is in no table
	workspace    string     // that it is, if it is one
	limits       Limits
	life         Life
	policing     sync.Mutex // held while what it may reach is changed

	mu         sync.Mutex
	expires    time.Time   // zero: never
	onEnd      *time.Timer // its time to live is over
	extended   int         // how often it was given another
	onIdle     *time.Timer // nobody calls into the guest
	using      int         // calls into the guest in progress
	used       time.Time   // when the last one ended
	format     engine.Format
	machine    engine.Machine // nil while suspended
	egress     egress.Policy  // what it may reach
	dir        string         // of the machine
	cgroup     *cgroup.Group  // of the machine; nil: there is none on this host
	hot        *hotImage      // what the machine was restored from; it is a user of it
	mapped     memory.ID      // the memory file it was restored from
	disks      []string       // its own disk files, the lowest first; the machine writes the last, the others are frozen
	nextDisk   int            // number of the next one
	conn       *guest.Conn
	dialing    chan struct{} // closed when a dial in progress has ended
	generation uint64
	state      lineage.State
	work       lineage.Work  // what is being done with it and excludes everything else; "": nothing
	idle       chan struct{} // closed when that is over
	news       func()        // what is told at that moment; nil: nothing
	reason     string
	console    []byte // kept after the machine's death
	ended      bool
	branches   int
	public     []int           // ports that everybody may connect to, in order
	latest     *store.Snapshot // its latest branch that became ready
	cut        int             // how many of disks that branch holds
	writing    int             // branches of it that are being written, which read its frozen disks
	suspended  *store.Suspended
	spent      proc.Consumption // of machines it had before, where it was suspended
	seen       proc.Consumption // of this one, when it was looked at last
	talked     bool             // it may have connections that leave its machine, whatever its network has seen
	lost       int              // how often the other ends of its connections went, since its guest was last told
	ran        store.Ran        // what was run in it
	netSpent   network.Totals   // of networks it had before
	net        network.Totals   // of this one, when it was looked at last
}

// View is what the edges see of a sandbox.
type View struct {
	ID, SnapshotTag, Hostname string
	Index, Count              int
	State                     lineage.State
	Reason                    string
	Labels                    map[string]string
	Env                       map[string]string // that it was forked with
	Created, Expires          time.Time
	PID                       int
	Layers                    []string // of the confinement of its VM process; only where usage is asked for
	Format                    engine.Format
	Usage                     memory.Usage // zero when it cannot be read
	Report                    *wire.AwakenReport
	Ready                     time.Duration
	Waited                    time.Duration // of that, for the memory of a snapshot that was still being written; only in a fork's result
	DiskOwn                   int64
	Branches                  int    // made of it
	LatestBranch              string // tag of the latest that is ready and still there
	Workspace                 string // that it is, if it is one
	Limits                    Limits
	Life                      Life
	Egress                    egress.Policy
	Warnings                  []string // what is not as it was asked for; only in a fork's result

	confined engine.Confined // its machine, if it runs and knows
}

func (s *sandbox) view() View {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := View{
		ID: s.id, SnapshotTag: s.tag, Hostname: s.hostname, Index: s.index, Count: s.count, State: s.state, Reason: s.reason,
		Labels: s.labels, Env: s.env, Created: s.created, Expires: s.expires, Format: s.format, Report: s.report, Ready: s.ready,
		Branches: s.branches, Workspace: s.workspace, Limits: s.limits, Life: s.life,
		Egress: s.egress.Clone(),
	}
	if s.latest != nil {
		v.LatestBranch = s.latest.Tag
	}
	if s.state == lineage.Running || s.state == lineage.Paused {
		v.PID = s.machine.Ref().PID
		v.DiskOwn = allocated(s.disks)
		v.confined, _ = s.machine.(engine.Confined)
	}
	return v
}

// allocated is what files take on their disk.
func allocated(files []string) int64 {
	var sum int64
	for _, f := range files {
		var st unix.Stat_t
		if unix.Stat(f, &st) == nil {
			sum += st.Blocks * 512
		}
	}
	return sum
}

// begin takes a sandbox for work that excludes all other. done ends it, with the state the sandbox is in then ("": as
// before); a sandbox that has failed or ended meanwhile stays so. What the host does by itself is waited for.
func (s *sandbox) begin(ctx context.Context, work lineage.Work) (done func(lineage.State), err error) {
	return s.beginIf(ctx, work, func() bool { return true })
}

// beginIf is begin while still says so, which is called with mu held.
func (s *sandbox) beginIf(ctx context.Context, work lineage.Work, still func() bool) (done func(lineage.State), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.work == lineage.Shortening || s.work == lineage.Copying || s.work == lineage.Thawing {
		idle := s.idle
		s.mu.Unlock()
		select {
		case <-idle:
			s.mu.Lock()
		case <-ctx.Done():
			s.mu.Lock()
			return nil, context.Cause(ctx)
		}
	}
	if s.ended {
		return nil, fmt.Errorf("sandbox %s: %w", s.id, ErrNotFound)
	}
	if err := lineage.Begin(s.state, s.work, work); err != nil {
		return nil, s.explain(err)
	}
	if !still() {
		return nil, fmt.Errorf("sandbox %s: %w", s.id, errUsed)
	}
	s.work, s.idle = work, make(chan struct{})
	return once(func(next lineage.State) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.work = ""
		close(s.idle)
		if next != "" && s.state.To(next) == nil {
			s.state = next
		}
		if s.news != nil {
			s.news()
			s.news = nil
		}
	}), nil
}

// announce has news of a work told at the moment it ends: who hears them may begin with the sandbox at once, and all hear
// them in the order in which things were. tell is called with mu held.
func (s *sandbox) announce(tell func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.news = tell
}

// goOn names what is left of a work when the sandbox runs again.
func (s *sandbox) goOn(work lineage.Work) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.work = work
}

// once makes f do nothing from its second call on.
func once[T any](f func(T)) func(T) {
	var o sync.Once
	return func(v T) { o.Do(func() { f(v) }) }
}

// explain adds what a user can do about a sandbox in the wrong state. The caller holds mu.
func (s *sandbox) explain(err error) error {
	err = fmt.Errorf("sandbox %s: %w", s.id, err)
	switch {
	case s.work != "":
		return hint(err, "try again when that is over")
	case s.state == lineage.Paused:
		return hint(err, "forkd resume %s", s.id)
	case s.state == lineage.Suspended:
		return hint(err, "forkd wake %s", s.id)
	case s.state == lineage.Failed:
		return hint(fmt.Errorf("%w: %s", err, s.reason), "see its console with: forkd logs %s", s.id)
	}
	return err
}

// withUsage adds the sandbox's memory.
func (v View) withUsage() View {
	if v.PID == 0 {
		return v
	}
	if u, err := memory.Glance(v.PID); err == nil {
		v.Usage = u
	}
	if v.confined != nil {
		v.Layers = v.confined.Layers()
	}
	return v
}

// guest returns the connection to the agent, dialling anew if the last one broke. Only an awakened sandbox is in the
// table, so whoever gets a connection here talks to a machine of its own.
func (s *sandbox) guest(ctx context.Context) (*guest.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout, &guest.SilentError{Method: "a new connection", Waited: answerTimeout})
	defer cancel()
	for {
		s.mu.Lock()
		if s.state != lineage.Running {
			err := s.explain(fmt.Errorf("%w: it is %s", lineage.ErrState, s.state))
			s.mu.Unlock()
			return nil, err
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
		generation, done, machine := s.generation, make(chan struct{}), s.machine
		s.dialing = done
		s.mu.Unlock()

		conn, err := guest.Dial(ctx, machine.DialGuest, generation)
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

// broken is why the last connection to the agent has ended, if it has.
func (s *sandbox) broken() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return nil
	}
	return s.conn.Err()
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
func (h *Host) watch(s *sandbox, machine engine.Machine) {
	h.wait.Go(func() { h.watchPorts(s, machine) })
	<-machine.Done()
	s.mu.Lock()
	if s.ended || s.machine != machine {
		s.mu.Unlock()
		return
	}
	s.state, s.reason = lineage.Failed, deathReason(machine)
	if limit := limitReached(s.cgroup, s.limits); limit != nil {
		s.reason = limit.Error()
	}
	s.console = machine.Console()
	conn := s.conn
	s.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
	}
	if err := h.free(s); err != nil {
		h.log.Warn("free a dead sandbox", "sandbox", s.id, "error", err)
	}
	h.tell(events.SandboxFailed, s, s.reason)
	h.log.Info("sandbox failed", "sandbox", s.id, "snapshot", s.tag, "reason", s.reason)
}

func deathReason(m engine.Machine) string {
	if err := m.Err(); err != nil {
		return err.Error()
	}
	return "the machine powered off"
}

// end kills the machine and frees everything. It is idempotent and waits.
func (h *Host) end(s *sandbox) error {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return nil
	}
	s.ended = true
	conn, machine, state := s.conn, s.machine, s.state
	s.disarm()
	s.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
	}
	if machine == nil {
		return h.store.RemoveSuspended(s.id)
	}
	err := machine.Close()
	if state == lineage.Failed { // freed when it failed
		return err
	}
	return errors.Join(err, h.free(s))
}

// free gives back what the machine held. Called once for a machine, after its end.
func (h *Host) free(s *sandbox) error {
	s.mu.Lock()
	machine, hot, dir, group := s.machine, s.hot, s.dir, s.cgroup
	s.mu.Unlock()
	err := errors.Join(machine.Close(), group.Remove())
	h.lastTotals(s)
	h.cfg.Networks.Detach(s.id)
	h.hot.release(hot)
	return errors.Join(err, s.removeDir(dir))
}
