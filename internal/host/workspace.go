package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// WorkspaceStatus is what a workspace's sandbox is.
type WorkspaceStatus string

// Statuses.
const (
	WorkspaceRunning   WorkspaceStatus = "running" // paused counts: its memory is there
	WorkspaceSuspended WorkspaceStatus = "suspended"
	WorkspaceStale     WorkspaceStatus = "stale" // its sandbox was ended, or died
)

// WorkspaceView is what the edges see of a workspace.
type WorkspaceView struct {
	store.Workspace
	Status WorkspaceStatus
	Reason string // of a stale one

	Warnings []string // what is not as it was asked for; only of one that was just made
}

// CreateWorkspace forks one sandbox and gives it a name that outlives it. On error there is no such workspace.
func (h *Host) CreateWorkspace(ctx context.Context, name string, spec ForkSpec) (WorkspaceView, error) {
	if err := lineage.CheckWorkspace(name); err != nil {
		return WorkspaceView{}, err
	}
	release, err := h.holdWorkspace(name, "create")
	if err != nil {
		return WorkspaceView{}, err
	}
	defer release()
	spec.N, spec.Workspace = 1, name
	now := time.Now().UTC().Round(time.Millisecond)
	w := store.Workspace{FormatVersion: store.FormatVersion, Name: name, Source: spec.Tag, CreatedAt: now, LastActive: now}
	// The name is durable before there is a sandbox: what dies in between leaves nothing that nobody knows of.
	if err := h.store.AddWorkspace(ctx, w); errors.Is(err, store.ErrExists) {
		return WorkspaceView{}, hint(fmt.Errorf("workspace %s: %w", name, err),
			"use another name, or remove it with: forkd workspace delete %s", name)
	} else if err != nil {
		return WorkspaceView{}, h.explainFull(err)
	}
	s, err := h.forkWorkspace(ctx, spec)
	if err == nil {
		w.Sandbox = s.ID
		err = h.store.ReplaceWorkspace(ctx, w)
		if err != nil {
			err = errors.Join(err, h.Kill(ctx, s.ID))
		}
	}
	if err != nil {
		return WorkspaceView{}, errors.Join(fmt.Errorf("create workspace %s: %w", name, err), h.store.RemoveWorkspace(name))
	}
	h.mu.Lock()
	h.spaces[name] = w
	h.mu.Unlock()
	v := h.viewWorkspace(w)
	v.Warnings = s.Warnings
	return v, nil
}

func (h *Host) forkWorkspace(ctx context.Context, spec ForkSpec) (View, error) {
	results, err := h.Fork(ctx, spec)
	if err != nil {
		return View{}, err
	}
	return results[0].Sandbox, results[0].Err
}

// Workspaces lists all, by name.
func (h *Host) Workspaces() []WorkspaceView {
	h.mu.Lock()
	all := maps.Clone(h.spaces)
	h.mu.Unlock()
	views := []WorkspaceView{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		views = append(views, h.viewWorkspace(all[name]))
	}
	return views
}

// Workspace describes one.
func (h *Host) Workspace(name string) (WorkspaceView, error) {
	w, err := h.findWorkspace(name)
	if err != nil {
		return WorkspaceView{}, err
	}
	return h.viewWorkspace(w), nil
}

// SuspendWorkspace writes a workspace's sandbox to disk and frees its memory.
func (h *Host) SuspendWorkspace(ctx context.Context, name string) (WorkspaceView, error) {
	return h.changeWorkspace(ctx, name, "suspend", h.Suspend)
}

// ResumeWorkspace lets it run on.
func (h *Host) ResumeWorkspace(ctx context.Context, name string) (WorkspaceView, error) {
	return h.changeWorkspace(ctx, name, "resume", func(ctx context.Context, id string) (View, error) {
		v, err := h.Sandbox(id)
		switch {
		case err != nil:
			return v, err
		case v.State == lineage.Paused:
			return h.Resume(ctx, id)
		}
		return h.Wake(ctx, id)
	})
}

