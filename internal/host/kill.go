package host

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/lineage"
)

// minPrefix is how much of an id must be given at least: fewer characters name too many sandboxes by accident.
const minPrefix = 4

// find returns the sandbox of an id, of a workspace's name, or of a beginning of an id that only one sandbox has.
func (h *Host) find(id string) (*sandbox, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s, ok := h.sandboxes[id]; ok {
		return s, nil
	}
	if w, ok := h.spaces[id]; ok {
		return h.workspaceSandbox(w)
	}
	if err := lineage.CheckSandboxID(id); err != nil {
		return nil, err
	}
	var matches []string
	for have := range h.sandboxes {
		if len(id) >= minPrefix && strings.HasPrefix(have, id) {
			matches = append(matches, have)
		}
	}
	switch len(matches) {
	case 1:
		return h.sandboxes[matches[0]], nil
	case 0:
		return nil, hint(fmt.Errorf("sandbox %s: %w", id, ErrNotFound), "list them with: forkd ls")
	}
	slices.Sort(matches)
	return nil, invalid("sandbox %s: the beginning of several ids: %s", id, strings.Join(matches, ", "))
}

// SandboxID is the whole id of the sandbox that a beginning of one, or a workspace's name, means; what names none stays as it is.
func (h *Host) SandboxID(id string) string {
	if whole, err := h.FindSandbox(id); err == nil {
		return whole
	}
	return id
}

// FindSandbox is the same, and says so when there is none.
func (h *Host) FindSandbox(id string) (whole string, err error) {
	s, err := h.find(id)
	if err != nil {
		return "", err
	}
	return s.id, nil
}

// Kill ends a sandbox and frees everything it held.
func (h *Host) Kill(_ context.Context, id string) error {
	s, err := h.find(id)
	if err != nil {
		return err
	}
	h.mu.Lock()
	if h.sandboxes[s.id] != s {
		h.mu.Unlock()
		return fmt.Errorf("sandbox %s: %w", id, ErrNotFound) // somebody else was faster
	}
	delete(h.sandboxes, s.id)
	h.mu.Unlock()
	err = h.end(s)
	h.tell(events.SandboxEnded, s, "killed")
	if err != nil {
		return fmt.Errorf("kill sandbox %s: %w", s.id, err)
	}
	return nil
}

// Sandboxes lists sandboxes that have all the given labels, oldest first.
func (h *Host) Sandboxes(labels map[string]string) []View {
	h.mu.Lock()
	all := slices.Collect(maps.Values(h.sandboxes))
	h.mu.Unlock()
	views := []View{}
	for _, s := range all {
		if hasLabels(s.labels, labels) {
			views = append(views, s.view().withUsage())
		}
	}
	slices.SortFunc(views, func(a, b View) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return views
}

func hasLabels(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// Sandbox describes one.
func (h *Host) Sandbox(id string) (View, error) {
	s, err := h.find(id)
	if err != nil {
		return View{}, err
	}
	return s.view().withUsage(), nil
}

// Peek is Sandbox without what it uses, which takes longer to find out.
func (h *Host) Peek(id string) (View, error) {
	s, err := h.find(id)
	if err != nil {
		return View{}, err
	}
	return s.view(), nil
}

// Logs is the newest part of a sandbox's console, which survives the sandbox's death until it is killed.
func (h *Host) Logs(id string) ([]byte, error) {
	s, err := h.find(id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == lineage.Failed || s.machine == nil {
		return s.console, nil
	}
	return s.machine.Console(), nil
}

// SandboxIDs are those of all sandboxes, in no order.
func (h *Host) SandboxIDs() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Collect(maps.Keys(h.sandboxes))
}
