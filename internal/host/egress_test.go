package host

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

// fakeNetworks remember what they are told, and have carried what the test says.
type fakeNetworks struct {
	noNetworks

	mu       sync.Mutex
	policies map[string]egress.Policy
	totals   map[string]network.Totals
	fail     error
}

func newFakeNetworks() *fakeNetworks {
	return &fakeNetworks{policies: map[string]egress.Policy{}, totals: map[string]network.Totals{}}
}

func (n *fakeNetworks) Attach(id string, p egress.Policy, _ int64) (machine, peer *os.File, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.policies[id] = p
	return nil, nil, nil // Machines of tests have no link.
}

func (n *fakeNetworks) SetPolicy(_ context.Context, id string, p egress.Policy) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fail == nil {
		n.policies[id] = p
	}
	return n.fail
}

func (n *fakeNetworks) Totals(context.Context) (map[string]network.Totals, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.totals, nil
}

func (n *fakeNetworks) TotalsOf(_ context.Context, id string) (totals network.Totals, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	totals, ok = n.totals[id]
	return totals, ok
}

func (n *fakeNetworks) carry(id string, t network.Totals) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.totals = map[string]network.Totals{id: t}
}

// policy reads "preset +allowed -denied budget=bytes".
func policyText(t *testing.T, text string) egress.Policy {
	t.Helper()
	var p egress.Policy
	for word := range strings.FieldsSeq(text) {
		if word == "budget" {
			p.BudgetBytes = 1000
			continue
		}
		if word[0] != '+' && word[0] != '-' {
			p.Preset = word
			continue
		}
		r, err := egress.ParseRule(word[1:])
		if err != nil {
			t.Fatal(err)
		}
		if word[0] == '+' {
			p.Allow = append(p.Allow, r)
		} else {
			p.Deny = append(p.Deny, r)
		}
	}
	return p
}

func samePolicy(t *testing.T, what string, got egress.Policy, want string) {
	t.Helper()
	if diff := cmp.Diff(policyText(t, want), got, cmp.Transformer("text", egress.Rule.String), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%s: %s", what, diff)
	}
}

// TestEgressFor: children inherit, may be narrowed by anybody, and widened by who may.
func TestEgressFor(t *testing.T) {
	for _, tt := range []struct {
		parent, asked string // asked "": nothing
		widen         bool
		want          string // "wider", "invalid": refused
	}{
		{"", "", false, ""},
		{"packages -pypi.org", "", false, "packages -pypi.org"},
		{"packages", "none", false, ""},
		{"packages", "-pypi.org", false, "packages -pypi.org"},
		{"packages", "packages -pypi.org budget", false, "packages -pypi.org budget"},
		{"", "+a.org", false, "wider"},
		{"", "+a.org", true, "+a.org"},
		{"+a.org", "+b.org", true, "+a.org +b.org"},
		{"+*.a.org", "none +x.a.org", false, "+x.a.org"},
		{"packages", "open", false, "wider"},
		{"packages -pypi.org budget", "open", true, "open"},
		{"packages -pypi.org budget", "packages", false, "packages -pypi.org budget"}, // what is denied stays denied
		{"open", "packages", false, "packages"},
		{"", "everything", true, "invalid"},
		{"packages", "budget", false, "packages budget"},
	} {
		var asked *egress.Policy
		if tt.asked != "" {
			p := policyText(t, tt.asked)
			asked = &p
		}
		got, err := egressFor(asked, policyText(t, tt.parent), tt.widen)
		what := tt.parent + " ← " + tt.asked
		switch tt.want {
		case "wider":
			if !errors.Is(err, ErrWider) {
				t.Errorf("%s: %v", what, err)
			}
		case "invalid":
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("%s: %v", what, err)
			}
		default:
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
			samePolicy(t, what, got, tt.want)
		}
	}
}

// TestSetEgress: a change reaches the network before it is written down, and a branch has its source's.
func TestSetEgress(t *testing.T) {
	n := newFakeNetworks()
	h := fakeHost(t, newFakeEngine(), func(c *Config) { c.Networks = n })
	asked := policyText(t, "+a.org +b.org")
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1, Egress: &asked, MayWiden: true})
	if err != nil || results[0].Err != nil {
		t.Fatal(err, results)
	}
	id := results[0].Sandbox.ID
	set := func(to string, widen bool) error {
		t.Helper()
		_, err := h.SetEgress(t.Context(), id, func(egress.Policy) (egress.Policy, error) { return policyText(t, to), nil }, widen)
		return err
	}
	now := func(what, want string) {
		t.Helper()
		v, err := h.Egress(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		samePolicy(t, what, v.Policy, want)
		samePolicy(t, what+", its network", n.policies[id], want)
	}
	now("forked", "+a.org +b.org")
	if err := set("packages", false); !errors.Is(err, ErrWider) {
		t.Errorf("widened without the right to: %v", err)
	}
	now("refused", "+a.org +b.org")
	if err := set("+a.org", false); err != nil {
		t.Error(err)
	}
	now("narrowed", "+a.org")
	n.fail = errors.New("no such link")
	if err := set("", false); !errors.Is(err, n.fail) {
		t.Errorf("a network that fails: %v", err)
	}
	n.fail = nil
	now("its network refused", "+a.org")
	if err := set("packages -pypi.org", true); err != nil {
		t.Error(err)
	}
	v, err := h.Branch(t.Context(), id, BranchSpec{Tag: "b", Mode: BranchDiff})
	if err != nil {
		t.Fatal(err)
	}
	samePolicy(t, "branch", v.Egress, "packages -pypi.org")
	children, err := h.Fork(t.Context(), ForkSpec{Tag: "b", N: 1})
	if err != nil || children[0].Err != nil {
		t.Fatal(err, children)
	}
	samePolicy(t, "its child", children[0].Sandbox.Egress, "packages -pypi.org")
	samePolicy(t, "its child's network", n.policies[children[0].Sandbox.ID], "packages -pypi.org")
}

