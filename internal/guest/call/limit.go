package call

import (
	"context"
	"fmt"
	"time"
)

// grace is how long after a time limit, which the guest is to keep, its answer is waited for.
const grace = 15 * time.Second

// limited bounds the wait for a guest that was given a time limit. Without a limit it is the caller who waits.
func limited(ctx context.Context, timeoutMS int64) (context.Context, context.CancelFunc) {
	if timeoutMS <= 0 || timeoutMS > int64(100*365*24*time.Hour/time.Millisecond) {
		return context.WithCancel(ctx)
	}
	limit := time.Duration(timeoutMS) * time.Millisecond
	return context.WithTimeoutCause(ctx, limit+grace, fmt.Errorf(
		"%w: the guest was given %s, and has neither ended nor stopped it after %s more", context.DeadlineExceeded, limit, grace))
}
