package egress

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

func TestNarrower(t *testing.T) {
	for _, c := range []struct {
		child, parent string
		problem       string // empty: child is narrower
	}{
		{"", "", ""},
		{"=none", "pypi.org", ""},
		{"pypi.org", "", "pypi.org"},
		{"=packages", "=packages", ""},
		{"=packages", "=open", ""},
		{"=open", "=open", ""},
		{"=open", "=packages", "all of *"},
		{"=dns-only", "=open", ""},
		{"=dns-only", "=packages", "*/dns"},
		{"pypi.org:443", "=packages", ""}, // UDP 443 by name is never allowed
		{"pypi.org:444", "=packages", "pypi.org:444"},
		{"pypi.org:443/tcp", "=packages", ""},
		{"pypi.org/dns", "=packages", ""},
		{"a.pypi.org", "*.pypi.org", ""},
		{"*.a.pypi.org", "*.pypi.org", ""},
		{"pypi.org", "*.pypi.org", "pypi.org"},
		{"*.pypi.org", "pypi.org", "*.pypi.org"},
		{"*", "*.pypi.org", "all of *"},
		{"pypi.org", "*", ""},
		{"pypi.org", "pypi.org/tcp pypi.org/udp", ""},
		{"pypi.org:1-100", "pypi.org:1-50 pypi.org:51-100", ""},
		{"pypi.org:1-101", "pypi.org:1-50 pypi.org:51-100", "pypi.org:1-101"},
		{"pypi.org", "0.0.0.0/0", "pypi.org"},
		{"8.8.8.0/24", "8.8.0.0/16", ""},
		{"8.8.0.0/16", "8.8.8.0/24", "8.8.0.0/16"},
		{"8.8.8.0/24:443", "8.8.0.0/16", "8.8.8.0/24:443"}, // with its ports it allows QUIC
		{"8.8.8.0/24:443/tcp", "8.8.0.0/16", ""},
		{"8.8.8.0/24:443", "8.8.0.0/16:443", ""},
		{"8.8.8.8", "=open", "the host's own"},
		{"8.8.8.8", "8.8.8.8", ""},
		{"10.0.0.0/8", "=open", "closed range"},
		{"10.1.0.0/16", "10.0.0.0/8", ""},
		{"10.0.0.0/8", "10.0.0.0/7", "closed range"},
		{"169.254.169.254", "169.254.0.0/16", "for one address"},
		{"169.254.0.0/16", "=open", "closed range"},
		{"[fd00::]/16", "[fc00::]/7", ""},
		{"8.8.8.8", "[::]/0", "8.8.8.8"},
		{"=open !evil.example", "=open", ""},
		{"=open", "=open !evil.example", "denied now"},
		{"=open !evil.example", "=open !evil.example", ""},
		{"=open !*.example", "=open !evil.example", ""},
		{"=open !evil.example:443", "=open !evil.example", "denied now"},
		{"=open !evil.example/tcp", "=open !evil.example", "denied now"},
		{"=open !evil.example", "=open !evil.example:443/tcp", ""},
		{"=open !evil.example:1-500", "=open !evil.example:443/tcp", ""},
		{"pypi.org", "* !evil.example", ""},
		{"*.example", "* !evil.example", "denied now"},
		{"pypi.org", "* !9.9.9.9", "denied now"}, // it may have that address
		{"8.8.8.0/24", "8.0.0.0/8 !8.9.0.0/16", ""},
		{"8.8.8.0/24", "8.0.0.0/8 !8.8.8.8", "denied now"},
		{"8.8.8.0/24 !8.8.8.0/28", "8.0.0.0/8 !8.8.8.8", ""},
		{"8.8.8.0/24:22", "8.0.0.0/8 !8.8.8.8:53", ""},
		{"8.8.8.0/24/tcp", "8.0.0.0/8 !8.8.8.8:53/udp", ""},
		{"pypi.org:443", "* !*:80", ""},
	} {
		err := Narrower(policy(t, c.child), policy(t, c.parent))
		switch {
		case c.problem == "" && err != nil:
			t.Errorf("%q within %q: %v", c.child, c.parent, err)
		case c.problem != "" && (!errors.Is(err, ErrWider) || !strings.Contains(err.Error(), c.problem)):
			t.Errorf("%q within %q: %v, want %q", c.child, c.parent, err, c.problem)
		}
	}
}

