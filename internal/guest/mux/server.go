package mux

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"
)

// window is how many bytes of a stream may be on their way without being read, in each direction.
const window = 256 << 10

const (
	typePing = 2
	flagACK  = 2
	flagFIN  = 4
	flagRST  = 8

	// maxData is the payload of one data frame: with its header it fits into one write of the guest's driver.
	maxData = 32<<10 - headerSize
)

// Results of a stream's Read and Write.
var (
	ErrSessionEnd = errors.New("session has ended")
	errReset      = errors.New("stream was reset by the host")
	errClosed     = errors.New("stream is closed")
	errAborted    = errors.New("stream was given up")
)

// errProtocol ends a session.
var errProtocol = errors.New("host broke the multiplexer's protocol")

// Server is the agent's side of a session: the wire format of yamux, but driven by its one reader, without a goroutine,
// a queue or a timer of its own. In a fork each of them is code that runs for the first time on a cold translation
// cache, and half of what the agent did until its first answer was yamux waking up its own parts.
type Server struct {
	accept     func(*Stream)
	maxStreams int

	// wmu keeps frames apart. It may be held for long, while no host reads.
	wmu sync.Mutex
	w   io.Writer
	out []byte

	mu      sync.Mutex // guards what follows, and all streams
	streams map[uint32]*Stream
	ended   bool

	// The reader's alone: the frame that is arriving.
	header  [headerSize]byte
	nheader int
	left    uint32 // of the body
	to      *Stream
}

// NewServer begins a session whose frames go to w. Accept is called by Feed with each new stream and must not block.
// Streams beyond maxStreams are reset.
func NewServer(w io.Writer, maxStreams int, accept func(*Stream)) *Server {
	return &Server{w: w, maxStreams: maxStreams, accept: accept}
}

// Stream is one call's bytes. Read, Write and Close may be used at the same time; Read by one goroutine.
type Stream struct {
	s    *Server
	id   uint32
	gone func()

	// All below is guarded by s.mu. A token in readable or writable says that something has changed.
	in       []byte
	read     int   // of in
	consumed int   // since the last update of the host's window
	inErr    error // after in
	readable chan struct{}
	room     int
	outErr   error
	writable chan struct{}
	acked    bool
	closed   bool // by us
}

// OnGone sets what is called once when the host closes the stream or the session ends. It must not block. Accept is
// the place to call it.
func (st *Stream) OnGone(f func()) { st.gone = f }

