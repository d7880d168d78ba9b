package egress

import (
	"fmt"
	"net/netip"
	"strings"
)

// The presets.
const (
	None     = "none"
	DNSOnly  = "dns-only"
	Packages = "packages"
	Open     = "open"
)

// Presets are the names that Preset knows, narrow ones first.
func Presets() []string { return []string{None, DNSOnly, Packages, Open} }

// Preset is a policy of that name's rules alone.
func Preset(name string) (Policy, error) {
	if _, err := rulesOf(name); err != nil {
		return Policy{}, err
	}
	return Policy{Preset: name}, nil
}

func rulesOf(preset string) ([]Rule, error) {
	switch preset {
	case "", None:
		return nil, nil
	case DNSOnly:
		return []Rule{{Domain: "*", Protocol: DNS}}, nil
	case Packages:
		return packages(), nil
	case Open:
		return open(), nil
	}
	return nil, fmt.Errorf("there is no egress preset %q; there are %s", clip(preset), strings.Join(Presets(), ", "))
}

// packages are the hosts that the package managers of languages and distributions name themselves.
func packages() []Rule {
	web := []PortRange{{80, 80}, {443, 443}}
	tls := []PortRange{{443, 443}}
	var rules []Rule
	for _, name := range []string{
		// Debian signs its indexes, and its mirrors and default sources are plain HTTP.
		"deb.debian.org", "security.debian.org", "snapshot.debian.org",
	} {
		rules = append(rules, Rule{Domain: name, Ports: web, Protocol: TCP})
	}
	for _, name := range []string{
		"pypi.org", "files.pythonhosted.org",
		"registry.npmjs.org",
		"proxy.golang.org", "sum.golang.org", "storage.googleapis.com", // storage: where the proxy redirects toolchains to
		"go.googlesource.com", // the repositories of golang.org/x
		"crates.io", "index.crates.io", "static.crates.io",
	} {
		rules = append(rules, Rule{Domain: name, Ports: tls, Protocol: TCP})
	}
	return rules
}

// open is the Internet. Ranges that are not the Internet's stay closed, because no rule here names them.
func open() []Rule {
	four, six := netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	quic := []PortRange{{443, 443}}
	return []Rule{
		{Domain: "*"},
		{CIDR: four},
		{CIDR: six},
		{CIDR: four, Ports: quic, Protocol: UDP},
		{CIDR: six, Ports: quic, Protocol: UDP},
	}
}
