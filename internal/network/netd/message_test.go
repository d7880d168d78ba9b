package netd

import (
	"context"
	"encoding/binary"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// sockets are both ends of a connection.
func sockets(t testing.TB) (a, b *socket) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*socket
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		conn, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = &socket{conn: conn.(*net.UnixConn)}
		t.Cleanup(ends[i].close)
	}
	return ends[0], ends[1]
}

// TestMessages: descriptors come with the message that they were sent with, however messages are read.
func TestMessages(t *testing.T) {
	a, b := sockets(t)
	ours, machine, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll([]*os.File{ours, machine})
	send := []struct {
		id    string
		files []*os.File
	}{{"none", nil}, {"one", []*os.File{ours}}, {"two", []*os.File{ours, machine}}, {"last", nil}}
	for _, s := range send {
		if err := a.send(&reply{ID: s.id}, s.files...); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range send {
		var r reply
		files, err := b.receive(&r)
		if err != nil || r.ID != s.id || len(files) != len(s.files) {
			t.Fatalf("message %q came as %q with %d descriptors, error %v", s.id, r.ID, len(files), err)
		}
		for _, f := range files {
			if !isLink(f) {
				t.Errorf("message %q: a descriptor is no link", s.id)
			}
		}
		closeAll(files)
	}
}

// TestLeftInTheMiddle: descriptors of a message that never came whole are not kept.
func TestLeftInTheMiddle(t *testing.T) {
	a, b := sockets(t)
	ours, machine, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll([]*os.File{ours, machine})
	se := &session{s: NewServer(nil, nil), socket: b, ready: make(chan struct{}, 1), closed: make(chan struct{})}
	if _, _, err := a.conn.WriteMsgUnix([]byte{0}, unix.UnixRights(descriptor(ours)), nil); err != nil {
		t.Fatal(err)
	}
	a.close()
	se.serve(context.WithoutCancel(t.Context()))
	if len(b.files) != 1 || descriptor(b.files[0]) != -1 {
		t.Errorf("%d descriptors, not closed", len(b.files))
	}
}

// FuzzReceive: whatever the process says, the daemon reads messages or gives the connection up.
func FuzzReceive(f *testing.F) {
	f.Add([]byte{0, 0, 0, 2, '{', '}'}, true)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, false)
	f.Add(append(binary.BigEndian.AppendUint32(nil, 9), `{"seq":1}`...), true)
	f.Add(append(binary.BigEndian.AppendUint32(nil, 26), `{"ids":["a"],"totals":null}`...), true)
	f.Fuzz(func(t *testing.T, text []byte, withFile bool) {
		a, b := sockets(t)
		c := newConn(b, func(*reply) {})
		defer c.end()
		if len(text) > 0 {
			var oob []byte
			if withFile {
				oob = unix.UnixRights(0)
			}
			if _, _, err := a.conn.WriteMsgUnix(text, oob, nil); err != nil {
				t.Fatal(err)
			}
		}
		a.close()
		select {
		case <-c.closed:
		case <-time.After(10 * time.Second):
			t.Fatal("the connection's end was not seen")
		}
	})
}
