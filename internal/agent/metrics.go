package agent

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// metrics samples the guest's accounting.
func (a *Agent) metrics(_ context.Context, s *wire.Stream, _ []byte) error {
	m := &wire.Metrics{Time: time.Now().UTC(), CPUs: runtime.NumCPU()}
	if err := sample(m); err != nil {
		return err
	}
	return s.SendMessage(m)
}

func sample(m *wire.Metrics) error {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return fmt.Errorf("read sysinfo: %w", err)
	}
	m.Processes = int(info.Procs)
	if b, err := os.ReadFile("/proc/uptime"); err == nil {
		first, _, _ := strings.Cut(string(b), " ")
		m.UptimeSeconds, _ = strconv.ParseFloat(first, 64)
	}
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return fmt.Errorf("read memory: %w", err)
	}
	m.MemTotal = meminfo(string(b), "MemTotal:")
	m.MemAvailable = meminfo(string(b), "MemAvailable:")
	var st unix.Statfs_t
	if err := unix.Statfs("/", &st); err != nil {
		return fmt.Errorf("read disk usage: %w", err)
	}
	m.DiskTotal = int64(st.Blocks) * st.Bsize
	m.DiskUsed = int64(st.Blocks-st.Bfree) * st.Bsize
	if b, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource"); err == nil {
		m.Clocksource = strings.TrimSpace(string(b))
	}
	return nil
}

// meminfo returns a value in bytes.
func meminfo(text, name string) int64 {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == name {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n << 10
		}
	}
	return 0
}
