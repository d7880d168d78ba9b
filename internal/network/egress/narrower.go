package egress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Narrower returns nil if child allows nothing that parent does not, and otherwise an error that wraps ErrWider and says
// what is beyond. It may refuse a child that is not wider in a roundabout way (a name whose addresses parent allows by
// range), never the reverse.
func Narrower(child, parent *Policy) error {
	for _, p := range []*Policy{child, parent} {
		if err := p.Validate(); err != nil {
			return err
		}
	}
	if parent.BudgetBytes != 0 && (child.BudgetBytes == 0 || child.BudgetBytes > parent.BudgetBytes) {
		return fmt.Errorf("%w: its budget would be %s, where it is %d bytes now", ErrWider, budget(child.BudgetBytes), parent.BudgetBytes)
	}
	rules, within := child.Rules(), parent.Rules()
	for i := range rules {
		if !covered(&rules[i], within) {
			return fmt.Errorf("%w: nothing allows all of %s now%s", ErrWider, rules[i], hint(&rules[i], within))
		}
	}
	for i := range parent.Deny {
		d := &parent.Deny[i]
		touches := slices.ContainsFunc(rules, func(r Rule) bool { return meet(&r, d) })
		if touches && !coveredDeny(d, child.Deny) {
			return fmt.Errorf("%w: %s is denied now, and would not be", ErrWider, d)
		}
	}
	return nil
}

// hint says what is beyond where it cannot be seen.
func hint(r *Rule, rules []Rule) string {
	around := func(w Rule) bool { return w.CIDR.IsValid() && includesPrefix(w.CIDR, r.CIDR) }
	switch {
	case !r.CIDR.IsValid() || !slices.ContainsFunc(rules, around):
		return ""
	case r.CIDR.IsSingleIP():
		return " (a rule for one address opens it even where it is the host's own or a closed range's; a range does not)"
	default:
		return " (a rule within a closed range opens it; one around the range does not)"
	}
}

func budget(bytes int64) string {
	if bytes == 0 {
		return "none"
	}
	return fmt.Sprintf("%d bytes", bytes)
}

func allPorts() []PortRange { return []PortRange{{1, 65535}} }

// ports are those that the rule opens for a protocol.
func (r *Rule) ports(protocol string) []PortRange {
	switch {
	case protocol == DNS:
		if r.Domain == "" {
			return nil
		}
		return allPorts()
	case r.Protocol != "" && r.Protocol != protocol:
		return nil
	case len(r.Ports) != 0 && (protocol == TCP || r.CIDR.IsValid()):
		return r.Ports
	case len(r.Ports) != 0:
		return minus(r.Ports, PortRange{443, 443})
	case protocol == UDP:
		return minus(allPorts(), PortRange{443, 443})
	}
	return allPorts()
}

// covered tells whether rules together open all that r does.
func covered(r *Rule, rules []Rule) bool {
	for _, protocol := range []string{TCP, UDP, DNS} {
		left := r.ports(protocol)
		for i := range rules {
			if !includes(&rules[i], r) {
				continue
			}
			for _, has := range rules[i].ports(protocol) {
				left = minus(left, has)
			}
		}
		if len(left) != 0 {
			return false
		}
	}
	return true
}

// includes tells whether the targets of inner are all targets of outer.
func includes(outer, inner *Rule) bool {
	if inner.Domain != "" {
		return includesName(outer.Domain, inner.Domain)
	}
	if !outer.CIDR.IsValid() || !includesPrefix(outer.CIDR, inner.CIDR) {
		return false
	}
	// A rule for one address opens it even where it is the host's own, which only the host knows.
	if inner.CIDR.IsSingleIP() && !outer.CIDR.IsSingleIP() {
		return false
	}
	return !opensMore(inner.CIDR, outer.CIDR)
}

// opensMore tells whether a rule for inner opens a special range that one for outer, which contains it, leaves closed.
func opensMore(inner, outer netip.Prefix) bool {
	for i := range table {
		s := &table[i]
		if s.prefix.Overlaps(inner) && s.opens(inner) && !s.opens(outer) {
			return true
		}
	}
	return false
}

func includesPrefix(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

func includesName(outer, inner string) bool {
	if outer == "*" || outer == inner {
		return outer != ""
	}
	base, wild := strings.CutPrefix(outer, "*") // ".pypi.org"
	return wild && inner != "*" && strings.HasSuffix(inner, base) && len(strings.TrimPrefix(inner, "*")) > len(base)
}

// coveredDeny tells whether one of the denying rules denies all that d does.
func coveredDeny(d *Rule, rules []Rule) bool {
	return slices.ContainsFunc(rules, func(have Rule) bool {
		if d.Domain != "" && !includesName(have.Domain, d.Domain) || d.CIDR.IsValid() && (!have.CIDR.IsValid() || !includesPrefix(have.CIDR, d.CIDR)) {
			return false
		}
		if have.Protocol != "" && have.Protocol != d.Protocol {
			return false
		}
		if len(have.Ports) == 0 {
			return true
		}
		left := d.Ports
		if len(left) == 0 {
			return false // it denies lookups too, or all ports
		}
		for _, p := range have.Ports {
			left = minus(left, p)
		}
		return len(left) == 0
	})
}

// meet tells whether a denying rule could take something away from an allowing one.
func meet(allow, deny *Rule) bool {
	if allow.Domain != "" && deny.Domain != "" && !includesName(allow.Domain, deny.Domain) && !includesName(deny.Domain, allow.Domain) {
		return false
	}
	if allow.CIDR.IsValid() && deny.CIDR.IsValid() && !allow.CIDR.Overlaps(deny.CIDR) {
		return false
	}
	if allow.Domain != "" && deny.Domain != "" && (deny.Protocol == DNS || deny.Protocol == "" && len(deny.Ports) == 0) {
		return true // lookups
	}
	for _, protocol := range []string{TCP, UDP} {
		if deny.Protocol != "" && deny.Protocol != protocol {
			continue
		}
		left := allow.ports(protocol)
		if len(left) != 0 && len(deny.Ports) == 0 {
			return true
		}
		for _, a := range left {
			for _, d := range deny.Ports {
				if a.First <= d.Last && d.First <= a.Last {
					return true
				}
			}
		}
	}
	return false
}

// minus is the ports without those of a range.
func minus(ports []PortRange, without PortRange) []PortRange {
	var left []PortRange
	for _, p := range ports {
		if p.Last < without.First || without.Last < p.First {
			left = append(left, p)
			continue
		}
		if p.First < without.First {
			left = append(left, PortRange{p.First, without.First - 1})
		}
		if without.Last < p.Last {
			left = append(left, PortRange{without.Last + 1, p.Last})
		}
	}
	return left
}