// Feed takes the session's next bytes. An error ends the session: Close it.
func (s *Server) Feed(b []byte) error {
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
func (s *Server) frame() error {
	h := s.header[:]
	kind, flags := h[1], h[3]
	id, length := binary.BigEndian.Uint32(h[4:]), binary.BigEndian.Uint32(h[8:])
	if h[0] != version || h[2] != 0 {
		return errProtocol
	}
	switch kind {
	case typeData, typeWindow:
	case typeGoAway:
		return nil
	case typePing:
		if flags&flagSYN == 0 {
			return nil
		}
		return s.send(typePing, flagACK, 0, length, nil)
	default:
		return errProtocol
	}
	if flags&flagSYN != 0 {
		if err := s.open(id); err != nil {
			return err
		}
	}
	s.mu.Lock()
	st := s.streams[id]
	var gone func()
	if st != nil {
		if kind == typeWindow {
			st.room += int(min(length, 1<<30))
			notify(st.writable)
		}
		gone = st.flags(flags)
	}
	s.mu.Unlock()
	if gone != nil {
		gone()
	}
	if kind == typeData {
		s.left, s.to = length, st
	}
	return nil
}

func (s *Server) open(id uint32) error {
	s.mu.Lock()
	_, known := s.streams[id]
	full := len(s.streams) >= s.maxStreams
	if known || s.ended {
		s.mu.Unlock()
		return errProtocol
	}
	if full {
		s.mu.Unlock()
		return s.send(typeWindow, flagRST, id, 0, nil)
	}
	st := &Stream{s: s, id: id, room: window, readable: make(chan struct{}, 1), writable: make(chan struct{}, 1)}
	if s.streams == nil {
		s.streams = map[uint32]*Stream{}
	}
	s.streams[id] = st
	s.mu.Unlock()
	s.accept(st)
	return nil
}

// flags needs s.mu.
func (st *Stream) flags(flags byte) (gone func()) {
	if flags&(flagFIN|flagRST) == 0 {
		return nil
	}
	if flags&flagRST != 0 {
		st.outErr = errReset
		if st.inErr == nil {
			st.inErr = errReset
		}
		delete(st.s.streams, st.id)
		notify(st.writable)
	} else if st.inErr == nil {
		st.inErr = io.EOF
		if st.closed {
			delete(st.s.streams, st.id)
		}
	}
	notify(st.readable)
	gone, st.gone = st.gone, nil
	return gone
}

// body hands over a part of a data frame.
func (s *Server) body(b []byte) error {
	st := s.to
	if st == nil {
		return nil // of a stream that we have given up
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.closed || st.inErr != nil {
		return nil
	}
	if len(st.in)-st.read+st.consumed+len(b) > window {
		return errProtocol
	}
	if st.read == len(st.in) || st.read >= window/4 {
		st.in = st.in[:copy(st.in, st.in[st.read:])]
		st.read = 0
	}
	st.in = append(st.in, b...)
	notify(st.readable)
	return nil
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Close ends the session: reading and writing its streams fails, and each is told that the host is gone.
func (s *Server) Close() {
	s.mu.Lock()
	s.ended = true
	var gone []func()
	for _, st := range s.streams {
		st.outErr = ErrSessionEnd
		if st.inErr == nil {
			st.inErr = ErrSessionEnd
		}
		notify(st.readable)
		notify(st.writable)
		if st.gone != nil {
			gone = append(gone, st.gone)
			st.gone = nil
		}
	}
	s.streams = nil
	s.mu.Unlock()
	for _, f := range gone {
		f()
	}
}

// send writes one frame.
func (s *Server) send(kind, flags byte, id, length uint32, payload []byte) error {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	b := append(s.out[:0], version, kind, 0, flags, 0, 0, 0, 0, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(b[4:], id)
	binary.BigEndian.PutUint32(b[8:], length)
	b = append(b, payload...)
	s.out = b
	_, err := s.w.Write(b)
	return err
}

// ack is the flag that goes with the first frame of a stream. It needs s.mu.
func (st *Stream) ack() byte {
	if st.acked {
		return 0
	}
	st.acked = true
	return flagACK
}

// Read waits for the host. After the host has closed the stream it returns io.EOF.
func (st *Stream) Read(p []byte) (int, error) {
	s := st.s
	for {
		s.mu.Lock()
		if n := copy(p, st.in[st.read:]); n > 0 || len(p) == 0 {
			st.read += n
			st.consumed += n
			update, flags := 0, byte(0)
			if st.consumed >= window/2 && st.inErr == nil && !st.closed {
				update, st.consumed = st.consumed, 0
				flags = st.ack()
			}
			s.mu.Unlock()
			if update > 0 {
				if err := s.send(typeWindow, flags, st.id, uint32(update), nil); err != nil {
					return n, err
				}
			}
			return n, nil
		}
		err := st.inErr
		if st.closed {
			err = errClosed
		}
		s.mu.Unlock()
		if err != nil {
			return 0, err
		}
		<-st.readable
	}
}

// Write returns when all is on its way; it waits while the host does not read.
func (st *Stream) Write(p []byte) (int, error) {
	s := st.s
	total := 0
	for total < len(p) {
		s.mu.Lock()
		err := st.outErr
		if st.closed {
			err = errClosed
		}
		n := min(len(p)-total, maxData, st.room)
		var flags byte
		if err == nil && n > 0 {
			st.room -= n
			flags = st.ack()
		}
		s.mu.Unlock()
		switch {
		case err != nil:
			notify(st.writable) // for another writer
			return total, err
		case n == 0:
			<-st.writable
			continue
		}
		if err := s.send(typeData, flags, st.id, uint32(n), p[total:total+n]); err != nil {
			return total, err
		}
		total += n
	}
	return total, nil
}

// Abort makes writing fail: nobody reads what would be written.
func (st *Stream) Abort() {
	st.s.mu.Lock()
	defer st.s.mu.Unlock()
	if st.outErr == nil {
		st.outErr = errAborted
	}
	notify(st.writable)
}

// Close tells the host that nothing follows. What the host still sends is dropped.
func (st *Stream) Close() error {
	s := st.s
	s.mu.Lock()
	if st.closed {
		s.mu.Unlock()
		return nil
	}
	st.closed = true
	known := s.streams[st.id] == st
	flags := st.ack() | flagFIN
	if st.inErr != nil {
		delete(s.streams, st.id)
	}
	st.in, st.read = nil, 0
	notify(st.readable)
	notify(st.writable)
	s.mu.Unlock()
	if !known {
		return nil
	}
	return s.send(typeWindow, flags, st.id, 0, nil)
}
