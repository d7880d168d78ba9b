package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/testenv"
)

// nobody is an outside in which every second address takes connections and says nothing.
type nobody struct{}

func (nobody) DialContext(_ context.Context, _, address string) (net.Conn, error) {
	if len(address)%2 == 0 {
		return nil, errors.New("nobody is there")
	}
	near, far := net.Pipe()
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := far.Read(buf); err != nil {
				return
			}
		}
	}()
	return near, nil
}

func (nobody) Lookup(context.Context, string, uint16) ([]netip.Addr, error) {
	return []netip.Addr{netip.MustParseAddr("203.0.114.1"), netip.MustParseAddr("2600::1")}, nil
}

func (nobody) Own(netip.Addr) bool { return false }

// FuzzFrames lets a guest send anything: whatever it is, nothing panics, and what is kept stays bounded. An input is a list of
// frames, each behind its length and how much of it is set right: all headers, only Ethernet's, or nothing.
func FuzzFrames(f *testing.F) {
	add := func(frames ...[]byte) {
		var input []byte
		for _, frame := range frames {
			input = append(append(input, 2, byte(len(frame)>>8), byte(len(frame))), frame...)
		}
		f.Add(input)
	}
	tcpSegment := func(flags byte, seq, ack byte, data string) []byte {
		return append([]byte{3, 232, 0, 80, 0, 0, 0, seq, 0, 0, 0, ack, 0x50, flags, 255, 255, 0, 0, 0, 0}, data...)
	}
	add(frame4("203.0.114.1", 6, tcpSegment(2, 0, 0, ""), nil), frame4("203.0.114.1", 6, tcpSegment(0x18, 1, 1, "GET / HTTP/1.1\r\n\r\n"), nil))
	add(frame6("2600::1", 6, tcpSegment(2, 0, 0, ""), nil), frame6("2600::1", 6, tcpSegment(4, 1, 1, ""), nil))
	add(frame4("203.0.114.1", 17, ports(1, 7), nil), frame4("192.0.0.1", 17, append([]byte{0, 9, 0, 53, 0, 37, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, "\x04good\x07example\x00\x00\x01\x00\x01"...), nil))
	add(frame4("203.0.114.1", 17, ports(1, 7), func(ip []byte) { ip[6] = 0x20 }), frame4("203.0.114.1", 17, make([]byte, 40), func(ip []byte) { ip[7] = 3 }))
	add(arp("192.0.0.2", "192.0.0.1", nil), frame4("192.0.0.1", 1, []byte{8, 0, 0, 0, 0, 1, 0, 1, 1}, nil))
	add(frame4("255.255.255.255", 17, append(ports(68, 67)[:8], make([]byte, 260)...), func(ip []byte) { copy(ip[12:16], []byte{0, 0, 0, 0}) }))
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		f.Fatal(err)
	}
	guest, host := os.NewFile(uintptr(fds[0]), "guest"), os.NewFile(uintptr(fds[1]), "host")
	n := New(Config{Outer: nobody{}, Policy: egress.Policy{Preset: egress.Open}, Limits: Limits{Flows: 64, FlowsPerSecond: 1e6}, Pool: NewPool(0, 100)})
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.Context()))
	done := make(chan error, 2)
	go func() { done <- n.Run(ctx, host) }()
	go func() { // A guest that takes what it is sent, or the test would be of a full socket.
		buf := make([]byte, FrameSize)
		for {
			if _, err := guest.Read(buf); err != nil {
				done <- nil
				return
			}
		}
	}()
	f.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			f.Error(err)
		}
		_, _ = guest.Close(), host.Close()
		if err := <-done; err != nil {
			f.Error(err)
		}
	})
	f.Fuzz(func(t *testing.T, input []byte) {
		frames := n.Totals().FramesIn
		sent := int64(0)
		for len(input) >= 3 {
			mode, size := input[0], int(input[1])<<8|int(input[2])
			body := input[3:]
			body = body[:min(len(body), size)]
			input = input[3+len(body):]
			frame := body
			switch mode % 6 {
			case 0:
				frame = frame4("203.0.114.1", protoTCP, body, nil)
			case 1:
				frame = frame6("2600::1", protoTCP, body, nil)
			case 3:
				frame = frame4("192.0.0.1", protoUDP, append([]byte{0, 9, 0, 53, byte((8 + len(body)) >> 8), byte(8 + len(body)), 0, 0}, body...), nil)
			case 4:
				frame = append(frame4("203.0.114.1", 0, nil, nil)[:HeaderSize], body...)
			case 5:
				frame = append(frame6("2600::1", 0, nil, nil)[:HeaderSize], body...)
			}
			if _, err := guest.Write(frame); err != nil && !errors.Is(err, unix.EMSGSIZE) {
				t.Fatal(err)
			} else if err == nil {
				sent++
			}
		}
		deadline := time.After(testenv.Timeout(20 * time.Second))
		for n.Totals().FramesIn < frames+sent {
			select {
			case <-deadline:
				t.Fatalf("frames are not read any more: %+v", n.Totals())
			case <-time.After(50 * time.Microsecond): // Frames are read elsewhere.
			}
		}
		if totals := n.Totals(); totals.Open > 64 || len(n.Flows()) > 64+1024+2*maxRefusals {
			t.Fatalf("more is kept than the limits allow: %+v", totals)
		}
	})
}
