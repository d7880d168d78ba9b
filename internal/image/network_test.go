package image

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"forkd.dev/forkd/internal/network/egress"
)

func rule(t *testing.T, text string) egress.Rule {
	t.Helper()
	r, err := egress.ParseRule(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestNetwork(t *testing.T) {
	const base = "base: debian:bookworm\n"
	some := egress.Policy{
		Preset: "packages", Allow: []egress.Rule{rule(t, "*.example.com:443"), rule(t, "10.1.2.3:5432/tcp")},
		Deny: []egress.Rule{rule(t, "pypi.org")}, BudgetBytes: 1 << 30,
	}
	const text = "network:\n  preset: packages\n  allow: [\"*.example.com:443\", 10.1.2.3:5432/tcp]\n  deny: [pypi.org]\n  budget: 1GiB\n"
	for text, want := range map[string]*Network{
		"":                                   nil,
		"network: none\n":                    {},
		"network: packages\n":                {Sandboxes: egress.Policy{Preset: "packages"}, Build: egress.Policy{Preset: "packages"}},
		"network:\n  build: open\n":          {Build: egress.Policy{Preset: "open"}},
		text:                                 {Sandboxes: some, Build: some},
		text + "  build: none\n":             {Sandboxes: some},
		text + "  build: {allow: [a.org]}\n": {Sandboxes: some, Build: egress.Policy{Allow: []egress.Rule{rule(t, "a.org")}}},
	} {
		r, err := ParseRecipe("x", []byte(base+text))
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if diff := cmp.Diff(want, r.Network, cmp.Transformer("text", egress.Rule.String), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: %s", text, diff)
		}
	}
}

func TestNetworkFaults(t *testing.T) {
	for text, says := range map[string]string{
		"network: everything":                       "x:2: network \"everything\": no such preset; there are none, dns-only",
		"network: [pypi.org]":                       "x:2: must be a mapping",
		"network:\n  allow: pypi.org":               "x:3: must be a list",
		"network:\n  allow:\n  - ok.org\n  - 'a b'": "x:5: egress rule \"a b\"",
		"network:\n  allow: [a.org, a.org]":         "given twice, first in line 3",
		"network:\n  budget: 5":                     "x:3: budget \"5\": write a whole number with a unit",
		"network:\n  domains: [a.org]":              "x:3: key \"domains\" is not known",
		"network: {build: {build: none}}":           "x:2: key \"build\" is not known",
		"network:\n  build: some":                   "x:3: network \"some\"",
		"network: {preset: [a]}":                    "single value",
		"network: &a none":                          "anchors",
	} {
		if _, err := ParseRecipe("x", []byte("base: debian:bookworm\n"+text+"\n")); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %s", text, err, says)
		}
	}
}
