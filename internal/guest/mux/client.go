package mux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

const (
	// maxOut is what a stream keeps that is not on its way yet.
	maxOut = 64 << 10
	// closePatience is how long a stream that we closed waits for the guest to close it, too.
	closePatience = 10 * time.Second
	// wasteful is what a frame that says nothing counts as, in bytes received for nobody.
	wasteful = 1 << 10
)

// ErrHostile is what no agent of ours sends. It ends the session.
var ErrHostile = errors.New("agent broke the multiplexer's protocol")

// errGuestReset is a stream that the agent gave up.
var errGuestReset = errors.New("the guest agent gave the call up")

// Session is the host's side. It trusts the guest with nothing:
//   - no wait depends on the guest alone: each ends with its context or deadline, also while the guest takes no byte;
//   - the guest cannot open streams, ping, exceed a window, grant more than it received, or name a stream that never was;
//   - what it sends for streams that are closed is bounded by what it may have had on its way, and so is what says nothing.
//
// A stream takes 256 KiB of memory in one direction and 64 KiB in the other at most, whatever the guest does. A guest that
// stands still (it is paused) keeps its session: there is no keep-alive.
type Session struct {
	conn  io.ReadWriteCloser
	slots chan struct{} // one for each stream that is known
	kick  chan struct{} // something is to be written
	done  chan struct{}

	mu       sync.Mutex // guards what follows, and all streams
	streams  map[uint32]*ClientStream
	ready    []*ClientStream // have something to write
	nextID   uint32
	mayWaste int
	err      error

	// The reader's alone: the frame that is arriving.
	header  [headerSize]byte
	nheader int
	left    uint32
	to      *ClientStream

	running sync.WaitGroup
}

// ClientStream is one call's bytes. It is a net.Conn: deadlines end a Read or Write whatever the guest does. Read and
// Write may be used at the same time, each by one goroutine.
type ClientStream struct {
	s  *Session
	id uint32

	// All below is guarded by s.mu. A token in readable or writable says that something has changed.
	in            []byte
	read          int    // of in
	grant         int    // what the guest may send
	consumed      int    // since the last grant
	inErr         error  // after in
	out           []byte // to be written; there is room for it at the guest
	room          int    // what the guest takes beyond out
	sent          int    // on its way and not granted anew
	outErr        error
	closed        bool // by us
	finished      bool // by the guest
	announced     bool
	fin, rst      bool // to be written
	finSent       bool
	update        int // grant to be written
	queued        bool
	patience      *time.Timer
	readDeadline  time.Time
	writeDeadline time.Time
	readable      chan struct{}
	writable      chan struct{}
}

// Client begins a session on conn, which it owns from then on, with at most maxStreams streams at a time.
func Client(conn io.ReadWriteCloser, maxStreams int) *Session {
	s := &Session{
		conn: conn, slots: make(chan struct{}, maxStreams), kick: make(chan struct{}, 1), done: make(chan struct{}),
		streams: map[uint32]*ClientStream{}, nextID: 1, mayWaste: window,
	}
	s.running.Go(func() { s.end(s.receive()) })
	s.running.Go(func() { s.end(s.write()) })
	return s
}

// Done is closed when the session has ended, by either side.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err is why the session has ended; nil while it has not.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close ends the session and its streams, and waits for its goroutines. It is idempotent.
func (s *Session) Close() error {
	s.end(ErrSessionEnd)
	s.running.Wait()
	return nil
}

func (s *Session) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	s.err = err
	for _, st := range s.streams {
		st.fail(err)
		if st.patience != nil {
			st.patience.Stop()
		}
	}
	s.streams, s.ready = nil, nil
	close(s.done)
	_ = s.conn.Close() // ends a Read or Write that is under way
}

