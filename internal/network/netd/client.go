package netd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

// Config is what a Client is made of.
type Config struct {
	Socket string // path of the process's socket; who can connect to it is the owner of all networks
	Record string // path of the note that says which process has it
	// First and Last are users that nobody else is, for a daemon that is root; both 0: the process is the daemon's own user.
	First, Last uint32
	Stage       string // path of a Stage; "": the outside is the world
	Log         *slog.Logger
	// Restarted is told that a process died, why, and whose links another is about to have: it is waited for. May be nil.
	Restarted func(ids []string, reason string)
}

const (
	// answerLimit is how long a fork waits for a network that it asked for.
	answerLimit = 10 * time.Second
	// callLimit bounds every other question.
	callLimit = 10 * time.Second
	// totalsLimit bounds those that somebody may ask for who wants to know something else, too.
	totalsLimit = 2 * time.Second
	// pingEvery and pingLimit: a process that does not answer so long is ended, and another started.
	pingEvery = 10 * time.Second
	pingLimit = 30 * time.Second
	// firstPause and lastPause are between attempts to start a process that does not stay.
	firstPause = 50 * time.Millisecond
	lastPause  = 5 * time.Second
	// graceLimit is how long a process may take to end when it is told to.
	graceLimit = 3 * time.Second
)

// ErrDown says that the process of networks does not run, or does not answer.
var ErrDown = errors.New("the process of the sandboxes' networks does not answer")

// errNoLink is for a sandbox that has no network.
var errNoLink = errors.New("it has no link to a network")

// held is a link as the daemon knows it: enough to hand it over again.
type held struct {
	file   *os.File // the process's end
	policy egress.Policy
	spent  int64
	open   bool
	last   network.Totals // as seen last
	pins   []network.Pin  // that its guest knew when it began
}

// Client is the daemon's side. It starts the process when the first link is made. It is safe for concurrent use.
type Client struct {
	cfg  Config
	life context.Context //nolint:containedctx // Ends with Leave; the process is looked after until then.
	die  context.CancelFunc
	work sync.WaitGroup

	pingEvery, pingLimit time.Duration
	protocol             int // of processes that it understands
	maxLinks             int // that a process can have

	mu       sync.Mutex
	links    map[string]*held
	conn     *conn // nil: there is none
	use      network.PoolUse
	changed  chan struct{} // closed when conn changes, and replaced
	why      error         // there is none
	watchers map[string]map[*watcher]bool
	tended   bool // somebody looks after a process
	left     bool
	last     bool // … and nothing is there for a later daemon
}

// New makes a Client that has started nothing.
func New(ctx context.Context, cfg Config) *Client {
	c := &Client{
		cfg: cfg, links: map[string]*held{}, changed: make(chan struct{}),
		watchers: map[string]map[*watcher]bool{}, pingEvery: pingEvery, pingLimit: pingLimit, protocol: protocol, maxLinks: linksOf(maxFilesOf()),
	}
	c.life, c.die = context.WithCancel(context.WithoutCancel(ctx))
	return c
}

// Attach makes a link for a machine and returns both ends, the machine's and a copy of the other, for the caller to close. It
// waits for nobody.
func (c *Client) Attach(id string, policy egress.Policy, spent int64) (machine, peer *os.File, err error) {
	if err := c.room(id); err != nil {
		return nil, nil, err
	}
	ours, machine, err := pair()
	if err != nil {
		return nil, nil, err
	}
	if peer, err = duplicate(ours); err != nil {
		closeAll([]*os.File{ours, machine})
		return nil, nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left {
		closeAll([]*os.File{ours, machine, peer})
		return nil, nil, errors.New("the daemon is stopping")
	}
	if old := c.links[id]; old != nil {
		_ = old.file.Close()
	}
	h := &held{file: ours, policy: policy.Clone(), spent: spent}
	c.links[id] = h
	if c.conn != nil {
		c.conn.tell(h.attach(id), ours)
	}
	c.wake()
	return machine, peer, nil
}

// filesEach is how many files the process has open for a link: it, its own copy, and two that tell of its events.
const filesEach = 4

// linksOf is how many links a process of so many files can have: half of them are for flows.
func linksOf(files uint64) int {
	if files == 0 {
		return 1 << 20
	}
	return int(max(1, (min(files, 1<<24)/2-min(files/4, 64))/filesEach)) //nolint:gosec // bounded.
}

// room says whether the process can have one more link. One that got more than it can hold would lose some, and its
// connection with them, again and again.
func (c *Client) room(id string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.links) < c.maxLinks || c.links[id] != nil {
		return nil
	}
	return fmt.Errorf("%w: %d machines have one, and the process that has them may open %d files; for more raise the limit of open "+
		"files (LimitNOFILE= of the service, or ulimit -Hn) and start the daemon again", network.ErrFull, len(c.links), maxFilesOf())
}

// attach is the request that hands a link over.
func (h *held) attach(id string) *request {
	policy := h.policy.Clone()
	return &request{Op: opAttach, ID: id, Policy: &policy, Spent: h.spent, Open: h.open, Pins: h.pins}
}

