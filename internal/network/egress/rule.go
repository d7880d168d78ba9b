package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// The protocols of rules and destinations.
const (
	TCP = "tcp"
	UDP = "udp"
	// DNS in a rule for a name: it may be looked up, and that is all.
	DNS = "dns"
)

// maxPorts bounds the ranges of one rule.
const maxPorts = 64

// A PortRange is the ports from First to Last, both included.
type PortRange struct{ First, Last uint16 }

func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

func (r PortRange) has(port uint16) bool { return r.First <= port && port <= r.Last }

// A Rule names destinations: by name or by address, never both.
//
//nolint:recvcheck // It is a value; only UnmarshalText changes one.
type Rule struct {
	// Domain is a name ("pypi.org"), every name below one ("*.pypi.org", which is not pypi.org itself), or every name ("*").
	Domain string
	CIDR   netip.Prefix
	// Ports are sorted and apart from one another. None: all.
	Ports []PortRange
	// Protocol is TCP, UDP, for a name also DNS. Empty: all of them.
	Protocol string
}

// ParseRule reads a rule: a name or an address range, then ":PORTS" and "/tcp" or "/udp" where it is for these alone.
// "pypi.org", "*.pypi.org:443", "10.1.2.0/24:5432/tcp", "[2001:db8::]/32:80-90,443", "example.com/dns" (may be looked up,
// not reached). Rule.String writes what it reads.
func ParseRule(text string) (Rule, error) {
	r, err := parseRule(text)
	if err != nil {
		return Rule{}, fmt.Errorf("egress rule %q: %w; write NAME, *.NAME, ADDRESS or ADDRESS/BITS, then optionally :PORTS and /tcp or /udp, "+
			"as in pypi.org:443 or 10.1.2.0/24:5432/tcp or [2001:db8::]/32:80-90", clip(text), err)
	}
	return r, nil
}

// clip keeps a stranger's text in an error short.
func clip(text string) string {
	if len(text) > 80 {
		return text[:80] + "…"
	}
	return text
}

func parseRule(text string) (Rule, error) {
	if len(text) > 1024 {
		return Rule{}, errors.New("it is longer than 1024 bytes")
	}
	if strings.Contains(text, "://") {
		return Rule{}, errors.New("it is a URL, of which only the host and the port can be ruled on")
	}
	rest, protocol := cutProtocol(text)
	r := Rule{Protocol: protocol}
	var ports string
	var hasPorts bool
	var err error
	switch {
	case rest == "":
		return Rule{}, errors.New("it names nothing")
	case rest[0] == '[': // [address]/bits:ports
		address, after, closed := strings.Cut(rest[1:], "]")
		if !closed {
			return Rule{}, errors.New("there is no ] after [")
		}
		var bits string
		bits, ports, hasPorts = strings.Cut(after, ":")
		if !strings.Contains(address, ":") {
			return Rule{}, errors.New("brackets are for IPv6 addresses")
		}
		if bits != "" && bits[0] != '/' {
			return Rule{}, fmt.Errorf("%q after the address is neither /BITS nor :PORTS", clip(bits))
		}
		r.CIDR, err = parsePrefix(address + bits)
	case strings.Count(rest, ":") > 1: // an IPv6 address without ports
		r.CIDR, err = parsePrefix(rest)
	default:
		rest, ports, hasPorts = strings.Cut(rest, ":")
		if looksNumeric(rest) {
			r.CIDR, err = parsePrefix(rest)
		} else {
			r.Domain, err = parsePattern(rest)
		}
	}
	if err != nil {
		return Rule{}, err
	}
	if hasPorts {
		if r.Ports, err = parsePorts(ports); err != nil {
			return Rule{}, err
		}
	}
	if r.Protocol == DNS && (r.Domain == "" || r.Ports != nil) {
		return Rule{}, errors.New("/dns goes with a name, without ports")
	}
	return r, nil
}

func cutProtocol(text string) (rest, protocol string) {
	for _, p := range []string{TCP, UDP, DNS} {
		if rest, ok := strings.CutSuffix(text, "/"+p); ok {
			return rest, p
		}
	}
	return text, ""
}

// looksNumeric: what a resolver somewhere may take for an address (its last label begins with a digit), or what has bits.
func looksNumeric(text string) bool {
	text = strings.TrimSuffix(text, ".")
	if strings.Contains(text, "/") {
		return true
	}
	last := text[strings.LastIndexByte(text, '.')+1:]
	return last != "" && '0' <= last[0] && last[0] <= '9'
}

