package agent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/internal/guest/wire"
)

func TestSample(t *testing.T) {
	proc := t.TempDir()
	for name, text := range map[string]string{
		"uptime":  "100.50 20.00\n",
		"stat":    "cpu  1000 50 200 9000 300 10 40 77 0 0\ncpu0 1 1 1\n",
		"loadavg": "0.50 0.25 0.10 2/61 900\n",
		"meminfo": "MemTotal: 1000 kB\nMemFree: 300 kB\nMemAvailable: 600 kB\nBuffers: 10 kB\nCached: 200 kB\nShmem: 20 kB\nSReclaimable: 30 kB\nSwapTotal: 0 kB\n",
		"vmstat":  "nr_free_pages 1\noom_kill 3\n",
	} {
		if err := os.WriteFile(filepath.Join(proc, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := sample(proc)
	if err != nil {
		t.Fatal(err)
	}
	if got.DiskTotal <= 0 || got.DiskUsed <= 0 || got.DiskFree <= 0 {
		t.Errorf("disk: %+v", got)
	}
	want := &wire.Metrics{
		Time: got.Time, UptimeSeconds: 100.5, CPUs: got.CPUs, CPUSeconds: 13, Load: [3]float64{0.5, 0.25, 0.1}, Threads: 61,
		MemTotal: 1000 << 10, MemAvailable: 600 << 10, MemCached: 220 << 10, MemUsed: 480 << 10, OOMKills: 3,
		DiskTotal: got.DiskTotal, DiskUsed: got.DiskUsed, DiskFree: got.DiskFree, Clocksource: got.Clocksource,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	var l lastSample
	m := wire.Metrics{UptimeSeconds: 100, CPUSeconds: 50, CPUs: 2}
	if l.percent(&m); m.CPUPercent != 25 {
		t.Errorf("since the boot: %v %%", m.CPUPercent)
	}
	m.UptimeSeconds, m.CPUSeconds = 102, 53
	if l.percent(&m); m.CPUPercent != 75 {
		t.Errorf("since the sample before: %v %%", m.CPUPercent)
	}
}
