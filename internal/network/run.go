package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"forkd.dev/forkd/internal/network/egress"
)

// ErrLinkGone says that the other end of a link is closed: the guest's machine has ended.
var ErrLinkGone = errors.New("the link's other end is gone")

// run is a Network in motion: what Run starts and ends.
type run struct {
	*Network
	ctx    context.Context //nolint:containedctx // Run's own; it ends the goroutines that the stack starts for us.
	cancel context.CancelFunc
	device *device
	stack  *stack.Stack // nil until the first frame
	udp    *udp.Forwarder

	mu     sync.Mutex // of ended, so that no goroutine begins while Run waits for them
	ended  bool
	begun  sync.WaitGroup
	asking chan struct{} // holds a token for each question being looked up
}

// maxAsking is how many questions are looked up for one guest at a time; those beyond it are lost, and asked again.
const maxAsking = 64

// Run moves frames between the link and the stack until ctx ends (nil) or the link's other end is gone (ErrLinkGone). It
// always reads; what cannot be taken is dropped. link is a connected AF_UNIX SOCK_SEQPACKET; it stays the caller's, who
// may keep it for another Run of another Network. When Run returns, all that it started has ended. It is called once.
func (n *Network) Run(ctx context.Context, link *os.File) error {
	own, err := openSocket(link)
	if err != nil {
		return fmt.Errorf("take a network's link: %w", err)
	}
	r := &run{Network: n, asking: make(chan struct{}, maxAsking)}
	r.ctx, r.cancel = context.WithCancel(ctx)
	defer r.cancel()
	r.device = newDevice(own, n, r.cancel)
	// It wakes who waits to read or to write.
	stop := context.AfterFunc(r.ctx, own.stop) //nolint:contextcheck // r.ctx is ctx, to be cancelled.
	r.spawn(func() { r.device.drain(r.ctx.Done()) })
	err = r.read() //nolint:contextcheck // r.ctx is ctx, to be cancelled.
	r.cancel()
	if stop() {
		own.stop()
	}
	err = errors.Join(err, r.end(), own.close())
	if ctx.Err() != nil || err == nil {
		return nil
	}
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.EPIPE) {
		return ErrLinkGone
	}
	return fmt.Errorf("move a network's frames: %w", err)
}

// read takes frames until the link is closed or nobody is at its other end.
func (r *run) read() error {
	buf := make([]byte, FrameSize+1)
	for {
		size, err := r.device.link.read(buf)
		switch {
		case errors.Is(err, os.ErrClosed):
			return nil
		case err != nil:
			return err
		case size == 0 && r.device.link.gone():
			return unix.EPIPE // nobody is at the other end, and never will be
		}
		r.flows.framesIn.Add(1)
		if !r.open.Load() {
			r.flows.framesDropped.Add(1)
			continue
		}
		if size > FrameSize {
			r.flows.framesRefused.Add(1)
			continue
		}
		if err := r.frame(buf[:size]); err != nil {
			return err
		}
	}
}

// frame decides on one frame.
func (r *run) frame(frame []byte) error {
	p := r.filter.look(frame)
	if p.talks {
		r.flows.talked.Store(true)
	}
	switch p.fate {
	case fateDrop:
	case fateRefuse:
		r.flows.framesRefused.Add(1)
		r.flows.refuse(Flow{Protocol: p.protocol, Guest: p.from, To: p.to, Reason: p.reason})
	case fateARP:
		r.device.send(r.filter.answerARP(&p))
	case fateNDP:
		r.device.send(r.filter.answerNDP(&p))
	case fateDHCP:
		r.device.send(r.filter.answerDHCP(&p))
	case fateEcho:
		r.echo(&p)
	case fatePass:
		if r.stack == nil {
			if err := r.start(); err != nil {
				return err
			}
		}
		r.device.receive(&p)
	}
	return nil
}