// TestCarried: what networks carry is counted on when one is begun anew, and what ended sandboxes had carried stays counted.
func TestCarried(t *testing.T) {
	n := newFakeNetworks()
	h := fakeHost(t, newFakeEngine(), func(c *Config) { c.Networks = n })
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil || results[0].Err != nil {
		t.Fatal(err, results)
	}
	id := results[0].Sandbox.ID
	var got []int64
	for _, sent := range []int64{10, 30, 5, 6} { // at 5 it is another network
		n.carry(id, network.Totals{Sent: sent, Flows: sent, FramesIn: sent})
		u, err := h.Usage(id)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, u.Network.Sent)
	}
	n.carry("nobody", network.Totals{}) // it is gone, and nobody knows where
	u, err := h.Usage(id)
	if err != nil {
		t.Fatal(err)
	}
	if got = append(got, u.Network.Sent); !slices.Equal(got, []int64{10, 30, 35, 36, 36}) {
		t.Errorf("sent, again and again: %d", got)
	}
	n.carry(id, network.Totals{Sent: 8, Flows: 7, FramesIn: 8}) // the last, which nobody asked for
	if err := h.Kill(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if f := h.Figures(); f.Network.Sent != 38 || f.Network.Flows != 37 {
		t.Errorf("of all: %+v", f.Network)
	}
}

// TestBuildNetwork: what a build's commands may reach counts in the keys of its steps, and what it makes has what it says.
func TestBuildNetwork(t *testing.T) {
	none, packages := egress.Policy{}, policyText(t, "packages")
	b := func(n *image.Network, widen bool) *build {
		return &build{recipe: &image.Recipe{Network: n}, spec: BuildSpec{MayWiden: widen}}
	}
	key := func(n *image.Network, base egress.Policy) string { return b(n, true).networkKey("x", base) }
	both := &image.Network{Sandboxes: packages, Build: packages}
	build := &image.Network{Build: packages}
	if key(nil, none) != "x" || key(&image.Network{}, none) != "x" || key(nil, packages) != "x" {
		t.Error("a build that reaches what its base does has another key")
	}
	if key(both, none) == "x" || key(both, none) != key(build, none) || key(&image.Network{}, packages) == "x" {
		t.Error("what commands may reach does not count, or something else does")
	}
	samePolicy(t, "commands alone", b(build, true).sandboxNetwork(none), "")
	samePolicy(t, "inherited", b(nil, true).sandboxNetwork(packages), "packages")
	for n, base := range map[*image.Network]egress.Policy{both: none, build: none} {
		if err := b(n, false).checkNetwork(base); !errors.Is(err, ErrWider) {
			t.Errorf("%+v over %+v: %v", n, base, err)
		}
		if err := b(n, true).checkNetwork(base); err != nil {
			t.Error(err)
		}
	}
	if err := b(both, false).checkNetwork(policyText(t, "open")); err != nil {
		t.Errorf("narrower than its base: %v", err)
	}
}

// duringNetworks have something happen while a policy is changed.
type duringNetworks struct {
	*fakeNetworks

	during func()
}

func (n *duringNetworks) SetPolicy(ctx context.Context, id string, p egress.Policy) error {
	n.during()
	return n.fakeNetworks.SetPolicy(ctx, id, p)
}

// TestChangedWhileSuspended: nothing is changed that the record of a suspended sandbox would not have.
func TestChangedWhileSuspended(t *testing.T) {
	n := &duringNetworks{newFakeNetworks(), func() {}}
	h := fakeHost(t, newFakeEngine(), func(c *Config) { c.Networks = n })
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil || results[0].Err != nil {
		t.Fatal(err, results)
	}
	id := results[0].Sandbox.ID
	s, err := h.find(id)
	if err != nil {
		t.Fatal(err)
	}
	widen := func(egress.Policy) (egress.Policy, error) { return policyText(t, "open"), nil }
	refused := func(when string) {
		t.Helper()
		if err := h.SetPublic(id, 80, true); !errors.Is(err, lineage.ErrState) || h.IsPublic(id, 80) {
			t.Errorf("%s a port is made public: %v", when, err)
		}
		if _, err := h.SetEgress(t.Context(), id, widen, true); !errors.Is(err, lineage.ErrState) {
			t.Errorf("%s its policy is changed: %v", when, err)
		}
		samePolicy(t, when, s.policy(), "")
		samePolicy(t, when+" its network's", n.policies[id], "")
	}
	work := func(w lineage.Work) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.work = w
	}
	work(lineage.Suspending)
	refused("as it is suspended")
	work("")
	n.during = func() { work(lineage.Suspending) }
	if _, err := h.SetEgress(t.Context(), id, widen, true); !errors.Is(err, lineage.ErrState) {
		t.Errorf("its policy is changed, and it is suspended meanwhile: %v", err)
	}
	samePolicy(t, "meanwhile", n.policies[id], "")
	work("")
	n.during = func() {}
	if err := h.SetPublic(id, 80, true); err != nil || !h.IsPublic(id, 80) {
		t.Errorf("a port is not public: %v", err)
	}
	if err := h.SetPublic(id, 80, false); err != nil || h.IsPublic(id, 80) {
		t.Errorf("a port is not hidden: %v", err)
	}
	if _, err := h.Suspend(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	refused("suspended")
}
