package host

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"testing"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
)

// linkNetworks note the order in which links are made, opened and ended.
type linkNetworks struct {
	*fakeNetworks

	mu   sync.Mutex
	did  []string
	open error
}

func (n *linkNetworks) note(what string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.did = append(n.did, what)
}

func (n *linkNetworks) Attach(id string, p egress.Policy, spent int64) (machine, peer *os.File, err error) {
	n.note("attach")
	return n.fakeNetworks.Attach(id, p, spent)
}

func (n *linkNetworks) Open(context.Context, string) error {
	n.note("open")
	return n.open
}

func (n *linkNetworks) Detach(string) { n.note("detach") }

func (n *linkNetworks) took() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	did := slices.Compact(n.did) // to end what is not there is nothing
	n.did = nil
	return did
}

// TestLinks: a machine's link is there before it, open after it has confirmed who it is, and gone with it.
func TestLinks(t *testing.T) {
	n, e := &linkNetworks{fakeNetworks: newFakeNetworks()}, newFakeEngine()
	h := fakeHost(t, e, func(c *Config) { c.Networks = n })
	want := func(what string, did ...string) {
		t.Helper()
		if got := n.took(); !slices.Equal(got, did) {
			t.Errorf("%s: %v, want %v", what, got, did)
		}
	}
	results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1})
	if err != nil || results[0].Err != nil {
		t.Fatal(err, results)
	}
	want("a fork", "attach", "open")
	if _, err := h.Suspend(t.Context(), results[0].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	want("a suspend", "detach")
	if _, err := h.Wake(t.Context(), results[0].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	want("a wake", "attach", "open")
	if err := h.Kill(t.Context(), results[0].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	want("an end", "detach")

	e.fail = func(int) error { return errors.New("no memory") }
	if results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1}); err != nil || results[0].Err == nil {
		t.Fatal(err, results)
	}
	want("a machine that does not start", "attach", "detach")
	e.fail = func(int) error { return nil }
	n.open = errors.New("it does not answer")
	if results, err := h.Fork(t.Context(), ForkSpec{Tag: fakeTag, N: 1}); err != nil || !errors.Is(results[0].Err, n.open) {
		t.Fatal(err, results)
	}
	want("a network that does not open", "attach", "open", "detach")
	if left := e.living(); left != 0 {
		t.Errorf("%d machines are left", left)
	}
}

// TestTalked: children end their parent's connections if it may have any, and what cannot be told counts as that.
func TestTalked(t *testing.T) {
	n, e := newFakeNetworks(), newFakeEngine()
	h := fakeHost(t, e, func(c *Config) { c.Networks = n })
	fork := func(tag string) string {
		t.Helper()
		results, err := h.Fork(t.Context(), ForkSpec{Tag: tag, N: 1})
		if err != nil || results[0].Err != nil {
			t.Fatal(err, results)
		}
		return results[0].Sandbox.ID
	}
	branch := func(id, tag string, talked bool) {
		t.Helper()
		v, err := h.Branch(t.Context(), id, BranchSpec{Tag: tag, Mode: BranchDiff})
		if err != nil || v.Talked != talked {
			t.Errorf("branch %s says %v, want %v; error %v", tag, v.Talked, talked, err)
		}
	}
	id := fork(fakeTag)
	branch(id, "quiet", false)
	n.carry(id, network.Totals{Talked: true, FramesIn: 1})
	branch(id, "talked", true)
	n.carry(id, network.Totals{}) // its network was begun anew
	branch(id, "had-talked", true)
	child := fork("talked")
	n.carry(child, network.Totals{})
	branch(child, "severed", false)
	h.NetworkRestarted([]string{child}, "it died")
	branch(child, "unknown", true)
	fork("quiet")
	if want := []bool{false, true, false}; !slices.Equal(e.severed, want) {
		t.Errorf("children were told to sever: %v, want %v", e.severed, want)
	}
}
