package nameserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/pin"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// world is what the names of tests lead to.
func world() map[string][]string {
	many := make([]string, 100)
	for i := range many {
		many[i] = fmt.Sprintf("93.184.216.%d", i)
	}
	return map[string][]string{
		"pypi.org":         {"151.101.0.223", "151.101.64.223", "2a04:4e42::223"},
		"v4.pypi.org":      {"151.101.0.223"},
		"rebind.pypi.org":  {"169.254.169.254"},
		"local.pypi.org":   {"127.0.0.1", "::1"},
		"private.pypi.org": {"10.0.0.7", "fd00::7"},
		"mapped.pypi.org":  {"::ffff:169.254.169.254"},
		"own.pypi.org":     {"93.184.216.34"},
		"mixed.pypi.org":   {"10.0.0.7", "151.101.0.224"},
		"many.pypi.org":    many,
	}
}

func server(t *testing.T, allow ...string) *Server {
	policy := &egress.Policy{}
	for _, text := range allow {
		r, err := egress.ParseRule(text)
		if err != nil {
			t.Fatal(err)
		}
		policy.Allow = append(policy.Allow, r)
	}
	names := world()
	return &Server{
		Policy: func() *egress.Policy { return policy },
		Lookup: func(_ context.Context, name string, qtype uint16) ([]netip.Addr, error) {
			if name == "broken.pypi.org" {
				return nil, errors.New("no route")
			}
			texts, ok := names[name]
			if !ok {
				return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
			}
			var addrs []netip.Addr
			for _, text := range texts {
				a := netip.MustParseAddr(text)
				if a.Is4() == (qtype == egress.TypeA) || a.Is4In6() {
					addrs = append(addrs, a)
				}
			}
			return addrs, nil
		},
		Own:  func(a netip.Addr) bool { return a == netip.MustParseAddr("93.184.216.34") },
		Pins: pin.New(0),
		Now:  func() time.Time { return start },
	}
}

func query(t testing.TB, name string, qtype dnsmessage.Type, edns int) []byte {
	n, err := dnsmessage.NewName(name)
	if err != nil {
		t.Fatal(err)
	}
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: 7, RecursionDesired: true})
	err = errors.Join(b.StartQuestions(), b.Question(dnsmessage.Question{Name: n, Type: qtype, Class: dnsmessage.ClassINET}))
	if edns > 0 {
		var h dnsmessage.ResourceHeader
		err = errors.Join(err, h.SetEDNS0(edns, dnsmessage.RCodeSuccess, false), b.StartAdditionals(), b.OPTResource(h, dnsmessage.OPTResource{}))
	}
	message, errFinish := b.Finish()
	if err := errors.Join(err, errFinish); err != nil {
		t.Fatal(err)
	}
	return message
}

func read(t testing.TB, reply []byte) dnsmessage.Message {
	var m dnsmessage.Message
	if err := m.Unpack(reply); err != nil {
		t.Fatalf("a reply that cannot be read: %v: %x", err, reply)
	}
	return m
}

