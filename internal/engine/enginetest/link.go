package enginetest

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/testenv"
)

// linkPair is the two ends of a link: ours, and that of a machine.
func linkPair(t *testing.T) (ours int, machine *os.File) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range pair {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	machine = os.NewFile(uintptr(pair[1]), "link")
	t.Cleanup(func() {
		_ = unix.Close(pair[0])
		_ = machine.Close()
	})
	return pair[0], machine
}

// linked restores a machine of the fixture with a link.
func (f *fixture) linked(t *testing.T, link *os.File) engine.Machine {
	t.Helper()
	spec := f.spec(t)
	spec.Link = link
	m, err := f.engine.Restore(t.Context(), spec, f.checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// frame waits for the next frame of a link; nil: none came.
func frame(t *testing.T, link int, wait time.Duration) []byte {
	t.Helper()
	poll := []unix.PollFd{{Fd: int32(link), Events: unix.POLLIN}}
	if n, err := unix.Poll(poll, int(wait.Milliseconds())); n == 0 || err != nil {
		return nil
	}
	buf := make([]byte, 128<<10)
	n, err := unix.Read(link, buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

// The parts of an Ethernet frame with a UDP datagram over IPv4.
const (
	atIP      = 14
	atUDP     = atIP + 20
	atPayload = atUDP + 8
)

// testLink: frames pass both ways unchanged, up to the largest, to a machine that was frozen with its network up and
// another link, or none. Nothing is sent that the guest did not send.
func testLink(t *testing.T, f *fixture) {
	link, machine := linkPair(t)
	m := f.linked(t, machine)
	_ = machine.Close() // The machine has its own.
	g := Talk(t, m)
	if b := frame(t, link, 300*time.Millisecond); b != nil {
		t.Fatalf("a restored machine has sent %d bytes by itself: %x", len(b), b[:min(len(b), 64)])
	}
	if mtu := g.Do("cat /sys/class/net/eth0/mtu"); mtu != `"65520"` {
		t.Errorf("the guest's MTU is %s", mtu)
	}
	for _, n := range []int{1, 100, 8180} { // eight bytes each
		answered := make(chan []byte, 1)
		go func() {
			b := frame(t, link, testenv.Timeout(10*time.Second))
			answered <- b
			if len(b) < atPayload {
				return
			}
			reply := bytes.Clone(b)
			swap(reply, 0, 6, 6)
			swap(reply, atIP+12, atIP+16, 4)
			swap(reply, atUDP, atUDP+2, 2)
			reply[atUDP+6], reply[atUDP+7] = 0, 0 // Without a checksum of its own: the guest's is over the same, in another order.
			for i := atPayload; i < len(reply); i++ {
				reply[i] ^= 0x20
			}
			if _, err := unix.Write(link, reply); err != nil {
				t.Error(err)
			}
		}()
		got := g.Do("send " + strconv.Itoa(n) + " abcdefgh")
		b := <-answered
		if want := strings.Repeat("abcdefgh", n); len(b) < atPayload || string(b[atPayload:]) != want {
			t.Fatalf("sent %d bytes, a frame of %d bytes came", len(want), len(b))
		}
		if want := []byte{2, 0x66, 0x6b, 0x64, 0, 1, 2, 0x66, 0x6b, 0x64, 0, 2, 8, 0}; !bytes.Equal(b[:atIP], want) {
			t.Errorf("the frame begins with % x, want % x", b[:atIP], want)
		}
		if want := strings.Repeat("ABCDEFGH", n); got != want {
			t.Errorf("%d bytes were answered, the guest has %d: %.60q", len(want), len(got), got)
		}
	}
}

func swap(b []byte, i, j, n int) {
	for k := range n {
		b[i+k], b[j+k] = b[j+k], b[i+k]
	}
}

// testLinkToNobody: a machine that was given no link, or one whose other end is gone, sends into the void and lives.
func testLinkToNobody(t *testing.T, f *fixture) {
	link, machine := linkPair(t)
	gone := f.linked(t, machine)
	_ = machine.Close()
	_ = unix.Shutdown(link, unix.SHUT_RDWR)
	for name, m := range map[string]engine.Machine{"none": f.restore(t), "gone": gone} {
		g := Talk(t, m)
		g.Do("flood 100")
		for range 20 {
			if answer := g.Do("get parent"); answer != "memory" {
				t.Errorf("%s: the guest answers %q", name, answer)
			}
		}
	}
}

// testLinkNobodyReads: a link that is full stops neither the guest nor whoever talks to it, and goes on when it is read.
func testLinkNobodyReads(t *testing.T, f *fixture) {
	link, machine := linkPair(t)
	m := f.linked(t, machine)
	_ = machine.Close()
	g := Talk(t, m)
	g.Do("flood 2000")
	for range 50 {
		if answer := g.Do("get parent"); answer != "memory" {
			t.Errorf("the guest answers %q", answer)
		}
	}
	for i := range 200 {
		if frame(t, link, testenv.Timeout(10*time.Second)) == nil {
			t.Fatalf("only %d frames came of a machine whose link had been full", i)
		}
	}
}
