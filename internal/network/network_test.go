package network_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/networktest"
	"forkd.dev/forkd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m.Run) }

func policy(t testing.TB, rules ...string) egress.Policy {
	t.Helper()
	var p egress.Policy
	for _, text := range rules {
		list := &p.Allow
		if rest, deny := strings.CutPrefix(text, "!"); deny {
			list, text = &p.Deny, rest
		}
		rule, err := egress.ParseRule(text)
		if err != nil {
			t.Fatal(err)
		}
		*list = append(*list, rule)
	}
	return p
}

// world is a network in motion, with a guest at its link and an outside on loopback.
type world struct {
	*network.Network
	*networktest.Guest
	outer *networktest.Outer
}

func start(t testing.TB, cfg network.Config) *world {
	t.Helper()
	outer, ok := cfg.Outer.(*networktest.Outer)
	if cfg.Outer == nil {
		outer, ok = &networktest.Outer{}, true
	}
	if ok {
		cfg.Outer = outer
	}
	guest, host := networktest.Pair(t)
	n := network.New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx, host) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, network.ErrLinkGone) {
			t.Errorf("Run: %v", err)
		}
	})
	return &world{Network: n, Guest: networktest.NewGuest(t, guest), outer: outer}
}

// echo is a TCP server that sends back what it hears.
func echo(t testing.TB) string {
	t.Helper()
	return serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
}

func serve(t testing.TB, handle func(net.Conn)) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				handle(conn)
			}()
		}
	}()
	return listener.Addr().String()
}

func (w *world) flow(t testing.TB, match func(network.Flow) bool) network.Flow {
	t.Helper()
	deadline := time.After(testenv.Timeout(5 * time.Second))
	for {
		for _, f := range w.Flows() {
			if match(f) {
				return f
			}
		}
		select {
		case <-deadline:
			t.Fatalf("no such flow among %+v", w.Flows())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestTCP(t *testing.T) {
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": echo(t), "[2600::1]:7": echo(t)}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.0/24", "2600::/16")})
	for to := range outer.Hosts {
		conn, err := w.DialTCP(t.Context(), to)
		if err != nil {
			t.Fatal(to, err)
		}
		if _, err := io.WriteString(conn, "hello"); err != nil {
			t.Fatal(err)
		}
		if err := conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(conn)
		if err != nil || string(got) != "hello" {
			t.Fatalf("%s: %q, %v", to, got, err)
		}
		_ = conn.Close()
		f := w.flow(t, func(f network.Flow) bool { return !f.Ended.IsZero() && f.To == netip.MustParseAddrPort(to) })
		if f.Sent != 5 || f.Received != 5 || f.Verdict != network.VerdictAllowed || f.Rule == "" || f.Reason != "" {
			t.Errorf("%+v", f)
		}
	}
	if totals := w.Totals(); !totals.Talked || totals.Open != 0 || totals.Flows != 2 || totals.Sent != 10 {
		t.Errorf("%+v", totals)
	}
}