// Open makes a stream. Nothing is sent before its first bytes are, which are one message to the guest with them. When as
// many streams are open as may be it waits.
func (s *Session) Open(ctx context.Context) (*ClientStream, error) {
	select {
	case s.slots <- struct{}{}:
	case <-s.done:
		return nil, s.Err()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	if s.nextID >= 1<<32-2 {
		return nil, errors.New("a connection has no more stream numbers; it must be made anew")
	}
	st := &ClientStream{
		s: s, id: s.nextID, grant: window, room: window, readable: make(chan struct{}, 1), writable: make(chan struct{}, 1),
	}
	s.nextID += 2
	s.streams[st.id] = st
	return st, nil
}

// forget ends what the session knows of a stream; it needs mu. What the guest had on its way for it may still come.
func (s *Session) forget(st *ClientStream) {
	if s.streams[st.id] != st {
		return
	}
	delete(s.streams, st.id)
	if st.patience != nil {
		st.patience.Stop()
	}
	if st.announced {
		s.mayWaste = min(s.mayWaste+st.grant+16*wasteful, 1<<30)
	}
	<-s.slots
}

// enqueue says that a stream has something to write; it needs mu.
func (s *Session) enqueue(st *ClientStream) {
	if !st.queued {
		st.queued = true
		s.ready = append(s.ready, st)
	}
	notify(s.kick)
}

// write is the one writer of the connection. Only it waits for the guest to take bytes.
func (s *Session) write() error {
	var buf []byte
	for {
		select {
		case <-s.kick:
		case <-s.done:
			return ErrSessionEnd
		}
		for {
			if buf = s.batch(buf[:0]); len(buf) == 0 {
				break
			}
			if _, err := s.conn.Write(buf); err != nil {
				return fmt.Errorf("write to guest agent: %w", err)
			}
		}
	}
}

// batch collects what streams have to say, for one write.
func (s *Session) batch(b []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.ready) > 0 && len(b) < maxData/2 {
		st := s.ready[0]
		s.ready = s.ready[1:]
		st.queued = false
		b = st.frames(b, maxData-len(b))
	}
	return b
}

// frames appends what the stream has to say, of its data at most room bytes; it needs s.mu.
func (st *ClientStream) frames(b []byte, room int) []byte {
	if st.rst {
		st.s.forget(st)
		return appendHeader(b, typeWindow, flagRST, st.id, 0)
	}
	syn := byte(0)
	if !st.announced {
		syn, st.announced = flagSYN, true
	}
	if st.update > 0 {
		b = appendHeader(b, typeWindow, syn, st.id, st.update)
		st.update, syn = 0, 0
	}
	if n := min(len(st.out), room); n > 0 {
		b = appendHeader(b, typeData, syn, st.id, n)
		b = append(b, st.out[:n]...)
		st.out = st.out[:copy(st.out, st.out[n:])]
		st.sent += n
		syn = 0
		notify(st.writable)
	}
	switch {
	case len(st.out) > 0:
		st.s.enqueue(st)
	case st.fin:
		b = appendHeader(b, typeWindow, syn|flagFIN, st.id, 0)
		st.fin, st.finSent = false, true
		if st.finished {
			st.s.forget(st)
		}
	case syn != 0:
		b = appendHeader(b, typeWindow, syn, st.id, 0)
	}
	return b
}

func appendHeader(b []byte, kind, flags byte, id uint32, length int) []byte {
	b = append(b, version, kind, 0, flags)
	b = binary.BigEndian.AppendUint32(b, id)
	return binary.BigEndian.AppendUint32(b, uint32(length))
}

