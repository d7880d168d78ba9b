package httpapi

import (
	"bufio"
	"cmp"
	"net"
	"net/http"
	"time"
)

// stall is how long a client may take nothing of an answer. What is behind it meanwhile stands still: a call into a guest, of
// which there are so many at a time, and a process whose output has nowhere to go.
const stall = 2 * time.Minute

// Patient has a handler's answers wait for their clients, but not for ever. One that takes nothing for that long is gone: its
// request ends, as if it had closed its connection.
func (s *Server) Patient(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := &patient{ResponseWriter: w, c: http.NewResponseController(w), stall: cmp.Or(s.Stall, stall)}
		p.end() // of the connection's request before
		h.ServeHTTP(p, r)
		p.begin() // what is still to be sent is sent when this returns
	})
}

// patient gives a client a while for each piece of an answer. Between pieces there is no deadline: HTTP/2 ends a stream at its
// deadline though nobody writes, and HTTP/1 has it for the connection's next request.
type patient struct {
	http.ResponseWriter

	c     *http.ResponseController
	stall time.Duration
	taken bool // the connection is not HTTP's any more
}

func (p *patient) begin() {
	if !p.taken {
		_ = p.c.SetWriteDeadline(time.Now().Add(p.stall))
	}
}

func (p *patient) end() { _ = p.c.SetWriteDeadline(time.Time{}) }

func (p *patient) Write(b []byte) (int, error) {
	p.begin()
	defer p.end()
	return p.ResponseWriter.Write(b)
}

// FlushError is what http.ResponseController flushes by.
func (p *patient) FlushError() error {
	p.begin()
	defer p.end()
	return p.c.Flush()
}

// Hijack is what http.ResponseController takes the connection over by; who has it sees to its deadlines.
func (p *patient) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	p.end()
	conn, rw, err := p.c.Hijack()
	p.taken = err == nil
	return conn, rw, err
}

// Unwrap lets http.ResponseController reach the rest.
func (p *patient) Unwrap() http.ResponseWriter { return p.ResponseWriter }
