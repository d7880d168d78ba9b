package egress

import (
	"net/netip"
	"testing"
)

func TestSpecialRanges(t *testing.T) {
	for text, want := range map[string]string{
		"::ffff:169.254.169.254": "an IPv4 address in disguise (IPv4-mapped)",
		"::ffff:8.8.8.8":         "an IPv4 address in disguise (IPv4-mapped)",
		"169.254.169.254":        "the metadata service of clouds",
		"8.8.8.8":                "",
		"2606:4700::1111":        "",
		"255.255.255.255":        "the broadcast address",
		"::1":                    "the host's loopback",
		"::":                     "this host's own range",
		"0.0.0.0":                "this host's own range",
	} {
		if got := Special(netip.MustParseAddr(text)); got != want {
			t.Errorf("%s is %q, want %q", text, got, want)
		}
	}
}
