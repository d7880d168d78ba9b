package network_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/networktest"
	"forkd.dev/forkd/internal/testenv"
)

func refusedFlow(f network.Flow) bool { return f.Verdict == network.VerdictRefused }

func TestNothingLeavesByDefault(t *testing.T) {
	outer := &networktest.Outer{
		Hosts: map[string]string{"203.0.114.1:7": echo(t)},
		Names: map[string][]netip.Addr{"example.com": {netip.MustParseAddr("203.0.114.1")}},
	}
	w := start(t, network.Config{Outer: outer})
	began := time.Now()
	for _, to := range []string{
		"203.0.114.1:7", "[2600::1]:443", "169.254.169.254:80", "10.0.0.1:22", "[fd66:6f72:6b64::1]:80", "192.0.0.1:80",
	} {
		if conn, err := w.DialTCP(t.Context(), to); err == nil {
			t.Errorf("%s: connected", to)
			_ = conn.Close()
		}
	}
	if took := time.Since(began); took > testenv.Timeout(2*time.Second) {
		t.Errorf("refusals took %v: a guest is to hear of them at once", took)
	}
	conn, err := w.DialUDP("203.0.114.1:443")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	timeout := time.After(testenv.Timeout(5 * time.Second))
	for {
		if _, err := conn.Write([]byte("hello")); err != nil {
			break // A refused datagram is answered by an error, which the next one finds.
		}
		select {
		case <-timeout:
			t.Fatal("a refused datagram is not answered")
		case <-time.After(time.Millisecond):
		}
	}
	if _, err := w.Resolver().LookupHost(t.Context(), "example.com"); err == nil {
		t.Error("a name was answered")
	}
	f := w.flow(t, func(f network.Flow) bool { return f.Protocol == "dns" })
	if f.Name != "example.com" || f.Verdict != network.VerdictRefused || f.Reason == "" {
		t.Errorf("%+v", f)
	}
	if dials, lookups := outer.Dials(), outer.Lookups(); len(dials)+len(lookups) > 0 {
		t.Errorf("dialled %q, looked up %q", dials, lookups)
	}
	if n := w.Totals().Refused; n < 7 {
		t.Errorf("%d refusals: %+v", n, w.Flows())
	}
}

func TestNames(t *testing.T) {
	tlsServer := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Host) }))
	defer tlsServer.Close()
	plain := httptest.NewServer(tlsServer.Config.Handler)
	defer plain.Close()
	addr := netip.MustParseAddr("203.0.114.9")
	outer := &networktest.Outer{
		Names: map[string][]netip.Addr{
			"good.example": {addr, netip.MustParseAddr("2600::9")}, "rebound.example": {netip.MustParseAddr("169.254.169.254")},
		},
		Hosts: map[string]string{
			"203.0.114.9:443": tlsServer.Listener.Addr().String(), "203.0.114.9:80": plain.Listener.Addr().String(),
			"203.0.114.9:22": echo(t),
		},
	}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "good.example", "rebound.example")})
	if _, err := w.DialTCP(t.Context(), "203.0.114.9:443"); err == nil {
		t.Fatal("an address is reached before its name was looked up")
	}
	addrs, err := w.Resolver().LookupHost(t.Context(), "good.example")
	if err != nil || len(addrs) != 2 {
		t.Fatal(addrs, err)
	}
	for _, name := range []string{"bad.example", "rebound.example"} {
		if addrs, err := w.Resolver().LookupHost(t.Context(), name); err == nil {
			t.Errorf("%s: %v", name, addrs)
		}
	}
	get := func(url string, host, sni string) (string, error) {
		client := &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, to string) (net.Conn, error) {
				_, port, _ := net.SplitHostPort(to)
				return w.DialTCP(ctx, net.JoinHostPort("203.0.114.9", port))
			},
			TLSClientConfig: &tls.Config{ServerName: sni, InsecureSkipVerify: true}, //nolint:gosec // the server is the test's.
		}}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return "", err
		}
		request.Host = host
		response, err := client.Do(request)
		if err != nil {
			return "", err
		}
		defer func() { _ = response.Body.Close() }()
		body, err := io.ReadAll(response.Body)
		return string(body), err
	}
	for _, url := range []string{"https://good.example/", "http://good.example/"} {
		if body, err := get(url, "good.example", "good.example"); err != nil || body != "good.example" {
			t.Errorf("%s: %q, %v", url, body, err)
		}
	}
	if _, err := get("https://good.example/", "", "bad.example"); err == nil {
		t.Error("TLS for another name passed")
	}
	if _, err := get("http://good.example/", "bad.example", ""); err == nil {
		t.Error("HTTP for another host passed")
	}
	for _, match := range []string{"bad.example", "good.example"} {
		w.flow(t, func(f network.Flow) bool {
			return f.Protocol == "tcp" && f.Name == match && refusedFlow(f) == (match[0] == 'b')
		})
	}
	// What is neither TLS nor HTTP passes where neither is expected, and the server may speak first.
	conn, err := w.DialTCP(t.Context(), "203.0.114.9:22")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := echoed(conn, "SSH-2.0-x\r\n"); err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := w.DialTCP(t.Context(), "203.0.114.10:22"); err == nil {
		t.Error("another address of nobody passed")
	}
}