func parsePrefix(text string) (netip.Prefix, error) {
	if !strings.Contains(text, "/") {
		a, err := netip.ParseAddr(text)
		if err != nil || a.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("%q is not an address", clip(text))
		}
		if a.Is4In6() {
			return netip.Prefix{}, fmt.Errorf("write the IPv4 address %s as such", a.Unmap())
		}
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not an address range", clip(text))
	}
	if p.Addr().Is4In6() {
		return netip.Prefix{}, errors.New("write IPv4 addresses as such")
	}
	if p != p.Masked() {
		return netip.Prefix{}, fmt.Errorf("%s has bits beyond its length: is %s meant, or %s/%d?", p, p.Masked(), p.Addr(), p.Addr().BitLen())
	}
	return p, nil
}

func parsePattern(text string) (string, error) {
	if text == "*" {
		return text, nil
	}
	base, wild := strings.CutPrefix(text, "*.")
	name, ok := Canonical(base)
	if !ok {
		return "", fmt.Errorf("%q is not a name (letters, digits, - and _ between dots; other alphabets as xn--…)", clip(text))
	}
	if wild {
		return "*." + name, nil
	}
	return name, nil
}

func parsePorts(text string) ([]PortRange, error) {
	var ports []PortRange
	for part := range strings.SplitSeq(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, errA := parsePort(first)
		b, errB := parsePort(last)
		if errA != nil || errB != nil || b < a {
			return nil, fmt.Errorf("%q is neither a port (1-65535) nor a range of ports", clip(part))
		}
		if ports = append(ports, PortRange{a, b}); len(ports) > maxPorts {
			return nil, fmt.Errorf("it has more than %d ranges of ports", maxPorts)
		}
	}
	return union(ports), nil
}

func parsePort(text string) (uint16, error) {
	if text == "" || strings.Trim(text, "0123456789") != "" {
		return 0, errors.New("not a number")
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err == nil && n == 0 {
		err = errors.New("there is no port 0")
	}
	return uint16(n), err
}

// union is the same ports, sorted, in as few ranges as there can be.
func union(ports []PortRange) []PortRange {
	ports = slices.Clone(ports)
	slices.SortFunc(ports, func(a, b PortRange) int { return int(a.First) - int(b.First) })
	out := ports[:0]
	for _, r := range ports {
		if n := len(out); n > 0 && int(r.First) <= int(out[n-1].Last)+1 {
			out[n-1].Last = max(out[n-1].Last, r.Last)
			continue
		}
		out = append(out, r)
	}
	return out
}

// String writes the rule as ParseRule reads it.
func (r Rule) String() string {
	var b strings.Builder
	switch {
	case r.Domain != "":
		b.WriteString(r.Domain)
	case !r.CIDR.IsValid():
		return ""
	case r.CIDR.Addr().Is4() && r.CIDR.IsSingleIP():
		b.WriteString(r.CIDR.Addr().String())
	case r.CIDR.Addr().Is4():
		b.WriteString(r.CIDR.String())
	case r.CIDR.IsSingleIP():
		fmt.Fprintf(&b, "[%s]", r.CIDR.Addr())
	default:
		fmt.Fprintf(&b, "[%s]/%d", r.CIDR.Addr(), r.CIDR.Bits())
	}
	for i, p := range r.Ports {
		if i == 0 {
			b.WriteByte(':')
		} else {
			b.WriteByte(',')
		}
		b.WriteString(p.String())
	}
	if r.Protocol != "" {
		b.WriteByte('/')
		b.WriteString(r.Protocol)
	}
	return b.String()
}

// MarshalText writes the rule as ParseRule reads it.
func (r Rule) MarshalText() ([]byte, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	return []byte(r.String()), nil
}

// UnmarshalText reads a rule with ParseRule.
func (r *Rule) UnmarshalText(text []byte) error {
	parsed, err := ParseRule(string(text))
	if err != nil {
		return err
	}
	*r = parsed
	return nil
}

// Validate finds rules that ParseRule would not have made.
func (r Rule) Validate() error {
	if (r.Domain != "") == r.CIDR.IsValid() {
		return errors.New("an egress rule names either a name or an address range")
	}
	again, err := ParseRule(r.String())
	if err != nil {
		return err
	}
	if again.Domain != r.Domain || again.CIDR != r.CIDR || again.Protocol != r.Protocol || !slices.Equal(again.Ports, r.Ports) {
		return fmt.Errorf("egress rule %q is not written as it would be read (%s)", clip(r.String()), again)
	}
	return nil
}

func (r *Rule) carries(protocol string, port uint16) bool {
	if r.Protocol != "" && r.Protocol != protocol {
		return false
	}
	return len(r.Ports) == 0 || slices.ContainsFunc(r.Ports, func(p PortRange) bool { return p.has(port) })
}

// names tells whether the rule is for this canonical name.
func (r *Rule) names(name string) bool {
	if r.Domain == "*" {
		return true
	}
	if base, wild := strings.CutPrefix(r.Domain, "*"); wild { // ".pypi.org"
		return len(name) > len(base) && strings.HasSuffix(name, base)
	}
	return r.Domain != "" && r.Domain == name
}
