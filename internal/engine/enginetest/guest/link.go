package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The guest's network, as the tests have it.
const (
	nic     = "eth0"
	ownAddr = "192.0.0.2"
	peer    = "192.0.0.1"
	port    = 7
)

// openLink brings the network device up, with one neighbour that is never asked for, and a socket to talk to it.
func openLink() (*net.UDPConn, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	// Or the kernel has something to say to its neighbours by itself.
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+nic+"/disable_ipv6", []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := setAddress(fd, unix.SIOCSIFADDR, ownAddr); err != nil {
		return nil, err
	}
	if err := setAddress(fd, unix.SIOCSIFNETMASK, "255.255.255.248"); err != nil {
		return nil, err
	}
	req, err := unix.NewIfreq(nic)
	if err != nil {
		return nil, err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return nil, fmt.Errorf("bring %s up: %w", nic, err)
	}
	if err := addNeighbour(fd); err != nil {
		return nil, err
	}
	return net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.ParseIP(peer), Port: port})
}

func setAddress(fd int, call uint, addr string) error {
	req, err := unix.NewIfreq(nic)
	if err != nil {
		return err
	}
	if err := req.SetInet4Addr(net.ParseIP(addr).To4()); err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, call, req); err != nil {
		return fmt.Errorf("give %s the address %s: %w", nic, addr, err)
	}
	return nil
}

func exchange(conn *net.UDPConn, count, text string) (string, error) {
	n, err := strconv.Atoi(count)
	if err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte(strings.Repeat(text, n))); err != nil {
		return "", err
	}
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	buf := make([]byte, 64<<10)
	got, err := conn.Read(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return "ok silence", nil
	}
	return "ok " + string(buf[:got]), err
}

// flood goes on sending, also when nobody takes what it sends any more.
func flood(conn *net.UDPConn, count string) (string, error) {
	n, err := strconv.Atoi(count)
	if err != nil {
		return "", err
	}
	go func() {
		for range n {
			_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
			_, _ = conn.Write(make([]byte, 32<<10))
		}
	}()
	return "ok", nil
}
