// Package inspect reads what a guest sends in a TCP flow as far as needed to know which server it is for: the name in
// TLS's client hello, the host of each HTTP/1 request of a connection. It is pure and bounded: it opens nothing, waits for
// nothing, and holds at most MaxHeld bytes of a flow. It decides nothing; the verdict is egress's.
//
// It reads strictly. A server that reads more kindly than this package could be made to see another name than it does, so
// what is not written as clients write it is an error (ErrMalformed) and not a finding.
package inspect

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
)

// maxName is longer than any name or address of a server. Whoever hears of a finding keeps its name.
const maxName = 255

// maxEarly bounds what passes of a slow flow before it is clear what that is.
const maxEarly = 4 << 10

// MaxHeld is the most that a Scanner holds back of a flow.
const MaxHeld = 64 << 10

// ErrMalformed is wrapped by the errors about bytes that cannot be trusted to mean one thing.
var ErrMalformed = errors.New("not as clients write it")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrMalformed)
}

// Kind is a protocol.
type Kind int

// What a flow can turn out to be.
const (
	TLS Kind = iota + 1
	HTTP
	Opaque // neither
)

// A Finding is what a Scanner asks about.
type Finding struct {
	Kind Kind
	// Name is the server's, as it was written, without a port; visible ASCII, 255 bytes at most. Empty: none was named.
	Name string
	// Hidden: the client hello is an encrypted one's outer part, and Name is not where it leads.
	Hidden bool
}

// A Scanner looks at one flow's bytes from the client. It is not safe for use by many at once, except Answered.
type Scanner struct {
	ask func(Finding) error

	rest []byte // what is held back, between calls
	held []byte // rest and what has come, during one
	off  int    // held[:off] may pass
	pos  int    // held[off:pos] has been looked at
	step func(*Scanner) (more bool, err error)
	err  error

	skip    int64  // bytes that pass next, whatever they are
	line    int    // where the search for the line's end goes on
	early   []byte // what End let pass while it was not clear what it begins
	tunnels int

	hello   []byte // the handshake message as far as it has come
	named   Finding
	records int

	requests int
	request  request

	upgrading atomic.Bool
	answered  atomic.Int32 // bytes of the server's first line that were as hoped; -1: they were others
}

// NewScanner makes a Scanner that calls ask before anything leaves: once for TLS and Opaque, for each request of HTTP. An
// error of ask's ends the flow: Scan returns it.
func NewScanner(ask func(Finding) error) *Scanner {
	return &Scanner{ask: ask, step: (*Scanner).begin}
}

// Scan takes the next bytes from the client and returns those, of all held so far, that may leave now. They are valid
// until the next call, and while p is: most of the time they are p, in which one header may have another name (see
// unexpect). After an error, which is ask's or wraps ErrMalformed,
// nothing may leave any more.
func (s *Scanner) Scan(p []byte) (pass []byte, err error) {
	if s.err != nil {
		return nil, s.err
	}
	if s.Passing() && len(s.rest) == 0 {
		return p, nil
	}
	own := len(s.rest) > 0
	s.held = p
	if own {
		s.held = append(s.rest, p...)
	}
	pass, err = s.advance()
	s.keep(own)
	return pass, err
}

// keep holds back what did not pass, and nothing else: flows that say nothing for long cost no memory. own: held is ours.
func (s *Scanner) keep(own bool) {
	switch {
	case s.err != nil || s.off == len(s.held):
		s.rest = nil
	case own && s.off == 0:
		s.rest = s.held
	default:
		s.rest = bytes.Clone(s.held[s.off:])
	}
	s.held, s.off, s.pos, s.line = nil, 0, s.pos-s.off, s.line-s.off
}

func (s *Scanner) advance() ([]byte, error) {
	for more := true; more; {
		if s.skip > 0 {
			n := int(min(s.skip, int64(len(s.held)-s.off)))
			s.skip -= int64(n)
			s.release(s.off + n)
		}
		if s.step == nil {
			s.release(len(s.held))
			break
		}
		if s.skip > 0 {
			break
		}
		more, s.err = s.step(s)
		if s.err == nil && (s.pos-s.off > MaxHeld || !more && s.step != nil && s.skip == 0 && len(s.held)-s.off > MaxHeld) {
			s.err = malformed("more than %d bytes that do not say which server they are for", MaxHeld)
		}
		if s.err != nil {
			return nil, s.err
		}
	}
	return s.held[:s.off], nil
}

// release lets everything before end pass.
func (s *Scanner) release(end int) { s.off, s.pos, s.line = end, end, end }

// End says that the client sends no more, or has kept everybody waiting for long enough (see Holding): what is held is
// judged as it is. Should more come all the same, it is held against what has passed.
func (s *Scanner) End() (pass []byte, err error) {
	if s.err != nil {
		return nil, s.err
	}
	b := s.rest
	switch {
	case len(b) == 0:
		return nil, nil
	case s.named.Kind == TLS, s.requests > s.tunnels:
		return nil, nil // the beginning of a record or a request that never comes
	case s.tunnels > 0 || !couldBeOpaque(b):
		s.err = malformed("it ends before it has said which server it is for")
	default:
		s.err = s.found(Finding{Kind: Opaque})
	}
	if s.err != nil {
		return nil, s.err
	}
	s.early, s.rest, s.pos, s.line = b, nil, 0, 0
	return b, nil
}

// couldBeOpaque tells whether bytes that begin a flow, and are all there is of it, are the beginning of neither TLS nor HTTP.
func couldBeOpaque(b []byte) bool {
	return b[0] != recordHandshake && !known(strings.TrimLeft(string(b[:min(len(b), maxEarly)]), " \t\v\f\r\n")) && len(b) <= maxEarly
}

// Holding tells whether bytes wait for more to come.
func (s *Scanner) Holding() bool { return s.err == nil && len(s.rest) > 0 }

// Passing tells whether all that is still to come will pass unseen.
func (s *Scanner) Passing() bool { return s.err == nil && s.step == nil && s.skip == 0 }

func (s *Scanner) found(f Finding) error {
	s.named = f
	return s.ask(f)
}

// begin finds out what a flow is from its first bytes.
func (s *Scanner) begin() (more bool, err error) {
	b := s.held[s.off:]
	if len(b) == 0 {
		return false, nil
	}
	if len(s.early) > 0 {
		return s.beginLate(b)
	}
	is, err := classify(b, s.line-s.off)
	s.line = len(s.held)
	switch {
	case err != nil:
		return false, err
	case is == unclear:
		return false, nil
	case is == secure:
		s.step, s.hello = (*Scanner).clientHello, nil
	case is == http:
		s.step, s.request, s.line = (*Scanner).head, request{}, s.off
	default:
		if err := s.found(Finding{Kind: Opaque}); err != nil {
			return false, err
		}
		s.step = nil
	}
	return true, nil
}

// beginLate goes on where End has let something pass: as neither TLS nor HTTP, so it must not become one of them now.
func (s *Scanner) beginLate(b []byte) (more bool, err error) {
	s.early = slices.Concat(s.early, b)
	is, err := classify(s.early, 0)
	switch {
	case err != nil:
		return false, err
	case is == secure, is == http, len(s.early) > maxEarly:
		return false, malformed("a first line that takes its time")
	case is == other:
		s.step, s.early = nil, nil
		return true, nil
	}
	s.release(len(s.held))
	return false, nil
}
