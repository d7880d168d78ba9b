package network

import (
	"net/netip"
	"testing"
	"time"

	"forkd.dev/forkd/internal/network/egress"
)

// TestBudgetRaised: bytes that were held against a budget before it became larger do not make the larger one a spent one.
func TestBudgetRaised(t *testing.T) {
	f := newFlows(Limits{}.withDefaults(), 100, nil)
	f.setBudget(50)
	if f.ask() == "" {
		t.Error("a spent budget lets a question pass")
	}
	f.setBudget(1000)
	if f.breaks() { // As pay does that has still seen the smaller one.
		t.Error("the larger budget counts as spent")
	}
	if reason := f.ask(); reason != "" {
		t.Error(reason)
	}
}

// TestRefusalFlood: who is refused ever new things is counted, and neither fills the record nor pushes out what is in it.
func TestRefusalFlood(t *testing.T) {
	var told []Flow
	f := newFlows(Limits{}.withDefaults(), 0, func(is Flow) { told = append(told, is) })
	allowed := f.begin(Flow{Protocol: "tcp"}, egress.Destination{}, false, nil)
	f.end(allowed, "", "")
	began := time.Now()
	const count = 20000
	for i := range count {
		to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 114, byte(i >> 16)}), uint16(i))
		f.refuse(Flow{Protocol: "tcp", To: to, Reason: "no rule allows it"})
	}
	most := 2*maxRefusals + newRefusals*int(time.Since(began)/time.Second+1)
	if len(told) > most {
		t.Errorf("%d events are told of %d refusals", len(told), count)
	}
	sums := f.sums()
	if sums.Refused != count || sums.Lost < count-int64(most) || sums.Lost > count-maxRefusals {
		t.Errorf("%+v", sums)
	}
	list := f.list()
	if len(list) > 2*maxRefusals+1 {
		t.Errorf("%d flows are kept", len(list))
	}
	var attempts int64
	found := false
	for _, is := range list {
		found = found || is.ID == allowed.ID
		if is.Reason == tooManyKinds {
			attempts += is.Attempts
		}
	}
	if !found {
		t.Error("what was allowed is not in the record any more")
	}
	if attempts != sums.Lost {
		t.Errorf("%d attempts are counted together, %d were not written down", attempts, sums.Lost)
	}
}
