package memory

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
)

// each does jobs 0 to n-1, shared among the cores. It returns the first error when all have ended, and looks at ctx
// before every job.
func each(ctx context.Context, n int, do func(i int) error) error {
	return among(ctx, runtime.NumCPU(), n, do)
}

// inBackground is each, but leaves a core to machines and their clients: for what nobody waits for.
func inBackground(ctx context.Context, n int, do func(i int) error) error {
	return among(ctx, max(1, runtime.NumCPU()-1), n, do)
}

func among(ctx context.Context, workers, n int, do func(i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, workers) {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := do(i); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