// echo: the gateway answers pings; nobody else can be pinged, so that no bytes leave in them.
func (r *run) echo(p *packet) {
	if to := p.to.Addr(); to == r.filter.gateway4 || to == r.filter.gateway6 {
		r.device.send(r.filter.answerEcho(p))
		return
	}
	r.flows.refuse(Flow{Protocol: p.protocol, Guest: p.from, To: p.to, Reason: "pings do not leave"})
	r.device.send(r.filter.prohibited(p))
}

// start makes the stack, which most sandboxes never need.
func (r *run) start() error {
	s, err := newStack(r.device)
	if err != nil {
		return err
	}
	r.stack = s
	r.share()
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, tcpBuffer, r.limits.Flows, func(request *tcp.ForwarderRequest) {
		if !r.enter() {
			request.Complete(true)
			return
		}
		defer r.begun.Done()
		r.tcp(request)
	}).HandlePacket)
	r.udp = udp.NewForwarder(s, r.udpFlow)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, r.udp.HandlePacket)
	return r.serveNames()
}

// share takes this Network's part of what its process has, from now until end.
func (r *run) share() {
	if r.pool == nil {
		return
	}
	m := r.pool.join(func(buffer int) {
		r.flows.shrink(buffer)
		r.device.queued.Store(int64(r.flows.queued()))
	})
	r.flows.mu.Lock()
	r.flows.member = m
	r.flows.mu.Unlock()
	m.tell()
}

// enter counts a goroutine that Run must wait for; false: it is too late to begin.
func (r *run) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return false
	}
	r.begun.Add(1)
	return true
}

// spawn runs f in a goroutine that Run waits for.
func (r *run) spawn(f func()) bool {
	if !r.enter() {
		return false
	}
	go func() {
		defer r.begun.Done()
		f()
	}()
	return true
}

// end ends every flow, the stack, and waits for all goroutines.
func (r *run) end() error {
	r.mu.Lock()
	r.ended = true
	r.mu.Unlock()
	r.flows.cut(func(*flow) string { return "the sandbox's network ended" })
	if r.stack != nil {
		r.stack.Close()
	}
	r.begun.Wait()
	if r.stack != nil {
		r.stack.Wait()
	}
	r.flows.unshare()
	return r.device.end()
}

// admit asks the policy, and enters the flow where it is allowed and no limit is reached. Refused ones are recorded, and nil.
// inspect: what it sends is to be looked at.
func (n *Network) admit(is Flow, cut func()) (open *flow, inspect bool) {
	destination := egress.Destination{
		Protocol: is.Protocol, AddrPort: is.To, Names: n.pins.Names(is.To.Addr(), time.Now()), Own: n.outer.Own(is.To.Addr()),
	}
	if len(destination.Names) > 0 {
		is.Name = destination.Names[len(destination.Names)-1]
	}
	policy := n.policy.Load()
	v := policy.Address(destination)
	is.Rule = v.Rule
	if !v.Allow {
		is.Reason = v.Reason
		n.flows.refuse(is)
		return nil, false
	}
	if open = n.flows.begin(is, destination, v.Inspect, cut); open == nil {
		return nil, false
	}
	n.flows.balance()
	// A policy that came meanwhile has not seen this flow when it cut others.
	if now := n.policy.Load(); now != policy {
		n.flows.cut(func(f *flow) string {
			if f != open {
				return ""
			}
			return n.judge(now, f)
		})
	}
	return open, v.Inspect
}

// judge is why a policy does not allow a flow that is open; empty: it does.
func (n *Network) judge(policy *egress.Policy, f *flow) string {
	to := n.destination(f)
	v := policy.Address(to)
	if v.Allow && v.Inspect {
		switch {
		case f.found != nil:
			v = verdict(policy, to, *f.found)
		case !f.inspected:
			v = egress.Verdict{Reason: "what is sent must be looked at, from its beginning"}
		}
	}
	if v.Allow {
		return ""
	}
	return "the policy changed: " + v.Reason
}
