package qemu

import (
	"bufio"
	"errors"
	"os"
	"strings"
)

// counterReadable: an unprivileged program can read the counter.
const counterReadable = true

// readCounter reads the time stamp counter, at a point in program order.
func readCounter() int64

// spin runs the loop of n turns that the measuring VM runs, natively; n is not 0.
func spin(n uint32)

// cpuIdentity is the vendor, which a guest under KVM sees and a snapshot therefore depends on.
func cpuIdentity() (string, error) {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if key, value, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(key) == "vendor_id" {
			return strings.TrimSpace(value), nil
		}
	}
	return "", errors.New("find the CPU's vendor in /proc/cpuinfo: no such line")
}