func TestAnswer(t *testing.T) {
	const a, aaaa = dnsmessage.TypeA, dnsmessage.TypeAAAA
	for _, c := range []struct {
		name    string
		qtype   dnsmessage.Type
		code    dnsmessage.RCode
		answers []string
		reason  string // of a refusal
	}{
		{"pypi.org.", a, 0, []string{"151.101.0.223", "151.101.64.223"}, ""},
		{"PyPI.org.", a, 0, []string{"151.101.0.223", "151.101.64.223"}, ""},
		{"pypi.org.", aaaa, 0, []string{"2a04:4e42::223"}, ""},
		{"v4.pypi.org.", aaaa, 0, nil, ""},
		{"mixed.pypi.org.", a, 0, []string{"151.101.0.224"}, ""},
		{"absent.pypi.org.", a, dnsmessage.RCodeNameError, nil, ""},
		{"broken.pypi.org.", a, dnsmessage.RCodeServerFailure, nil, ""},
		{"pypi.org.", dnsmessage.TypeTXT, 0, nil, "only addresses"},
		{"pypi.org.", 65, 0, nil, "only addresses"},
		{"pypi.org.", dnsmessage.TypeALL, 0, nil, "only addresses"},
		{"evil.example.", a, dnsmessage.RCodeNameError, nil, "no rule allows"},
		{"c2VjcmV0.evil.example.", dnsmessage.TypeTXT, dnsmessage.RCodeNameError, nil, "no rule allows"},
		{"pypi.org.evil.example.", a, dnsmessage.RCodeNameError, nil, "no rule allows"},
		{"notpypi.org.", a, dnsmessage.RCodeNameError, nil, "no rule allows"},
		{"pypi.org\x00.evil.example.", a, dnsmessage.RCodeNameError, nil, "not a name"},
		{"169.254.169.254.", a, dnsmessage.RCodeNameError, nil, "not a name"},
		{"0xa9fea9fe.", a, dnsmessage.RCodeNameError, nil, "not a name"},
		{".", a, dnsmessage.RCodeNameError, nil, "not a name"},
		{"rebind.pypi.org.", a, dnsmessage.RCodeNameError, nil, "metadata"},
		{"local.pypi.org.", a, dnsmessage.RCodeNameError, nil, "loopback"},
		{"local.pypi.org.", aaaa, dnsmessage.RCodeNameError, nil, "loopback"},
		{"private.pypi.org.", a, dnsmessage.RCodeNameError, nil, "private"},
		{"private.pypi.org.", aaaa, dnsmessage.RCodeNameError, nil, "private"},
		{"mapped.pypi.org.", a, dnsmessage.RCodeNameError, nil, "metadata"},
		{"mapped.pypi.org.", aaaa, dnsmessage.RCodeNameError, nil, "in disguise"},
		{"own.pypi.org.", a, dnsmessage.RCodeNameError, nil, "of this host"},
	} {
		s := server(t, "pypi.org", "*.pypi.org:443")
		reply, q := s.Answer(t.Context(), query(t, c.name, c.qtype, 4096), 0)
		m := read(t, reply)
		var got []string
		for _, r := range m.Answers {
			switch body := r.Body.(type) {
			case *dnsmessage.AResource:
				got = append(got, netip.AddrFrom4(body.A).String())
			case *dnsmessage.AAAAResource:
				got = append(got, netip.AddrFrom16(body.AAAA).String())
			}
		}
		if m.RCode != c.code || !slices.Equal(got, c.answers) || m.ID != 7 || !m.Response || m.Truncated {
			t.Errorf("%q %v: %v %v, want %v %v", c.name, c.qtype, m.RCode, got, c.code, c.answers)
		}
		if (c.reason != "") == q.Verdict.Allow || !strings.Contains(q.Verdict.Reason, c.reason) {
			t.Errorf("%q %v: the verdict is %+v, want %q", c.name, c.qtype, q.Verdict, c.reason)
		}
		for _, text := range c.answers {
			if names := s.Pins.Names(netip.MustParseAddr(text), start); len(names) != 1 || !strings.EqualFold(names[0]+".", c.name) {
				t.Errorf("%q: %s is remembered for %v", c.name, text, names)
			}
		}
		if s.Pins.Len() != len(c.answers) {
			t.Errorf("%q: %d addresses are remembered for %d answers", c.name, s.Pins.Len(), len(c.answers))
		}
	}
}

// TestSizes: what does not fit is left out and said, and comes whole over TCP.
func TestSizes(t *testing.T) {
	for _, c := range []struct{ edns, size, answers int }{{0, 0, 16}, {550, 0, 16}, {4096, 0, 32}, {65535, 0, 32}, {0, 65535, 32}, {1, 0, 16}} {
		s := server(t, "*.pypi.org")
		reply, _ := s.Answer(t.Context(), query(t, "many.pypi.org.", dnsmessage.TypeA, c.edns), c.size)
		m := read(t, reply)
		if len(m.Answers) != c.answers || m.Truncated != (c.answers < maxAddresses) {
			t.Errorf("%+v: %d answers in %d bytes, truncated %v", c, len(m.Answers), len(reply), m.Truncated)
		}
	}
}

