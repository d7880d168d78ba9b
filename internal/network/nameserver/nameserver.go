// Package nameserver answers a guest's questions for names: those that its policy allows, with addresses that its policy
// could let it reach, and it remembers what it gave (package pin). It opens no sockets; whoever has the messages calls
// Answer, and brings the function that looks names up.
package nameserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/pin"
)

const (
	// TTL is what answers may be kept by a guest, the host's resolver having none to tell.
	TTL = 60 * time.Second
	// Kept is how long an address stays the name's: programs keep addresses longer than they may.
	Kept = time.Hour
	// maxAddresses of one answer.
	maxAddresses = 32
	// minUDP is what every client takes; maxUDP what none is sent more than, whatever it says.
	minUDP, maxUDP = 512, 4096
	// headerSize of a DNS message.
	headerSize = 12
)

// The codes of extended errors (RFC 8914).
const (
	optionExtendedError = 15
	extendedProhibited  = 18
	extendedFiltered    = 17
)

// A Server answers for one guest. Its fields are set before the first Answer, which may be called by many at once.
type Server struct {
	Policy func() *egress.Policy
	// Lookup finds the addresses of an allowed name; the contract is that of network.Outer.
	Lookup func(ctx context.Context, name string, qtype uint16) ([]netip.Addr, error)
	// Own tells of this host's addresses. It may be nil.
	Own  func(netip.Addr) bool
	Pins *pin.Table
	Now  func() time.Time
}

// A Question is what was asked, and what became of it.
type Question struct {
	Name      string // canonical, or quoted where it is no host's name
	Type      uint16
	Verdict   egress.Verdict
	Addresses []netip.Addr // that were given
	// Err is why no answer was found to an allowed question.
	Err error
}

// Answer replies to a message. The reply is nil where none is due: the message is no question. size is the largest
// reply that the transport takes, 0 for UDP's, which the message says itself.
func (s *Server) Answer(ctx context.Context, message []byte, size int) ([]byte, Question) {
	var p dnsmessage.Parser
	header, err := p.Start(message)
	if err != nil || header.Response {
		return nil, Question{Verdict: egress.Verdict{Reason: "not a question to a name server"}}
	}
	question, err := p.Question()
	if err == nil {
		_, another := p.Question()
		if !errors.Is(another, dnsmessage.ErrSectionDone) {
			err = errors.New("more than one question")
		}
	}
	if err != nil {
		return s.reply(header, nil, answer{code: dnsmessage.RCodeFormatError, size: minUDP}),
			Question{Verdict: egress.Verdict{Reason: "not a question to a name server"}}
	}
	a := answer{size: size}
	if udp, ok := edns(&p); ok {
		a.edns = true
		if size == 0 {
			a.size = min(max(udp, minUDP), maxUDP)
		}
	}
	if a.size == 0 {
		a.size = minUDP
	}
	asked := s.ask(ctx, header, question, &a)
	return s.reply(header, &question, a), asked
}

// edns finds the client's OPT record, and the size of messages it takes.
func edns(p *dnsmessage.Parser) (udp int, ok bool) {
	if p.SkipAllAnswers() != nil || p.SkipAllAuthorities() != nil {
		return 0, false
	}
	for range 8 {
		h, err := p.AdditionalHeader()
		if err != nil {
			return 0, false
		}
		if h.Type == dnsmessage.TypeOPT {
			return int(h.Class), true
		}
		if p.SkipAdditional() != nil {
			return 0, false
		}
	}
	return 0, false
}

type answer struct {
	code      dnsmessage.RCode
	addresses []netip.Addr
	size      int
	edns      bool
	extended  uint16 // an extended error, where the client knows of them
	text      string
}

func (a *answer) refuse(v egress.Verdict) {
	// Not REFUSED: resolvers take that for a server's own trouble, and try again for a while.
	a.code, a.extended, a.text = dnsmessage.RCodeNameError, extendedProhibited, "forkd: "+v.Reason
}

