package proc

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestConsumed(t *testing.T) {
	start, err := StartTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	before, err := Consumed(os.Getpid(), start)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); { // work that counts
	}
	after, err := Consumed(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if after.CPU < before.CPU || after.CPU > time.Hour {
		t.Errorf("CPU: %s, then %s", before.CPU, after.CPU)
	}
	if after.WrittenBytes < before.WrittenBytes {
		t.Errorf("written: %d, then %d", before.WrittenBytes, after.WrittenBytes)
	}
	for _, gone := range []struct {
		pid   int
		start uint64
	}{{1 << 30, 0}, {os.Getpid(), start + 1}} {
		if _, err := Consumed(gone.pid, gone.start); !errors.Is(err, ErrGone) {
			t.Errorf("%d, %d: %v, want ErrGone", gone.pid, gone.start, err)
		}
	}
}

func TestParseConsumption(t *testing.T) {
	const stat = "42 (a (b) c) S 1 42 42 0 -1 4194304 100 0 0 0 150 50 0 0 20 0 3 0 12345 1000 10"
	if cpu, err := parseCPU(stat); err != nil || cpu != 2*time.Second {
		t.Errorf("%s, %v", cpu, err)
	}
	for _, bad := range []string{"", "42 (x) S", "42 x S 1 2 3 4 5 6 7 8 9 0 1 2 3", "1 (x) S 1 42 42 0 -1 4 100 0 0 0 x 50 0"} {
		if _, err := parseCPU(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
	r, w := parseIO([]byte("rchar: 9\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 4096\nx\n"))
	if r != 4096 || w != 4096 {
		t.Errorf("read %d, written %d", r, w)
	}
}

func FuzzConsumption(f *testing.F) {
	f.Add("42 (a) S 1 42 42 0 -1 4194304 100 0 0 0 150 50 0 0 20 0 3 0 12345 1000 10", "read_bytes: 1\n")
	f.Fuzz(func(t *testing.T, stat, io string) {
		if cpu, err := parseCPU(stat); err == nil && cpu < 0 {
			t.Errorf("%q: %s", stat, cpu)
		}
		if r, w := parseIO([]byte(io)); r < 0 || w < 0 {
			t.Errorf("%q: %d, %d", io, r, w)
		}
	})
}
