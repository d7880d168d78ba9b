package network_test

import (
	"net/netip"
	"testing"
	"time"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/networktest"
)

// TestPins: a copy of a guest goes on to use what that had looked up, if its policy allows it and as long as that might.
func TestPins(t *testing.T) {
	addr := netip.MustParseAddr("203.0.114.9")
	outer := &networktest.Outer{
		Names: map[string][]netip.Addr{"good.example": {addr}}, Hosts: map[string]string{"203.0.114.9:7": echo(t)},
	}
	reaches := func(w *world) bool {
		conn, err := w.DialTCP(t.Context(), "203.0.114.9:7")
		if err != nil {
			return false
		}
		_ = conn.Close()
		return true
	}
	first := start(t, network.Config{Outer: outer, Policy: policy(t, "good.example")})
	if reaches(first) {
		t.Fatal("reached before it was looked up")
	}
	if _, err := first.Resolver().LookupHost(t.Context(), "good.example"); err != nil {
		t.Fatal(err)
	}
	pins := first.Pins()
	if len(pins) != 1 || pins[0].Name != "good.example" || pins[0].Addr != addr || !reaches(first) {
		t.Fatalf("%+v", pins)
	}
	asked := len(outer.Lookups())
	copied := start(t, network.Config{Outer: outer, Policy: policy(t, "good.example")})
	copied.Pin(pins)
	if !reaches(copied) {
		t.Error("a copy does not reach what was looked up")
	}
	if len(outer.Lookups()) != asked {
		t.Error("somebody has looked it up again")
	}
	narrower := start(t, network.Config{Outer: outer, Policy: policy(t, "other.example")})
	narrower.Pin(pins)
	if reaches(narrower) {
		t.Error("a copy that may not reach it does")
	}
	late := start(t, network.Config{Outer: outer, Policy: policy(t, "good.example")})
	late.Pin([]network.Pin{{Addr: addr, Name: "good.example", Until: time.Now().Add(-time.Second)}})
	if reaches(late) {
		t.Error("what is forgotten is reached")
	}
}

// TestPinsBounded: whoever hands pins over, they are few, names, and not for ever.
func TestPinsBounded(t *testing.T) {
	now := time.Now()
	ok := network.Pin{Addr: netip.MustParseAddr("203.0.114.9"), Name: "good.example", Until: now.Add(time.Minute)}
	with := func(change func(*network.Pin)) network.Pin {
		p := ok
		change(&p)
		return p
	}
	given := []network.Pin{
		with(func(p *network.Pin) { p.Name = "Good.Example." }), with(func(p *network.Pin) { p.Name = "" }),
		with(func(p *network.Pin) { p.Name = string(make([]byte, 300)) }), with(func(p *network.Pin) { p.Addr = netip.Addr{} }),
		with(func(p *network.Pin) { p.Addr = netip.MustParseAddr("fe80::1%eth0") }), with(func(p *network.Pin) { p.Until = now }),
		with(func(p *network.Pin) { p.Until = now.Add(1000 * time.Hour) }), ok,
	}
	got := network.FitPins(given, now)
	if len(got) != 2 || got[0].Until.After(now.Add(time.Hour)) || got[1] != ok {
		t.Errorf("%+v", got)
	}
	var many []network.Pin
	for range 2 * network.MaxPins {
		many = append(many, ok)
	}
	if got := network.FitPins(many, now); len(got) > network.MaxPins {
		t.Errorf("%d are taken", len(got))
	}
}
