package network

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"forkd.dev/forkd/internal/testenv"
)

// linked is a device and the other end of its link, which does not block.
func linked(t *testing.T, delay time.Duration) (*device, int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	host := os.NewFile(uintptr(fds[1]), "host")
	link, err := openSocket(host)
	if err != nil {
		t.Fatal(err)
	}
	d := newDevice(link, New(Config{Outer: nobody{}}), func() {})
	d.ack.delay = delay
	t.Cleanup(func() {
		_ = d.end()
		_, _, _ = link.close(), host.Close(), unix.Close(fds[0])
	})
	return d, fds[0]
}

// sends is a segment as the stack sends them, of 203.0.114.1:80 to a port of the guest's.
func (d *device) sends(port uint16, flags header.TCPFlags, ack uint32, options []byte, payload string) {
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: 60 + 20, Payload: buffer.MakeWithData([]byte(payload)),
	})
	defer pkt.DecRef()
	tcp := header.TCP(pkt.TransportHeader().Push(20 + len(options)))
	tcp.Encode(&header.TCPFields{SrcPort: 80, DstPort: port, SeqNum: 1, AckNum: ack, DataOffset: uint8(20 + len(options)), Flags: flags})
	copy(tcp[20:], options)
	pkt.TransportProtocolNumber, pkt.NetworkProtocolNumber = header.TCPProtocolNumber, header.IPv4ProtocolNumber
	ip := pkt.NetworkHeader().Push(20)
	copy(ip, []byte{0x45, 0, 0, byte(20 + len(tcp) + len(payload)), 0, 0, 0, 0, 64, 6, 0, 0, 203, 0, 114, 1, 192, 0, 0, 2})
	var list stack.PacketBufferList
	list.PushBack(pkt)
	_, _ = d.WritePackets(list)
}

// heard are the acknowledgements of the frames that have come.
func heard(t *testing.T, fd int) (acks []uint32) {
	t.Helper()
	buf := make([]byte, FrameSize)
	for {
		n, err := unix.Read(fd, buf)
		if err != nil {
			return acks
		}
		acks = append(acks, header.TCP(buf[HeaderSize+20:n]).AckNumber())
	}
}

// TestAcks: an acknowledgement waits for what goes the same way, and nothing that says more waits or is lost.
func TestAcks(t *testing.T) {
	const ack = header.TCPFlagAck
	stamp := []byte{1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 1}
	blocks := []byte{1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2}
	for name, test := range map[string]struct {
		send func(*device)
		want []uint32
	}{
		"alone":           {func(d *device) { d.sends(1, ack, 10, stamp, "") }, nil},
		"with the answer": {func(d *device) { d.sends(1, ack, 10, stamp, ""); d.sends(1, ack|header.TCPFlagPsh, 10, stamp, "x") }, []uint32{10}},
		"with the end":    {func(d *device) { d.sends(1, ack, 10, nil, ""); d.sends(1, ack|header.TCPFlagFin, 10, nil, "") }, []uint32{10}},
		"every second":    {func(d *device) { d.sends(1, ack, 10, nil, ""); d.sends(1, ack, 11, nil, "") }, []uint32{11}},
		"and the third waits": {func(d *device) {
			d.sends(1, ack, 10, nil, "")
			d.sends(1, ack, 11, nil, "")
			d.sends(1, ack, 12, nil, "")
		}, []uint32{11}},
		"the same again":           {func(d *device) { d.sends(1, ack, 10, nil, ""); d.sends(1, ack, 10, nil, "") }, []uint32{10, 10}},
		"an older one after":       {func(d *device) { d.sends(1, ack, 10, nil, ""); d.sends(1, ack, 9, nil, "x") }, []uint32{10, 9}},
		"another connection's":     {func(d *device) { d.sends(1, ack, 10, nil, ""); d.sends(2, ack, 20, nil, "") }, []uint32{10}},
		"another connection talks": {func(d *device) { d.sends(1, ack, 10, nil, ""); d.sends(2, ack, 20, nil, "x") }, []uint32{20}},
		"a reset":                  {func(d *device) { d.sends(1, ack, 10, nil, ""); d.sends(1, header.TCPFlagRst, 0, nil, "") }, []uint32{10, 0}},
		"blocks":                   {func(d *device) { d.sends(1, ack, 10, blocks, "") }, []uint32{10}},
		"over the end of numbers":  {func(d *device) { d.sends(1, ack, 0xffffffff, nil, ""); d.sends(1, ack, 1, nil, "x") }, []uint32{1}},
	} {
		t.Run(name, func(t *testing.T) {
			d, guest := linked(t, time.Hour)
			test.send(d)
			if got := heard(t, guest); len(got) != len(test.want) {
				t.Fatalf("heard %v, want %v", got, test.want)
			} else {
				for i := range got {
					if got[i] != test.want[i] {
						t.Fatalf("heard %v, want %v", got, test.want)
					}
				}
			}
		})
	}
	d, guest := linked(t, time.Millisecond)
	d.sends(1, ack, 10, stamp, "")
	deadline := time.After(testenv.Timeout(10 * time.Second))
	for got := heard(t, guest); len(got) == 0; got = heard(t, guest) {
		select {
		case <-deadline:
			t.Fatal("an acknowledgement with which nothing goes is never sent")
		case <-time.After(time.Millisecond):
		}
	}
}

// TestRoom: what a socket does not take at once goes, in order, as soon as it takes some again.
func TestRoom(t *testing.T) {
	d, guest := linked(t, time.Hour)
	d.frames = 1000
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		d.drain(done)
	}()
	const frames = 200
	for i := range frames {
		frame := make([]byte, 20000)
		frame[0] = byte(i)
		d.send(frame)
	}
	d.mu.Lock()
	waiting := len(d.queue)
	d.mu.Unlock()
	if waiting == 0 {
		t.Fatal("the socket took everything")
	}
	buf := make([]byte, FrameSize)
	deadline := time.After(testenv.Timeout(20 * time.Second))
	for i := 0; i < frames; {
		n, err := unix.Read(guest, buf)
		if err == nil {
			if n != 20000 || buf[0] != byte(i) {
				t.Fatalf("frame %d: %d bytes, number %d", i, n, buf[0])
			}
			i++
			continue
		}
		select {
		case <-deadline:
			t.Fatalf("%d frames have come: %v", i, err)
		case <-time.After(time.Millisecond):
		}
	}
	close(done)
	d.link.stop()
	<-ended
	if dropped := d.flows.framesDropped.Load(); dropped != 0 {
		t.Errorf("%d frames were dropped", dropped)
	}
}
