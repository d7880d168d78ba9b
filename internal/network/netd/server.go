package netd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

const (
	// lonely is how long a Server without links waits for a daemon before it ends.
	lonely = 5 * time.Second
	// lookEvery is how often it looks whether it is needed, and drops, while there is no daemon, links whose machines have ended.
	lookEvery = 5 * time.Second
	// untold is how many flows may wait for a daemon that is slow to read; those beyond it are not told.
	untold = 4096
)

// Server holds the networks. Serve is called once.
type Server struct {
	outer network.Outer
	pool  *network.Pool

	mu    sync.Mutex
	links map[string]*link
	told  *session // the newest daemon's
	left  time.Time
	work  sync.WaitGroup
	over  chan struct{}
	once  sync.Once
}

// link is one sandbox's.
type link struct {
	id      string
	file    *os.File
	net     *network.Network
	cancel  context.CancelFunc
	done    chan struct{}
	watched bool  // guarded by the server's mu
	missed  int64 // flows that were not told, since one was; likewise
}

// NewServer makes one whose networks end in outer and share a pool.
func NewServer(outer network.Outer, pool *network.Pool) *Server {
	return &Server{outer: outer, pool: pool, links: map[string]*link{}, over: make(chan struct{}), left: time.Now()}
}

// Serve takes daemons, one at a time, until one tells it to end, ctx ends, or nobody needs it any more.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.work.Go(func() { s.look(ctx) })
	stop := context.AfterFunc(ctx, s.end)
	defer stop()
	s.work.Go(func() {
		<-s.over
		_ = l.Close()
	})
	failed := s.accept(ctx, l)
	ended := isClosed(s.over)
	s.end()
	cancel()
	s.supersede(nil)
	s.detachAll()
	s.work.Wait()
	if ended {
		return nil
	}
	return fmt.Errorf("take the daemon's connection: %w", failed)
}

func (s *Server) accept(ctx context.Context, l *net.UnixListener) error {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		if !trusted(conn) {
			_ = conn.Close()
			continue
		}
		se := &session{s: s, socket: &socket{conn: conn}, ready: make(chan struct{}, 1), closed: make(chan struct{})}
		s.supersede(se)
		s.work.Go(func() { se.serve(ctx) })
	}
}

func (s *Server) end() { s.once.Do(func() { close(s.over) }) }

// trusted says whether a peer is of root or of this process's own user: whoever else gets to the socket has no business
// with it.
func trusted(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	ok := false
	_ = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		ok = err == nil && (cred.Uid == 0 || cred.Uid == uint32(os.Geteuid()))
	})
	return ok
}

// supersede gives all links to the daemon of a new connection.
func (s *Server) supersede(se *session) {
	s.mu.Lock()
	old := s.told
	s.told = se
	for _, l := range s.links {
		l.watched = false
	}
	s.mu.Unlock()
	if old != nil {
		old.close()
	}
}

// leave is supersede by nobody, unless there is somebody else by now.
func (s *Server) leave(se *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.told == se {
		s.told, s.left = nil, time.Now()
	}
}

// look ends links whose machines are gone while no daemon says so, and the process when nobody needs it.
func (s *Server) look(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.over:
			return
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		alone := s.told == nil
		idle := alone && len(s.links) == 0 && time.Since(s.left) >= lonely
		all := make([]*link, 0, len(s.links))
		for _, l := range s.links {
			all = append(all, l)
		}
		s.mu.Unlock()
		if idle {
			s.end()
			return
		}
		if !alone {
			continue
		}
		for _, l := range all {
			if isClosed(l.done) {
				s.detach(l.id, l)
			}
		}
	}
}

func (s *Server) attach(ctx context.Context, req *request, file *os.File) error {
	if !isLink(file) {
		_ = file.Close()
		return errors.New("the descriptor is no link")
	}
	s.detach(req.ID, nil)
	var policy egress.Policy
	if req.Policy != nil {
		policy = *req.Policy
	}
	l := &link{id: req.ID, file: file, done: make(chan struct{})}
	l.net = network.New(network.Config{
		Policy: policy, Outer: s.outer, Pool: s.pool, Spent: req.Spent, Closed: !req.Open,
		Events: func(f network.Flow) { s.tell(l, f) },
	})
	l.net.Pin(req.Pins)
	ctx, l.cancel = context.WithCancel(ctx)
	s.mu.Lock()
	s.links[req.ID] = l
	s.mu.Unlock()
	go func() {
		err := l.net.Run(ctx, file)
		close(l.done)
		if err != nil && ctx.Err() == nil {
			s.lost(l)
		}
	}()
	return nil
}

// lost tells that a link has ended by itself. It stays until the daemon detaches it, for its counters.
func (s *Server) lost(l *link) {
	s.mu.Lock()
	se := s.told
	s.mu.Unlock()
	if se != nil {
		se.put(&reply{ID: l.id, Gone: true})
	}
}

// detach ends a link, the given one if it is not nil.
func (s *Server) detach(id string, which *link) {
	s.mu.Lock()
	l := s.links[id]
	if l == nil || which != nil && l != which {
		s.mu.Unlock()
		return
	}
	delete(s.links, id)
	s.mu.Unlock()
	l.cancel()
	<-l.done
	_ = l.file.Close()
}

func (s *Server) detachAll() {
	s.mu.Lock()
	ids := make([]string, 0, len(s.links))
	for id := range s.links {
		ids = append(ids, id)
	}
	s.mu.Unlock()
	for _, id := range ids {
		s.detach(id, nil)
	}
}

func (s *Server) find(id string) *link {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.links[id]
}