func echoed(conn net.Conn, text string) (string, error) {
	if _, err := io.WriteString(conn, text); err != nil {
		return "", err
	}
	buf := make([]byte, len(text))
	_, err := io.ReadFull(conn, buf)
	if err == nil && string(buf) != text {
		err = errors.New("something else came back")
	}
	return string(buf), err
}

// TestHeldBack: what might still become HTTP is let pass when nothing more comes.
func TestHeldBack(t *testing.T) {
	addr := netip.MustParseAddr("203.0.114.9")
	outer := &networktest.Outer{
		Names: map[string][]netip.Addr{"good.example": {addr}}, Hosts: map[string]string{"203.0.114.9:22": echo(t)},
	}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "good.example:22")})
	if _, err := w.Resolver().LookupHost(t.Context(), "good.example"); err != nil {
		t.Fatal(err)
	}
	conn, err := w.DialTCP(t.Context(), "203.0.114.9:22")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := echoed(conn, "hello"); err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

func udpEcho(t testing.TB) string {
	t.Helper()
	conn, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	go func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(buf[:n], from)
		}
	}()
	return conn.LocalAddr().String()
}

func TestUDP(t *testing.T) {
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": udpEcho(t), "[2600::1]:7": udpEcho(t)}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.0/24:7/udp", "[2600::]/16:7/udp")})
	for to := range outer.Hosts {
		for _, size := range []int{1, 1200, 60000} {
			conn, err := w.DialUDP(to)
			if err != nil {
				t.Fatal(err)
			}
			_ = conn.SetDeadline(time.Now().Add(testenv.Timeout(5 * time.Second)))
			if _, err := echoed(conn, strings.Repeat("x", size)); err != nil {
				t.Errorf("%s, %d bytes: %v", to, size, err)
			}
			_ = conn.Close()
		}
	}
	if totals := w.Totals(); totals.Open != 6 || totals.Sent != 2*61201 || totals.Received != totals.Sent {
		t.Errorf("%+v", totals)
	}
	w.SetPolicy(egress.Policy{})
	if totals := w.Totals(); totals.Open != 0 || totals.Cut != 6 {
		t.Errorf("%+v", totals)
	}
}

