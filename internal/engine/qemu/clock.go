package qemu

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	clockWindow = 20 * time.Millisecond // gives a frequency to a few parts per million
	clockTries  = 16                    // readings at each end, of which the least disturbed counts
)

// measureClock measures the frequency of the CPU's counter against the host's clock, 0 where it cannot be read. That
// clock is the one corrected by NTP, since it is the true time that guests must keep.
func measureClock(ctx context.Context) (int64, error) {
	if !counterReadable {
		return 0, nil
	}
	c1, t1 := reading()
	timer := time.NewTimer(clockWindow)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return 0, fmt.Errorf("measure clock: %w", context.Cause(ctx))
	}
	c2, t2 := reading()
	if c2 <= c1 || t2.Sub(t1) <= 0 {
		return 0, errors.New("measure clock: the CPU's time stamp counter does not advance")
	}
	return int64(float64(c2-c1) / t2.Sub(t1).Seconds()), nil
}

// reading is the counter and the time at one instant. The process may be interrupted between reading the two, so the
// closest of several pairs is taken.
func reading() (int64, time.Time) {
	var (
		counter int64
		at      time.Time
		closest int64
	)
	for i := range clockTries {
		before := readCounter()
		now := time.Now()
		after := readCounter()
		if d := after - before; i == 0 || d < closest {
			counter, at, closest = before+d/2, now, d
		}
	}
	return counter, at
}
