package agent

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// StepClock puts the wall clock forward or back by a time.
func StepClock(d time.Duration) error {
	const nanoseconds = 0x2000 // ADJ_NANO
	sec := d / time.Second
	rest := d % time.Second
	if rest < 0 {
		sec, rest = sec-1, rest+time.Second
	}
	t := unix.Timex{Modes: unix.ADJ_SETOFFSET | nanoseconds, Time: unix.Timeval{Sec: int64(sec), Usec: int64(rest)}}
	if _, err := unix.ClockAdjtime(unix.CLOCK_REALTIME, &t); err != nil {
		return fmt.Errorf("step the clock by %v: %w", d, err)
	}
	return nil
}
