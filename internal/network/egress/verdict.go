package egress

import (
	"fmt"
	"net/netip"
	"slices"
)

// Types of DNS questions that are answered.
const (
	TypeA    = 1
	TypeAAAA = 28
)

func allowed(rule *Rule, reason string) Verdict {
	return Verdict{Allow: true, Rule: rule.String(), Reason: reason}
}

func refused(reason string) Verdict { return Verdict{Reason: reason} }

func denied(rule *Rule) Verdict {
	return Verdict{Rule: rule.String(), Reason: "denied by rule"}
}

// Name decides whether a name may be looked up. Types other than A and AAAA are never asked of anybody: HTTPS records
// would bring the keys of encrypted client hellos, and the rest carries data in and out.
func (p *Policy) Name(name string, qtype uint16) Verdict {
	canonical, ok := Canonical(name)
	if !ok {
		return refused("not a name of a host")
	}
	for i := range p.Deny {
		if d := &p.Deny[i]; d.names(canonical) && (d.Protocol == DNS || d.Protocol == "" && len(d.Ports) == 0) {
			return denied(d)
		}
	}
	rules := p.Rules()
	for i := range rules {
		if !rules[i].names(canonical) {
			continue
		}
		if qtype != TypeA && qtype != TypeAAAA {
			return Verdict{Rule: rules[i].String(), Reason: "only addresses are looked up (A, AAAA)", Type: true}
		}
		return allowed(&rules[i], "allowed by rule")
	}
	return refused("no rule allows this name")
}

// Given decides whether a guest may be told of an address that a name it may look up has: names do not lead to what rules
// keep closed (rebinding).
func (p *Policy) Given(addr netip.Addr, own bool) Verdict {
	for i := range p.Deny {
		if d := &p.Deny[i]; d.CIDR.IsValid() && d.CIDR.Contains(addr) && d.Protocol == "" && len(d.Ports) == 0 {
			return denied(d)
		}
	}
	s := specialOf(addr)
	if s == nil && !own {
		return Verdict{Allow: true}
	}
	rules := p.Rules()
	for i := range rules {
		r := &rules[i]
		if r.CIDR.IsValid() && r.CIDR.Contains(addr) && (s == nil || s.opens(r.CIDR)) && (!own || r.CIDR.IsSingleIP()) {
			return allowed(r, "allowed by rule")
		}
	}
	if s == nil {
		return refused(ownReason)
	}
	return refused(s.refusal())
}

const ownReason = "an address of this host: only a rule for exactly this address opens it"

// Address decides before an address is dialled.
func (p *Policy) Address(to Destination) Verdict {
	v, _ := p.address(to)
	return v
}

// address also tells whether a rule by address allowed it.
func (p *Policy) address(to Destination) (v Verdict, byAddress bool) {
	addr, port := to.AddrPort.Addr(), to.AddrPort.Port()
	if to.Protocol != TCP && to.Protocol != UDP || !to.AddrPort.IsValid() || port == 0 || addr.Zone() != "" {
		return refused("not a destination of TCP or UDP"), false
	}
	for i := range p.Deny {
		if d := &p.Deny[i]; d.CIDR.IsValid() && d.CIDR.Contains(addr) && d.carries(to.Protocol, port) {
			return denied(d), false
		}
	}
	names, hidden := p.names(to)
	if len(names) == 0 && hidden != nil {
		return denied(hidden), false
	}
	if quic(to) && p.deniesNames(to) {
		return refused("QUIC hides its server's name, and rules deny names"), false
	}
	rules := p.Rules()
	if r := byCIDR(rules, to); r != nil {
		v := allowed(r, "allowed by rule")
		v.Inspect = p.deniesNames(to)
		return v, true
	}
	if to.Own {
		return refused(ownReason), false
	}
	if s := specialOf(addr); s != nil {
		return refused(s.refusal()), false
	}
	if quic(to) {
		return refused("UDP to port 443 needs a rule by address and port"), false
	}
	for i := range rules {
		for _, name := range names {
			if r := &rules[i]; r.names(name) && r.carries(to.Protocol, port) {
				v := allowed(r, fmt.Sprintf("allowed by rule: the address was given for %s", name))
				v.Inspect = true
				return v, false
			}
		}
	}
	if len(to.Names) == 0 {
		return refused("no rule allows this address, and no name was looked up that has it"), false
	}
	return refused(fmt.Sprintf("no rule allows %s on this port and protocol", to.Names[0])), false
}

