package network_test

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/networktest"
	"forkd.dev/forkd/internal/testenv"
)

// TestPool: one that takes all it can get leaves the others their parts, what all have is bounded, and comes back.
func TestPool(t *testing.T) {
	pool := network.NewPool(0, 0) // the least there is: 64 flows
	most := pool.Use().Flows
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": echo(t)}}
	cfg := network.Config{Outer: outer, Policy: policy(t, "203.0.114.1"), Pool: pool, Limits: network.Limits{FlowsPerSecond: 1e6}}
	hog, other := start(t, cfg), start(t, cfg)
	// Both have said something: they share.
	var kept []net.Conn
	open := func(w *world) bool {
		conn, err := w.DialTCP(t.Context(), "203.0.114.1:7")
		if err != nil {
			return false
		}
		kept = append(kept, conn)
		return true
	}
	if !open(hog) || !open(other) {
		t.Fatal("the first flow is refused")
	}
	taken := 1
	for ; open(hog); taken++ {
		if taken > most {
			t.Fatalf("%d flows are open, of %d that there are", taken, most)
		}
	}
	// What was free for all, apart from the other's one.
	if taken < most/2-1 || taken > most/2 {
		t.Errorf("one has %d of %d flows, while there is another", taken, most)
	}
	refused := hog.flow(t, func(f network.Flow) bool { return f.Verdict == network.VerdictRefused })
	if !strings.Contains(refused.Reason, "of all sandboxes") {
		t.Errorf("%+v", refused)
	}
	for n := 1; n < most/4; n++ {
		if !open(other) {
			t.Fatalf("the other has %d flows of its part, which is %d", n, most/4)
		}
	}
	for _, conn := range kept {
		if _, err := echoed(conn, "hello"); err != nil {
			t.Fatal(err)
		}
	}
	if use := pool.Use(); use.Among != 2 || use.Open > use.Flows || use.Open != len(kept) {
		t.Errorf("%+v, and %d connections", use, len(kept))
	}
	for _, conn := range kept {
		_ = conn.Close()
	}
	deadline := time.After(testenv.Timeout(20 * time.Second))
	for pool.Use().Open > 0 {
		select {
		case <-deadline:
			t.Fatalf("flows have ended, and count: %+v", pool.Use())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// TestPoolLeaves: a network that ends gives its part back, whatever it had open.
func TestPoolLeaves(t *testing.T) {
	pool := network.NewPool(0, 0)
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": echo(t)}}
	guestLink, hostLink := networktest.Pair(t)
	n := network.New(network.Config{Outer: outer, Policy: policy(t, "203.0.114.1"), Pool: pool})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx, hostLink) }()
	guest := networktest.NewGuest(t, guestLink)
	conn, err := guest.DialTCP(t.Context(), "203.0.114.1:7")
	if err != nil {
		t.Fatal(err)
	}
	if use := pool.Use(); use.Among != 1 || use.Open != 1 {
		t.Errorf("%+v", use)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	_ = conn.Close()
	if use := pool.Use(); use.Among != 0 || use.Open != 0 {
		t.Errorf("it has ended: %+v", use)
	}
}

// TestPoolShrinks: what flows keep becomes less when more of them share, and bytes go on.
func TestPoolShrinks(t *testing.T) {
	pool := network.NewPool(0, 1<<20)
	payload := strings.Repeat("x", 1<<20)
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:7": echo(t), "203.0.114.1:8": udpEcho(t)}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.1"), Pool: pool, Limits: network.Limits{FlowsPerSecond: 1e6}})
	first, err := w.DialTCP(t.Context(), "203.0.114.1:7")
	if err != nil {
		t.Fatal(err)
	}
	udp, err := w.DialUDP("203.0.114.1:8")
	if err != nil {
		t.Fatal(err)
	}
	for range 240 { // of 512, and it may have half: each keeps less than a flow does otherwise
		if _, err := w.DialTCP(t.Context(), "203.0.114.1:7"); err != nil {
			t.Fatal(err)
		}
	}
	go func() { _, _ = io.WriteString(first, payload) }()
	_ = first.SetReadDeadline(time.Now().Add(testenv.Timeout(30 * time.Second)))
	got := make([]byte, len(payload))
	if _, err := io.ReadFull(first, got); err != nil || string(got) != payload {
		t.Errorf("what was sent has not come back: %v", err)
	}
	_ = udp.SetDeadline(time.Now().Add(testenv.Timeout(30 * time.Second)))
	if got, err := echoed(udp, payload[:30000]); err != nil || len(got) != 30000 {
		t.Errorf("a datagram: %d bytes, %v", len(got), err)
	}
}
