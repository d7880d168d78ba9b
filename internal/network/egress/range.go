package egress

import "net/netip"

// How a rule must name an address of a range that is not the Internet's.
type opening int

const (
	byRange opening = iota // by a range within it
	byOne                  // as that one address
	never                  // not at all: no such packet has an honest use
)

type special struct {
	prefix  netip.Prefix
	what    string
	opening opening
}

// table has the ranges that rules do not open by containing them, special ones before those they lie in: IANA's registries
// of special-purpose addresses (RFC 6890 and its successors), and where clouds serve their metadata. It is never written.
var table = [...]special{
	// Metadata services hand the host's own credentials to whoever asks.
	one("169.254.169.254", "the metadata service of clouds"),
	one("169.254.170.2", "the credentials service of AWS containers"),
	one("169.254.170.23", "the credentials service of AWS EKS"),
	one("fd00:ec2::254", "the metadata service of AWS"),
	one("fd00:ec2::23", "the credentials service of AWS EKS"),
	one("fd20:ce::254", "the metadata service of Google Cloud"),
	one("100.100.100.200", "the metadata service of Alibaba Cloud"),
	one("192.0.0.192", "the metadata service of Oracle Cloud"),
	one("168.63.129.16", "the metadata service of Azure"),
	one("fd00:42::42", "the metadata service of Scaleway"),

	in("0.0.0.0/8", "this host's own range", never),
	in("10.0.0.0/8", "a private range", byRange),
	in("100.64.0.0/10", "the shared range of providers", byRange),
	in("127.0.0.0/8", "the host's loopback", byOne),
	in("169.254.0.0/16", "the link-local range", byRange),
	in("172.16.0.0/12", "a private range", byRange),
	in("192.0.0.0/24", "a range reserved for protocols", byRange),
	in("192.0.2.0/24", "a range for documentation", byRange),
	in("192.31.196.0/24", "a range reserved for protocols", byRange),
	in("192.52.193.0/24", "a range reserved for protocols", byRange),
	in("192.88.99.0/24", "a range of relays", byRange),
	in("192.168.0.0/16", "a private range", byRange),
	in("192.175.48.0/24", "a range reserved for protocols", byRange),
	in("198.18.0.0/15", "a range for benchmarks", byRange),
	in("198.51.100.0/24", "a range for documentation", byRange),
	in("203.0.113.0/24", "a range for documentation", byRange),
	in("224.0.0.0/4", "the multicast range", byRange),
	in("255.255.255.255/32", "the broadcast address", never),
	in("240.0.0.0/4", "a reserved range", byRange),

	in("::/128", "this host's own range", never),
	in("::1/128", "the host's loopback", byOne),
	// An IPv4 address is named as one, so that no rule for IPv6 opens it in disguise.
	in("::ffff:0:0/96", "an IPv4 address in disguise (IPv4-mapped)", never),
	in("::ffff:0:0:0/96", "an IPv4 address in disguise (IPv4-translated)", never),
	in("::/96", "an IPv4 address in disguise (IPv4-compatible)", never),
	in("64:ff9b::/96", "an IPv4 address in disguise (NAT64)", never),
	in("64:ff9b:1::/48", "an IPv4 address in disguise (NAT64)", never),
	in("100::/64", "the discard range", byRange),
	in("2001::/32", "an IPv4 address in disguise (Teredo)", never),
	in("2001::/23", "a range reserved for protocols", byRange),
	in("2001:db8::/32", "a range for documentation", byRange),
	in("2002::/16", "an IPv4 address in disguise (6to4)", never),
	in("2620:4f:8000::/48", "a range reserved for protocols", byRange),
	in("3fff::/20", "a range for documentation", byRange),
	in("fc00::/7", "a private range", byRange),
	in("fe80::/10", "the link-local range", byRange),
	in("fec0::/10", "a private range", byRange),
	in("ff00::/8", "the multicast range", byRange),
	// What is left outside 2000::/3 is nobody's.
	in("::/3", "a reserved range", byRange),
	in("4000::/2", "a reserved range", byRange),
	in("8000::/1", "a reserved range", byRange),
}

func one(address, what string) special {
	a := netip.MustParseAddr(address)
	return special{netip.PrefixFrom(a, a.BitLen()), what, byOne}
}

func in(prefix, what string, how opening) special {
	return special{netip.MustParsePrefix(prefix), what, how}
}

// specialOf is the range that decides about an address; nil: it is one of the Internet's.
func specialOf(a netip.Addr) *special {
	for i := range table {
		if p := &table[i]; p.prefix.Contains(a) {
			return p
		}
	}
	return nil
}

// opens tells whether a rule for prefix, which contains the address, names it as its range demands.
func (s *special) opens(prefix netip.Prefix) bool {
	switch s.opening {
	case byRange:
		return prefix.Bits() >= s.prefix.Bits() && s.prefix.Contains(prefix.Addr())
	case byOne:
		return prefix.IsSingleIP()
	default:
		return false
	}
}
