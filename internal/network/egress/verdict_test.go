package egress

import (
	"net/netip"
	"strings"
	"testing"
)

func TestSpecialRanges(t *testing.T) {
	for text, want := range map[string]string{
		"::ffff:169.254.169.254": "IPv4-mapped",
		"::ffff:8.8.8.8":         "IPv4-mapped",
		"::ffff:0:8.8.8.8":       "IPv4-translated",
		"::8.8.8.8":              "IPv4-compatible",
		"64:ff9b::a9fe:a9fe":     "NAT64",
		"64:ff9b:1::1":           "NAT64",
		"2002:a9fe:a9fe::1":      "6to4",
		"2001::1":                "Teredo",
		"169.254.169.254":        "metadata",
		"fd00:ec2::254":          "metadata",
		"fd20:ce::254":           "metadata",
		"100.100.100.200":        "metadata",
		"168.63.129.16":          "metadata",
		"169.254.1.1":            "link-local",
		"fe80::1":                "link-local",
		"127.0.0.1":              "loopback",
		"127.255.255.254":        "loopback",
		"::1":                    "loopback",
		"::":                     "this host",
		"0.0.0.0":                "this host",
		"0.1.2.3":                "this host",
		"10.0.0.1":               "private",
		"172.31.255.255":         "private",
		"192.168.0.1":            "private",
		"fd66:6f72:6b64::1":      "private",
		"fec0::1":                "private",
		"100.64.0.1":             "providers",
		"192.0.0.1":              "protocols",
		"192.0.2.1":              "documentation",
		"2001:db8::1":            "documentation",
		"224.0.0.1":              "multicast",
		"ff02::1":                "multicast",
		"240.0.0.1":              "reserved",
		"255.255.255.255":        "broadcast",
		"4000::1":                "reserved",
		"1::1":                   "reserved",
		"f000::1":                "reserved",
		"8.8.8.8":                "",
		"172.32.0.1":             "",
		"11.0.0.0":               "",
		"128.0.0.1":              "",
		"100.128.0.1":            "",
		"2606:4700::1111":        "",
		"2a04:4e42::223":         "",
	} {
		if got := Special(netip.MustParseAddr(text)); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s is %q, want %q", text, got, want)
		}
	}
}

// to reads "tcp 1.2.3.4:443 name name"; "own" among the names makes it an address of the host's.
func to(t testing.TB, text string) Destination {
	fields := strings.Fields(text)
	addr, err := netip.ParseAddrPort(fields[1])
	if err != nil {
		t.Fatal(err)
	}
	d := Destination{Protocol: fields[0], AddrPort: addr}
	for _, name := range fields[2:] {
		if name == "own" {
			d.Own = true
		} else {
			d.Names = append(d.Names, name)
		}
	}
	return d
}

