package host

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// The cache of a build's steps is the family tree: the machine after a finished step is a snapshot with a tag that no user
// can give, and what follows a step stands on it. A step's key is the digest of the key before it and of all that
// determines what it does, so equal keys are equal histories. Those that a user's snapshot stands on stay with it; of the
// others the least recently used go when they take too much.

const defaultStepBytes = 16 << 30

// stepKey is the key of what comes after a step.
func stepKey(before string, what ...any) string {
	text, err := json.Marshal(append([]any{before}, what...))
	if err != nil {
		panic(err) // strings, numbers, lists and maps of them always encode
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// newStepTag is never that of another step: two builds may do the same one at the same time, or again.
func newStepTag() string {
	var b [32]byte
	_, _ = rand.Read(b[:])
	return lineage.StepTag(hex.EncodeToString(b[:]))
}

// step finds the newest snapshot of a key, and keeps it until forget is called.
func (h *Host) step(key string) (m store.Snapshot, forget func(), ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for tag, s := range h.snapshots {
		if s.Source == key && lineage.IsStep(tag) && h.busy[tag] == "" && (!ok || s.CreatedAt.After(m.CreatedAt)) {
			m, ok = s, true
		}
	}
	if !ok {
		return m, nil, false
	}
	h.forks[m.Tag]++
	return m, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.forks[m.Tag]--; h.forks[m.Tag] == 0 {
			delete(h.forks, m.Tag)
		}
	}, true
}

// used notes that a step was used, also for a later daemon.
func (h *Host) used(tag string) {
	now := time.Now()
	h.mu.Lock()
	h.stepUse[tag] = now
	h.mu.Unlock()
	if err := os.Chtimes(h.cfg.Home.Snapshot(tag), now, now); err != nil {
		h.log.Warn("note that a step was used", "step", tag, "error", err)
	}
}

// loadSteps reads when snapshots and steps were used, and forgets those that were not finished.
func (h *Host) loadSteps() {
	for tag, m := range h.snapshots {
		h.stepUse[tag] = m.CreatedAt
		if info, err := os.Stat(h.cfg.Home.Snapshot(tag)); err == nil {
			h.stepUse[tag] = info.ModTime()
		}
	}
	for tag := range h.writing {
		if lineage.IsStep(tag) {
			h.dropFailedStep(tag)
		}
	}
}

// dropFailedStep forgets a step that could not be stored: nobody asks for its reason later.
func (h *Host) dropFailedStep(tag string) {
	if !h.removeFailed(tag) {
		return
	}
	if err := h.store.EndSnapshot(tag); err != nil {
		h.log.Warn("forget a step that was not finished", "step", tag, "error", err)
	}
}

// looseSteps are the steps that no user's snapshot stands on. The caller holds mu.
func (h *Host) looseSteps() []string {
	family := h.family()
	kept := map[string]bool{}
	for tag := range family {
		if lineage.IsStep(tag) {
			continue
		}
		for _, up := range lineage.Ancestors(tag, family) {
			kept[up] = true
		}
	}
	var loose []string
	for tag := range h.snapshots {
		if lineage.IsStep(tag) && !kept[tag] {
			loose = append(loose, tag)
		}
	}
	slices.SortFunc(loose, func(a, b string) int { return cmp.Or(h.stepUse[a].Compare(h.stepUse[b]), cmp.Compare(a, b)) })
	return loose
}

// trimSteps removes the least recently used steps that nothing stands on, until the others take no more than they may.
func (h *Host) trimSteps(ctx context.Context) {
	limit := cmp.Or(h.cfg.StepMaxBytes, defaultStepBytes)
	removed := false
	for tried := map[string]bool{}; ; {
		h.mu.Lock()
		victim, total := "", int64(0)
		family := h.family()
		// A snapshot of the same layers costs nothing more.
		owned := map[[2]layer.Digest]bool{}
		for tag, m := range h.snapshots {
			if !lineage.IsStep(tag) {
				owned[[2]layer.Digest{m.Memory, m.Disk}] = true
			}
		}
		for _, tag := range h.looseSteps() {
			if m := h.snapshots[tag]; !owned[[2]layer.Digest{m.Memory, m.Disk}] {
				total += m.Stored
			}
			if victim == "" && !tried[tag] && len(lineage.Dependents(tag, family)) == 0 {
				victim = tag
			}
		}
		h.mu.Unlock()
		if total <= limit || victim == "" {
			break
		}
		tried[victim] = true
		if err := h.removeStep(victim, ""); err != nil {
			if !errors.Is(err, ErrBusy) {
				h.log.Warn("remove an old step", "step", victim, "error", err)
			}
			continue
		}
		h.log.Info("removed an old step of a build", "step", victim)
		removed = true
	}
	if removed {
		h.collect(ctx)
	}
}

// removeStep removes one that nothing stands on, and leaves its layers to be collected. Why is told of a user's snapshot.
func (h *Host) removeStep(tag, why string) error {
	release, err := h.hold(tag, removeWhat)
	if err != nil {
		return err
	}
	defer release()
	if err := h.unclaimed(tag, nil); err != nil {
		return err
	}
	return h.removeLeaf(tag, why)
}

// removeStepsOn removes the steps that stand on a snapshot, if nothing else does: the cache is no reason to keep what a
// user wants to remove.
func (h *Host) removeStepsOn(tag string) error {
	h.mu.Lock()
	down := descendants(tag, h.family())
	h.mu.Unlock()
	if len(down) == 0 || !lineage.OnlySteps(down) {
		return nil
	}
	for _, t := range slices.Backward(down) {
		if err := h.removeStep(t, ""); err != nil {
			return fmt.Errorf("remove the steps of builds on %s: %w", tag, err)
		}
	}
	return nil
}

// removeStepsOf removes the steps on an image, if nothing else stands on it, and returns the tags of users that do.
func (h *Host) removeStepsOf(image string) ([]string, error) {
	h.mu.Lock()
	tags := h.snapshotsOf(image)
	family := h.family()
	h.mu.Unlock()
	if users := slices.DeleteFunc(slices.Clone(tags), lineage.IsStep); len(users) > 0 {
		return users, nil
	}
	for _, tag := range tags {
		if family[tag].Parent != "" {
			continue // goes with what it stands on
		}
		if err := h.removeStepsOn(tag); err != nil {
			return nil, err
		}
		if err := h.removeStep(tag, ""); err != nil {
			return nil, err
		}
	}
	return nil, nil
}
