package layer

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
)

// worker does jobs one after another; it owns buffers that would be too many with one a job.
type worker struct {
	do   func(job int) error
	stop func()
}

// parallel does jobs 0 to n-1, shared among as many workers as there are cores. It returns the first error when all
// workers have ended, and looks at ctx before every job.
func parallel(ctx context.Context, n int, start func() (worker, error)) error {
	return among(ctx, runtime.NumCPU(), n, start)
}

// inBackground is parallel, but leaves a core to machines and their clients: nobody waits for a layer to be written, and
// compressing on two of two cores doubles what the source of a branch feels of it.
func inBackground(ctx context.Context, n int, start func() (worker, error)) error {
	return among(ctx, max(1, runtime.NumCPU()-1), n, start)
}

func among(ctx context.Context, workers, n int, start func() (worker, error)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, workers) {
		w, err := start()
		if err != nil {
			cancel(err)
			break
		}
		wg.Go(func() {
			defer w.stop()
			for ctx.Err() == nil {
				job := int(next.Add(1)) - 1
				if job >= n {
					return
				}
				if err := w.do(job); err != nil {
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
