package network_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/network"
	"forkd.dev/forkd/internal/network/escapetest"
	"forkd.dev/forkd/internal/network/networktest"
	"forkd.dev/forkd/internal/testenv"
)

// prisoner makes attempts with a stack in this process.
type prisoner struct {
	*networktest.Guest
	link *os.File
}

func (p *prisoner) Dial(ctx context.Context, kind, address string) (net.Conn, error) {
	if kind == "udp" {
		return p.DialUDP(address)
	}
	return p.DialTCP(ctx, address)
}

func (*prisoner) Patience() time.Duration { return 50 * time.Millisecond }

func (p *prisoner) Send(frame []byte) error {
	_, err := p.link.Write(frame)
	return err
}

// TestEscapes makes every attempt of the table from a guest without a policy, and from one that may reach one domain:
// nothing that is not allowed is dialled, looked up or sent, and the record tells of each attempt. e2e does the same with
// a virtual machine.
func TestEscapes(t *testing.T) {
	for name, rules := range map[string][]string{
		"no policy": nil, "one domain": {escapetest.Allowed, "*." + escapetest.Allowed},
	} {
		t.Run(name, func(t *testing.T) {
			servers := networktest.NewServers(t)
			outer := &networktest.Outer{Names: escapetest.Names(), Hosts: servers.Hosts, Ours: []netip.Addr{netip.MustParseAddr(escapetest.Own4)}}
			link, host := networktest.Pair(t)
			n := network.New(network.Config{Policy: policy(t, rules...), Outer: outer})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- n.Run(ctx, host) }()
			t.Cleanup(func() {
				cancel()
				if err := <-done; err != nil && !errors.Is(err, network.ErrLinkGone) {
					t.Errorf("Run: %v", err)
				}
			})
			g := &prisoner{networktest.NewGuest(t, link), link}
			made, looked := 0, false
			for _, a := range escapetest.All() {
				if a.WithName && rules == nil {
					continue
				}
				if a.WithName && !looked {
					if err := escapetest.Look(t.Context(), g); err != nil {
						t.Fatal(err)
					}
					looked = true
				}
				made++
				begun := time.Now()
				heard, err := a.Try(t.Context(), g)
				if took := time.Since(begun); took > 100*time.Millisecond {
					t.Logf("%s: %v", a.Name, took)
				}
				if a.Escaped(heard) || err == nil {
					t.Errorf("%s: heard %q, %v", a.Name, heard, err)
				}
				told(t, n.Flows, &a, rules == nil)
			}
			t.Logf("%d attempts, %d flows", made, len(n.Flows()))
			for _, leak := range escapetest.Leaks(outer.Dials(), outer.Lookups(), servers.Seen(), rules != nil) {
				t.Error(leak)
			}
			if rules != nil {
				works(t, g)
			}
		})
	}
}

// told waits until the record has the attempt.
func told(t *testing.T, flows func() []network.Flow, a *escapetest.Attempt, closed bool) {
	t.Helper()
	deadline := time.After(testenv.Timeout(10 * time.Second))
	for {
		all := flows()
		if slices.ContainsFunc(all, func(f network.Flow) bool {
			return f.Verdict == network.VerdictRefused && a.Tells(f.Protocol, f.To.String(), f.Name, f.Reason, closed)
		}) {
			return
		}
		select {
		case <-deadline:
			var near []string
			for _, f := range all[max(0, len(all)-4):] {
				near = append(near, fmt.Sprintf("%s %s %q %s: %s", f.Protocol, f.To, f.Name, f.Verdict, f.Reason))
			}
			t.Errorf("%s: the record does not tell of %s %s %s: %s; its last are\n%s", a.Name, a.Protocol, a.To, a.Flow, a.Reason, strings.Join(near, "\n"))
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// works: what is allowed goes through.
func works(t *testing.T, g escapetest.Guest) {
	for name, try := range escapetest.Honest() {
		if heard, err := try(t.Context(), g); err != nil {
			t.Errorf("%s: %v, heard %q", name, err, heard)
		}
	}
}
