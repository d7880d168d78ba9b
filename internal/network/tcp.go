package network

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"forkd.dev/forkd/internal/network/egress"
)

const (
	// dialTimeout is how long a guest's connection may be in the making on the outside.
	dialTimeout = 30 * time.Second
	// chunk is what is moved at once.
	chunk = 128 << 10
	// smallChunk is, where there is little memory.
	smallChunk = 16 << 10
)

var errGuestReset = errors.New("the guest reset the connection")

// tcp holds one connection of the guest's from its SYN to its end. The outside is dialled before the guest is answered, so
// that it sees what a direct connection would show: a refused one is refused.
func (r *run) tcp(request *tcp.ForwarderRequest) {
	id := request.ID()
	guest, to := addrPort(id.RemoteAddress, id.RemotePort), addrPort(id.LocalAddress, id.LocalPort)
	is := Flow{Protocol: egress.TCP, Guest: guest, To: to}
	if r.isGateway(to.Addr()) {
		if to.Port() == DNSPort {
			r.namesOverTCP(request)
			return
		}
		is.Reason = "the gateway answers for names only"
		r.flows.refuse(is)
		request.Complete(true)
		return
	}
	c := &conversation{run: r}
	c.ctx, c.cancel = context.WithCancel(r.ctx)
	defer c.cancel()
	inspect := false
	if c.flow, inspect = r.admit(is, c.cut); c.flow == nil {
		request.Complete(true)
		return
	}
	if inspect {
		c.inspection = newInspection(r.Network, c.flow)
	}
	verdict, reason := c.hold(request)
	c.run.flows.end(c.flow, verdict, reason)
}

// conversation is one TCP connection with both its halves.
type conversation struct {
	*run
	flow       *flow
	ctx        context.Context //nolint:containedctx // of this connection alone: cut ends it.
	cancel     context.CancelFunc
	inspection *inspection // nil: bytes pass unseen

	mu    sync.Mutex
	guest *guestEnd
	outer net.Conn
	out   *sink
	dead  bool
}

// cut resets both halves, at whatever point they are.
func (c *conversation) cut() {
	c.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = true
	if c.guest != nil {
		c.guest.ep.Abort()
	}
	if c.outer != nil {
		reset(c.outer)
	}
}

// reset closes a connection in a way that its peer sees as broken off rather than complete.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// hold dials, answers the guest, and moves bytes until both are through. It returns what is to be recorded of the end.
func (c *conversation) hold(request *tcp.ForwarderRequest) (verdict, reason string) {
	dialing, cancel := context.WithTimeout(c.ctx, dialTimeout)
	outer, err := c.run.outer.DialContext(dialing, "tcp", c.flow.To.String())
	cancel()
	if err != nil {
		request.Complete(true)
		return "", plain(err)
	}
	c.mu.Lock()
	c.outer, c.out = outer, newSink(outer)
	c.mu.Unlock()
	defer func() { _ = outer.Close() }()
	guest, err := c.answer(request)
	if err != nil {
		reset(outer)
		return "", plain(err)
	}
	c.mu.Lock()
	c.guest = guest
	dead := c.dead
	c.mu.Unlock()
	if dead {
		guest.ep.Abort()
		return "", ""
	}
	return c.relay()
}

// answer completes the handshake with the guest, for as long as the flow may live.
func (c *conversation) answer(request *tcp.ForwarderRequest) (*guestEnd, error) {
	var queue waiter.Queue
	done := make(chan struct{})
	var woken sync.WaitGroup
	stop := context.AfterFunc(c.ctx, func() {
		defer woken.Done()
		// The handshake waits for this queue and for nothing else; it may not have begun to yet.
		for tick := time.NewTicker(10 * time.Millisecond); ; {
			queue.Notify(waiter.WritableEvents)
			select {
			case <-done:
				tick.Stop()
				return
			case <-tick.C:
			}
		}
	})
	woken.Add(1)
	ep, err := request.CreateEndpoint(&queue)
	request.Complete(err != nil)
	close(done)
	if stop() {
		woken.Done()
	}
	woken.Wait()
	if err != nil {
		return nil, errors.New("the guest did not complete its handshake: " + err.String())
	}
	ep.SocketOptions().SetDelayOption(false)
	guest := newGuestEnd(ep, &queue)
	if c.flow == nil { // The name server's own.
		guest.shrink(tcpBufferMany)
	} else if buffer := c.flows.keeps(c.flow, guest.shrink); buffer < tcpBufferMax {
		guest.shrink(buffer)
	}
	return guest, nil
}

func (c *conversation) relay() (verdict, reason string) {
	up := make(chan error, 1)
	if !c.spawn(func() {
		err := c.up()
		if err != nil {
			c.cut()
		}
		up <- err
	}) {
		c.cut()
		return "", ""
	}
	down := c.down()
	if down != nil {
		c.cut()
	}
	err := <-up
	if err == nil {
		err = down
	}
	if err == nil {
		_ = c.outer.Close()
		c.guest.settle(c.ctx)
	}
	c.guest.close()
	if no, ok := errors.AsType[*refusedError](errors.Join(err, down)); ok {
		return VerdictRefused, no.reason
	}
	return "", plain(err)
}