// pair makes a link. From a datagram socket its owners could send to any other of the host's; this kind knows its peer alone.
// Its ends are blocking as they begin, so that no use of these files changes what their other owners make
// of them.
func pair() (ours, machine *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a link: %w", err)
	}
	for _, fd := range fds {
		// As large as the host allows without privileges; a smaller one only sends more often.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, network.LinkBuffer)
	}
	return os.NewFile(uintptr(fds[0]), "link"), os.NewFile(uintptr(fds[1]), "link"), nil
}

// wake has a process started, if there is none. The caller holds mu.
func (c *Client) wake() {
	if !c.tended && !c.left {
		c.tended = true
		c.work.Go(func() { c.tend(nil, nil) })
	}
}

// Open lets frames pass. It waits for the process only where something may leave.
func (c *Client) Open(ctx context.Context, id string) error {
	c.mu.Lock()
	h := c.links[id]
	if h == nil {
		c.mu.Unlock()
		return errNoLink
	}
	h.open = true
	closed := nothingLeaves(&h.policy)
	if closed {
		if c.conn != nil {
			c.conn.tell(&request{Op: opOpen, ID: id, Open: true})
		}
		c.mu.Unlock()
		return nil
	}
	c.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, answerLimit, ErrDown)
	defer cancel()
	return c.settle(ctx, func(conn *conn) error { return conn.do(ctx, &request{Op: opOpen, ID: id, Open: true}) })
}

// Pin has a guest that has sent nothing yet know the names of addresses that another was given.
func (c *Client) Pin(id string, pins []network.Pin) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.links[id]
	if h == nil || len(pins) == 0 {
		return
	}
	h.pins = network.FitPins(pins, time.Now())
	if c.conn != nil {
		c.conn.tell(&request{Op: opPin, ID: id, Pins: h.pins})
	}
}

// Pins are the names of addresses that a guest was given. It does not wait long.
func (c *Client) Pins(ctx context.Context, id string) (pins []network.Pin, err error) {
	c.mu.Lock()
	conn := c.conn
	c.mu.Unlock()
	if conn == nil || isClosed(conn.closed) || conn.deaf.Load() || !c.has(id) {
		return nil, ErrDown
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lastLimit, ErrDown)
	defer cancel()
	err = conn.ask(ctx, &request{Op: opPins, ID: id}, func(r *reply, files []*os.File) {
		closeAll(files)
		pins = network.FitPins(r.Pins, time.Now())
	})
	if err != nil {
		return nil, err
	}
	return pins, nil
}

// nothingLeaves says whether a policy can allow anything.
func nothingLeaves(p *egress.Policy) bool {
	return len(p.Rules()) == 0 && (p.Preset == "" || p.Preset == egress.None)
}

// SetPolicy replaces a policy; what it does not allow is cut when it returns.
func (c *Client) SetPolicy(ctx context.Context, id string, policy egress.Policy) error {
	c.mu.Lock()
	h := c.links[id]
	if h == nil {
		c.mu.Unlock()
		return errNoLink
	}
	old := h.policy
	h.policy = policy.Clone()
	c.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, ErrDown)
	defer cancel()
	err := c.settle(ctx, func(conn *conn) error { return conn.do(ctx, &request{Op: opPolicy, ID: id, Policy: &policy}) })
	if err == nil {
		return nil
	}
	// Who is refused a change has what was before, also in a process that is started later. One that hangs may have taken
	// it: so it is told again as soon as it hears.
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.links[id] == h {
		h.policy = old
		if c.conn != nil {
			c.conn.tell(&request{Op: opPolicy, ID: id, Policy: &old})
		}
	}
	return err
}

// settle does something with the process that a process started meanwhile has been told with its links.
func (c *Client) settle(ctx context.Context, do func(*conn) error) error {
	conn, err := c.await(ctx)
	if err != nil {
		return err
	}
	err = do(conn)
	if !errors.Is(err, errClosed) {
		return err
	}
	_, err = c.await(ctx) // It has the links, and with them what is to be.
	return err
}

// await is the connection to the process, as soon as there is one.
func (c *Client) await(ctx context.Context) (*conn, error) {
	for {
		c.mu.Lock()
		conn, changed, why := c.conn, c.changed, c.why
		c.mu.Unlock()
		if conn != nil && !isClosed(conn.closed) {
			return conn, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), why)
		}
	}
}

// Detach ends a link.
func (c *Client) Detach(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.links[id]
	if h == nil {
		return
	}
	delete(c.links, id)
	_ = h.file.Close()
	if c.conn != nil {
		c.conn.tell(&request{Op: opDetach, ID: id})
	}
	for w := range c.watchers[id] {
		w.end()
	}
}

// Flows are those that a link is known by, by their ids.
func (c *Client) Flows(ctx context.Context, id string) ([]network.Flow, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, ErrDown)
	defer cancel()
	if !c.has(id) {
		return nil, errNoLink
	}
	conn, err := c.await(ctx)
	if err != nil {
		return nil, err
	}
	var flows []network.Flow
	err = conn.ask(ctx, &request{Op: opFlows, ID: id}, func(r *reply, files []*os.File) {
		closeAll(files)
		for i := range r.Flows[:min(len(r.Flows), maxFlows-len(flows))] {
			flows = append(flows, fit(r.Flows[i]))
		}
	})
	return flows, err
}