// TestQUICWhereNamesAreDenied: a server whose name is denied is not reached by its address over QUIC, on whatever port.
func TestQUICWhereNamesAreDenied(t *testing.T) {
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:8443": udpEcho(t)}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.0/24", "!evil.example")})
	conn, err := w.DialUDP("203.0.114.1:8443")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(testenv.Timeout(5 * time.Second)))
	if _, err := echoed(conn, "hello"); err != nil {
		t.Error("what is not QUIC:", err)
	}
	if _, err := io.WriteString(conn, "\xc0\x00\x00\x00\x01\x08"+strings.Repeat("x", 1200)); err != nil {
		t.Fatal(err)
	}
	if f := w.flow(t, refusedFlow); !strings.Contains(f.Reason, "QUIC") || f.Sent != 5 {
		t.Errorf("%+v", f)
	}
}

func TestPolicyCuts(t *testing.T) {
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": echo(t), "203.0.114.2:7": echo(t)}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.0/24")})
	var conns []net.Conn
	for _, to := range []string{"203.0.114.1:7", "203.0.114.2:7"} {
		conn, err := w.DialTCP(t.Context(), to)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := echoed(conn, "hello"); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	w.SetPolicy(policy(t, "203.0.114.0/24", "!203.0.114.1"))
	if _, err := conns[0].Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the denied connection ended with %v, not broken off", err)
	}
	if _, err := echoed(conns[1], "hello"); err != nil {
		t.Errorf("the other: %v", err)
	}
	f := w.flow(t, func(f network.Flow) bool { return f.Verdict == network.VerdictCut })
	if f.To.String() != "203.0.114.1:7" || !strings.Contains(f.Reason, "policy") || f.Sent != 5 {
		t.Errorf("%+v", f)
	}
	if totals := w.Totals(); totals.Open != 1 || totals.Cut != 1 {
		t.Errorf("%+v", totals)
	}
}

// TestPolicyCutsUnseen: a flow whose bytes nobody looked at does not go on under a policy that would look at them, and one
// that was looked at goes on where it could begin anew.
func TestPolicyCutsUnseen(t *testing.T) {
	addr := []netip.Addr{netip.MustParseAddr("203.0.114.9")}
	outer := &networktest.Outer{
		Names: map[string][]netip.Addr{"a.example": addr, "b.example": addr}, Hosts: map[string]string{"203.0.114.9:80": echo(t)},
	}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.0/24", "a.example", "b.example")})
	dial := func(later, text string) net.Conn {
		conn, err := w.DialTCP(t.Context(), "203.0.114.9:80")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Resolver().LookupHost(t.Context(), later); err != nil {
			t.Fatal(err)
		}
		if _, err := echoed(conn, text); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	if _, err := w.Resolver().LookupHost(t.Context(), "a.example"); err != nil {
		t.Fatal(err)
	}
	unseen := dial("a.example", "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
	names := policy(t, "a.example", "b.example")
	w.SetPolicy(names)
	if _, err := echoed(unseen, "hello"); err == nil {
		t.Error("a connection to nobody knows whom goes on under a policy of names")
	}
	const request = "GET / HTTP/1.1\r\nHost: b.example\r\n\r\n"
	seen := dial("b.example", request)
	w.SetPolicy(names)
	if _, err := echoed(seen, request); err != nil {
		t.Errorf("a connection to a name that was looked up after it began, under the same policy: %v", err)
	}
	w.SetPolicy(policy(t, "a.example"))
	if _, err := echoed(seen, request); err == nil {
		t.Error("a connection to a name that is not allowed any more goes on")
	}
}

func TestBudget(t *testing.T) {
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": echo(t)}}
	p := policy(t, "203.0.114.0/24")
	p.BudgetBytes = 1000
	w := start(t, network.Config{Outer: outer, Policy: p, Spent: 500})
	conn, err := w.DialTCP(t.Context(), "203.0.114.1:7")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := echoed(conn, strings.Repeat("x", 200)); err != nil {
		t.Fatal(err)
	}
	if left := w.Totals().BudgetLeft; left != 100 {
		t.Errorf("%d left", left)
	}
	if _, err := echoed(conn, strings.Repeat("x", 200)); err == nil {
		t.Error("more passed than the budget has")
	}
	if _, err := w.DialTCP(t.Context(), "203.0.114.1:7"); err == nil {
		t.Error("a connection after the budget is spent")
	}
	totals := w.Totals()
	if !totals.BudgetExceeded || totals.BudgetLeft != 0 || totals.Cut != 1 || totals.Refused != 1 {
		t.Errorf("%+v", totals)
	}
	p.BudgetBytes = 1 << 20
	w.SetPolicy(p)
	conn, err = w.DialTCP(t.Context(), "203.0.114.1:7")
	if err != nil {
		t.Fatal("with a larger budget:", err)
	}
	if _, err := echoed(conn, "hello"); err != nil {
		t.Error(err)
	}
}

func TestLimits(t *testing.T) {
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": echo(t)}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.0/24"), Limits: network.Limits{Flows: 2, Kept: 3}})
	var conns []net.Conn
	for range 2 {
		conn, err := w.DialTCP(t.Context(), "203.0.114.1:7")
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for range 3 {
		if _, err := w.DialTCP(t.Context(), "203.0.114.1:7"); err == nil {
			t.Fatal("a third connection")
		}
	}
	f := w.flow(t, refusedFlow)
	if f.Attempts != 3 || !strings.Contains(f.Reason, "limit") {
		t.Errorf("%+v", f)
	}
	for _, conn := range conns {
		_ = conn.Close()
	}
	w.flow(t, func(f network.Flow) bool { return !f.Ended.IsZero() && f.Verdict == network.VerdictAllowed })
}

