package network

import (
	"bytes"
	"encoding/binary"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// ackDelay is how long an acknowledgement waits for something to go with. The stack acknowledges at once whatever comes: a
// guest that asks and waits for an answer would be interrupted twice, and an interrupt is dear where CPUs are emulated.
// What answers at all on this host or near it does so sooner; senders take many times as much for what it is (Linux: 40 ms).
const ackDelay = 2 * time.Millisecond

// maxAck is the longest frame of an acknowledgement without blocks: Ethernet, IPv6, TCP with a time stamp.
const maxAck = HeaderSize + header.IPv6MinimumSize + header.TCPMinimumSize + 12

// heldAck is an acknowledgement that waits, of one connection at a time. Nothing is lost if a later segment of its
// connection goes first: that says as much. device.mu guards it.
type heldAck struct {
	frame [maxAck]byte
	size  int // 0: none waits
	flow  [36]byte
	ack   uint32
	timer *time.Timer
	delay time.Duration
}

// segment is what is to be known of a packet of the stack's.
type segment struct {
	flow   [36]byte // both addresses and ports
	number uint32   // it acknowledges
	acks   bool     // it does
	bare   bool     // it does nothing else
}

func look(pkt *stack.PacketBuffer) (s segment, ok bool) {
	tcp := header.TCP(pkt.TransportHeader().Slice())
	ip := pkt.NetworkHeader().Slice()
	if pkt.TransportProtocolNumber != header.TCPProtocolNumber || len(tcp) < header.TCPMinimumSize || len(ip) < header.IPv4MinimumSize {
		return s, false
	}
	if pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		if len(ip) < header.IPv6MinimumSize {
			return s, false
		}
		copy(s.flow[:], ip[8:40])
	} else {
		copy(s.flow[:], ip[12:20])
	}
	copy(s.flow[32:], tcp[:4])
	s.number = tcp.AckNumber()
	s.acks = tcp.Flags().Contains(header.TCPFlagAck)
	// Blocks and the like are news that must not wait.
	s.bare = tcp.Flags() == header.TCPFlagAck && pkt.Data().Size() == 0 && HeaderSize+len(ip)+len(tcp) <= maxAck && plainOptions(tcp.Options())
	return s, true
}

// plainOptions: nothing but a time stamp, as the stack writes it.
func plainOptions(options []byte) bool {
	return len(options) == 0 || len(options) == 12 && binary.BigEndian.Uint32(options) == 0x0101080a
}

// holdLocked takes an acknowledgement of the stack's to go later, if it may wait. What waits already is sent before the
// packet, unless that says as much. Every second one of a connection goes at once: a sender's window is to grow.
func (d *device) holdLocked(pkt *stack.PacketBuffer) (held bool) {
	s, ok := look(pkt)
	if !ok {
		return false
	}
	if d.ack.size > 0 && d.ack.flow == s.flow {
		if newer := int32(s.number - d.ack.ack); !s.acks || newer < 0 || newer == 0 && s.bare {
			d.sendAckLocked()
		} else {
			d.dropAckLocked()
		}
		return false
	}
	if !s.bare || len(d.queue) > 0 {
		return false
	}
	if d.ack.size > 0 {
		d.sendAckLocked()
	}
	d.ack.size, d.ack.flow, d.ack.ack = 0, s.flow, s.number
	for _, part := range d.iovecs(queued{pkt: pkt}) {
		d.ack.size += copy(d.ack.frame[d.ack.size:], part)
	}
	if d.ack.timer == nil {
		d.ack.timer = time.AfterFunc(d.ack.delay, d.late)
	} else {
		d.ack.timer.Reset(d.ack.delay)
	}
	return true
}

// late sends what has waited long enough.
func (d *device) late() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sendAckLocked()
}

func (d *device) sendAckLocked() {
	if d.ack.size == 0 {
		return
	}
	frame := bytes.Clone(d.ack.frame[:d.ack.size])
	d.dropAckLocked()
	d.sendLocked(queued{frame: frame})
}

func (d *device) dropAckLocked() {
	d.ack.size = 0
	if d.ack.timer != nil {
		d.ack.timer.Stop()
	}
}
