package access

import (
	"net/netip"
	"testing"
	"time"
)

func TestFailures(t *testing.T) {
	f := &Failures{Burst: 3, Every: 2 * time.Second}
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	f.Succeeded(a, "tkgood", now)
	for range 3 {
		if wait := f.Refused(a, "", now); wait != 0 {
			t.Fatal(wait)
		}
		f.Failed(a, now)
	}
	if wait := f.Refused(a, "", now); wait != 2*time.Second {
		t.Errorf("wait %s", wait)
	}
	if f.Refused(a, "tkother", now) == 0 {
		t.Error("a guess that hits is let in")
	}
	if f.Refused(a, "tkgood", now) != 0 {
		t.Error("who was there before is locked out")
	}
	if f.Refused(b, "", now) != 0 {
		t.Error("another address is locked out")
	}
	now = now.Add(2 * time.Second)
	if f.Refused(a, "tkother", now) != 0 {
		t.Error("it is never heard again")
	}
	f.Failed(a, now)
	if f.Refused(a, "", now) == 0 {
		t.Error("the pause gives back more than it should")
	}
}

func TestNetworks(t *testing.T) {
	f := &Failures{Burst: 1}
	now := time.Now()
	f.Failed(netip.MustParseAddr("2001:db8:0:1::1"), now)
	f.Failed(netip.MustParseAddr("::ffff:192.0.2.1"), now)
	f.Failed(netip.Addr{}, now)
	for _, tt := range []struct {
		addr    string
		refused bool
	}{
		{"2001:db8:0:1:ffff::2", true}, {"2001:db8:0:2::1", false}, {"192.0.2.1", true}, {"192.0.2.2", false}, {"fe80::1%eth0", false},
	} {
		if got := f.Refused(netip.MustParseAddr(tt.addr), "", now) > 0; got != tt.refused {
			t.Errorf("%s: %v", tt.addr, got)
		}
	}
	if f.Refused(netip.Addr{}, "", now) == 0 {
		t.Error("no address counts as one")
	}
}

// TestManyAddresses: whoever has many of them fills no memory, and wins no time for the others.
func TestManyAddresses(t *testing.T) {
	f := &Failures{Burst: 1}
	now := time.Now()
	addr := netip.MustParseAddr("10.0.0.0")
	for range maxAddresses + 100 {
		addr = addr.Next()
		now = now.Add(time.Microsecond)
		f.Failed(addr, now)
	}
	if len(f.from) > maxAddresses {
		t.Errorf("%d addresses", len(f.from))
	}
	if f.Refused(addr, "", now) == 0 {
		t.Error("the latest is forgotten")
	}
}