const (
	// maxFlows is more than a Network knows of; a process that somebody has taken over may say what it likes.
	maxFlows = 8192
	// maxText is longer than any name, rule or reason.
	maxText = 1024
)

// fit is a flow as the process tells it, no larger than one can be.
func fit(f network.Flow) network.Flow {
	for _, text := range []*string{&f.Protocol, &f.Name, &f.Verdict, &f.Rule, &f.Reason} {
		if len(*text) > maxText {
			*text = strings.Clone(strings.ToValidUTF8((*text)[:maxText], ""))
		}
	}
	return f
}

func (c *Client) has(id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.links[id] != nil
}

// Totals are the counters of all links. Those of a process that does not answer are as they were seen last.
func (c *Client) Totals(ctx context.Context) (map[string]network.Totals, error) {
	c.mu.Lock()
	all := make(map[string]network.Totals, len(c.links))
	for id, h := range c.links {
		all[id] = h.last
	}
	c.mu.Unlock()
	if len(all) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, totalsLimit, ErrDown)
	defer cancel()
	conn, err := c.await(ctx)
	if err != nil {
		return all, err
	}
	if conn.deaf.Load() { // Somebody waits for it already: nobody else needs to.
		return all, ErrDown
	}
	now, err := c.look(ctx, conn)
	if err != nil {
		return all, err
	}
	return now, nil
}

// look asks the process for all counters, and notes them.
func (c *Client) look(ctx context.Context, conn *conn) (map[string]network.Totals, error) {
	now := map[string]network.Totals{}
	c.mu.Lock()
	for id := range c.links {
		now[id] = network.Totals{}
	}
	c.mu.Unlock()
	told := map[string]bool{}
	var use network.PoolUse
	err := conn.ask(ctx, &request{Op: opTotals}, func(r *reply, files []*os.File) {
		closeAll(files)
		if r.Use != nil {
			use = *r.Use
		}
		for id, t := range r.Totals {
			if _, known := now[id]; known {
				now[id], told[id] = t, true
			}
		}
	})
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(now, func(id string, _ network.Totals) bool { return !told[id] })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.use = use
	for id, t := range now {
		if h := c.links[id]; h != nil && c.conn == conn {
			h.last = t
		}
	}
	return now, nil
}

// State says how the process is.
func (c *Client) State() network.State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := network.State{Links: len(c.links), Error: c.why, Use: c.use}
	if c.conn != nil && !isClosed(c.conn.closed) {
		s.PID, s.Error = c.conn.pid, nil
	}
	return s
}

// watcher follows the flows of one link.
type watcher struct {
	flows chan network.Flow
	over  chan struct{}
	once  sync.Once
	lost  int64 // flows that it was not told since one was, guarded by the client's mu
}

func (w *watcher) end() { w.once.Do(func() { close(w.over) }) }

// unseen is how many flows may wait for who watches them; those beyond it are not seen.
const unseen = 1024

// Watch calls each for the flows of a link as they begin, are refused and end, until ctx ends, the link does (nil), or each
// returns an error, which is returned. begun is called when no later flow is missed.
func (c *Client) Watch(ctx context.Context, id string, begun func(), each func(network.Flow) error) error {
	w := &watcher{flows: make(chan network.Flow, unseen), over: make(chan struct{})}
	c.mu.Lock()
	if c.links[id] == nil {
		c.mu.Unlock()
		return errNoLink
	}
	if c.watchers[id] == nil {
		c.watchers[id] = map[*watcher]bool{}
	}
	c.watchers[id][w] = true
	c.mu.Unlock()
	defer c.ignore(id, w)
	asking, cancel := context.WithTimeoutCause(ctx, callLimit, ErrDown)
	defer cancel()
	if err := c.settle(asking, func(conn *conn) error { return conn.do(asking, &request{Op: opWatch, ID: id}) }); err != nil {
		return err
	}
	begun()
	for {
		select {
		case f := <-w.flows:
			if err := each(f); err != nil {
				return err
			}
		case <-w.over:
			return nil
		case <-c.life.Done():
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (c *Client) ignore(id string, w *watcher) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.watchers[id], w)
	if len(c.watchers[id]) > 0 {
		return
	}
	delete(c.watchers, id)
	if c.conn != nil && c.links[id] != nil {
		c.conn.tell(&request{Op: opIgnore, ID: id})
	}
}

// told is what the process says without being asked.
func (c *Client) told(r *reply) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Flow == nil || c.links[r.ID] == nil {
		return // that a machine has ended the daemon knows before
	}
	flow := fit(*r.Flow)
	for w := range c.watchers[r.ID] {
		f := flow
		f.Lost += w.lost
		select {
		case w.flows <- f:
			w.lost = 0
		default:
			w.lost = f.Lost + 1
		}
	}
}

// ids lists the links. The caller holds mu.
func (c *Client) ids() []string { return slices.Sorted(maps.Keys(c.links)) }
