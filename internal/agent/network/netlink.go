package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agent/quick"
)

const (
	netlinkHeader = 16
	// replyRoom holds what the kernel says at once: at most 32 KiB of a list, and never more than that of confirmations.
	replyRoom = 32 << 10
	// maxBatch messages have their confirmations in the socket's buffer at the same time.
	maxBatch = 64
)

var order = binary.NativeEndian

// netlink is a socket to the kernel, whose answers are there when a request has been written: nothing here waits.
type netlink struct {
	fd    int
	reply []byte
}

func openNetlink(protocol int) (*netlink, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	// Bound now: the first write would do it, in a fork.
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, errors.Join(fmt.Errorf("bind netlink socket: %w", err), unix.Close(fd))
	}
	return &netlink{fd: fd, reply: make([]byte, replyRoom)}, nil
}

func (n *netlink) close() { _ = unix.Close(n.fd) }

// do sends a batch whose messages all ask for confirmation. All are carried out; the first error is returned.
func (n *netlink) do(b *batch) error {
	if b.count == 0 {
		return nil
	}
	if _, err := quick.Write(n.fd, b.b); err != nil {
		return fmt.Errorf("ask the kernel: %w", err)
	}
	var first error
	for left := b.count; left > 0; {
		err := n.receive(func(kind uint16, body []byte) error {
			if kind != unix.NLMSG_ERROR || len(body) < 4 {
				return nil
			}
			left--
			if errno := int32(order.Uint32(body)); errno != 0 && first == nil && !b.tolerable(-errno) {
				first = unix.Errno(-errno)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return first
}

// list sends a request and calls f with each message of the answer.
func (n *netlink) list(b *batch, f func(body []byte)) error {
	if _, err := quick.Write(n.fd, b.b); err != nil {
		return fmt.Errorf("ask the kernel: %w", err)
	}
	for done := false; !done; {
		err := n.receive(func(kind uint16, body []byte) error {
			switch kind {
			case unix.NLMSG_DONE:
				done = true
			case unix.NLMSG_ERROR:
				done = true
				if len(body) >= 4 && order.Uint32(body) != 0 {
					return unix.Errno(-int32(order.Uint32(body)))
				}
			default:
				f(body)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// receive calls f with the messages of one datagram.
func (n *netlink) receive(f func(kind uint16, body []byte) error) error {
	size, err := quick.Read(n.fd, n.reply)
	if err != nil {
		return fmt.Errorf("read the kernel's answer: %w", err)
	}
	var first error
	split(n.reply[:size], func(kind uint16, body []byte) {
		if err := f(kind, body); err != nil && first == nil {
			first = err
		}
	})
	return first
}

// split takes a datagram apart. What has no sense is left out.
func split(b []byte, f func(kind uint16, body []byte)) {
	for len(b) >= netlinkHeader {
		size := int(order.Uint32(b))
		if size < netlinkHeader || size > len(b) {
			return
		}
		f(order.Uint16(b[4:]), b[netlinkHeader:size])
		b = b[min(align(size), len(b)):]
	}
}

func align(n int) int { return (n + 3) &^ 3 }

// batch is a few messages in one datagram.
type batch struct {
	b     []byte
	start int // of the message that is being made
	count int
	gone  bool // that something is gone already is no error
}

func (b *batch) begin(kind uint16, flags uint16) {
	b.start = len(b.b)
	b.b = append(b.b, make([]byte, netlinkHeader)...)
	order.PutUint16(b.b[b.start+4:], kind)
	order.PutUint16(b.b[b.start+6:], flags|unix.NLM_F_REQUEST)
	b.count++
}

func (b *batch) end() {
	order.PutUint32(b.b[b.start:], uint32(len(b.b)-b.start))
	for len(b.b) != align(len(b.b)) {
		b.b = append(b.b, 0)
	}
}

func (b *batch) tolerable(errno int32) bool {
	return b.gone && (errno == int32(unix.ENOENT) || errno == int32(unix.ESRCH))
}

func (b *batch) u8(v ...byte) { b.b = append(b.b, v...) }

func (b *batch) u32(v uint32) { b.b = order.AppendUint32(b.b, v) }

// attribute is padded to four bytes.
func (b *batch) attribute(kind uint16, value []byte) {
	b.b = order.AppendUint16(b.b, uint16(4+len(value)))
	b.b = order.AppendUint16(b.b, kind)
	b.b = append(b.b, value...)
	for len(b.b) != align(len(b.b)) {
		b.b = append(b.b, 0)
	}
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// link is struct ifinfomsg.
func (b *batch) link(index int, flags, change uint32) {
	b.u8(unix.AF_UNSPEC, 0, 0, 0)
	b.u32(uint32(index))
	b.u32(flags)
	b.u32(change)
}

// address is struct ifaddrmsg with an address that is not asked for before it is used.
func (b *batch) address(index int, prefix netip.Prefix) {
	b.u8(family(prefix.Addr()), byte(prefix.Bits()), unix.IFA_F_NODAD|unix.IFA_F_PERMANENT, unix.RT_SCOPE_UNIVERSE)
	b.u32(uint32(index))
	b.attribute(unix.IFA_LOCAL, prefix.Addr().AsSlice())
	b.attribute(unix.IFA_ADDRESS, prefix.Addr().AsSlice())
}

// neighbour is struct ndmsg with one that is never looked for.
func (b *batch) neighbour(index int, addr netip.Addr, mac []byte) {
	b.u8(family(addr), 0, 0, 0)
	b.u32(uint32(index))
	b.b = order.AppendUint16(b.b, unix.NUD_PERMANENT)
	b.u8(0, unix.RTN_UNICAST)
	b.attribute(unix.NDA_DST, addr.AsSlice())
	b.attribute(unix.NDA_LLADDR, mac)
}

// route is one through a gateway, or a black hole.
type route struct {
	to     netip.Prefix // invalid: everything
	via    netip.Addr
	v6     bool // of a black hole for everything
	link   int
	metric int
}

// route is struct rtmsg.
func (b *batch) route(r route) {
	kind, fam := byte(unix.RTN_BLACKHOLE), byte(unix.AF_INET)
	switch {
	case r.via.IsValid():
		kind, fam = unix.RTN_UNICAST, family(r.via)
	case r.to.IsValid():
		fam = family(r.to.Addr())
	case r.v6:
		fam = unix.AF_INET6
	}
	bits := 0
	if r.to.IsValid() {
		bits = r.to.Bits()
	}
	b.u8(fam, byte(bits), 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, kind)
	b.u32(0)
	if r.to.IsValid() {
		b.attribute(unix.RTA_DST, r.to.Addr().AsSlice())
	}
	if r.via.IsValid() {
		b.attribute(unix.RTA_GATEWAY, r.via.AsSlice())
		b.attribute(unix.RTA_OIF, order.AppendUint32(nil, uint32(r.link)))
	}
	b.attribute(unix.RTA_PRIORITY, order.AppendUint32(nil, uint32(r.metric)))
}
