package proc

import (
	"slices"

	"golang.org/x/sys/unix"
)

// refusedCalls are those that a child in a jail has no use for, and whoever has taken it over would have: they ask for
// namespaces and mounts, for other processes, for keys of the daemon's, or for parts of the kernel with a long record of
// faults. A VM process needs none of them; it asks for some and does without.
var refusedCalls = slices.Concat(refusedHere, []uint32{
	unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_MOVE_MOUNT,
	unix.SYS_OPEN_TREE, unix.SYS_FSOPEN, unix.SYS_FSMOUNT, unix.SYS_FSCONFIG, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR,
	unix.SYS_MKNODAT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD,
	unix.SYS_NAME_TO_HANDLE_AT, unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_FANOTIFY_INIT,
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PROCESS_MADVISE, unix.SYS_PROCESS_MRELEASE,
	unix.SYS_PIDFD_OPEN, unix.SYS_PIDFD_GETFD, unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_KCMP,
	// It is given the sockets that it listens on. Landlock does not keep anybody from sockets that have a path.
	unix.SYS_SOCKET, unix.SYS_SOCKETPAIR, unix.SYS_CONNECT,
	unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY,
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD,
	unix.SYS_REBOOT, unix.SYS_SYSLOG, unix.SYS_ACCT, unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME,
	unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_ADJTIMEX, unix.SYS_CLOCK_ADJTIME,
})

// newSpaces are the flags by which clone makes namespaces.
const newSpaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
	unix.CLONE_NEWPID | unix.CLONE_NEWNET

// Where a filter finds what, in struct seccomp_data. The low half of an argument comes first on the machines we run on.
const (
	dataNumber   = 0
	dataMachine  = 4
	dataArgument = 16 // the first
)

// How a filter ends.
const (
	allow = unix.SECCOMP_RET_ALLOW
	fails = unix.SECCOMP_RET_ERRNO
)

// callFilter is the program that the kernel runs before each call of a child. Where the child's namespaces are asked for
// by the call that makes it, clone must be let make them. A child that dials may make sockets of the Internet, and one that
// asks the kernel for the host's addresses.
func callFilter(spacesByClone, dials bool) []unix.SockFilter {
	var p []unix.SockFilter
	load := func(offset uint32) {
		p = append(p, unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset})
	}
	end := func(result uint32) { p = append(p, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: result}) }
	// when does what follows, up to n instructions, only if the comparison holds.
	when := func(compare uint16, with uint32, n uint8) {
		p = append(p, unix.SockFilter{Code: unix.BPF_JMP | compare | unix.BPF_K, K: with, Jf: n})
	}
	unless := func(equals uint32, n uint8) {
		p = append(p, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: equals, Jt: n})
	}
	// The numbers below are of this machine's calls; the kernel offers those of others, too.
	load(dataMachine)
	unless(machine, 1)
	end(unix.SECCOMP_RET_KILL_PROCESS)
	load(dataNumber)
	when(unix.BPF_JGE, foreignCalls, 1)
	end(fails | uint32(unix.ENOSYS))
	if dials {
		when(unix.BPF_JEQ, unix.SYS_SOCKET, 6)
		load(dataArgument)
		unless(unix.AF_INET, 3)
		unless(unix.AF_INET6, 2)
		unless(unix.AF_NETLINK, 1)
		end(fails | uint32(unix.EAFNOSUPPORT))
		end(allow)
	}
	for _, call := range refusedCalls {
		if dials && (call == unix.SYS_SOCKET || call == unix.SYS_CONNECT) {
			continue
		}
		when(unix.BPF_JEQ, call, 1)
		end(fails | uint32(unix.EPERM))
	}
	// Its flags are in memory, where a filter cannot see them. Whoever is told that there is none takes the older one.
	when(unix.BPF_JEQ, unix.SYS_CLONE3, 1)
	end(fails | uint32(unix.ENOSYS))
	if !spacesByClone {
		when(unix.BPF_JEQ, unix.SYS_CLONE, 4)
		load(dataArgument)
		when(unix.BPF_JSET, newSpaces, 1)
		end(fails | uint32(unix.EPERM))
		end(allow)
	}
	end(allow)
	return p
}