func (s *special) refusal() string {
	switch s.opening {
	case byOne:
		return s.what + ": only a rule for exactly this address opens it"
	case never:
		return s.what + ": never reached"
	default:
		return s.what + ": only a rule by address within it opens it"
	}
}

// names are those of the destination that are not denied there, and the rule that took others away.
func (p *Policy) names(to Destination) (names []string, hidden *Rule) {
	for _, name := range to.Names {
		canonical, ok := Canonical(name)
		if !ok {
			continue
		}
		if d := p.denies(canonical, to); d != nil {
			hidden = d
			continue
		}
		names = append(names, canonical)
	}
	return names, hidden
}

func (p *Policy) denies(name string, to Destination) *Rule {
	for i := range p.Deny {
		if d := &p.Deny[i]; d.names(name) && d.carries(to.Protocol, to.AddrPort.Port()) {
			return d
		}
	}
	return nil
}

// deniesNames tells whether a name alone could make the flow a denied one.
func (p *Policy) deniesNames(to Destination) bool {
	return slices.ContainsFunc(p.Deny, func(d Rule) bool { return d.Domain != "" && d.carries(to.Protocol, to.AddrPort.Port()) })
}

func quic(to Destination) bool { return to.Protocol == UDP && to.AddrPort.Port() == 443 }

// byCIDR is the rule by address that allows the destination.
func byCIDR(rules []Rule, to Destination) *Rule {
	addr := to.AddrPort.Addr()
	s := specialOf(addr)
	for i := range rules {
		r := &rules[i]
		if !r.CIDR.IsValid() || !r.CIDR.Contains(addr) || !r.carries(to.Protocol, to.AddrPort.Port()) {
			continue
		}
		if s != nil && !s.opens(r.CIDR) || to.Own && !r.CIDR.IsSingleIP() || quic(to) && len(r.Ports) == 0 {
			continue
		}
		return r
	}
	return nil
}

// Server decides about TLS and HTTP when the first bytes have named their server: the name of a client hello, the host of
// each request. Empty: they named none. It holds all that Address does.
func (p *Policy) Server(to Destination, name string) Verdict {
	v, byAddress := p.address(to)
	if !v.Allow {
		return v
	}
	v.Inspect = false
	canonical, ok := Canonical(name)
	if ok {
		if d := p.denies(canonical, to); d != nil {
			return denied(d)
		}
	}
	if byAddress {
		return v
	}
	if name == "" {
		return refused("it names no server, and its address is allowed only for a name")
	}
	if !ok {
		return refused(fmt.Sprintf("its server %q is not a name, and its address is allowed only for a name", clip(name)))
	}
	if !slices.ContainsFunc(to.Names, func(n string) bool { c, _ := Canonical(n); return c == canonical }) {
		return refused(fmt.Sprintf("its server is %s, which was not given this address", canonical))
	}
	rules := p.Rules()
	for i := range rules {
		if r := &rules[i]; r.names(canonical) && r.carries(to.Protocol, to.AddrPort.Port()) {
			return allowed(r, fmt.Sprintf("allowed by rule: its server is %s", canonical))
		}
	}
	return refused(fmt.Sprintf("its server is %s, which no rule allows here", canonical))
}

// Hidden decides about TLS whose client hello is encrypted, so that the name that can be read is not the server's.
func (p *Policy) Hidden(to Destination) Verdict {
	v, byAddress := p.address(to)
	if !v.Allow {
		return v
	}
	if !byAddress || p.deniesNames(to) {
		return refused("an encrypted client hello hides its server's name")
	}
	return v
}

// Opaque decides about bytes that are neither TLS nor HTTP. On the ports of these two they are refused where a name must be
// seen; elsewhere they are what the address is reached for.
func (p *Policy) Opaque(to Destination) Verdict {
	v, byAddress := p.address(to)
	if !v.Allow {
		return v
	}
	v.Inspect = false
	if byAddress && !p.deniesNames(to) {
		return v
	}
	switch port := to.AddrPort.Port(); port {
	case 80, 443:
		return refused(fmt.Sprintf("neither TLS nor HTTP, on port %d of an address that is allowed only for a name", port))
	}
	return v
}

// Special names the range of an address that is not the Internet's; empty: it is one of the Internet's.
func Special(a netip.Addr) string {
	if s := specialOf(a); s != nil {
		return s.what
	}
	return ""
}
