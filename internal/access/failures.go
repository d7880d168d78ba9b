package access

import (
	"math"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Failures counts wrong tokens by the address that they come from. An address that has shown too many is refused
// unheard for a while; who has shown a good token there before is not: he shares an address with whoever guesses, behind a
// proxy for example. The zero value allows ten failures at once and then one every six seconds.
type Failures struct {
	Burst int           // 0: ten
	Every time.Duration // one more is allowed; 0: six seconds

	mu   sync.Mutex
	from map[netip.Prefix]*counter
}

// maxAddresses bounds memory. The one that was seen longest ago is forgotten.
const maxAddresses = 4096

type counter struct {
	left float64 // failures that are allowed now
	at   time.Time
	good []string // tokens, latest last
}

// maxGood tokens of an address are remembered.
const maxGood = 32

func (f *Failures) burst() float64 {
	if f.Burst > 0 {
		return float64(f.Burst)
	}
	return 10
}

func (f *Failures) every() time.Duration {
	if f.Every > 0 {
		return f.Every
	}
	return 6 * time.Second
}

// Refused says how long an address must wait before it is heard again; 0: it is heard. tokenID is the good token that it
// shows, if that is one.
func (f *Failures) Refused(from netip.Addr, tokenID string, now time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.from[network(from)]
	if c == nil || tokenID != "" && slices.Contains(c.good, tokenID) {
		return 0
	}
	f.refill(c, now)
	if c.left >= 1 {
		return 0
	}
	return max(time.Second, time.Duration(math.Ceil((1-c.left)*f.every().Seconds()))*time.Second)
}

// Failed counts a wrong token.
func (f *Failures) Failed(from netip.Addr, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.counter(from, now)
	c.left = max(0, c.left-1)
}

// Succeeded remembers a good token.
func (f *Failures) Succeeded(from netip.Addr, tokenID string, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.counter(from, now)
	if slices.Contains(c.good, tokenID) {
		return
	}
	c.good = append(c.good, tokenID)
	if len(c.good) > maxGood {
		c.good = slices.Delete(c.good, 0, 1)
	}
}

func (f *Failures) counter(from netip.Addr, now time.Time) *counter {
	key := network(from)
	c := f.from[key]
	if c == nil {
		if f.from == nil {
			f.from = map[netip.Prefix]*counter{}
		}
		if len(f.from) >= maxAddresses {
			f.forgetOne()
		}
		c = &counter{left: f.burst(), at: now}
		f.from[key] = c
	}
	f.refill(c, now)
	return c
}

func (f *Failures) refill(c *counter, now time.Time) {
	if passed := now.Sub(c.at); passed > 0 {
		c.left = min(f.burst(), c.left+passed.Seconds()/f.every().Seconds())
		c.at = now
	}
}

func (f *Failures) forgetOne() {
	var oldest netip.Prefix
	var at time.Time
	for key, c := range f.from {
		if at.IsZero() || c.at.Before(at) {
			oldest, at = key, c.at
		}
	}
	delete(f.from, oldest)
}

// network is what one party has at least: an IPv6 host has 64 bits of addresses to itself.
func network(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // of no address: the zero prefix
	return p
}
