package proc

import "golang.org/x/sys/unix"

const (
	machine      = unix.AUDIT_ARCH_AARCH64
	foreignCalls = 1 << 31 // there are none
)

var refusedHere []uint32
