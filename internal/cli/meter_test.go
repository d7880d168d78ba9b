package cli

import (
	"testing"
	"time"
)

func TestMeterLine(t *testing.T) {
	m := &meter{}
	m.bytes.Store(3 << 20)
	m.name("evil\x1b[2J\nname-that-is-long")
	if got, want := m.line(2*time.Second, 40), "   3.0 MiB    1.5 MiB/s  e-that-is-long"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := m.line(2*time.Second, 80), "   3.0 MiB    1.5 MiB/s  evil name-that-is-long"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
