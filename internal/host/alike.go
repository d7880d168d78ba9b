package host

import (
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// alike are the memories that a machine of an image most likely has much in common with, at whatever places: that of the newest
// snapshot of its recipe that was built, else of its image. One with the tag of the new snapshot is replaced, and would leave
// behind, beside what the new one shares with it, the rest of those chunks. The machine may be a copy of root, which was booted
// before; what came after that is most likely one as well.
func (h *Host) alike(tag, recipe, image string, format engine.Format, root store.Snapshot) []layer.Digest {
	h.mu.Lock()
	defer h.mu.Unlock()
	var best store.Snapshot
	old, replaced := h.snapshots[tag]
	for _, m := range h.snapshots {
		if replaced && m.Memory == old.Memory || m.Image != image || m.Engine.Arch != format.Arch || m.Branch != nil || lineage.IsStep(m.Tag) {
			continue
		}
		ours, theirs := best.Recipe == recipe, m.Recipe == recipe
		if best.Tag == "" || theirs && !ours || ours == theirs && m.CreatedAt.After(best.CreatedAt) {
			best = m
		}
	}
	var like []layer.Digest
	if root.Tag != "" && !best.CreatedAt.After(root.CreatedAt) {
		like = append(like, root.Memory)
	}
	if best.Tag != "" {
		like = append(like, best.Memory)
	}
	return like
}