// receive reads until the connection ends or the guest breaks the protocol.
func (s *Session) receive() error {
	buf := make([]byte, 32<<10)
	for {
		n, err := s.conn.Read(buf)
		if err := s.feed(buf[:n]); err != nil {
			return err
		}
		if err != nil {
			return fmt.Errorf("connection to guest agent: %w", unexpected(err))
		}
	}
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (s *Session) feed(b []byte) error {
	for len(b) > 0 {
		if s.left > 0 {
			n := int(min(uint32(len(b)), s.left))
			if err := s.body(b[:n]); err != nil {
				return err
			}
			s.left -= uint32(n)
			b = b[n:]
			continue
		}
		n := copy(s.header[s.nheader:], b)
		b = b[n:]
		if s.nheader += n; s.nheader < headerSize {
			return nil
		}
		s.nheader = 0
		if err := s.frame(); err != nil {
			return err
		}
	}
	return nil
}

// frame is called with a complete header.
func (s *Session) frame() error {
	h := s.header[:]
	kind, flags := h[1], h[3]
	id, length := binary.BigEndian.Uint32(h[4:]), binary.BigEndian.Uint32(h[8:])
	if h[0] != version || h[2] != 0 || kind != typeData && kind != typeWindow || flags&^(flagACK|flagFIN|flagRST) != 0 {
		return fmt.Errorf("%w: a frame of kind %d with flags %d", ErrHostile, kind, flags)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if id%2 == 0 || id >= s.nextID {
		return fmt.Errorf("%w: stream %d was never opened", ErrHostile, id)
	}
	st := s.streams[id]
	if st != nil && !st.announced {
		return fmt.Errorf("%w: an answer to what was not asked", ErrHostile)
	}
	if st == nil || flags&(flagFIN|flagRST) == 0 && length == 0 {
		if err := s.waste(wasteful); err != nil {
			return err
		}
	}
	if st != nil && kind == typeWindow {
		// It grants what it took, and no more.
		if int64(length) > int64(st.sent) {
			return fmt.Errorf("%w: it grants what it has not received", ErrHostile)
		}
		st.sent -= int(length)
		st.room += int(length)
		notify(st.writable)
	}
	if kind == typeData {
		if st != nil && int64(length) > int64(st.grant) {
			return fmt.Errorf("%w: %d bytes where %d were granted", ErrHostile, length, st.grant)
		}
		s.left, s.to = length, st
		if st != nil {
			st.grant -= int(length)
			if st.finished && length > 0 {
				return fmt.Errorf("%w: data after the end", ErrHostile)
			}
		}
	}
	if st != nil && flags&(flagFIN|flagRST) != 0 {
		return st.over(flags)
	}
	return nil
}

// waste counts what comes for nobody; it needs mu.
func (s *Session) waste(n int) error {
	if s.mayWaste -= n; s.mayWaste < 0 {
		return fmt.Errorf("%w: more for nobody than can have been on its way", ErrHostile)
	}
	return nil
}

// over is the guest's end of a stream; it needs s.mu. The body of the frame is still to come.
func (st *ClientStream) over(flags byte) error {
	if flags&flagRST != 0 {
		st.fail(errGuestReset)
		st.out = nil
		st.s.forget(st)
		return nil
	}
	if st.finished {
		return fmt.Errorf("%w: a stream ended twice", ErrHostile)
	}
	st.finished = true
	if st.inErr == nil && st.s.left == 0 {
		st.inErr = io.EOF
	}
	notify(st.readable)
	if st.closed && st.finSent {
		st.s.forget(st)
	}
	return nil
}

// body hands over a part of a data frame, which is within what was granted.
func (s *Session) body(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.to
	if st == nil {
		return s.waste(len(b))
	}
	if !st.closed && st.inErr == nil {
		if st.read == len(st.in) || st.read >= window/4 {
			st.in = st.in[:copy(st.in, st.in[st.read:])]
			st.read = 0
		}
		st.in = append(st.in, b...)
	}
	if st.finished && uint32(len(b)) == s.left && st.inErr == nil {
		st.inErr = io.EOF
	}
	notify(st.readable)
	return nil
}

// fail ends both directions; it needs s.mu. What has arrived can still be read.
func (st *ClientStream) fail(err error) {
	if st.inErr == nil {
		st.inErr = err
	}
	if st.outErr == nil {
		st.outErr = err
	}
	notify(st.readable)
	notify(st.writable)
}

// Read waits for the guest. After the guest has closed the stream it returns io.EOF.
func (st *ClientStream) Read(p []byte) (int, error) {
	s := st.s
	for {
		s.mu.Lock()
		deadline, err := st.readDeadline, st.inErr
		switch {
		case st.closed:
			err = errClosed
		case !deadline.IsZero() && !time.Now().Before(deadline):
			err = os.ErrDeadlineExceeded
		case len(p) == 0 || st.read < len(st.in):
			n := copy(p, st.in[st.read:])
			st.read += n
			st.consumed += n
			if st.read == len(st.in) && cap(st.in) > window/4 {
				st.in, st.read = nil, 0 // a call that is waiting has no need of what a burst took
			}
			if st.consumed >= window/2 && err == nil {
				st.update += st.consumed
				st.grant += st.consumed
				st.consumed = 0
				s.enqueue(st)
			}
			s.mu.Unlock()
			return n, nil
		}
		s.mu.Unlock()
		if err != nil {
			return 0, err
		}
		wait(st.readable, deadline)
	}
}

// Write returns when all of p is with the session's writer; it waits while the guest does not read.
func (st *ClientStream) Write(p []byte) (int, error) {
	s := st.s
	total := 0
	for {
		s.mu.Lock()
		deadline, err := st.writeDeadline, st.outErr
		switch {
		case st.closed:
			err = errClosed
		case !deadline.IsZero() && !time.Now().Before(deadline):
			err = os.ErrDeadlineExceeded
		}
		if err != nil {
			s.mu.Unlock()
			return total, err
		}
		if n := min(len(p)-total, st.room, maxOut-len(st.out)); n > 0 {
			st.out = append(st.out, p[total:total+n]...)
			st.room -= n
			total += n
			s.enqueue(st)
		}
		s.mu.Unlock()
		if total == len(p) {
			return total, nil
		}
		wait(st.writable, deadline)
	}
}

// wait returns when there is a token or the deadline has passed.
func wait(c <-chan struct{}, deadline time.Time) {
	if deadline.IsZero() {
		<-c
		return
	}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case <-c:
	case <-timer.C:
	}
}

// Close tells the guest that nobody listens any more, after what was written, and returns at once. What the guest still
// sends is dropped.
func (st *ClientStream) Close() error {
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.closed {
		return nil
	}
	st.closed = true
	st.in, st.read = nil, 0
	notify(st.readable)
	notify(st.writable)
	if s.streams[st.id] != st {
		return nil
	}
	if !st.announced && len(st.out) == 0 {
		s.forget(st)
		return nil
	}
	st.fin = true
	s.enqueue(st)
	if !st.finished {
		st.patience = time.AfterFunc(closePatience, st.giveUp)
	}
	return nil
}

// giveUp ends a stream that we closed and the guest did not.
func (st *ClientStream) giveUp() {
	s := st.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[st.id] != st {
		return
	}
	st.rst, st.out = true, nil
	s.enqueue(st)
}

// SetDeadline ends a Read or Write that is under way, and later ones, at a time.
func (st *ClientStream) SetDeadline(t time.Time) error {
	return errors.Join(st.SetReadDeadline(t), st.SetWriteDeadline(t))
}

// SetReadDeadline is SetDeadline for Read.
func (st *ClientStream) SetReadDeadline(t time.Time) error {
	st.s.mu.Lock()
	defer st.s.mu.Unlock()
	st.readDeadline = t
	notify(st.readable)
	return nil
}

// SetWriteDeadline is SetDeadline for Write.
func (st *ClientStream) SetWriteDeadline(t time.Time) error {
	st.s.mu.Lock()
	defer st.s.mu.Unlock()
	st.writeDeadline = t
	notify(st.writable)
	return nil
}

type address struct{}

func (address) Network() string { return "forkd" }
func (address) String() string  { return "guest agent" }

// LocalAddr is there for net.Conn.
func (st *ClientStream) LocalAddr() net.Addr { return address{} }

// RemoteAddr is there for net.Conn.
func (st *ClientStream) RemoteAddr() net.Addr { return address{} }
