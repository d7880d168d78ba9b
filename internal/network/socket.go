package network

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// socket is a Network's own descriptor of its link, and how it is waited for. The runtime's poller would watch it for
// being writable, too: then each frame that the guest's machine takes would wake this process, in the middle of the
// machine's way to its guest. So there are two sets of events, which the poller watches instead: one of frames to read, and
// one of room to write, which tells once, when somebody has asked.
type socket struct {
	fd      int
	in      *os.File
	reading syscall.RawConn

	mu      sync.Mutex
	out     *os.File // nil until somebody has to wait for room
	stopped bool
}

// openSocket makes one; link stays the caller's.
func openSocket(link *os.File) (*socket, error) {
	raw, err := link.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &socket{fd: -1}
	control := raw.Control(func(from uintptr) { s.fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) })
	if err := errors.Join(control, err); err != nil {
		return nil, err
	}
	// As large as the host allows without privileges; a smaller one only sends more often.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, LinkBuffer)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, LinkBuffer)
	err = unix.SetNonblock(s.fd, true)
	if err == nil {
		s.in, err = s.set(unix.EPOLLIN)
	}
	if err == nil {
		s.reading, err = s.in.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// set makes a set of the socket's events.
func (s *socket) set(events uint32) (*os.File, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a set of events: %w", err)
	}
	err = unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, s.fd, &unix.EpollEvent{Events: events, Fd: int32(s.fd)}) //nolint:gosec // a descriptor.
	if err == nil {
		err = unix.SetNonblock(fd, true) // Only so is it watched.
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "events"), nil //nolint:gosec // a descriptor.
}

// read waits for a frame; 0 bytes: nobody is at the other end (see gone), or a frame of none. One reads at a time.
func (s *socket) read(p []byte) (n int, err error) {
	wait := s.reading.Read(func(uintptr) bool {
		n, err = readNow(uintptr(s.fd), p) //nolint:gosec // a descriptor.
		return !errors.Is(err, unix.EAGAIN)
	})
	if wait != nil {
		return 0, wait
	}
	return n, err
}

// gone tells whether the other end is closed. A guest can send a frame of no bytes, which reads like the end.
func (s *socket) gone() bool {
	poll := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLRDHUP}} //nolint:gosec // a descriptor.
	_, err := unix.Poll(poll, 0)
	return err == nil && poll[0].Revents&(unix.POLLHUP|unix.POLLRDHUP|unix.POLLERR) != 0
}

// send sends a frame in parts without waiting. An error means that nobody is at the other end.
func (s *socket) send(parts [][]byte) (sent bool, err error) {
	switch err = sendNow(uintptr(s.fd), parts); { //nolint:gosec // a descriptor.
	case err == nil:
		return true, nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		return false, nil
	case errors.Is(err, unix.EMSGSIZE):
		return true, nil // Lost, as it would be on a wire.
	default:
		return false, err
	}
}

// writable waits until there may be room. One waits at a time.
func (s *socket) writable() error {
	room, err := s.room()
	if err != nil {
		return err
	}
	asked := false
	wait := room.Read(func(set uintptr) bool {
		if !asked {
			asked = true
			event := unix.EpollEvent{Events: unix.EPOLLOUT | unix.EPOLLONESHOT, Fd: int32(s.fd)} //nolint:gosec // a descriptor.
			err = unix.EpollCtl(int(set), unix.EPOLL_CTL_MOD, s.fd, &event)                      //nolint:gosec // a descriptor.
			if err != nil {
				return true
			}
		}
		var events [1]unix.EpollEvent
		n := 0
		n, err = unix.EpollWait(int(set), events[:], 0) //nolint:gosec // a descriptor.
		if errors.Is(err, unix.EINTR) {
			err = nil
		}
		return n > 0 || err != nil
	})
	return errors.Join(wait, err)
}

// room is what tells of room.
func (s *socket) room() (syscall.RawConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil, os.ErrClosed
	}
	if s.out == nil {
		out, err := s.set(unix.EPOLLONESHOT)
		if err != nil {
			return nil, err
		}
		s.out = out
	}
	return s.out.SyscallConn()
}

// stop wakes who waits; neither read nor writable waits any more.
func (s *socket) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	if s.in != nil {
		_ = s.in.Close()
	}
	if s.out != nil {
		_ = s.out.Close()
	}
}

// close is called when nobody uses it any more.
func (s *socket) close() error {
	s.stop()
	return unix.Close(s.fd)
}
