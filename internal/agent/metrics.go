package agent

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/guest/wire"
)

// lastSample is what the percentage of the next is counted from.
type lastSample struct {
	mu   sync.Mutex
	at   time.Duration // uptime
	busy time.Duration
}

// metrics samples the guest's accounting. Nothing is sampled unless somebody asks.
func (a *Agent) metrics(_ context.Context, s *wire.Stream, _ []byte) error {
	m, err := sample("/proc")
	if err != nil {
		return err
	}
	// The groups' lists are short work also when a program starts others without end.
	if a.cfg.Cgroups != nil {
		if pids, err := a.cfg.Cgroups.PIDs(); err == nil {
			m.Processes = len(pids) + 1
		}
	}
	a.sampled.percent(m)
	return s.SendMessage(m)
}

// percent is of the time since the sample before, or since the machine was booted.
func (l *lastSample) percent(m *wire.Metrics) {
	at, busy := seconds(m.UptimeSeconds), seconds(m.CPUSeconds)
	l.mu.Lock()
	defer l.mu.Unlock()
	if passed := at - l.at; passed > 0 && m.CPUs > 0 {
		m.CPUPercent = min(100, max(0, 100*float64(busy-l.busy)/float64(passed)/float64(m.CPUs)))
	}
	l.at, l.busy = at, busy
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// sample reads the kernel's accounting, below proc.
func sample(proc string) (*wire.Metrics, error) {
	m := &wire.Metrics{Time: time.Now().UTC(), CPUs: runtime.NumCPU()}
	read := func(name string) string {
		b, err := os.ReadFile(proc + "/" + name)
		if err != nil {
			return ""
		}
		return string(b)
	}
	m.UptimeSeconds = number(field(read("uptime"), 0))
	m.CPUSeconds = cpuTime(read("stat"))
	load := read("loadavg")
	for i := range m.Load {
		m.Load[i] = number(field(load, i))
	}
	_, threads, _ := strings.Cut(field(load, 3), "/")
	m.Threads = int(number(threads))
	memory := read("meminfo")
	if memory == "" {
		return nil, fmt.Errorf("read %s/meminfo", proc)
	}
	m.MemTotal, m.MemAvailable = meminfo(memory, "MemTotal:"), meminfo(memory, "MemAvailable:")
	m.MemCached = meminfo(memory, "Cached:") + meminfo(memory, "Buffers:") + meminfo(memory, "SReclaimable:") - meminfo(memory, "Shmem:")
	m.MemUsed = max(0, m.MemTotal-meminfo(memory, "MemFree:")-m.MemCached)
	m.SwapTotal = meminfo(memory, "SwapTotal:")
	for line := range strings.Lines(read("vmstat")) {
		if count, ok := strings.CutPrefix(line, "oom_kill "); ok {
			m.OOMKills = int64(number(strings.TrimSpace(count)))
		}
	}
	var st unix.Statfs_t
	if err := unix.Statfs("/", &st); err != nil {
		return nil, fmt.Errorf("read disk usage: %w", err)
	}
	m.DiskTotal = int64(st.Blocks) * st.Bsize
	m.DiskUsed = int64(st.Blocks-st.Bfree) * st.Bsize
	m.DiskFree = int64(st.Bavail) * st.Bsize
	if b, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource"); err == nil {
		m.Clocksource = strings.TrimSpace(string(b))
	}
	return m, nil
}

// cpuTime adds up the first line of /proc/stat: "cpu user nice system idle iowait irq softirq steal …", in hundredths. What
// the machine waited for its disk or was kept waiting by its host is not work.
func cpuTime(stat string) float64 {
	line, _, _ := strings.Cut(stat, "\n")
	var busy float64
	for i, f := range strings.Fields(line) {
		if i >= 1 && i <= 7 && i != 4 && i != 5 {
			busy += number(f)
		}
	}
	return busy / 100
}

func field(text string, i int) string {
	if f := strings.Fields(text); i < len(f) {
		return f[i]
	}
	return ""
}

func number(s string) float64 {
	n, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return 0
	}
	return n
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
