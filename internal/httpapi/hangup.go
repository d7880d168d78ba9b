package httpapi

import (
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hangupInterval is how often a client's connection is looked at.
const hangupInterval = time.Second

// watchHangup calls gone when the client has closed its connection, until stop is called, which waits. Reading would tell
// as well, but not while what the client has sent waits for a guest that takes nothing.
func watchHangup(client net.Conn, gone func()) (stop func()) {
	return every(hangupInterval, func() (more bool) {
		if hungUp(client) {
			gone()
			return false
		}
		return true
	})
}

// every does something again and again until it wants no more or stop is called, which waits.
func every(interval time.Duration, do func() (more bool)) (stop func()) {
	end := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-end:
				return
			}
			if !do() {
				return
			}
		}
	})
	return sync.OnceFunc(func() {
		close(end)
		running.Wait()
	})
}

// hungUp reports whether the other end has said that it sends no more: a client that lives never does, its half-closes
// are frames.
func hungUp(c net.Conn) bool {
	for { // through what encrypts or counts it
		below, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = below.NetConn()
	}
	s, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return true
	}
	up := true
	err = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(p, 0)
		up = err != nil || n == 0 || p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) == 0
	})
	return err != nil || !up
}
