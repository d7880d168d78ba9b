// Package network is the guest's side of its network: it sets up the interface and the name server once, without asking or
// waiting for anybody; severs the connections that a fork has of its parent; lists the ports that services listen on; and
// connects to those for the host. It is no general configuration of networks: there is one interface, and its addresses are
// the same in every machine. Only the agent imports it; what needs a guest kernel is tested in VMs.
package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// What the host's network is made for; package internal/network has the same, and a test compares them. That package is not
// imported here because it would bring a whole TCP/IP stack into every guest.
const (
	guestMAC   = "02:66:6b:64:00:02"
	gatewayMAC = "02:66:6b:64:00:01"
	guest4     = "192.0.0.2/29"
	guest6     = "fd66:6f72:6b64::2/64"
	gateway4   = "192.0.0.1"
	gateway6   = "fd66:6f72:6b64::1"
)

// metric of our default routes: one that is better can be put before them.
const metric = 1024

// Resolver is the content of /etc/resolv.conf. Without an answer programs give up soon: the name server is always there,
// unless the machine has no network at all.
const Resolver = "nameserver " + gateway4 + "\noptions timeout:5 attempts:2\n"

// SetUp gives the interface its addresses, routes and neighbour, if there is one. MTU and link come from the device.
func SetUp() error {
	name, index, err := findInterface("/sys/class/net")
	if err != nil || name == "" {
		return err
	}
	if err := configure(name, index); err != nil {
		return fmt.Errorf("set up network interface %s: %w", name, err)
	}
	return nil
}

// findInterface finds it by its address; a machine of an earlier format has none.
func findInterface(class string) (name string, index int, err error) {
	names, err := os.ReadDir(class)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", 0, fmt.Errorf("find network interface: %w", err)
	}
	for _, n := range names {
		address, err := os.ReadFile(filepath.Join(class, n.Name(), "address"))
		if err != nil || strings.TrimSpace(string(address)) != guestMAC {
			continue
		}
		text, err := os.ReadFile(filepath.Join(class, n.Name(), "ifindex"))
		if err != nil {
			return "", 0, fmt.Errorf("find network interface: %w", err)
		}
		if index, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil {
			return "", 0, fmt.Errorf("find network interface: %w", err)
		}
		return n.Name(), index, nil
	}
	return "", 0, nil
}

// quiet is what makes IPv6 say and wait for nothing: no address of its own making, no question whether somebody has ours,
// no call for routers, of which there is one.
func quiet() map[string]string {
	return map[string]string{"addr_gen_mode": "1", "accept_ra": "0", "autoconf": "0", "router_solicitations": "0", "accept_dad": "0", "dad_transmits": "0"}
}

func configure(name string, index int) error {
	dir := filepath.Join("/proc/sys/net/ipv6/conf", name)
	for key, value := range quiet() {
		if err := os.WriteFile(filepath.Join(dir, key), []byte(value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	nl, err := openNetlink(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer nl.close()
	b := &batch{}
	b.begin(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	b.link(index, unix.IFF_UP, unix.IFF_UP)
	b.end()
	for _, text := range []string{guest4, guest6} {
		prefix := netip.MustParsePrefix(text)
		b.begin(unix.RTM_NEWADDR, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
		b.address(index, prefix)
		b.end()
	}
	gateway := mac(gatewayMAC)
	for _, text := range []string{gateway4, gateway6} {
		addr := netip.MustParseAddr(text)
		b.begin(unix.RTM_NEWNEIGH, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
		b.neighbour(index, addr, gateway)
		b.end()
		b.begin(unix.RTM_NEWROUTE, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
		b.route(route{via: addr, link: index, metric: metric})
		b.end()
	}
	if err := nl.do(b); err != nil {
		// A kernel started without IPv6 has no such addresses; the rest is there.
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT) {
			return nil
		}
		return err
	}
	return nil
}

func mac(text string) []byte {
	var b []byte
	for part := range strings.SplitSeq(text, ":") {
		n, err := strconv.ParseUint(part, 16, 8)
		if err != nil {
			panic(err) // A constant of this file.
		}
		b = append(b, byte(n))
	}
	return b
}
