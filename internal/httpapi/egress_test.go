package httpapi

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

func TestChangeEgress(t *testing.T) {
	start, err := policyOf(&api.Egress{Preset: "packages", Allow: []string{"A.org", "b.org:443"}, Deny: []string{"c.org"}, BudgetBytes: 5})
	if err != nil {
		t.Fatal(err)
	}
	change, err := changeOf(&api.EgressChange{
		Preset: new("none"), Allow: []string{"d.org", "a.org"}, RemoveAllow: []string{"b.org:443"}, RemoveDeny: []string{"c.org"}, BudgetBytes: new(int64(0)),
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := change(start.Clone())
	if err != nil || got.Preset != "none" || !slices.Equal(texts(got.Allow), []string{"a.org", "d.org"}) || len(got.Deny) != 0 || got.BudgetBytes != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	missing, err := changeOf(&api.EgressChange{RemoveDeny: []string{"a.org"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := missing(start.Clone()); !errors.Is(err, host.ErrInvalid) || !strings.Contains(err.Error(), `no rule "a.org" under deny`) {
		t.Errorf("a rule that is not there: %v", err)
	}
	for field, e := range map[string]*api.Egress{
		"egress.allow[1]": {Allow: []string{"a.org", "a b"}}, "egress.deny[0]": {Deny: []string{"10.0.0.1/8"}},
	} {
		if _, err := policyOf(e); !errors.Is(err, host.ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestEgressState(t *testing.T) {
	if egressOf(egress.Policy{}) != nil {
		t.Error("what reaches nothing has a policy")
	}
	s := egressState(host.EgressView{})
	if s.Preset != "none" || s.Rules == nil || s.BudgetLeftBytes != nil {
		t.Errorf("%+v", s)
	}
	s = egressState(host.EgressView{
		Policy: egress.Policy{Preset: "packages", BudgetBytes: 10}, Totals: network.Totals{Sent: 8, Received: 4, Open: 1, Refused: 2},
	})
	if s.Preset != "packages" || !slices.Contains(s.Rules, "pypi.org:443/tcp") || *s.BudgetLeftBytes != 0 || s.FlowsOpen != 1 || s.FlowsRefused != 2 {
		t.Errorf("%+v", s)
	}
}

// TestEgressIsWrittenDown: the audit log has what was asked to be reachable.
func TestEgressIsWrittenDown(t *testing.T) {
	s, path := audited(t, nil)
	askAs(s, access.Owner(), "PATCH /v1/sandboxes/sbx/egress", `{"preset":"open","allow":["a.org"],"remove_deny":["b.org"]}`)
	text, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(text), `"egress":["open","+a.org","no -b.org"]`) {
		t.Errorf("%v: %s", err, text)
	}
}
