package netd

import (
	"net"
	"net/netip"
	"testing"

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
