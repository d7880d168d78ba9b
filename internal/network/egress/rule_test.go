package egress

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func rule(t testing.TB, text string) Rule {
	r, err := ParseRule(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestParseRule(t *testing.T) {
	for text, want := range map[string]string{
		"pypi.org":                    "pypi.org",
		"PyPI.org.":                   "pypi.org",
		"*.pypi.org:443":              "*.pypi.org:443",
		"*":                           "*",
		"*/dns":                       "*/dns",
		"*:443/tcp":                   "*:443/tcp",
		"xn--bcher-kva.example":       "xn--bcher-kva.example",
		"_dmarc.a_b.example":          "_dmarc.a_b.example",
		"1.pypi.org":                  "1.pypi.org",
		"localhost":                   "localhost",
		"10.1.2.0/24:5432/tcp":        "10.1.2.0/24:5432/tcp",
		"10.1.2.3":                    "10.1.2.3",
		"10.1.2.3/32":                 "10.1.2.3",
		"10.1.2.3:53/udp":             "10.1.2.3:53/udp",
		"0.0.0.0/0":                   "0.0.0.0/0",
		"[2001:db8::]/32:80-90":       "[2001:db8::]/32:80-90",
		"2001:db8::/32":               "[2001:db8::]/32",
		"2001:db8::1":                 "[2001:db8::1]",
		"[2001:DB8::1]:443,80":        "[2001:db8::1]:80,443",
		"[2001:db8::1]/tcp":           "[2001:db8::1]/tcp",
		"::/0":                        "[::]/0",
		"pypi.org:80,443,440-442,1-1": "pypi.org:1,80,440-443",
		"pypi.org:1-65535":            "pypi.org:1-65535",
	} {
		got, err := ParseRule(text)
		if err != nil || got.String() != want {
			t.Errorf("%q is read as %q (%v), want %q", text, got, err, want)
			continue
		}
		if again := rule(t, want); cmp.Diff(got, again, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })) != "" {
			t.Errorf("%q is not read back as it was", want)
		}
		if err := got.Validate(); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
	for text, why := range map[string]string{
		"":                                "names nothing",
		":443":                            "is not a name",
		"/tcp":                            "names nothing",
		"pypi.org:":                       "neither a port",
		"pypi.org:0":                      "neither a port",
		"pypi.org:65536":                  "neither a port",
		"pypi.org:9-1":                    "neither a port",
		"pypi.org:+1":                     "neither a port",
		"pypi.org:80,,443":                "neither a port",
		"pypi.org/icmp":                   "not an address range",
		"pypi.org/tcp/udp":                "not an address range",
		"pypi.org:443/dns":                "without ports",
		"10.0.0.1/dns":                    "with a name",
		"*.*.pypi.org":                    "is not a name",
		"*pypi.org":                       "is not a name",
		"pypi.*":                          "is not a name",
		"*.":                              "is not a name",
		"**":                              "is not a name",
		"-a.example":                      "is not a name",
		"a-.example":                      "is not a name",
		"a..example":                      "is not a name",
		".example":                        "is not a name",
		"a b":                             "is not a name",
		"bücher.example":                  "xn--",
		"https://pypi.org/":               "it is a URL",
		"10.1.2.3/24":                     "10.1.2.0/24",
		"10.1.2":                          "not an address",
		"0x7f.1":                          "not an address",
		"127.1":                           "not an address",
		"a.example.1":                     "not an address",
		"2130706433":                      "not an address",
		"010.0.0.1":                       "not an address",
		"10.0.0.0/33":                     "not an address range",
		"10.0.0.0/08":                     "not an address range",
		"::ffff:10.0.0.1":                 "as such",
		"::ffff:10.0.0.0/104":             "as such",
		"fe80::1%eth0":                    "not an address",
		"[10.0.0.1]:80":                   "brackets",
		"[::1":                            "no ]",
		"[::1]80":                         "neither /BITS nor",
		"2001:db8::1:443/tcp":             "", // an address whose last group is 443
		strings.Repeat("a", 64) + ".x":    "is not a name",
		strings.Repeat("a.", 127) + "org": "is not a name",
		strings.Repeat("a", 2000):         "1024",
	} {
		_, err := ParseRule(text)
		if why == "" {
			if err != nil {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%q: %v, want %q", text, err, why)
		}
	}
}

func TestPolicyAsJSON(t *testing.T) {
	const text = `{"preset":"packages","allow":["*.example.org:443/tcp","[2001:db8::]/32"],"deny":["10.0.0.0/8"],"budget_bytes":1000}`
	var p Policy
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(p)
	if err != nil || string(out) != text {
		t.Errorf("%s comes back as %s (%v)", text, out, err)
	}
	if zero, _ := json.Marshal(Policy{}); string(zero) != "{}" {
		t.Errorf("the zero policy is written as %s", zero)
	}
	if err := json.Unmarshal([]byte(`{"allow":["http://x"]}`), &p); err == nil || !strings.Contains(err.Error(), "http://x") {
		t.Errorf("a broken rule in JSON: %v", err)
	}
	if _, err := json.Marshal(Rule{}); err == nil {
		t.Error("a rule for nothing can be written")
	}
}

func TestValidate(t *testing.T) {
	for why, p := range map[string]Policy{
		"no egress preset":         {Preset: "everything"},
		"cannot be negative":       {BudgetBytes: -1},
		"at most 1000":             {Allow: slices.Repeat([]Rule{{Domain: "a"}}, maxRules+1)},
		"either a name or":         {Allow: []Rule{{}}},
		"a name or an address":     {Deny: []Rule{{Domain: "a", CIDR: netip.MustParsePrefix("10.0.0.0/8")}}},
		"not written as it would":  {Allow: []Rule{{Domain: "a", Ports: []PortRange{{2, 3}, {1, 1}}}}},
		"is not a name":            {Allow: []Rule{{Domain: "a b"}}},
		"neither a port":           {Allow: []Rule{{Domain: "a", Ports: []PortRange{{0, 3}}}}},
		"bits beyond its length":   {Allow: []Rule{{CIDR: netip.MustParsePrefix("10.0.0.1/8")}}},
		"not an address range":     {Allow: []Rule{{Domain: "a", Protocol: "sctp"}}},
		"/dns goes with a name":    {Allow: []Rule{{Domain: "a", Protocol: DNS, Ports: []PortRange{{1, 1}}}}},
		"write the IPv4 address":   {Allow: []Rule{{CIDR: netip.PrefixFrom(netip.MustParseAddr("::ffff:1.2.3.4"), 128)}}},
		"as it would be read (a/u": {Allow: []Rule{{Domain: "A", Protocol: UDP}}},
	} {
		if err := p.Validate(); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%+v: %v, want %q", p, err, why)
		}
	}
	for _, name := range append(Presets(), "") {
		p, err := Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Validate(); err != nil {
			t.Error(err)
		}
		for _, r := range p.Rules() {
			if err := r.Validate(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func FuzzParseRule(f *testing.F) {
	for _, text := range []string{"pypi.org", "*.pypi.org:443", "10.1.2.0/24:5432/tcp", "[2001:db8::]/32:80-90", "::/0", "*/dns", "a:1-2,3/udp"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRule(text)
		if err != nil {
			return
		}
		again, err := ParseRule(r.String())
		if err != nil || again.String() != r.String() {
			t.Fatalf("%q is written %q, and that %q (%v)", text, r, again, err)
		}
		if err := r.Validate(); err != nil {
			t.Fatal(err)
		}
	})
}
