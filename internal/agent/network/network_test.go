package network

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/guest/wire"
	link "forkd.dev/forkd/internal/network"
)

// The two sides of a link cannot share their constants, and must not differ.
func TestSameLink(t *testing.T) {
	for _, p := range [][2]string{
		{guestMAC, link.GuestMAC},
		{gatewayMAC, link.GatewayMAC},
		{guest4, link.Guest4},
		{guest6, link.Guest6},
		{gateway4, link.Gateway4},
		{gateway6, link.Gateway6},
	} {
		if p[0] != p[1] {
			t.Errorf("the guest has %s, the host %s", p[0], p[1])
		}
	}
	if link.DNSPort != 53 {
		t.Error("a file of name servers cannot say another port")
	}
}

func TestLeaves(t *testing.T) {
	for _, c := range []struct {
		local, remote string
		want          bool
	}{
		{"192.0.0.2:4000", "93.184.216.34:443", true},
		{"192.0.0.2:4000", "192.0.0.1:53", true},
		{"[fd66:6f72:6b64::2]:4000", "[2606::1]:443", true},
		{"[::ffff:192.0.0.2]:4000", "[::ffff:93.184.216.34]:443", true},
		{"192.0.0.2:4000", "169.254.169.254:80", true},
		{"0.0.0.0:4000", "10.0.0.1:80", true},
		{"127.0.0.1:4000", "127.0.0.1:80", false},
		{"127.0.0.1:4000", "127.9.9.9:80", false},
		{"[::1]:4000", "[::1]:80", false},
		{"[::ffff:127.0.0.1]:4000", "[::ffff:127.0.0.1]:80", false},
		{"192.0.0.2:4000", "192.0.0.2:80", false},
		{"[fd66:6f72:6b64::2]:4000", "[fd66:6f72:6b64::2]:80", false},
		{"0.0.0.0:53", "0.0.0.0:0", false},
		{"[::]:53", "[::]:0", false},
	} {
		local, remote := netip.MustParseAddrPort(c.local), netip.MustParseAddrPort(c.remote)
		s := parsed(t, local, remote)
		if got := s.leaves(); got != c.want {
			t.Errorf("%s → %s leaves: %v, want %v", c.local, c.remote, got, c.want)
		}
		if s.remote.Port() != remote.Port() || s.inode != 77 {
			t.Errorf("%s → %s was read as %+v", c.local, c.remote, s)
		}
	}
}

// parsed is what becomes of a socket on its way through the kernel's message.
func parsed(t *testing.T, local, remote netip.AddrPort) socket {
	t.Helper()
	b := make([]byte, socketSize)
	b[0] = unix.AF_INET6
	if local.Addr().Is4() {
		b[0] = unix.AF_INET
	}
	b[4], b[5] = byte(local.Port()>>8), byte(local.Port())
	b[6], b[7] = byte(remote.Port()>>8), byte(remote.Port())
	copy(b[8:], local.Addr().AsSlice())
	copy(b[24:], remote.Addr().AsSlice())
	order.PutUint32(b[socketSize-4:], 77)
	s, ok := parseSocket(b)
	if !ok {
		t.Fatalf("%s → %s is not taken", local, remote)
	}
	return s
}

func FuzzMessages(f *testing.F) {
	b := &batch{}
	b.begin(unix.RTM_NEWROUTE, unix.NLM_F_ACK)
	b.route(route{metric: 1})
	b.end()
	b.begin(destroySocket, 0)
	b.u8(make([]byte, socketSize)...)
	b.end()
	f.Add(b.b)
	f.Add([]byte{255, 255, 255, 255, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		split(b, func(_ uint16, body []byte) {
			n++
			if s, ok := parseSocket(body); ok {
				s.leaves()
			}
		})
		if n > len(b)/netlinkHeader {
			t.Fatalf("%d messages in %d bytes", n, len(b))
		}
	})
}

func TestDial(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(address, func(t *testing.T) {
			l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
			if err != nil {
				t.Skipf("no %s here: %v", address, err)
			}
			defer l.Close()
			served := make(chan error, 1)
			go func() { served <- shout(l) }()
			h := dialer()
			s := agenttest.Call(t, h, wire.DialRequest{Port: l.Addr().(*net.TCPAddr).Port})
			var reply wire.DialReply
			if err := s.RecvMessage(&reply); err != nil {
				t.Fatal(err)
			}
			if reply.Address != l.Addr().String() {
				t.Errorf("connected to %s, want %s", reply.Address, l.Addr())
			}
			text := bytes.Repeat([]byte("quiet "), 50000)
			sent := make(chan error, 1)
			go func() {
				_, err := s.Data(wire.KindData).Write(text)
				sent <- errors.Join(err, s.HalfClose())
			}()
			got, err := io.ReadAll(s.DataReader())
			if err != nil || !bytes.Equal(got, bytes.ToUpper(text)) {
				t.Errorf("%d bytes came back of %d: %v", len(got), len(text), err)
			}
			if err := errors.Join(<-sent, <-served); err != nil {
				t.Error(err)
			}
			if _, _, err := s.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("the call ended with %v", err)
			}
		})
	}
}

// dialer stays on the host's loopback.
func dialer() wire.Handler {
	v := &Service{addresses: ownAddresses()[:2], dials: make(chan struct{}, 1)}
	return v.Handlers()[wire.MethodDial]
}

// shout answers one connection with all that it says, in capitals.
func shout(l net.Listener) error {
	c, err := l.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	b := make([]byte, 4096)
	for {
		n, err := c.Read(b)
		if _, err := c.Write(bytes.ToUpper(b[:n])); err != nil {
			return err
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func TestDialRefusals(t *testing.T) {
	h := dialer()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		port int
		code string
	}{{0, wire.CodeInvalid}, {-1, wire.CodeInvalid}, {65536, wire.CodeInvalid}, {free, wire.CodeNotFound}} {
		err := agenttest.Unary(t, h, wire.DialRequest{Port: c.port}, nil)
		if agenttest.Code(err) != c.code {
			t.Errorf("port %d: %v, want %s", c.port, err, c.code)
		}
	}
}

// A caller that leaves ends the connection, also while the service neither reads nor writes.
func TestDialCallerLeaves(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := agenttest.Call(t, dialer(), wire.DialRequest{Port: l.Addr().(*net.TCPAddr).Port})
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := s.RecvMessage(&wire.DialReply{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("the service read %d, %v", n, err)
	}
}

func TestReply(t *testing.T) {
	got := reply([]listener{{80, "0.0.0.0", 1}, {80, "0.0.0.0", 2}, {80, "::", 3}}, map[uint32]owner{1: {5, "nginx"}})
	want := []wire.Port{{Port: 80, Address: "0.0.0.0", PID: 5, Process: "nginx"}, {Port: 80, Address: "::"}}
	if len(got.Ports) != len(want) || got.Ports[0] != want[0] || got.Ports[1] != want[1] {
		t.Errorf("%+v, want %+v", got.Ports, want)
	}
}

func TestResolver(t *testing.T) {
	if !strings.HasPrefix(Resolver, "nameserver 192.0.0.1\n") {
		t.Errorf("resolv.conf is %q", Resolver)
	}
}
