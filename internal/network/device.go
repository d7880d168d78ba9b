package network

import (
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// maxQueuedBytes bounds what waits for a guest that does not take its frames, beside Limits.FramesBuffered.
const maxQueuedBytes = 4 << 20

// device is the gateway's interface as the stack sees it: packets without Ethernet, to the one neighbour there is, so that
// nothing is ever resolved or announced. Frames that the socket does not take at once wait, bounded, and go in order.
type device struct {
	link   *socket
	flows  *flows
	open   *atomic.Bool
	frames int          // that may wait
	queued atomic.Int64 // bytes of them

	header4, header6 []byte

	dispatcher atomic.Pointer[stack.NetworkDispatcher]

	mu      sync.Mutex
	queue   []queued
	bytes   int
	scratch [][]byte
	gone    bool
	err     error         // why nothing can be sent any more
	failed  func()        // called once, when that is so
	wake    chan struct{} // holds one token while the queue is not empty
	ack     heldAck
}

// queued is a packet of the stack or a frame of our own.
type queued struct {
	pkt   *stack.PacketBuffer
	frame []byte
}

func (q queued) size() int {
	if q.pkt != nil {
		return HeaderSize + q.pkt.Size()
	}
	return len(q.frame)
}

func (q queued) release() {
	if q.pkt != nil {
		q.pkt.DecRef()
	}
}

// newDevice makes one; failed is called, with locks held, when nobody is at the other end any more.
func newDevice(link *socket, n *Network, failed func()) *device {
	d := &device{
		link: link, flows: n.flows, open: &n.open, frames: n.limits.FramesBuffered,
		header4: n.filter.header(typeIPv4, 0), header6: n.filter.header(typeIPv6, 0), wake: make(chan struct{}, 1), failed: failed,
		ack: heldAck{delay: ackDelay},
	}
	d.queued.Store(maxQueuedBytes)
	return d
}

// receive hands a packet of the guest's to the stack.
func (d *device) receive(p *packet) {
	dispatcher := d.dispatcher.Load()
	if dispatcher == nil {
		return
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(buffer.NewViewWithData(p.network))})
	defer pkt.DecRef()
	protocol := header.IPv4ProtocolNumber
	if p.v6 {
		protocol = header.IPv6ProtocolNumber
	}
	(*dispatcher).DeliverNetworkPacket(protocol, pkt)
}

// WritePackets implements stack.LinkWriter.
func (d *device) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, pkt := range list.AsSlice() {
		if !d.holdLocked(pkt) {
			d.sendLocked(queued{pkt: pkt})
		}
	}
	return list.Len(), nil // What was dropped is the wire's loss, as on any wire.
}

// send sends a frame of our own.
func (d *device) send(frame []byte) {
	if frame == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sendLocked(queued{frame: frame})
}

func (d *device) sendLocked(q queued) {
	switch {
	case d.gone:
		return
	case !d.open.Load():
		d.flows.framesDropped.Add(1)
		return
	case len(d.queue) == 0:
		sent, err := d.link.send(d.iovecs(q))
		if err != nil {
			d.failLocked(err)
			return
		}
		if sent {
			d.flows.framesOut.Add(1)
			return
		}
	}
	size := q.size()
	if len(d.queue) >= d.frames || int64(d.bytes+size) > d.queued.Load() {
		d.flows.framesDropped.Add(1)
		return
	}
	if q.pkt != nil {
		q.pkt = q.pkt.Clone() // The caller's list is its own.
	}
	d.queue = append(d.queue, q)
	d.bytes += size
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *device) iovecs(q queued) [][]byte {
	if q.frame != nil {
		return append(d.scratch[:0], q.frame)
	}
	head := d.header4
	if q.pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		head = d.header6
	}
	d.scratch = append(d.scratch[:0], head)
	for _, part := range q.pkt.AsSlices() {
		if len(part) > 0 {
			d.scratch = append(d.scratch, part)
		}
	}
	return d.scratch
}

func (d *device) failLocked(err error) {
	if !d.gone {
		d.gone, d.err = true, err
		d.failed()
	}
}

// drain sends what waits, whenever the socket takes some again, until the link is closed or nobody is at its other end.
func (d *device) drain(done <-chan struct{}) {
	for {
		select {
		case <-done:
			return
		case <-d.wake:
		}
		for {
			blocked, err := d.flush()
			if err != nil {
				return
			}
			if !blocked {
				break
			}
			// It is closed, or no descriptors are left to wait with.
			if d.link.writable() != nil && !pause(done) {
				return
			}
		}
	}
}

// pause lets others give descriptors back; false: it is over.
func pause(done <-chan struct{}) bool {
	timer := time.NewTimer(50 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}

// flush sends what waits, as far as the socket takes it.
func (d *device) flush() (blocked bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.queue) > 0 {
		sent, err := d.link.send(d.iovecs(d.queue[0]))
		if err != nil {
			d.failLocked(err)
			return false, err
		}
		if !sent {
			return true, nil
		}
		d.flows.framesOut.Add(1)
		d.bytes -= d.queue[0].size()
		d.queue[0].release()
		d.queue[0] = queued{}
		d.queue = d.queue[1:]
	}
	d.queue = nil
	return false, nil
}

// end lets go of what still waits, and tells why the link failed, if it did.
func (d *device) end() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gone = true
	d.dropAckLocked()
	for _, q := range d.queue {
		q.release()
	}
	d.queue, d.bytes = nil, 0
	return d.err
}

// The rest of stack.LinkEndpoint: an interface whose properties never change.

// MTU implements stack.LinkEndpoint.
func (d *device) MTU() uint32 { return MTU }

// SetMTU implements stack.LinkEndpoint.
func (d *device) SetMTU(uint32) {}

// MaxHeaderLength implements stack.LinkEndpoint; the Ethernet header is sent from a place of its own.
func (d *device) MaxHeaderLength() uint16 { return 0 }

// LinkAddress implements stack.LinkEndpoint.
func (d *device) LinkAddress() tcpip.LinkAddress { return "" }

// SetLinkAddress implements stack.LinkEndpoint.
func (d *device) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities implements stack.LinkEndpoint: a socket of the same kernel damages nothing, so what the guest's checksums
// say is not looked at.
func (d *device) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// Attach implements stack.LinkEndpoint.
func (d *device) Attach(dispatcher stack.NetworkDispatcher) {
	if dispatcher == nil {
		d.dispatcher.Store(nil)
		return
	}
	d.dispatcher.Store(&dispatcher)
}

// IsAttached implements stack.LinkEndpoint.
func (d *device) IsAttached() bool { return d.dispatcher.Load() != nil }

// Wait implements stack.LinkEndpoint.
func (d *device) Wait() {}

// ARPHardwareType implements stack.LinkEndpoint.
func (d *device) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }

// AddHeader implements stack.LinkEndpoint.
func (d *device) AddHeader(*stack.PacketBuffer) {}

// ParseHeader implements stack.LinkEndpoint.
func (d *device) ParseHeader(*stack.PacketBuffer) bool { return true }

// Close implements stack.LinkEndpoint.
func (d *device) Close() {}

// SetOnCloseAction implements stack.LinkEndpoint.
func (d *device) SetOnCloseAction(func()) {}