func policy(t testing.TB, text string) *Policy {
	p := &Policy{}
	for field := range strings.FieldsSeq(text) {
		switch {
		case strings.HasPrefix(field, "="):
			p.Preset = field[1:]
		case strings.HasPrefix(field, "!"):
			p.Deny = append(p.Deny, rule(t, field[1:]))
		default:
			p.Allow = append(p.Allow, rule(t, field))
		}
	}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestAddress(t *testing.T) {
	for _, c := range []struct {
		policy, to string
		want       string // the rule that allows, or part of why not
		allow      bool
	}{
		{"", "tcp 8.8.8.8:443", "no rule allows this address", false},
		{"", "tcp 8.8.8.8:443 pypi.org", "no rule allows pypi.org", false},
		{"=none", "tcp 8.8.8.8:443 pypi.org", "no rule allows pypi.org", false},
		{"=dns-only", "tcp 8.8.8.8:443 pypi.org", "no rule allows pypi.org", false},
		{"=dns-only", "udp 8.8.8.8:53 pypi.org", "no rule allows pypi.org", false},
		{"=packages", "tcp 151.101.0.223:443 pypi.org", "pypi.org:443/tcp", true},
		{"=packages", "tcp 151.101.0.223:80 pypi.org", "no rule allows pypi.org", false},
		{"=packages", "tcp 151.101.0.223:80 deb.debian.org", "deb.debian.org:80,443/tcp", true},
		{"=packages", "udp 151.101.0.223:53 deb.debian.org", "no rule allows", false},
		{"=packages", "tcp 151.101.0.223:443", "no name was looked up", false},
		{"=open", "tcp 151.101.0.223:443", "0.0.0.0/0", true},
		{"=open", "tcp [2a04:4e42::223]:443", "[::]/0", true},
		{"=open", "udp 151.101.0.223:443", "0.0.0.0/0:443/udp", true},
		{"=open", "udp 151.101.0.223:53", "0.0.0.0/0", true},
		{"=open", "tcp 10.0.0.1:443", "private", false},
		{"=open", "tcp 127.0.0.1:443", "loopback", false},
		{"=open", "tcp 169.254.169.254:80", "metadata", false},
		{"=open", "tcp 168.63.129.16:80", "metadata", false},
		{"=open", "tcp [::ffff:8.8.8.8]:443", "in disguise", false},
		{"=open", "tcp [fd00:ec2::254]:80", "metadata", false},
		{"=open", "udp 255.255.255.255:67", "broadcast", false},
		{"=open", "udp 224.0.0.251:5353", "multicast", false},
		{"=open", "tcp 0.0.0.0:80", "never", false},
		{"=open", "tcp 8.8.8.8:443 own", "of this host", false},
		{"=open 8.8.8.8", "tcp 8.8.8.8:443 own", "8.8.8.8", true},
		{"8.8.8.0/24", "tcp 8.8.8.8:443 own", "of this host", false},
		{"pypi.org", "tcp 8.8.8.8:443 own pypi.org", "of this host", false},
		{"pypi.org", "tcp 8.8.8.8:443 pypi.org", "pypi.org", true},
		{"pypi.org", "tcp 8.8.8.8:22 PyPI.org.", "pypi.org", true},
		{"pypi.org", "tcp 8.8.8.8:443 notpypi.org", "no rule allows", false},
		{"pypi.org", "tcp 8.8.8.8:443 a.pypi.org", "no rule allows", false},
		{"*.pypi.org", "tcp 8.8.8.8:443 a.pypi.org", "*.pypi.org", true},
		{"*.pypi.org", "tcp 8.8.8.8:443 a.b.pypi.org", "*.pypi.org", true},
		{"*.pypi.org", "tcp 8.8.8.8:443 pypi.org", "no rule allows", false},
		{"*.pypi.org", "tcp 8.8.8.8:443 xpypi.org", "no rule allows", false},
		{"*", "tcp 8.8.8.8:443 pypi.org", "*", true},
		{"*", "tcp 8.8.8.8:443", "no name was looked up", false},
		{"*", "tcp 10.0.0.1:443 pypi.org", "private", false},
		{"*", "udp 8.8.8.8:443 pypi.org", "needs a rule by address and port", false},
		{"pypi.org:443/udp", "udp 8.8.8.8:443 pypi.org", "needs a rule by address and port", false},
		{"8.8.8.0/24", "udp 8.8.8.8:443", "needs a rule by address and port", false},
		{"8.8.8.0/24:443", "udp 8.8.8.8:443", "8.8.8.0/24:443", true},
		{"8.8.8.0/24:443/tcp", "udp 8.8.8.8:443", "needs a rule by address and port", false},
		{"8.8.8.0/24:443/tcp", "udp 8.8.8.8:53", "no rule allows", false},
		{"pypi.org/tcp", "udp 8.8.8.8:53 pypi.org", "no rule allows", false},
		{"pypi.org:53/udp", "udp 8.8.8.8:53 pypi.org", "pypi.org:53/udp", true},
		{"pypi.org/dns", "tcp 8.8.8.8:53 pypi.org", "no rule allows", false},
		{"10.0.0.0/8", "tcp 10.1.2.3:80", "10.0.0.0/8", true},
		{"10.1.2.0/24:5432/tcp", "tcp 10.1.2.3:5432", "10.1.2.0/24:5432/tcp", true},
		{"10.1.2.0/24:5432/tcp", "tcp 10.1.2.3:5433", "private", false},
		{"8.0.0.0/5", "tcp 10.1.2.3:80", "private", false},
		{"169.254.0.0/16", "tcp 169.254.169.254:80", "metadata", false},
		{"169.254.0.0/16", "tcp 169.254.1.1:80", "169.254.0.0/16", true},
		{"169.254.169.254", "tcp 169.254.169.254:80", "169.254.169.254", true},
		{"169.254.169.254", "tcp [::ffff:169.254.169.254]:80", "in disguise", false},
		{"127.0.0.0/8", "tcp 127.0.0.1:80", "loopback", false},
		{"127.0.0.1:80", "tcp 127.0.0.1:80", "127.0.0.1:80", true},
		{"127.0.0.1:80", "tcp 127.0.0.1:81", "loopback", false},
		{"0.0.0.0", "tcp 0.0.0.0:80", "never", false},
		{"224.0.0.251:5353", "udp 224.0.0.251:5353", "224.0.0.251:5353", true},
		{"[::]/0", "tcp [::1]:80", "loopback", false},
		{"[2000::]/3", "tcp [2001:db8::1]:80", "documentation", false},
		{"=open !8.8.8.8", "tcp 8.8.8.8:443", "denied", false},
		{"=open !8.8.8.8:53", "tcp 8.8.8.8:443", "0.0.0.0/0", true},
		{"=open !8.8.8.8:53", "tcp 8.8.8.8:53", "denied", false},
		{"=open !8.8.8.8/udp", "tcp 8.8.8.8:53", "0.0.0.0/0", true},
		{"=open !evil.example", "tcp 8.8.8.8:443 evil.example", "denied", false},
		{"=open !evil.example", "tcp 8.8.8.8:443 good.example", "0.0.0.0/0", true},
		{"=open !evil.example", "tcp 8.8.8.8:443 evil.example good.example", "0.0.0.0/0", true},
		{"=open !evil.example", "udp 8.8.8.8:443", "rules deny names", false},
		{"=open !*.example", "tcp 8.8.8.8:443 a.example", "denied", false},
		{"pypi.org !*", "tcp 8.8.8.8:443 pypi.org", "denied", false},
		{"pypi.org !0.0.0.0/0", "tcp 8.8.8.8:443 pypi.org", "denied", false},
		{"pypi.org !8.8.0.0/16:1-80", "tcp 8.8.8.8:443 pypi.org", "pypi.org", true},
		{"8.8.8.8 !8.8.8.8", "tcp 8.8.8.8:443", "denied", false},
		{"=open", "icmp 8.8.8.8:443", "not a destination", false},
		{"=open", "tcp 8.8.8.8:0", "not a destination", false},
		{"=open", "tcp [fe80::1%eth0]:80", "not a destination", false},
	} {
		v := policy(t, c.policy).Address(to(t, c.to))
		if v.Allow != c.allow || c.allow && v.Rule != c.want || !c.allow && !strings.Contains(v.Reason, c.want) || v.Reason == "" {
			t.Errorf("%q, %s: %+v, want %v by %q", c.policy, c.to, v, c.allow, c.want)
		}
	}
	if v := policy(t, "=open").Address(Destination{Protocol: TCP}); v.Allow {
		t.Error("nowhere is allowed")
	}
}

func TestServer(t *testing.T) {
	const shared = "tcp 8.8.8.8:443 good.example other.example"
	for _, c := range []struct {
		policy, to, name string
		want             string
		allow            bool
	}{
		{"good.example", shared, "good.example", "good.example", true},
		{"good.example", shared, "GOOD.example.", "good.example", true},
		{"good.example", shared, "other.example", "which no rule allows here", false},
		{"good.example", shared, "evil.example", "was not given this address", false},
		{"good.example", shared, "", "names no server", false},
		{"good.example", shared, "8.8.8.8", "is not a name", false},
		{"good.example", shared, "169.254.169.254", "is not a name", false},
		{"good.example", shared, "good.example.evil.example", "was not given", false},
		{"good.example", shared, "good.example\x00.evil.example", "is not a name", false},
		{"good.example", shared, "*.example", "is not a name", false},
		{"*.example", shared, "other.example", "*.example", true},
		{"*.example", shared, "evil.example", "was not given", false},
		{"*", shared, "other.example", "*", true},
		{"*", shared, "evil.example", "was not given", false},
		{"good.example:80 other.example:443", shared, "good.example", "which no rule allows here", false},
		{"8.8.8.8", shared, "evil.example", "8.8.8.8", true},
		{"8.8.8.8", shared, "", "8.8.8.8", true},
		{"8.8.8.8 !evil.example", shared, "evil.example", "denied", false},
		{"8.8.8.8 !evil.example:80", shared, "evil.example", "8.8.8.8", true},
		{"=open !*.evil.example", shared, "a.evil.example", "denied", false},
		{"=open !*.evil.example", shared, "good.example", "0.0.0.0/0", true},
		{"*.example !other.example", shared, "other.example", "denied", false},
		{"good.example", "tcp 8.8.8.8:443", "good.example", "no name was looked up", false},
		{"good.example", "tcp 10.0.0.1:443 good.example", "good.example", "private", false},
	} {
		v := policy(t, c.policy).Server(to(t, c.to), c.name)
		if v.Allow != c.allow || c.allow && v.Rule != c.want || !c.allow && !strings.Contains(v.Reason+v.Rule, c.want) || v.Reason == "" || v.Allow && v.Inspect {
			t.Errorf("%q, %s, %q: %+v, want %v by %q", c.policy, c.to, c.name, v, c.allow, c.want)
		}
	}
}

// TestUnseen: flows whose server cannot be read, and which of them are looked at.
func TestUnseen(t *testing.T) {
	for _, c := range []struct {
		policy, to              string
		inspect, hidden, opaque bool
	}{
		{"good.example", "tcp 8.8.8.8:443 good.example", true, false, false},
		{"good.example", "tcp 8.8.8.8:80 good.example", true, false, false},
		{"good.example", "tcp 8.8.8.8:22 good.example", true, false, true},
		{"8.8.8.8", "tcp 8.8.8.8:443 good.example", false, true, true},
		{"=open", "tcp 8.8.8.8:443", false, true, true},
		{"=open !evil.example", "tcp 8.8.8.8:443", true, false, false},
		{"=open !evil.example", "tcp 8.8.8.8:22", true, false, true},
		{"=open !evil.example:443", "tcp 8.8.8.8:80", false, true, true},
		{"=open !evil.example", "udp 8.8.8.8:8443", true, false, true},
		{"=open !evil.example:443", "udp 8.8.8.8:8443", false, true, true},
		{"good.example", "udp 8.8.8.8:8443 good.example", true, false, true},
		{"", "tcp 8.8.8.8:443", false, false, false},
	} {
		p, d := policy(t, c.policy), to(t, c.to)
		if v := p.Address(d); v.Inspect != c.inspect {
			t.Errorf("%q, %s: inspect is %v", c.policy, c.to, v.Inspect)
		}
		if v := p.Hidden(d); v.Allow != c.hidden {
			t.Errorf("%q, %s: a hidden server: %+v", c.policy, c.to, v)
		}
		if v := p.Opaque(d); v.Allow != c.opaque {
			t.Errorf("%q, %s: opaque bytes: %+v", c.policy, c.to, v)
		}
	}
}

func TestName(t *testing.T) {
	for _, c := range []struct {
		policy, name string
		qtype        uint16
		want         string
		allow        bool
	}{
		{"", "pypi.org", TypeA, "no rule", false},
		{"=dns-only", "pypi.org", TypeA, "*/dns", true},
		{"=packages", "pypi.org.", TypeAAAA, "pypi.org:443/tcp", true},
		{"=packages", "evil.example", TypeA, "no rule", false},
		{"pypi.org", "PYPI.org", TypeA, "pypi.org", true},
		{"pypi.org", "pypi.org", 16, "only addresses", false},
		{"pypi.org", "pypi.org", 65, "only addresses", false},
		{"pypi.org", "evil.example", 16, "no rule", false},
		{"10.0.0.0/8", "pypi.org", TypeA, "no rule", false},
		{"0.0.0.0/0", "pypi.org", TypeA, "no rule", false},
		{"* !evil.example", "evil.example", TypeA, "denied", false},
		{"* !evil.example/dns", "evil.example", TypeA, "denied", false},
		{"* !evil.example:80", "evil.example", TypeA, "*", true},
		{"* !evil.example/tcp", "evil.example", TypeA, "*", true},
		{"*", "127.0.0.1", TypeA, "not a name", false},
		{"*", "a..b", TypeA, "not a name", false},
		{"*", "", TypeA, "not a name", false},
		{"*", "metadata.google.internal", TypeA, "*", true},
	} {
		v := policy(t, c.policy).Name(c.name, c.qtype)
		if v.Allow != c.allow || c.allow && v.Rule != c.want || !c.allow && !strings.Contains(v.Reason, c.want) {
			t.Errorf("%q, %s %d: %+v, want %v by %q", c.policy, c.name, c.qtype, v, c.allow, c.want)
		}
	}
}

func TestGiven(t *testing.T) {
	for _, c := range []struct {
		policy, addr string
		own, allow   bool
	}{
		{"*", "8.8.8.8", false, true},
		{"*", "8.8.8.8", true, false},
		{"* 8.8.8.8", "8.8.8.8", true, true},
		{"* 8.8.8.0/24", "8.8.8.8", true, false},
		{"*", "10.0.0.1", false, false},
		{"* 10.0.0.0/8:80", "10.0.0.1", false, true},
		{"=open", "10.0.0.1", false, false},
		{"=open", "169.254.169.254", false, false},
		{"=open 169.254.0.0/16", "169.254.169.254", false, false},
		{"=open 169.254.169.254", "169.254.169.254", false, true},
		{"=open 169.254.169.254", "::ffff:169.254.169.254", false, false},
		{"=open !8.8.8.8", "8.8.8.8", false, false},
		{"=open !8.8.8.8:80", "8.8.8.8", false, true},
	} {
		if v := policy(t, c.policy).Given(netip.MustParseAddr(c.addr), c.own); v.Allow != c.allow || !v.Allow && v.Reason == "" {
			t.Errorf("%q, %s: %+v", c.policy, c.addr, v)
		}
	}
}

// TestUnknownPreset: a policy that a later version wrote opens nothing here by its preset.
func TestUnknownPreset(t *testing.T) {
	p := &Policy{Preset: "tomorrow"}
	if p.Address(to(t, "tcp 8.8.8.8:443 pypi.org")).Allow || p.Name("pypi.org", TypeA).Allow {
		t.Error("an unknown preset allows something")
	}
}
