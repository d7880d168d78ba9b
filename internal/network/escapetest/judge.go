package escapetest

import (
	"fmt"
	"net/netip"
	"strings"
)

// Escaped tells whether what an attempt heard shows that it has succeeded.
func (a *Attempt) Escaped(heard string) bool {
	return heard != "" && !a.Answers || strings.Contains(heard, Evil) || strings.Contains(heard, Other)
}

// Tells tells whether a refused flow is the record of the attempt. closed: the policy allows no name.
func (a *Attempt) Tells(protocol, to, name, reason string, closed bool) bool {
	want := a.Reason
	if closed && a.Closed != "" {
		want = a.Closed
	}
	return protocol == a.Protocol && strings.Contains(reason, want) && (a.To == "" || to == a.To) && (a.Flow == "" || name == a.Flow)
}

// Leaks finds what has left a guest and was not allowed to, in the records of the outside: dials ("tcp ADDRESS:PORT"),
// names that were looked up, and hosts that servers were asked for ("https NAME"). open: one domain is allowed; else nothing is.
func Leaks(dials, lookups, seen []string, open bool) (leaks []string) {
	leak := func(what, text string) { leaks = append(leaks, fmt.Sprintf("%s: %s", what, text)) }
	for _, dial := range dials {
		_, to, _ := strings.Cut(dial, " ")
		addr, err := netip.ParseAddrPort(to)
		if err != nil || !open || addr.Addr().String() != Allowed4 && addr.Addr().String() != Allowed6 {
			leak("dialled", dial)
		}
	}
	for _, name := range lookups {
		if !open || name != Allowed && !strings.HasSuffix(name, "."+Allowed) {
			leak("looked up", name)
		}
	}
	for _, what := range seen {
		_, host, _ := strings.Cut(what, " ")
		if host, _, _ = strings.Cut(host, ":"); !open || !strings.EqualFold(host, Allowed) {
			leak("a server was asked for", what)
		}
	}
	return leaks
}
