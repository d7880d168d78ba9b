package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/memory"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// Two boots of one image leave the kernel's tables at other places and in another order, so that what was booted twice has
// little in common. A recipe that only warms a machine of its image therefore warms a copy of the one that all builds on
// that image share, which is also quicker than to boot another. What it ends with stands on nothing but the image, as if it
// had booted itself: the booted machine is a step in the cache, and may go like any other.

// fromBooted makes the snapshot of a copy of the image's booted machine, or of one that boots for it alone, where there is no room
// for both or the cache is not wanted.
func (b *build) fromBooted(ctx context.Context, img store.Image) (store.Snapshot, error) {
	if b.spec.NoCache || !b.features.Capture || !b.h.roomForCopy(b.recipe.Machine.MemoryBytes) {
		return b.snapshot(ctx, img)
	}
	defer b.h.trimSteps(context.WithoutCancel(ctx))
	root, forget, err := b.rootStep(ctx, img)
	if err != nil {
		return store.Snapshot{}, err
	}
	forget = sync.OnceFunc(forget)
	defer forget()
	began := time.Now()
	machine, err := b.startBuilder(ctx, root)
	if err != nil {
		forget()
		return b.instead(ctx, img, root, err)
	}
	defer machine.close()
	b.say("boot", "agent answered after %.1f s", time.Since(began).Seconds())
	return b.snapshotOf(ctx, img, func(ctx context.Context, _, overlay, _ string) (*warmed, error) {
		return machine.warm(ctx, root, overlay)
	})
}

// instead boots a machine when no copy of the booted one could be had. That one is of no use to others either, unless it is
// only room that is short.
func (b *build) instead(ctx context.Context, img store.Image, root store.Snapshot, err error) (store.Snapshot, error) {
	if ctx.Err() != nil {
		return store.Snapshot{}, err
	}
	b.h.log.Warn("boot another machine for a build", "image", short(img.ID), "error", err)
	if !errors.Is(err, ErrExhausted) {
		if err := b.h.removeStep(root.Tag, ""); err != nil {
			b.h.log.Warn("remove a booted machine that cannot be gone on with", "step", root.Tag, "error", err)
		}
	}
	return b.snapshot(ctx, img)
}

// roomForCopy says whether there is memory for what a copy of a machine takes beside it: the pages it writes, those pages
// once more when it is captured, and the image they become.
func (h *Host) roomForCopy(bytes int64) bool {
	const times = 3
	h.mu.Lock()
	defer h.mu.Unlock()
	free, err := h.freeMemory()
	return err == nil && free/times >= bytes
}

// warm warms the machine and freezes it, and leaves its disk, and that of what it is a copy of, as one over the image's. The
// machine is gone afterwards, whatever is returned.
func (bl *builder) warm(ctx context.Context, root store.Snapshot, overlay string) (*warmed, error) {
	defer bl.close()
	w := &warmed{protocol: bl.conn.Hello().Version, boot: time.Duration(root.BootMS * float64(time.Millisecond)), root: root}
	if err := bl.b.bringToRest(ctx, bl.s.machine, bl.conn, bl.s, w); err != nil {
		return nil, err
	}
	image, err := bl.h.hot.shareMemory(bl.s.hot)
	if err != nil {
		return nil, err
	}
	var u undo.Stack
	defer u.Run()
	u.Add(func() { _ = image.Close() })
	captured, err := bl.capture(ctx)
	if err != nil {
		return nil, withConsole(fmt.Errorf("freeze machine: %w", deathOr(bl.s.machine, err)), bl.s.machine.Console())
	}
	u.Add(func() { closeCaptured(captured) })
	below := bl.s.hot.disks
	last := len(below) - 1
	if err := disk.Merge(ctx, overlay, append(reversed(below[:last]), bl.s.disks...), below[last], "raw"); err != nil {
		return nil, err
	}
	bl.close() // what it has of its own makes room for the image
	w.checkpoint = &engine.Checkpoint{Format: captured.Format, State: captured.State}
	if captured.Image != nil {
		w.checkpoint.Memory, captured.Image = captured.Image, nil
		return w, nil
	}
	w.checkpoint.Memory, err = memory.Flatten(ctx, memory.View{Image: image, Pages: captured.Pages})
	return w, err
}

// capture takes the machine, whose processes are frozen, as it is. Nothing is to come of it but what was taken.
func (bl *builder) capture(ctx context.Context) (*engine.Captured, error) {
	capturer, ok := bl.s.machine.(engine.Capturer)
	if !ok {
		return nil, fmt.Errorf("%w: its machine cannot be captured while it runs", ErrUnsupported)
	}
	top := diskPath(bl.s.dir, bl.s.nextDisk)
	if err := disk.CreateOverlay(top, bl.s.disks[0], "qcow2"); err != nil {
		return nil, err
	}
	capture, err := capturer.Capture(ctx, &engine.CaptureSpec{
		Mode: engine.CaptureDiff, DiskTop: top, Quiesce: func(context.Context) error { return nil },
	})
	if err != nil {
		return nil, err
	}
	return capture.Finish(ctx)
}
