package host

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

// TestSteadily: the clock runs while the guest is busy with a piece, not while there is none for it.
func TestSteadily(t *testing.T) {
	ctx, r, stop := steadily(t.Context(), strings.NewReader("piece"))
	defer stop()
	if _, err := io.ReadAll(r); err != nil || ctx.Err() != nil {
		t.Fatal(err, ctx.Err())
	}
	s, ok := r.(*steadyReader)
	if !ok {
		t.Fatalf("%T", r)
	}
	s.timer.Reset(time.Millisecond) // as after stallTimeout
	<-ctx.Done()
	if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		t.Fatal(context.Cause(ctx))
	}
}