// up moves bytes from the guest outward, through the inspection where there is one.
func (c *conversation) up() error {
	for {
		buf, n, err := c.guest.read(c.ctx, c.inspection.wait())
		if n > 0 {
			err = c.forward((*buf)[:n])
		}
		release(buf)
		switch {
		case errors.Is(err, io.EOF):
			if err := c.through(); err != nil {
				return err
			}
			return c.closeOuter()
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = c.through()
		}
		if err != nil {
			return err
		}
	}
}

// through lets pass, or refuses, what was held back in the hope of more.
func (c *conversation) through() error {
	if c.inspection == nil {
		return nil
	}
	b, err := c.inspection.end()
	if err != nil || len(b) == 0 {
		return err
	}
	return c.pass(b)
}

func (c *conversation) forward(b []byte) error {
	if c.inspection != nil {
		var err error
		if b, err = c.inspection.take(b); err != nil || len(b) == 0 {
			return err
		}
	}
	return c.pass(b)
}

func (c *conversation) pass(b []byte) error {
	if !c.flows.count(c.flow, len(b), 0) {
		return context.Canceled // The budget: all flows are being cut.
	}
	if err := c.pace(c.ctx, len(b)); err != nil {
		return err
	}
	return c.out.write(b)
}

// closeOuter tells the outside that the guest has said all it will say.
func (c *conversation) closeOuter() error {
	half, ok := c.outer.(interface{ CloseWrite() error })
	if !ok {
		return nil
	}
	if err := half.CloseWrite(); err != nil && !errors.Is(err, unix.ENOTCONN) {
		return err
	}
	return nil
}

// down moves bytes from the outside to the guest.
func (c *conversation) down() error {
	from := newSource(c.outer)
	from.small = &c.guest.small
	for {
		buf, n, err := from.read()
		if n > 0 {
			if c.inspection != nil {
				c.inspection.Answered((*buf)[:n])
			}
			switch {
			case !c.flows.count(c.flow, 0, n):
				err = context.Canceled
			default:
				if paced := c.pace(c.ctx, n); paced != nil {
					err = paced
				} else if written := c.guest.write((*buf)[:n]); written != nil {
					err = written
				}
			}
		}
		release(buf)
		if errors.Is(err, io.EOF) {
			return c.guest.closeWrite()
		}
		if err != nil {
			return err
		}
	}
}

// plain is an error as the record of a flow tells it: without addresses, which it has already.
func plain(err error) string {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, net.ErrClosed) {
		return ""
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, unix.ETIMEDOUT) {
		return "no answer in time"
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	return err.Error()
}

// Buffers are taken where there is something to move, and not kept while a connection waits.
var (
	chunks      = sync.Pool{New: func() any { b := make([]byte, chunk); return &b }}      //nolint:gochecknoglobals // a pool is one per process or none.
	smallChunks = sync.Pool{New: func() any { b := make([]byte, smallChunk); return &b }} //nolint:gochecknoglobals // likewise.
)

func take(small bool) *[]byte {
	if small {
		return smallChunks.Get().(*[]byte) //nolint:forcetypeassert // the pool holds nothing else.
	}
	return chunks.Get().(*[]byte) //nolint:forcetypeassert // likewise.
}

func release(buf *[]byte) {
	switch {
	case buf == nil:
	case len(*buf) == smallChunk:
		smallChunks.Put(buf)
	default:
		chunks.Put(buf)
	}
}

// guestEnd is the half of a connection that the guest sees, as blocking calls.
type guestEnd struct {
	ep                 tcpip.Endpoint
	queue              *waiter.Queue
	reading, writing   waiter.Entry
	readable, writable chan struct{}
	closing            sync.Once
	small              atomic.Bool // It keeps little: what is in hand is to be little, too.
}

func newGuestEnd(ep tcpip.Endpoint, queue *waiter.Queue) *guestEnd {
	g := &guestEnd{ep: ep, queue: queue}
	const broken = waiter.EventHUp | waiter.EventErr
	g.reading, g.readable = waiter.NewChannelEntry(waiter.ReadableEvents | broken)
	g.writing, g.writable = waiter.NewChannelEntry(waiter.WritableEvents | broken)
	queue.EventRegister(&g.reading)
	queue.EventRegister(&g.writing)
	return g
}

// shrink has it keep so many bytes each way at most, as far as it has not promised more already.
func (g *guestEnd) shrink(buffer int) {
	g.ep.SocketOptions().SetReceiveBufferSize(int64(buffer), true)
	g.ep.SocketOptions().SetSendBufferSize(int64(buffer), true)
	g.small.Store(buffer < chunk)
}

func (g *guestEnd) close() {
	g.closing.Do(func() {
		g.queue.EventUnregister(&g.reading)
		g.queue.EventUnregister(&g.writing)
		g.ep.Close()
	})
}

