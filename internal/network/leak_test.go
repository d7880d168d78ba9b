package network_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/network/networktest"
	"forkd.dev/forkd/internal/testenv"
)

// TestManyFlowsLeaveNothing opens and closes flows of all kinds by the thousand: of TCP that both sides end well, that the
// guest or the outside breaks off, that are refused; of UDP; and questions. Afterwards the network holds what it held.
func TestManyFlowsLeaveNothing(t *testing.T) {
	count := 1000
	if testenv.Soak() {
		count = 10000
	}
	addr := netip.MustParseAddr("203.0.114.1")
	outer := &networktest.Outer{
		Names: map[string][]netip.Addr{"good.example": {addr}},
		Hosts: map[string]string{
			"203.0.114.1:1": echo(t), "203.0.114.1:3": udpEcho(t), "203.0.114.1:4": "127.0.0.1:1",
			"203.0.114.1:2": serve(t, func(conn net.Conn) {
				_, _ = conn.Read(make([]byte, 1))
				_ = conn.(*net.TCPConn).SetLinger(0)
			}),
		},
	}
	p := policy(t, "203.0.114.1", "good.example")
	w := start(t, network.Config{Outer: outer, Policy: p, Limits: network.Limits{FlowsPerSecond: 1e6}})
	// The guest forgets connections at once and may take the port of one that the network still ends: that is refused.
	dial := func(to string) (net.Conn, error) {
		conn, err := w.DialTCP(t.Context(), to)
		if err != nil {
			conn, err = w.DialTCP(t.Context(), to)
		}
		return conn, err
	}
	kinds := []func() error{
		func() error { // Ended well.
			conn, err := dial("203.0.114.1:1")
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			if _, err := echoed(conn, "hello"); err != nil {
				return err
			}
			_ = conn.(*gonet.TCPConn).CloseWrite()
			_, err = io.ReadAll(conn)
			return err
		},
		func() error { // Left by the guest in the middle.
			conn, err := dial("203.0.114.1:1")
			if err != nil {
				return err
			}
			_, err = io.WriteString(conn, "hello")
			return errors.Join(err, conn.Close())
		},
		func() error { // Broken off by the outside.
			conn, err := dial("203.0.114.1:2")
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			if _, err := echoed(conn, "x"); err == nil {
				return errors.New("not broken off")
			}
			return nil
		},
		func() error { // Refused by the outside, and by the policy.
			if _, err := w.DialTCP(t.Context(), "203.0.114.1:4"); err == nil {
				return errors.New("not refused")
			}
			if _, err := w.DialTCP(t.Context(), "203.0.114.2:4"); err == nil {
				return errors.New("not refused")
			}
			return nil
		},
		func() error { // A datagram and its answer; the exchange is cut below.
			conn, err := w.DialUDP("203.0.114.1:3")
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			_ = conn.SetDeadline(time.Now().Add(testenv.Timeout(10 * time.Second)))
			_, err = echoed(conn, "hello")
			return err
		},
		func() error {
			_, err := w.Resolver().LookupHost(t.Context(), "good.example")
			return err
		},
	}
	round := func(n int) {
		var wait sync.WaitGroup
		next := make(chan int)
		for range 16 {
			wait.Go(func() {
				for i := range next {
					if err := kinds[i%len(kinds)](); err != nil {
						t.Errorf("kind %d: %v", i%len(kinds), err)
					}
				}
			})
		}
		for i := range n {
			next <- i
		}
		close(next)
		wait.Wait()
		w.SetPolicy(egress.Policy{})
		w.SetPolicy(p)
	}
	round(120)
	settled := func() (goroutines, descriptors int, memory uint64) {
		for range 5 {
			runtime.GC()
			debug.FreeOSMemory()
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(entries), m.HeapInuse + m.StackInuse
	}
	var goroutines, descriptors int
	var memory uint64
	quiet := func() string {
		for deadline := time.After(testenv.Timeout(20 * time.Second)); ; {
			g, d, m := settled()
			if goroutines == 0 && w.Totals().Open == 0 && len(w.Stack.CleanupEndpoints()) == 0 || g <= goroutines && d <= descriptors && m <= memory+(8<<20) {
				goroutines, descriptors, memory = g, d, m
				return ""
			}
			select {
			case <-deadline:
				return fmt.Sprintf("goroutines %d → %d, descriptors %d → %d, memory %d → %d KiB, %d flows open",
					goroutines, g, descriptors, d, memory>>10, m>>10, w.Totals().Open)
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
	if left := quiet(); left != "" { // When TIME_WAIT of both stacks is over.
		t.Fatal(left)
	}
	for done := 0; done < count; done += 500 { // Or the open exchanges of UDP reach the limit.
		round(min(500, count-done))
	}
	if left := quiet(); left != "" {
		t.Error(left)
	}
	t.Logf("%d flows: %d goroutines, %d descriptors, %d KiB; %+v", count, goroutines, descriptors, memory>>10, w.Totals())
}

// TestUnreadIsBounded: a guest that opens all it may and sends to servers that do not read costs its host no more than is
// said of it.
func TestUnreadIsBounded(t *testing.T) {
	const flows = 200
	payload := make([]byte, 4<<20)
	deaf := serve(t, func(conn net.Conn) {
		_ = conn.(*net.TCPConn).SetReadBuffer(4096)
		<-t.Context().Done()
	})
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:1": deaf}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.1"), Limits: network.Limits{FlowsPerSecond: 1e6}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wait sync.WaitGroup
	for range flows {
		conn, err := w.DialTCP(ctx, "203.0.114.1:1")
		if err != nil {
			t.Fatal(err)
		}
		wait.Go(func() {
			_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
			_, _ = conn.Write(payload)
		})
	}
	wait.Wait()
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	// The guest is in this process, too, and keeps up to 1 MiB of what each connection could not send.
	if held := m.HeapInuse >> 20; held > 64*2+136/8+flows+100 {
		t.Errorf("%d MiB are held for %d connections", held, flows)
	} else {
		t.Logf("%d MiB are held for %d connections, the guest's own among them", held, flows)
	}
}

// TestUntakenCounts: what a guest does not take keeps its flow open, although both sides have said all they will say: a guest
// cannot leave its host with more of it than it may have flows.
func TestUntakenCounts(t *testing.T) {
	payload := make([]byte, 300<<10)
	outer := &networktest.Outer{Hosts: map[string]string{
		"203.0.114.1:1": serve(t, func(conn net.Conn) { _, _ = conn.Write(payload) }),
	}}
	w := start(t, network.Config{Outer: outer, Policy: policy(t, "203.0.114.1")})
	small := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: 4096, Max: 4096}
	if err := w.Stack.SetTransportProtocolOption(tcp.ProtocolNumber, &small); err != nil {
		t.Fatal(err)
	}
	conn, err := w.DialTCP(t.Context(), "203.0.114.1:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	w.flow(t, func(f network.Flow) bool { return f.Received == int64(len(payload)) })
	select {
	case <-time.After(300 * time.Millisecond):
	case <-t.Context().Done():
	}
	if open := w.Totals().Open; open != 1 {
		t.Errorf("%d flows are open, while the guest has taken nothing yet", open)
	}
	if got, err := io.ReadAll(conn); err != nil || len(got) != len(payload) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	_ = conn.Close()
	f := w.flow(t, func(f network.Flow) bool { return !f.Ended.IsZero() })
	if f.Verdict != network.VerdictAllowed || f.Reason != "" {
		t.Errorf("%+v", f)
	}
}

// TestRunEnds: whatever a guest has under way when its network ends, Run returns soon, and nothing is left.
func TestRunEnds(t *testing.T) {
	hang := &hanging{Outer: networktest.Outer{Hosts: map[string]string{"203.0.114.1:1": echo(t), "203.0.114.1:2": udpEcho(t)}}}
	guestLink, hostLink := networktest.Pair(t)
	n := network.New(network.Config{Outer: hang, Policy: policy(t, "203.0.114.1", "slow.example")})
	before := runtime.NumGoroutine()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx, hostLink) }()
	guest := networktest.NewGuest(t, guestLink)
	conn, err := guest.DialTCP(t.Context(), "203.0.114.1:1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := echoed(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	udp, err := guest.DialUDP("203.0.114.1:2")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := echoed(udp, "hello"); err != nil {
		t.Fatal(err)
	}
	dialling, stop := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() { _, _ = guest.DialTCP(dialling, "203.0.114.1:9") })                     // A dial that takes for ever.
	wait.Go(func() { _, _ = guest.Resolver().LookupHost(dialling, "slow.example") })        // A name, too.
	wait.Go(func() { _, _ = (&half{guest: guestLink}).syn() })                              // A handshake that is not completed.
	for deadline := time.Now().Add(testenv.Timeout(5 * time.Second)); hang.waiting() < 2; { // Both are under way.
		if time.Now().After(deadline) {
			t.Fatal("neither dial nor look-up has begun")
		}
		runtime.Gosched()
	}
	began := time.Now()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > testenv.Timeout(time.Second) {
		t.Errorf("Run took %v to end", took)
	}
	stop()
	_, _ = conn.Close(), udp.Close()
	guest.Close()
	wait.Wait()
	for deadline := time.Now().Add(testenv.Timeout(5 * time.Second)); runtime.NumGoroutine() > before; {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("goroutines are left:\n%s", buf[:runtime.Stack(buf, true)])
		}
		runtime.Gosched()
	}
	if open := n.Totals().Open; open != 0 {
		t.Errorf("%d flows are still open", open)
	}
}

