package host

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Keeping is the daemon's own policy for what it keeps: it is applied whenever a snapshot has been made. Like GC it removes
// nothing that is pinned, in use or stood on.
type Keeping struct {
	MaxBytes  int64         // the store may take; 0: what there is
	KeepLast  int           // of each recipe so many, the newest; 0: all, unless OlderThan is given
	OlderThan time.Duration // not used for so long; 0: however long
}

func (k Keeping) none() bool { return k == Keeping{} }

// tidy applies the policy. What was just made stays: it is what somebody waits for.
func (h *Host) tidy(ctx context.Context, made string) {
	if h.cfg.Keep.none() {
		return
	}
	if _, err := h.applyPolicy(ctx, made, h.cfg.Keep.MaxBytes); err != nil {
		h.log.Warn("remove what the daemon is not to keep", "error", err)
	}
}

func (h *Host) applyPolicy(ctx context.Context, made string, most int64) (GCResult, error) {
	// One at a time: what another is about to remove need not be made up for.
	h.tidying.Lock()
	defer h.tidying.Unlock()
	k := h.cfg.Keep
	return h.gc(ctx, GCSpec{OlderThan: k.OlderThan, KeepLast: k.KeepLast, MaxBytes: most}, made)
}

// quota refuses a new snapshot when the store takes what it may, and nothing can go.
func (h *Host) quota(ctx context.Context, tag string) error {
	most := h.cfg.Keep.MaxBytes
	if most == 0 {
		return nil
	}
	u, err := h.layers.Usage(ctx, h.roots(nil, nil))
	if err != nil || u.Kept < most {
		return err
	}
	res, err := h.applyPolicy(ctx, tag, max(most-1, 1)) // so that there is some room
	if err != nil {
		return err
	}
	if u, err = h.layers.Usage(ctx, h.roots(nil, nil)); err != nil || u.Kept < most {
		return err
	}
	return hint(fmt.Errorf("%w: the store takes %s of the %s that it may, and nothing more can go by itself%s", ErrExhausted, mib(u.Kept), mib(most), whyKept(res.Kept)),
		"remove snapshots (forkd rmi) or let them go (forkd unpin, forkd kill), remove images (forkd gc --images), or let the store take more: FORKD_STORE_MAX_BYTES")
}

// whyKept names some of what stays, and why.
func whyKept(kept map[string]string) string {
	const most = 5
	var list []string
	for _, tag := range slices.Sorted(maps.Keys(kept)) {
		if len(list) == most {
			list = append(list, fmt.Sprintf("and %d more", len(kept)-most))
			break
		}
		list = append(list, tag+" ("+kept[tag]+")")
	}
	if len(list) == 0 {
		return ""
	}
	return ": " + strings.Join(list, ", ")
}
