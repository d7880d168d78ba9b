package host

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
)

// initTimeout is how long the image's own init may take to come up: dozens of services, under software emulation.
const initTimeout = 10 * time.Minute

// startInit starts the image's own init in the parent. What is started from then on, by the warm-up and in the children,
// is started inside it.
func (b *build) startInit(ctx context.Context, conn *guest.Conn) error {
	if !slices.Contains(conn.Hello().Features, wire.FeatureInit) {
		return fmt.Errorf("%w: init: the agent of the snapshot that this one is built on is too old; build that again", ErrUnsupported)
	}
	b.say("init", "starting %s", b.recipe.Init)
	start := time.Now()
	reply, err := conn.Init(ctx, b.recipe.Init, initTimeout)
	if err != nil {
		return fmt.Errorf("init: %w", err)
	}
	failed := ""
	if len(reply.Failed) > 0 {
		failed = ", failed: " + strings.Join(reply.Failed, ", ")
	}
	b.say("init", "%s is %s after %.1f s%s", b.recipe.Init, reply.State, time.Since(start).Seconds(), failed)
	return nil
}
