package daemon

import (
	"net"
	"sync"

	"golang.org/x/sys/unix"
)

// boundedListener accepts no more connections than that at once. What anybody may open must leave the daemon descriptors for
// its machines and for its owner.
type boundedListener struct {
	net.Listener

	places chan struct{}
	closed chan struct{}
	once   sync.Once
}

func newBoundedListener(l net.Listener, most int) *boundedListener {
	return &boundedListener{Listener: l, places: make(chan struct{}, most), closed: make(chan struct{})}
}

// mostConnections is a quarter of what this process may open.
func mostConnections() int {
	const least, most = 32, 4096
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) != nil {
		return least
	}
	return int(max(least, min(lim.Cur/4, most)))
}

// Accept waits for a place first.
func (b *boundedListener) Accept() (net.Conn, error) {
	select {
	case b.places <- struct{}{}:
	case <-b.closed:
		return nil, net.ErrClosed
	}
	c, err := b.Listener.Accept()
	if err != nil {
		<-b.places
		return nil, err
	}
	return &placedConn{Conn: c, leave: sync.OnceFunc(func() { <-b.places })}, nil
}

// Close ends waiting, too.
func (b *boundedListener) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.Listener.Close()
}

// placedConn gives its place back when it is closed.
type placedConn struct {
	net.Conn

	leave func()
}

func (p *placedConn) Close() error {
	err := p.Conn.Close()
	p.leave()
	return err
}

// NetConn is the connection below: whoever looks whether the other end is there needs its descriptor.
func (p *placedConn) NetConn() net.Conn { return p.Conn }