func TestNarrowerBudget(t *testing.T) {
	for _, c := range []struct {
		child, parent int64
		ok            bool
	}{{0, 0, true}, {5, 0, true}, {5, 5, true}, {4, 5, true}, {6, 5, false}, {0, 5, false}} {
		if err := Narrower(&Policy{BudgetBytes: c.child}, &Policy{BudgetBytes: c.parent}); (err == nil) != c.ok {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if err := Narrower(&Policy{Preset: "x"}, &Policy{}); err == nil || errors.Is(err, ErrWider) {
		t.Errorf("a policy that is none: %v", err)
	}
}

func TestMerge(t *testing.T) {
	parent := policy(t, "=open !evil.example !8.8.8.8")
	parent.BudgetBytes = 100
	child := policy(t, "=packages !evil.example")
	child.BudgetBytes = 200
	m := Merge(child, parent)
	if err := Narrower(&m, parent); err != nil {
		t.Error(err)
	}
	if len(m.Deny) != 2 || m.BudgetBytes != 100 || len(child.Deny) != 1 || child.BudgetBytes != 200 {
		t.Errorf("merged: %+v, the child is now %+v", m, child)
	}
}

// A world small enough that random rules meet in it.
type small struct{ *rand.Rand }

func pick[T any](r small, from ...T) T { return from[r.IntN(len(from))] }

func (r small) rule(t testing.TB) Rule {
	text := pick(r, "*", "a.x", "b.x", "*.x", "*.a.x", "c.a.x", "0.0.0.0/0", "8.0.0.0/8", "8.8.8.0/24", "8.8.8.8", "10.0.0.0/8", "10.0.0.0/7", "10.1.0.0/16",
		"10.1.1.1", "169.254.0.0/16", "169.254.169.254", "127.0.0.1", "127.0.0.0/8", "[::]/0", "[2000::]/3", "[fd00::]/8", "[::1]")
	text += pick(r, "", "", ":443", ":80", ":80,443", ":1-443", ":53-80", ":443-500")
	text += pick(r, "", "", "/tcp", "/udp")
	if !strings.Contains(text, "/") && !strings.Contains(text, ":") && r.IntN(4) == 0 && strings.Contains(text, "x") {
		text += "/dns"
	}
	return rule(t, text)
}

func (r small) policy(t testing.TB) *Policy {
	p := &Policy{Preset: pick(r, "", "", "", "", Open, DNSOnly)}
	for range r.IntN(4) {
		p.Allow = append(p.Allow, r.rule(t))
	}
	for range r.IntN(3) {
		p.Deny = append(p.Deny, r.rule(t))
	}
	return p
}

func (r small) narrowed(t testing.TB, p *Policy) *Policy {
	c := p.Clone()
	if len(c.Allow) > 0 && r.IntN(2) == 0 {
		i := r.IntN(len(c.Allow))
		c.Allow[i] = r.rule(t)
	}
	if r.IntN(3) == 0 {
		c.Deny = append(c.Deny, r.rule(t))
	}
	if len(c.Deny) > 0 && r.IntN(3) == 0 {
		c.Deny = c.Deny[1:]
	}
	return &c
}

// everywhere calls f with every destination of the small world.
func everywhere(f func(d Destination)) {
	names := [][]string{nil, {"a.x"}, {"b.x"}, {"c.a.x"}, {"a.x", "b.x"}}
	for _, addr := range []string{"8.8.8.8", "8.8.8.9", "8.9.9.9", "9.9.9.9", "10.1.1.1", "10.1.1.2", "11.1.1.1", "169.254.169.254", "169.254.1.1", "127.0.0.1", "127.0.0.2", "::1", "2600::1", "fd00::1"} {
		for _, port := range []uint16{22, 53, 80, 443, 444, 600} {
			for _, protocol := range []string{TCP, UDP} {
				for _, n := range names {
					d := Destination{Protocol: protocol, AddrPort: netip.AddrPortFrom(netip.MustParseAddr(addr), port), Names: n}
					f(d)
					d.Own = true
					f(d)
				}
			}
		}
	}
}

// wider finds something that child allows and parent does not.
func wider(child, parent *Policy) (what string) {
	for _, name := range []string{"a.x", "b.x", "c.a.x", "d.c.a.x", "y.z"} {
		if child.Name(name, TypeA).Allow && !parent.Name(name, TypeA).Allow {
			return "looking up " + name
		}
	}
	everywhere(func(d Destination) {
		v := child.Address(d)
		if !v.Allow || what != "" {
			return
		}
		differs := func(verb string, ask func(*Policy) Verdict) {
			if ask(child).Allow && !ask(parent).Allow {
				what = fmt.Sprintf("%s at %+v: child %+v, parent %+v", verb, d, ask(child), ask(parent))
			}
		}
		differs("dialling", func(p *Policy) Verdict { return p.Address(d) })
		differs("unseen bytes", func(p *Policy) Verdict { v := p.Address(d); v.Allow = v.Allow && !v.Inspect; return v })
		differs("a hidden server", func(p *Policy) Verdict { return p.Hidden(d) })
		differs("unknown bytes", func(p *Policy) Verdict { return p.Opaque(d) })
		for _, server := range []string{"", "a.x", "b.x", "c.a.x", "8.8.8.8"} {
			differs("server "+server, func(p *Policy) Verdict { return p.Server(d, server) })
		}
	})
	return what
}

// TestNarrowerIsSound: of random policies, no child that Narrower accepts allows anything that its parent does not.
func TestNarrowerIsSound(t *testing.T) {
	r := small{rand.New(rand.NewPCG(1, 2))} //nolint:gosec // repeatable
	accepted := 0
	for range 4000 {
		parent := r.policy(t)
		child := r.narrowed(t, parent)
		if r.IntN(4) == 0 {
			child = r.policy(t)
		}
		if Narrower(child, parent) != nil {
			continue
		}
		if len(child.Rules()) == 0 {
			continue
		}
		if accepted++; accepted > 150 {
			break
		}
		if what := wider(child, parent); what != "" {
			t.Fatalf("parent %+v\nchild %+v is taken for narrower, but: %s", parent, child, what)
		}
	}
	if accepted < 100 {
		t.Errorf("only %d were accepted", accepted)
	}
}

// FuzzNarrower does the same with other random policies.
func FuzzNarrower(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		r := small{rand.New(rand.NewPCG(a, b))} //nolint:gosec // repeatable
		parent := r.policy(t)
		child := r.narrowed(t, parent)
		if err := Narrower(parent, parent); err != nil {
			t.Fatalf("%+v is wider than itself: %v", parent, err)
		}
		if Narrower(child, parent) != nil {
			return
		}
		if what := wider(child, parent); what != "" {
			t.Fatalf("parent %+v\nchild %+v is taken for narrower, but: %s", parent, child, what)
		}
	})
}
