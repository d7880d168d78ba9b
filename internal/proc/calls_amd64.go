package proc

import "golang.org/x/sys/unix"

const (
	machine      = unix.AUDIT_ARCH_X86_64
	foreignCalls = 0x40000000 // the numbers of x32 begin here
)

var refusedHere = []uint32{unix.SYS_MKNOD, unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT, unix.SYS_USELIB, unix.SYS_USTAT}
