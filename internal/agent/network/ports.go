package network

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

const (
	// settleTime lets a service that opens several ports open them before they are told of.
	settleTime = 20 * time.Millisecond
	// pollInterval is how often is looked where the kernel does not say that a port was opened.
	pollInterval = time.Second
	maxPorts     = 1024
	maxCommand   = 200
)

// Service serves calls about the ports of the guest's services.
type Service struct {
	// pids are the processes of users, among which is looked for who has a port open.
	pids      func() ([]int, error)
	opened    *notifier
	addresses []netip.Addr // of services
	dials     chan struct{}

	mu   sync.Mutex
	diag *netlink
}

// NewService watches for ports that are opened from then on.
func NewService(pids func() ([]int, error)) *Service {
	return &Service{pids: pids, opened: newNotifier(), addresses: ownAddresses(), dials: make(chan struct{}, maxDials)}
}

// Handlers are the calls this package serves.
func (v *Service) Handlers() map[string]wire.Handler {
	return map[string]wire.Handler{wire.MethodPorts: wire.Handle(v.ports), wire.MethodDial: wire.Handle(v.dial)}
}

func (v *Service) ports(ctx context.Context, s *wire.Stream, req *wire.PortsRequest) error {
	var last []listener
	names := map[uint32]owner{}
	for first := true; ; first = false {
		changed := v.opened.next()
		now, err := v.listeners()
		if err != nil {
			return err
		}
		if first || !slices.Equal(now, last) {
			last = now
			names = v.owners(now, names)
			if err := s.SendMessage(reply(now, names)); err != nil {
				return err
			}
		}
		if !req.Follow {
			return nil
		}
		if err := wait(ctx, changed); err != nil {
			return nil //nolint:nilerr // the caller has left
		}
	}
}

// wait returns some time after a port was opened or closed.
func wait(ctx context.Context, changed <-chan struct{}) error {
	after := settleTime
	if changed == nil {
		after = pollInterval
	} else {
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	t := time.NewTimer(after)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// listener is a port that is listened on.
type listener struct {
	port  uint16
	addr  string
	inode uint32
}

func (v *Service) listeners() ([]listener, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.diag == nil {
		nl, err := openNetlink(unix.NETLINK_SOCK_DIAG)
		if err != nil {
			return nil, err
		}
		v.diag = nl
	}
	var list []listener
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		err := v.diag.sockets(family, unix.IPPROTO_TCP, listening, func(s *socket) {
			if len(list) < maxPorts {
				list = append(list, listener{s.local.Port(), s.local.Addr().String(), s.inode})
			}
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortFunc(list, func(a, b listener) int {
		return cmp.Or(cmp.Compare(a.port, b.port), cmp.Compare(a.addr, b.addr), cmp.Compare(a.inode, b.inode))
	})
	return list, nil
}

func reply(list []listener, names map[uint32]owner) *wire.PortsReply {
	r := &wire.PortsReply{Ports: []wire.Port{}}
	for _, l := range list {
		p := wire.Port{Port: int(l.port), Address: l.addr, PID: names[l.inode].pid, Process: names[l.inode].command}
		// Services share a port by a socket for each of their processes.
		if n := len(r.Ports); n == 0 || r.Ports[n-1].Port != p.Port || r.Ports[n-1].Address != p.Address {
			r.Ports = append(r.Ports, p)
		}
	}
	return r
}

// owner is a process that has a socket open.
type owner struct {
	pid     int
	command string
}

// owners finds who has the sockets open. Those that are known already are not looked for again.
func (v *Service) owners(list []listener, known map[uint32]owner) map[uint32]owner {
	found, missing := map[uint32]owner{}, map[string]uint32{}
	for _, l := range list {
		if o, ok := known[l.inode]; ok {
			found[l.inode] = o
		} else if l.inode != 0 {
			missing[fmt.Sprintf("socket:[%d]", l.inode)] = l.inode
		}
	}
	if len(missing) == 0 {
		return found
	}
	pids, err := v.pids()
	if err != nil {
		return found // names are an extra
	}
	for _, pid := range pids {
		dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
		names, err := os.ReadDir(dir)
		if err != nil {
			continue // ended
		}
		for _, n := range names {
			target, err := os.Readlink(filepath.Join(dir, n.Name()))
			if inode, ok := missing[target]; ok && err == nil {
				found[inode] = owner{pid, command(pid)}
				delete(missing, target)
			}
		}
		if len(missing) == 0 {
			break
		}
	}
	return found
}

// command is what a process was started as.
func command(pid int) string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil {
		return ""
	}
	text := strings.TrimSpace(strings.ReplaceAll(strings.ToValidUTF8(string(b), "?"), "\x00", " "))
	if len(text) > maxCommand {
		text = strings.ToValidUTF8(text[:maxCommand], "") + "…"
	}
	return text
}