// TestRefusalIsExplained: a client that knows extended errors hears why.
func TestRefusalIsExplained(t *testing.T) {
	s := server(t)
	reply, _ := s.Answer(t.Context(), query(t, "evil.example.", dnsmessage.TypeA, 1232), 0)
	if !strings.Contains(string(reply), "no rule allows this name") {
		t.Errorf("the reason is not in %q", reply)
	}
	reply, _ = s.Answer(t.Context(), query(t, "evil.example.", dnsmessage.TypeA, 0), 0)
	if m := read(t, reply); len(m.Additionals) != 0 {
		t.Errorf("a client that sent no OPT gets one")
	}
}

// TestNoQuestion: what deserves no answer gets none, or the shortest.
func TestNoQuestion(t *testing.T) {
	whole := query(t, "pypi.org.", dnsmessage.TypeA, 0)
	response := slices.Clone(whole)
	response[2] |= 0x80
	two := slices.Concat(whole, whole[headerSize:])
	two[5] = 2
	for name, c := range map[string]struct {
		message []byte
		code    dnsmessage.RCode
		none    bool
	}{
		"empty":         {nil, 0, true},
		"short":         {whole[:11], 0, true},
		"header only":   {whole[:12], dnsmessage.RCodeFormatError, false},
		"response":      {response, 0, true},
		"two questions": {two, dnsmessage.RCodeFormatError, false},
		"cut":           {whole[:20], dnsmessage.RCodeFormatError, false},
	} {
		s := server(t, "pypi.org")
		reply, q := s.Answer(t.Context(), c.message, 0)
		if q.Verdict.Allow || q.Verdict.Reason == "" {
			t.Errorf("%s: %+v", name, q)
		}
		if c.none != (reply == nil) {
			t.Errorf("%s: the reply is %x", name, reply)
		} else if !c.none {
			if m := read(t, reply); m.RCode != c.code || len(m.Answers) != 0 {
				t.Errorf("%s: %v with %d answers", name, m.RCode, len(m.Answers))
			}
		}
	}
}

// FuzzAnswer: whatever a guest sends, the reply is small and can be read, and only allowed names are looked up.
func FuzzAnswer(f *testing.F) {
	for _, name := range []string{"pypi.org.", "evil.example.", "many.pypi.org.", "rebind.pypi.org.", "."} {
		for _, qtype := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA, dnsmessage.TypeTXT} {
			f.Add(query(f, name, qtype, 0), 0)
			f.Add(query(f, name, qtype, 1232), 0)
			f.Add(query(f, name, qtype, 65535), 65535)
		}
	}
	f.Fuzz(func(t *testing.T, message []byte, size int) {
		s := server(t, "pypi.org", "*.pypi.org")
		lookup := s.Lookup
		s.Lookup = func(ctx context.Context, name string, qtype uint16) ([]netip.Addr, error) {
			if name != "pypi.org" && !strings.HasSuffix(name, ".pypi.org") {
				t.Errorf("%q is looked up", name)
			}
			return lookup(ctx, name, qtype)
		}
		if size != 0 {
			size = 65535
		}
		reply, q := s.Answer(t.Context(), message, size)
		if reply == nil {
			return
		}
		if strings.ContainsFunc(q.Name+q.Verdict.Reason, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q would steer a terminal", q.Name)
		}
		if m := read(t, reply); len(m.Answers) > 0 && !q.Verdict.Allow {
			t.Errorf("a refused question has answers: %+v", q)
		}
		if size == 0 && len(reply) > maxUDP {
			t.Errorf("%d bytes over UDP", len(reply))
		}
		for _, a := range q.Addresses {
			if egress.Special(a) != "" {
				t.Errorf("%s was given", a)
			}
		}
	})
}