// settle waits until the guest has taken everything, the end included, after which nothing of the connection is kept. The
// stack would keep it for a guest that takes nothing for as long as that lives, and does not count what it keeps: until
// then a flow is open.
func (g *guestEnd) settle(ctx context.Context) {
	for wait := time.Millisecond; !g.settled(); wait = min(2*wait, time.Second) {
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

func (g *guestEnd) settled() bool {
	switch tcp.EndpointState(g.ep.State()) {
	case tcp.StateEstablished, tcp.StateCloseWait, tcp.StateFinWait1, tcp.StateClosing, tcp.StateLastAck:
		return false
	default:
		return true
	}
}

// read waits for bytes of the guest's, if patience is not 0 no longer than that. The buffer is to be released.
func (g *guestEnd) read(ctx context.Context, patience time.Duration) (*[]byte, int, error) {
	var late <-chan time.Time
	if patience > 0 {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		late = timer.C
	}
	for {
		buf := take(g.small.Load())
		w := tcpip.SliceWriter(*buf)
		result, err := g.ep.Read(&w, tcpip.ReadOptions{})
		if err == nil {
			g.ep.ModerateRecvBuf(result.Count)
			return buf, result.Count, nil
		}
		release(buf)
		switch err.(type) {
		case *tcpip.ErrWouldBlock:
			select {
			case <-g.readable:
			case <-late:
				return nil, 0, os.ErrDeadlineExceeded
			case <-ctx.Done():
				return nil, 0, ctx.Err()
			}
		case *tcpip.ErrClosedForReceive:
			return nil, 0, io.EOF
		default:
			return nil, 0, guestError(err)
		}
	}
}

func guestError(err tcpip.Error) error {
	switch err.(type) {
	case *tcpip.ErrConnectionReset:
		return errGuestReset
	case *tcpip.ErrAborted, *tcpip.ErrConnectionAborted:
		return context.Canceled
	default:
		return errors.New("towards the guest: " + err.String())
	}
}

func (g *guestEnd) write(b []byte) error {
	var payload bytes.Reader
	for len(b) > 0 {
		payload.Reset(b)
		n, err := g.ep.Write(&payload, tcpip.WriteOptions{})
		b = b[n:]
		switch err.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			<-g.writable
		default:
			return guestError(err)
		}
	}
	return nil
}

// writeDatagram sends one, or loses it.
func (g *guestEnd) writeDatagram(b []byte) error {
	var payload bytes.Reader
	payload.Reset(b)
	_, err := g.ep.Write(&payload, tcpip.WriteOptions{})
	switch err.(type) {
	case nil, *tcpip.ErrWouldBlock, *tcpip.ErrNoBufferSpace, *tcpip.ErrMessageTooLong:
		return nil
	default:
		return guestError(err)
	}
}

func (g *guestEnd) closeWrite() error {
	err := g.ep.Shutdown(tcpip.ShutdownWrite)
	if err == nil {
		return nil
	}
	if _, gone := err.(*tcpip.ErrNotConnected); gone {
		return nil
	}
	return guestError(err)
}

// source reads from the outside into a buffer that is taken only once there is something to read.
type source struct {
	conn net.Conn
	raw  syscall.RawConn // nil: the connection is no socket
	// datagrams: one of no bytes is no end.
	datagrams bool
	small     *atomic.Bool // nil: never
}

func newSource(conn net.Conn) *source {
	s := &source{conn: conn}
	switch sock := conn.(type) {
	case *net.TCPConn:
		s.raw, _ = sock.SyscallConn()
	case *net.UDPConn:
		s.raw, _ = sock.SyscallConn()
		s.datagrams = true
	}
	return s
}

func (s *source) read() (buf *[]byte, n int, err error) {
	if s.raw == nil {
		buf = take(s.small != nil && s.small.Load())
		n, err = s.conn.Read(*buf)
		return buf, n, err
	}
	wait := s.raw.Read(func(fd uintptr) bool {
		buf = take(s.small != nil && s.small.Load())
		n, err = readNow(fd, *buf)
		if errors.Is(err, unix.EAGAIN) {
			release(buf)
			buf = nil
			return false
		}
		return true
	})
	switch {
	case wait != nil:
		return buf, 0, wait
	case err != nil:
		return buf, 0, err
	case n == 0 && !s.datagrams:
		return buf, 0, io.EOF
	}
	return buf, n, nil
}

// sink writes to the outside.
type sink struct {
	conn net.Conn
	raw  syscall.RawConn // nil: the connection is no socket
}

func newSink(conn net.Conn) *sink {
	s := &sink{conn: conn}
	switch sock := conn.(type) {
	case *net.TCPConn:
		s.raw, _ = sock.SyscallConn()
	case *net.UDPConn:
		s.raw, _ = sock.SyscallConn()
	}
	return s
}

func (s *sink) write(b []byte) error {
	if s.raw == nil {
		_, err := s.conn.Write(b)
		return err
	}
	var err error
	wait := s.raw.Write(func(fd uintptr) bool {
		for {
			var n int
			n, err = writeNow(fd, b)
			if errors.Is(err, unix.EAGAIN) {
				return false
			}
			b = b[n:]
			if err != nil || len(b) == 0 {
				return true
			}
		}
	})
	return cmp.Or(wait, err)
}