// TestClosed: a machine that has not been confirmed is neither heard nor answered.
func TestClosed(t *testing.T) {
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": echo(t)}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.0/24"), Closed: true})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := w.DialTCP(ctx, "203.0.114.1:7"); err == nil {
		t.Fatal("connected")
	}
	if totals := w.Totals(); totals.FramesDropped == 0 || totals.FramesOut != 0 || totals.Flows != 0 {
		t.Errorf("%+v", totals)
	}
	w.Open(true)
	if _, err := w.DialTCP(t.Context(), "203.0.114.1:7"); err != nil {
		t.Fatal(err)
	}
}

// TestEnds: how one side ends is what the other sees.
func TestEnds(t *testing.T) {
	heard := make(chan error, 1)
	outer := &networktest.Outer{Hosts: map[string]string{
		"203.0.114.1:1": serve(t, func(conn net.Conn) {
			_, err := io.ReadAll(conn)
			heard <- err
		}),
		"203.0.114.1:2": serve(t, func(conn net.Conn) {
			_, _ = conn.Read(make([]byte, 1))
			_ = conn.(*net.TCPConn).SetLinger(0)
		}),
		"203.0.114.1:3": serve(t, func(conn net.Conn) { _, _ = io.WriteString(conn, "bye") }),
		"203.0.114.1:4": "127.0.0.1:1",
	}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.0/24")})
	conn, err := w.DialTCP(t.Context(), "203.0.114.1:1")
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.CloseWrite()
	if err := <-heard; err != nil {
		t.Errorf("the guest's end is heard as %v", err)
	}
	if conn, err = w.DialTCP(t.Context(), "203.0.114.1:2"); err != nil {
		t.Fatal(err)
	}
	if got, err := echoed(conn, "x"); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a reset from outside is seen as %q, %v", got, err)
	}
	if conn, err = w.DialTCP(t.Context(), "203.0.114.1:3"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); string(b) != "bye" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	_ = conn.Close()
	if _, err = w.DialTCP(t.Context(), "203.0.114.1:4"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("what nobody listens on: %v", err)
	}
	f := w.flow(t, func(f network.Flow) bool { return f.To.Port() == 4 && !f.Ended.IsZero() })
	if f.Verdict != network.VerdictAllowed || !strings.Contains(f.Reason, "refused") {
		t.Errorf("%+v", f)
	}
	w.flow(t, func(f network.Flow) bool {
		return f.To.Port() == 3 && !f.Ended.IsZero() && f.Reason == "" && f.Received == 3
	})
}