func (h *Host) changeWorkspace(ctx context.Context, name, what string,
	change func(ctx context.Context, id string) (View, error),
) (WorkspaceView, error) {
	release, err := h.holdWorkspace(name, what)
	if err != nil {
		return WorkspaceView{}, err
	}
	defer release()
	w, err := h.findWorkspace(name)
	if err != nil {
		return WorkspaceView{}, err
	}
	h.mu.Lock()
	_, err = h.workspaceSandbox(w)
	h.mu.Unlock()
	if err != nil {
		return WorkspaceView{}, err
	}
	if _, err = change(ctx, w.Sandbox); err != nil {
		return WorkspaceView{}, fmt.Errorf("workspace %s: %w", name, err)
	}
	w.LastActive = time.Now().UTC().Round(time.Millisecond)
	h.mu.Lock()
	h.spaces[name] = w
	h.mu.Unlock()
	// What was asked for is done, and the record says the same but for the time.
	if err := h.store.ReplaceWorkspace(ctx, w); err != nil {
		h.log.Warn("record a workspace", "workspace", name, "error", err)
	}
	return h.viewWorkspace(w), nil
}

// RemoveWorkspace ends a workspace's sandbox, running or suspended, and frees its name.
func (h *Host) RemoveWorkspace(ctx context.Context, name string) error {
	release, err := h.holdWorkspace(name, "delete")
	if err != nil {
		return err
	}
	defer release()
	w, err := h.findWorkspace(name)
	if err != nil {
		return err
	}
	if err := h.Kill(ctx, w.Sandbox); err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("delete workspace %s: %w", name, err)
	}
	if err := h.store.RemoveWorkspace(name); err != nil {
		return err
	}
	h.mu.Lock()
	delete(h.spaces, name)
	h.mu.Unlock()
	return nil
}

// holdWorkspace lets one request at a time change a workspace.
func (h *Host) holdWorkspace(name, what string) (release func(), err error) {
	return h.hold("workspace "+name, what)
}

func (h *Host) findWorkspace(name string) (store.Workspace, error) {
	if err := lineage.CheckWorkspace(name); err != nil {
		return store.Workspace{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	w, ok := h.spaces[name]
	if !ok {
		return w, hint(fmt.Errorf("workspace %s: %w", name, ErrNotFound), "list them with: forkd workspace list")
	}
	return w, nil
}

// workspaceSandbox is the sandbox of a workspace that is not stale. The caller holds mu.
func (h *Host) workspaceSandbox(w store.Workspace) (*sandbox, error) {
	s, ok := h.sandboxes[w.Sandbox]
	if !ok {
		return nil, hint(fmt.Errorf("workspace %s: %w: it is %s: %s", w.Name, lineage.ErrState, WorkspaceStale, goneReason),
			"forkd workspace delete %s, then create it again", w.Name)
	}
	return s, nil
}

// goneReason is why a workspace has no sandbox: it is in no table any more.
const goneReason = "its sandbox was ended, or the host has been started anew"

func (h *Host) viewWorkspace(w store.Workspace) WorkspaceView {
	v := WorkspaceView{Workspace: w, Status: WorkspaceStale, Reason: goneReason}
	s, err := h.Sandbox(w.Sandbox)
	if err != nil {
		return v
	}
	switch s.State {
	case lineage.Running, lineage.Paused:
		v.Status, v.Reason = WorkspaceRunning, ""
	case lineage.Suspended:
		v.Status, v.Reason = WorkspaceSuspended, ""
	case lineage.Failed:
		v.Reason = s.Reason
	}
	return v
}

// loadWorkspaces reads the names, after what an earlier daemon left was adopted. One that was being made when its daemon
// died gets its sandbox, or is gone if there is none.
func (h *Host) loadWorkspaces(ctx context.Context) error {
	list, bad, err := h.store.Workspaces()
	if err != nil {
		return err
	}
	for _, err := range bad {
		h.log.Warn("record left alone", "error", err)
	}
	h.mu.Lock()
	made := map[string]string{}
	for id, s := range h.sandboxes {
		if s.workspace != "" {
			made[s.workspace] = id
		}
	}
	h.mu.Unlock()
	for _, w := range list {
		if w.Sandbox == "" {
			if w.Sandbox = made[w.Name]; w.Sandbox == "" {
				if err := h.store.RemoveWorkspace(w.Name); err != nil {
					return err
				}
				continue
			}
			if err := h.store.ReplaceWorkspace(ctx, w); err != nil {
				return err
			}
		}
		h.mu.Lock()
		h.spaces[w.Name] = w
		h.mu.Unlock()
	}
	return nil
}
