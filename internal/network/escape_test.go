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
	"forkd.dev/forkd/internal/network/networktest"
	"forkd.dev/forkd/internal/network/networktest/attempts"
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
		"no policy": nil, "one domain": {attempts.Allowed, "*." + attempts.Allowed},
	} {
		t.Run(name, func(t *testing.T) {
			servers := networktest.NewServers(t)
			outer := &networktest.Outer{Names: attempts.Names(), Hosts: servers.Hosts, Ours: []netip.Addr{netip.MustParseAddr(attempts.Own4)}}
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
			for _, a := range attempts.All() {
				if a.WithName && rules == nil {
					continue
				}
				if a.WithName && !looked {
					if err := attempts.Look(t.Context(), g); err != nil {
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
				if heard != "" && !a.Answers || strings.Contains(heard, attempts.Evil) || strings.Contains(heard, attempts.Other) {
					t.Errorf("%s: heard %q", a.Name, heard)
				}
				if err == nil {
					t.Errorf("%s: no error, heard %q", a.Name, heard)
				}
				told(t, n.Flows, &a, rules == nil)
			}
			t.Logf("%d attempts, %d flows", made, len(n.Flows()))
			checkOutside(t, outer.Dials(), outer.Lookups(), servers.Seen(), rules != nil)
			if rules != nil {
				works(t, g)
			}
		})
	}
}

// told waits until the record has the attempt.
func told(t *testing.T, flows func() []network.Flow, a *attempts.Attempt, closed bool) {
	t.Helper()
	deadline := time.After(5 * time.Second)
	for {
		all := flows()
		if slices.ContainsFunc(all, func(f network.Flow) bool { return matches(&f, a, closed) }) {
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

func matches(f *network.Flow, a *attempts.Attempt, closed bool) bool {
	reason := a.Reason
	if closed && a.Closed != "" {
		reason = a.Closed
	}
	return f.Verdict == network.VerdictRefused && f.Protocol == a.Protocol && strings.Contains(f.Reason, reason) &&
		(a.To == "" || f.To.String() == a.To) && (a.Flow == "" || f.Name == a.Flow)
}

// checkOutside: nothing else than what is allowed has left.
func checkOutside(t *testing.T, dials, lookups, seen []string, open bool) {
	t.Helper()
	if !open && len(dials)+len(lookups)+len(seen) > 0 {
		t.Errorf("without a policy there were dials %q, lookups %q, requests %q", dials, lookups, seen)
	}
	for _, dial := range dials {
		_, to, _ := strings.Cut(dial, " ")
		addr, err := netip.ParseAddrPort(to)
		if err != nil || addr.Addr().String() != attempts.Allowed4 && addr.Addr().String() != attempts.Allowed6 {
			t.Errorf("dialled: %s", dial)
		}
	}
	for _, name := range lookups {
		if name != attempts.Allowed && !strings.HasSuffix(name, "."+attempts.Allowed) {
			t.Errorf("looked up: %s", name)
		}
	}
	for _, what := range seen {
		_, host, _ := strings.Cut(what, " ")
		if host, _, _ = strings.Cut(host, ":"); host != attempts.Allowed {
			t.Errorf("a server was asked for %s", what)
		}
	}
}

// works: what is allowed goes through.
func works(t *testing.T, g attempts.Guest) {
	for name, try := range attempts.Honest() {
		if heard, err := try(t.Context(), g); err != nil {
			t.Errorf("%s: %v, heard %q", name, err, heard)
		}
	}
}
