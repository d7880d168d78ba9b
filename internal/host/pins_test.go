package host

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/store"
)

// pinNetworks are networks whose guests all know one name.
type pinNetworks struct {
	*fakeNetworks

	mu    sync.Mutex
	knows []network.Pin
	given map[string][]network.Pin
}

func (n *pinNetworks) Totals(context.Context) (map[string]network.Totals, error) {
	n.fakeNetworks.mu.Lock()
	defer n.fakeNetworks.mu.Unlock()
	all := map[string]network.Totals{}
	for id := range n.policies {
		all[id] = network.Totals{Talked: true, Questions: 1}
	}
	return all, nil
}

func (n *pinNetworks) Pins(context.Context, string) ([]network.Pin, error) { return n.knows, nil }

func (n *pinNetworks) Pin(id string, pins []network.Pin) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.given[id] = pins
}

func (n *pinNetworks) of(id string) []network.Pin {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.given[id]
}

func somePins(n int, until time.Time) (pins []network.Pin) {
	for i := range n {
		pins = append(pins, network.Pin{
			Addr: netip.AddrFrom4([4]byte{203, 0, 114, byte(i)}), Name: fmt.Sprintf("n%d.example", i), Until: until,
		})
	}
	return pins
}

// TestPinBook: what is known is bounded, goes from hand to hand, and what would be forgotten first makes room.
func TestPinBook(t *testing.T) {
	var b pinBook
	now := time.Now()
	b.put("a", somePins(2, now.Add(time.Hour)))
	b.hand("a", "b")
	if got := b.get("b"); len(got) != 2 {
		t.Errorf("%v", got)
	}
	b.hand("nobody", "b")
	if got := b.get("b"); got != nil {
		t.Errorf("of nobody: %v", got)
	}
	for i := range 2 * maxPinned {
		b.put(fmt.Sprint("s", i), somePins(1, now.Add(time.Minute+time.Duration(i)*time.Millisecond)))
	}
	if len(b.of) > maxPinned {
		t.Errorf("%d are remembered", len(b.of))
	}
	if b.get("a") == nil || b.get(fmt.Sprint("s", 2*maxPinned-1)) == nil || b.get("s0") != nil {
		t.Error("not those that would be forgotten first were")
	}
	older := store.Snapshot{Tag: "t", CreatedAt: now.Add(-time.Second)}
	if snapshotKey(&older) == snapshotKey(&store.Snapshot{Tag: "t", CreatedAt: now}) {
		t.Error("a tag that is another's now knows what the one before knew")
	}
}

// TestPinsAreInherited: children of a branch, and a sandbox that wakes, know the names that were known when it was taken.
func TestPinsAreInherited(t *testing.T) {
	n := &pinNetworks{fakeNetworks: newFakeNetworks(), knows: somePins(3, time.Now().Add(time.Hour)), given: map[string][]network.Pin{}}
	h := fakeHost(t, newFakeEngine(), func(c *Config) { c.Networks = n })
	fork := func(tag string) string {
		t.Helper()
		results, err := h.Fork(t.Context(), ForkSpec{Tag: tag, N: 1})
		if err != nil || results[0].Err != nil {
			t.Fatal(err, results)
		}
		return results[0].Sandbox.ID
	}
	id := fork(fakeTag)
	if got := n.of(id); got != nil {
		t.Errorf("a child of what knew nothing knows %v", got)
	}
	if _, err := h.Branch(t.Context(), id, BranchSpec{Tag: "knowing"}); err != nil {
		t.Fatal(err)
	}
	child := fork("knowing")
	if got := n.of(child); !slices.Equal(got, n.knows) {
		t.Errorf("a child knows %v", got)
	}
	if _, err := h.Suspend(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if v, err := h.Wake(t.Context(), id); err != nil || v.State != lineage.Running {
		t.Fatal(err, v)
	}
	if got := n.of(id); !slices.Equal(got, n.knows) {
		t.Errorf("what woke knows %v", got)
	}
}
