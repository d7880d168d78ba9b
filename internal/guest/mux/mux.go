// Package mux carries many streams over the control channel, in yamux's wire format. The host's side is yamux itself: no
// keep-alive and no write time-out, because a paused guest must not lose its connection; no logging; few writes, because
// each is an interrupt of the guest. The agent's side, Server, is our own, for the sake of a fork's first answer. The
// package knows nothing of calls or preambles. Only packages guest and agent import it.
package mux

import (
	"encoding/binary"
	"errors"
	"io"
	"time"

	"github.com/hashicorp/yamux"
)

const (
	headerSize = 12
	typeData   = 0
	typeWindow = 1
	typeGoAway = 3
	flagSYN    = 1
	version    = 0
	forever    = 100 * 365 * 24 * time.Hour
)

// ErrHostile is a frame that no agent of ours sends.
var ErrHostile = errors.New("agent broke the multiplexer's protocol")

// Client is the host's side. It trusts the peer with nothing: a guest may not open streams or send pings, each of
// which would make the daemon allocate or start something.
func Client(conn io.ReadWriteCloser, maxOpening int) (*yamux.Session, error) {
	guarded := &guard{ReadWriteCloser: &joiner{ReadWriteCloser: conn}}
	return yamux.Client(guarded, &yamux.Config{
		// The agent agrees to a stream with the first frame it has for it, which may take as long as the call.
		AcceptBacklog:          maxOpening,
		KeepAliveInterval:      forever,
		ConnectionWriteTimeout: forever,
		MaxStreamWindowSize:    window,
		// A stream the daemon closed is given up a little later whether the guest agrees or not.
		StreamCloseTimeout: 10 * time.Second,
		LogOutput:          io.Discard,
	})
}

// joiner sends a data frame's header together with its body, which yamux writes one after the other.
type joiner struct {
	io.ReadWriteCloser
	buf []byte
}

// Write is called by yamux's one sending goroutine.
func (j *joiner) Write(p []byte) (int, error) {
	if len(j.buf) == 0 && len(p) == headerSize && p[1] == typeData && binary.BigEndian.Uint32(p[8:]) > 0 {
		j.buf = append(j.buf, p...)
		return len(p), nil
	}
	if len(j.buf) == 0 {
		return j.ReadWriteCloser.Write(p)
	}
	j.buf = append(j.buf, p...)
	_, err := j.ReadWriteCloser.Write(j.buf)
	j.buf = j.buf[:0]
	return len(p), err
}

// guard follows the frames of the incoming stream and ends it at the first that no agent sends.
type guard struct {
	io.ReadWriteCloser
	header  [headerSize]byte
	nheader int
	body    uint32
}

func (g *guard) Read(p []byte) (int, error) {
	n, err := g.ReadWriteCloser.Read(p)
	for b := p[:n]; len(b) > 0; {
		if g.body > 0 {
			m := min(uint32(len(b)), g.body)
			b = b[m:]
			g.body -= m
			continue
		}
		m := copy(g.header[g.nheader:], b)
		b = b[m:]
		if g.nheader += m; g.nheader < headerSize {
			break
		}
		g.nheader = 0
		if !g.allowed() {
			return 0, ErrHostile
		}
	}
	return n, err
}

func (g *guard) allowed() bool {
	flags := binary.BigEndian.Uint16(g.header[2:])
	switch {
	case g.header[0] != version, flags&flagSYN != 0:
		return false
	case g.header[1] == typeData:
		g.body = binary.BigEndian.Uint32(g.header[8:])
		return true
	default:
		return g.header[1] == typeWindow || g.header[1] == typeGoAway
	}
}
