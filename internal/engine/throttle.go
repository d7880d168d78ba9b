package engine

import "context"

// Throttler is a Machine that can hold up what its guest reads and writes on its disk (Features.Throttle).
type Throttler interface {
	// Throttle allows so many bytes and requests a second, of reading and of writing each; zero: any number. It lasts until
	// the machine ends.
	Throttle(ctx context.Context, bytes, requests int64) error
}