// ask decides and looks up.
func (s *Server) ask(ctx context.Context, header dnsmessage.Header, question dnsmessage.Question, a *answer) Question {
	q := Question{Name: shown(question.Name.String()), Type: uint16(question.Type)}
	if header.OpCode != 0 || question.Class != dnsmessage.ClassINET {
		a.code = dnsmessage.RCodeNotImplemented
		q.Verdict.Reason = "only questions of class IN are answered"
		return q
	}
	policy := s.Policy()
	q.Verdict = policy.Name(q.Name, q.Type)
	if !q.Verdict.Allow {
		a.refuse(q.Verdict)
		if q.Verdict.Type {
			a.code = dnsmessage.RCodeSuccess // the name is there, and has nothing of this type
		}
		return q
	}
	found, err := s.Lookup(ctx, q.Name, q.Type)
	if notFound, ok := errors.AsType[*net.DNSError](err); ok && notFound.IsNotFound {
		a.code, q.Err = dnsmessage.RCodeNameError, errors.New("no such name")
		return q
	}
	if err != nil {
		a.code, q.Err = dnsmessage.RCodeServerFailure, err
		return q
	}
	q.Addresses, q.Verdict = s.given(policy, q, found)
	a.addresses = q.Addresses
	if !q.Verdict.Allow {
		a.refuse(q.Verdict)
		a.extended = extendedFiltered
		return q
	}
	now := s.Now()
	s.Pins.Add(q.Name, q.Addresses, now, now.Add(Kept))
	return q
}

// shown is a name in its canonical form, or quoted: a guest's bytes may steer whoever reads a record.
func shown(name string) string {
	if canonical, ok := egress.Canonical(name); ok {
		return canonical
	}
	return strings.Trim(strconv.QuoteToASCII(name), `"`)
}

// given are the addresses that the guest may hear of: a name cannot lead it to what its rules keep closed.
func (s *Server) given(policy *egress.Policy, q Question, found []netip.Addr) ([]netip.Addr, egress.Verdict) {
	var addrs []netip.Addr
	verdict := q.Verdict
	for _, addr := range found {
		addr = addr.WithZone("")
		if q.Type == egress.TypeA {
			addr = addr.Unmap() // as some resolvers give IPv4 addresses; one in an AAAA record is a trick
		}
		if addr.Is4() != (q.Type == egress.TypeA) || slices.Contains(addrs, addr) {
			continue
		}
		v := policy.Given(addr, s.Own != nil && s.Own(addr))
		if !v.Allow {
			verdict = v
			verdict.Reason = fmt.Sprintf("%s is %s: %s", q.Name, addr, v.Reason)
			continue
		}
		if addrs = append(addrs, addr); len(addrs) == maxAddresses {
			break
		}
	}
	if len(addrs) > 0 {
		verdict = q.Verdict
	}
	return addrs, verdict
}

// reply writes the message; addresses beyond the size are left out, and the client told to ask again over TCP.
func (s *Server) reply(asked dnsmessage.Header, question *dnsmessage.Question, a answer) []byte {
	for n := len(a.addresses); ; n = n / 2 {
		header := dnsmessage.Header{
			ID: asked.ID, Response: true, OpCode: asked.OpCode, RecursionDesired: asked.RecursionDesired,
			RecursionAvailable: true, RCode: a.code, Truncated: n < len(a.addresses),
		}
		message, err := write(header, question, a, a.addresses[:n])
		if err != nil {
			return nil // a name that cannot be written again
		}
		if len(message) <= a.size || n == 0 {
			return message
		}
	}
}

func write(header dnsmessage.Header, question *dnsmessage.Question, a answer, addresses []netip.Addr) ([]byte, error) {
	b := dnsmessage.NewBuilder(make([]byte, 0, minUDP), header)
	b.EnableCompression()
	if question != nil {
		if err := errors.Join(b.StartQuestions(), b.Question(*question)); err != nil {
			return nil, err
		}
	}
	if len(addresses) > 0 {
		if err := b.StartAnswers(); err != nil {
			return nil, err
		}
		h := dnsmessage.ResourceHeader{Name: question.Name, Class: dnsmessage.ClassINET, TTL: uint32(TTL / time.Second)}
		for _, addr := range addresses {
			var err error
			if addr.Is4() {
				err = b.AResource(h, dnsmessage.AResource{A: addr.As4()})
			} else {
				err = b.AAAAResource(h, dnsmessage.AAAAResource{AAAA: addr.As16()})
			}
			if err != nil {
				return nil, err
			}
		}
	}
	if a.edns {
		if err := opt(&b, a); err != nil {
			return nil, err
		}
	}
	return b.Finish()
}

func opt(b *dnsmessage.Builder, a answer) error {
	if err := b.StartAdditionals(); err != nil {
		return err
	}
	var h dnsmessage.ResourceHeader
	if err := h.SetEDNS0(maxUDP, dnsmessage.RCodeSuccess, false); err != nil {
		return err
	}
	var options []dnsmessage.Option
	if a.extended != 0 {
		text := a.text[:min(len(a.text), 200)]
		options = []dnsmessage.Option{{Code: optionExtendedError, Data: append([]byte{byte(a.extended >> 8), byte(a.extended)}, text...)}}
	}
	return b.OPTResource(h, dnsmessage.OPTResource{Options: options})
}
