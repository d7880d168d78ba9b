package qemu

import (
	"context"
	"os"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/proc"
)

// liveHost is what this host and its QEMU offer for live captures. They need a userfaultfd, which QEMU itself opens.
type liveHost struct {
	lacks  string // what QEMU lacks, or ""
	free   string // why a machine without a jail cannot be captured live, or ""
	jailed string // why one that has no privileges cannot
	device bool   // machines get the device that hands out userfaultfds
}

// reason says why a machine that is started now cannot be captured live, or "".
func (l *liveHost) reason(jailer *proc.Jailer) string {
	if jailer != nil {
		return l.jailed
	}
	return l.free
}

const (
	userfaultDevice = "/dev/userfaultfd"
	userfaultSysctl = "/proc/sys/vm/unprivileged_userfaultfd"
)

// probeLive tries what the daemon may; what its machines may, if they are other users, is up to the administrator. No
// machine is given a privilege for it.
func probeLive(ctx context.Context, h *host) error {
	if h.live.lacks != "" {
		h.live.free, h.live.jailed = h.live.lacks, h.live.lacks
		return nil
	}
	var err error
	if h.live.free, err = protectionUnavailable(ctx, false); err != nil {
		return err
	}
	if h.jailer == nil || !h.jailer.Privileged() {
		if h.live.free != "" && opensDevice(h.version) {
			why, err := protectionUnavailable(ctx, true)
			if err != nil {
				return err
			}
			if why == "" {
				h.live.free, h.live.device = "", true
			}
		}
	}
	h.live.jailed = h.live.free
	if h.live.free == "" && !h.live.device && !othersMay() {
		h.live.jailed = "the kernel refuses userfaultfd to VM processes in jails; see docs/security.md for sysctl " +
			"vm.unprivileged_userfaultfd=1 and FORKD_JAIL=off"
		if opensDevice(h.version) && othersMayOpen() {
			h.live.jailed, h.live.device = "", true
		}
	}
	return nil
}

// othersMay reports whether the kernel gives users without privileges userfaultfds that serve its own faults, too.
func othersMay() bool {
	text, err := os.ReadFile(userfaultSysctl)
	return err == nil && strings.TrimSpace(string(text)) == "1"
}

// othersMayOpen reports whether the administrator has opened the device to everybody.
func othersMayOpen() bool {
	info, err := os.Stat(userfaultDevice)
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && info.Mode()&0o006 == 0o006
}

// opensDevice reports whether this QEMU looks for the device: those before 8.0 do not.
func opensDevice(version string) bool {
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	return err == nil && n >= 8
}
