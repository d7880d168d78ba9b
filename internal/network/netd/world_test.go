package netd

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"forkd.dev/forkd/internal/network/egress"
)

// TestWorld: what a policy is told of this host is so, and what was not judged as an address is not dialled.
func TestWorld(t *testing.T) {
	w := newWorld()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	open, err := egress.Preset(egress.Open)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		addr := netip.MustParsePrefix(a.String()).Addr()
		if !w.Own(addr) || addr.Is4() && !w.Own(netip.AddrFrom16(addr.As16())) {
			t.Errorf("%s is not known for the host's", addr)
		}
		to := egress.Destination{Protocol: egress.TCP, AddrPort: netip.AddrPortFrom(addr, 7777), Own: w.Own(addr)}
		if v := open.Address(to); v.Allow {
			t.Errorf("a port of the host's own %s is reached: %+v", addr, v)
		}
	}
	if w.Own(netip.MustParseAddr("192.0.2.1")) {
		t.Error("an address for documentation is taken for the host's")
	}
	for _, address := range []string{"localhost:80", "[localhost]:80", ":80", "127.0.0.1", "pypi.org:443"} {
		if conn, err := w.DialContext(t.Context(), "tcp", address); err == nil {
			_ = conn.Close()
			t.Errorf("%q is dialled", address)
		}
	}
}

// TestWorldCannotTell: while the host's addresses cannot be listed, every address may be one of them.
func TestWorldCannotTell(t *testing.T) {
	w := newWorld()
	list := w.addrs
	w.addrs = func() ([]net.Addr, error) { return nil, errors.New("too many open files") }
	other := netip.MustParseAddr("203.0.114.1")
	if !w.Own(other) {
		t.Error("an address is known for another's, although nothing is known")
	}
	w.addrs = list
	if w.Own(other) {
		t.Error("an address of nobody's is taken for the host's")
	}
	w.asOf, w.addrs = time.Now().Add(-2*ownFor), func() ([]net.Addr, error) { return nil, errors.New("too many open files") }
	if !w.Own(other) {
		t.Error("an old list is believed")
	}
}