// tell is called with locks of a Network held: it waits for nobody.
func (s *Server) tell(l *link, f network.Flow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.told == nil || !l.watched {
		return
	}
	f.Lost = l.missed
	if s.told.put(&reply{ID: l.id, Flow: &f}) {
		l.missed = 0
	} else {
		l.missed++
	}
}

// totals are the counters of all links, or of the one of an id.
func (s *Server) totals(id string) map[string]network.Totals {
	s.mu.Lock()
	all := make([]*link, 0, len(s.links))
	for of, l := range s.links {
		if id == "" || id == of {
			all = append(all, l)
		}
	}
	s.mu.Unlock()
	totals := make(map[string]network.Totals, len(all))
	for _, l := range all {
		totals[l.id] = l.net.Totals()
	}
	return totals
}

// session is one daemon's connection.
type session struct {
	s      *Server
	socket *socket

	mu     sync.Mutex
	queue  []outgoing
	ready  chan struct{}
	closed chan struct{}
	once   sync.Once
}

type outgoing struct {
	reply *reply
	files []*os.File // copies, closed when sent
}

func (se *session) close() {
	se.once.Do(func() {
		close(se.closed)
		se.socket.close()
	})
}

// put queues what is told without being asked for. A daemon that does not read is not told.
func (se *session) put(r *reply) (told bool) {
	se.mu.Lock()
	if told = len(se.queue) < untold; told {
		se.queue = append(se.queue, outgoing{reply: r})
	}
	se.mu.Unlock()
	se.wake()
	return told
}

func (se *session) wake() {
	select {
	case se.ready <- struct{}{}:
	default:
	}
}

// answer queues an answer; there are no more of them than a daemon asks for.
func (se *session) answer(r *reply, files ...*os.File) {
	se.mu.Lock()
	se.queue = append(se.queue, outgoing{r, files})
	se.mu.Unlock()
	se.wake()
}

func (se *session) write() {
	for {
		se.mu.Lock()
		queue := se.queue
		se.queue = nil
		se.mu.Unlock()
		for _, out := range queue {
			err := se.socket.send(out.reply, out.files...)
			closeAll(out.files)
			if err != nil {
				se.close()
			}
		}
		select {
		case <-se.ready:
		case <-se.closed:
			return
		}
	}
}

// drop closes what has come or was to be sent, and is nobody's now.
func (se *session) drop() {
	closeAll(se.socket.files)
	se.mu.Lock()
	defer se.mu.Unlock()
	for _, out := range se.queue {
		closeAll(out.files)
	}
	se.queue = nil
}

func (se *session) serve(ctx context.Context) {
	defer se.drop()
	var writer sync.WaitGroup
	writer.Go(se.write)
	defer writer.Wait()
	defer se.s.leave(se)
	defer se.close()
	for {
		var req request
		files, err := se.socket.receive(&req)
		if err != nil {
			return
		}
		if err := se.do(ctx, &req, files); err != nil {
			return
		}
	}
}

// do does what is asked for. Its error ends the connection.
func (se *session) do(ctx context.Context, req *request, files []*os.File) error {
	defer func() { closeAll(files) }()
	r := &reply{Seq: req.Seq}
	switch req.Op {
	case opHello:
		r.Protocol = protocol
	case opAttach:
		if len(files) != 1 || req.ID == "" {
			return errors.New("an attach without a link")
		}
		if err := se.s.attach(ctx, req, files[0]); err != nil {
			r.Error = err.Error()
		}
		files = nil
	case opDetach:
		se.s.detach(req.ID, nil)
	case opTotals:
		r.Totals = se.s.totals(req.ID)
		if req.ID == "" && se.s.pool != nil {
			use := se.s.pool.Use()
			use.Held = inUse()
			r.Use = &use
		}
	case opLinks:
		se.links(req.Seq)
		return nil
	case opEnd:
		se.s.end()
	default:
		l := se.s.find(req.ID)
		if l == nil {
			r.Error = "no such link"
			break
		}
		se.doLink(req, l, r)
	}
	if req.Seq != 0 {
		se.answer(r)
	}
	return nil
}

func (se *session) doLink(req *request, l *link, r *reply) {
	switch req.Op {
	case opPolicy:
		if req.Policy == nil {
			r.Error = "no policy is given"
			return
		}
		l.net.SetPolicy(*req.Policy)
	case opOpen:
		l.net.Open(req.Open)
	case opPins:
		r.Pins = l.net.Pins()
	case opPin:
		l.net.Pin(req.Pins)
	case opFlows:
		flows := l.net.Flows()
		for part := range slices.Chunk(flows, flowsEach) {
			se.answer(&reply{Seq: req.Seq, Flows: part, More: true})
		}
	case opWatch, opIgnore:
		se.s.mu.Lock()
		l.watched = req.Op == opWatch && se.s.told == se
		se.s.mu.Unlock()
	default:
		r.Error = fmt.Sprintf("no such request: %.40q", req.Op)
	}
}

// links hands copies of all links over.
func (se *session) links(seq uint64) {
	se.s.mu.Lock()
	var ids []string
	var files []*os.File
	for id, l := range se.s.links {
		file, err := duplicate(l.file)
		if err != nil {
			continue // The daemon ends what it does not get.
		}
		ids, files = append(ids, id), append(files, file)
	}
	se.s.mu.Unlock()
	for len(ids) > 0 {
		n := min(len(ids), maxFiles)
		se.answer(&reply{Seq: seq, IDs: ids[:n], More: true}, files[:n]...)
		ids, files = ids[n:], files[n:]
	}
	se.answer(&reply{Seq: seq})
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