// TestLinkGone: a machine that is gone ends its network, as soon as that has anything to say to it.
func TestLinkGone(t *testing.T) {
	guest, host := networktest.Pair(t)
	outer := &networktest.Outer{Hosts: map[string]string{"203.0.114.1:1": echo(t)}}
	n := network.New(network.Config{Outer: outer, Policy: policy(t, "203.0.114.1")})
	done := make(chan error, 1)
	go func() { done <- n.Run(t.Context(), host) }()
	if _, err := (&half{guest}).syn(); err != nil { // Its answer is repeated until somebody takes it.
		t.Fatal(err)
	}
	_ = guest.Close()
	select {
	case err := <-done:
		if !errors.Is(err, network.ErrLinkGone) {
			t.Error(err)
		}
	case <-time.After(testenv.Timeout(5 * time.Second)):
		t.Fatal("Run goes on")
	}
}

// half is a guest that begins connections and does not go on with them.
type half struct{ guest io.Writer }

func (h *half) syn() (int, error) {
	frame := networktest.Ethernet(nil, 0x0800)
	frame = append(frame, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0x4f, 0x1b, 192, 0, 0, 2, 203, 0, 114, 1)
	frame = append(frame, 3, 3, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 255, 255, 0, 0, 0, 0)
	return h.guest.Write(frame)
}

