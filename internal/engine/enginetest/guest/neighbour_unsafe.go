package main

import (
	"fmt"
	"net"
	"unsafe"

	"golang.org/x/sys/unix"
)

var peerMAC = [6]byte{0x02, 0x66, 0x6b, 0x64, 0x00, 0x01}

// arpRequest is the kernel's struct arpreq.
type arpRequest struct {
	protocol, hardware [16]byte
	flags              int32
	netmask, device    [16]byte
}

func addNeighbour(fd int) error {
	const permanent, complete = 0x04, 0x02
	r := arpRequest{flags: permanent | complete}
	r.protocol[0] = unix.AF_INET
	copy(r.protocol[4:], net.ParseIP(peer).To4())
	r.hardware[0] = unix.ARPHRD_ETHER
	copy(r.hardware[2:], peerMAC[:])
	copy(r.device[:], nic)
	// SAFETY: r outlives the call and has the layout of the kernel's struct, which the call only reads.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSARP, uintptr(unsafe.Pointer(&r))); errno != 0 {
		return fmt.Errorf("add a neighbour: %w", errno)
	}
	return nil
}
