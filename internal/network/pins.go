package network

import (
	"net/netip"
	"slices"
	"time"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/nameserver"
	"forkd.dev/forkd/internal/network/pin"
)

// Pin is a name that a guest was given an address for.
type Pin = pin.Pin

// MaxPins are as many as go from one Network to another.
const MaxPins = 512

// Pins are the names of addresses that the guest was given, the latest if they are many, for a Network that a copy of
// this guest is to have: it goes on to use them without asking.
func (n *Network) Pins() []Pin { return n.pins.List(time.Now(), MaxPins) }

// Pin remembers those of another Network, for no longer than it would have. What the policy says of the names and addresses is asked as
// ever when something is to go there.
func (n *Network) Pin(pins []Pin) {
	now := time.Now()
	for _, p := range slices.Backward(FitPins(pins, now)) { // The latest last.
		n.pins.Add(p.Name, []netip.Addr{p.Addr}, now, p.Until)
	}
}

// FitPins are those that can have come of answers to questions, and are good still: whoever tells of them may have been taken over.
func FitPins(pins []Pin, now time.Time) []Pin {
	var fit []Pin
	for _, p := range pins[:min(len(pins), MaxPins)] {
		name, ok := egress.Canonical(p.Name)
		if !ok || name != p.Name || !p.Addr.IsValid() || p.Addr.Zone() != "" || !p.Until.After(now) {
			continue
		}
		if longest := now.Add(nameserver.Kept); p.Until.After(longest) {
			p.Until = longest
		}
		fit = append(fit, p)
	}
	return fit
}