// hanging is an outside in which what the test does not know takes for ever.
type hanging struct {
	networktest.Outer
	mu   sync.Mutex
	held int
}

func (h *hanging) wait(ctx context.Context) error {
	h.mu.Lock()
	h.held++
	h.mu.Unlock()
	<-ctx.Done()
	return ctx.Err()
}

func (h *hanging) waiting() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held
}

func (h *hanging) DialContext(ctx context.Context, kind, address string) (net.Conn, error) {
	if _, ok := h.Hosts[address]; !ok {
		return nil, h.wait(ctx)
	}
	return h.Outer.DialContext(ctx, kind, address)
}

func (h *hanging) Lookup(ctx context.Context, _ string, _ uint16) ([]netip.Addr, error) {
	return nil, h.wait(ctx)
}

// TestEmptyFrame: a frame of no bytes is one that is refused, and not the end of the link.
func TestEmptyFrame(t *testing.T) {
	guest, host := networktest.Pair(t)
	n := network.New(network.Config{Outer: &networktest.Outer{}})
	done := make(chan error, 1)
	go func() { done <- n.Run(t.Context(), host) }()
	for range 3 {
		if _, err := guest.Write(nil); err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.After(testenv.Timeout(10 * time.Second))
	for n.Totals().FramesRefused < 3 {
		select {
		case err := <-done:
			t.Fatalf("Run has ended: %v", err)
		case <-deadline:
			t.Fatalf("%+v", n.Totals())
		case <-time.After(time.Millisecond):
		}
	}
	_ = guest.Close()
	select {
	case err := <-done:
		if !errors.Is(err, network.ErrLinkGone) {
			t.Error(err)
		}
	case <-time.After(testenv.Timeout(5 * time.Second)):
		t.Fatal("Run goes on")
	}
}
