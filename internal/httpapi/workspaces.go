package httpapi

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

func (s *Server) workspaceOperations() []operation {
	const one = " /v1/workspaces/{name}"
	return []operation{
		{"GET /v1/workspaces", access.Read, "List workspaces", s.workspaces},
		{"POST /v1/workspaces", access.Manage, "Fork a sandbox under a name that outlives it", s.createWorkspace},
		{"GET" + one, access.Read, "A workspace", s.workspace},
		{"DELETE" + one, access.Manage, "End a workspace and its sandbox", s.removeWorkspace},
		{"POST" + one + "/suspend", access.Manage, "Store a workspace and free its memory", s.suspendWorkspace},
		{"POST" + one + "/resume", access.Manage, "Let a suspended workspace run on", s.resumeWorkspace},
	}
}

func (s *Server) workspaces(w http.ResponseWriter, r *http.Request) error {
	list := []api.Workspace{}
	for _, v := range s.Host.Workspaces() {
		list = append(list, workspace(v))
	}
	list, err := page(w, r, list, func(w *api.Workspace) string { return w.Name })
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, list)
}

func (s *Server) createWorkspace(w http.ResponseWriter, r *http.Request) error {
	var req api.WorkspaceRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	noteTouched(r, "snapshot", req.SnapshotTag)
	spec, err := forkSpec(api.ForkRequest{
		SnapshotTag: req.SnapshotTag, Labels: req.Labels, Env: req.Env, PerChildNetns: req.PerChildNetns,
		MemoryLimitMiB: req.MemoryLimitMiB, Bounds: req.Bounds, Egress: req.Egress,
	})
	if err != nil {
		return err
	}
	noteEgress(r, req.Egress)
	spec.MayWiden = s.mayWiden(r)
	v, err := s.Host.CreateWorkspace(r.Context(), req.Name, spec)
	if err != nil {
		return err
	}
	out := workspace(v)
	noteCreated(r, "workspace", out.Name)
	noteCreated(r, "sandbox", out.SandboxID)
	return Reply(w, http.StatusCreated, out)
}

func (s *Server) workspace(w http.ResponseWriter, r *http.Request) error {
	v, err := s.Host.Workspace(r.PathValue("name"))
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, workspace(v))
}

func (s *Server) removeWorkspace(w http.ResponseWriter, r *http.Request) error {
	v, err := s.Host.Workspace(r.PathValue("name"))
	if err != nil {
		return err
	}
	noteTouched(r, "sandbox", v.Sandbox)
	if err := s.Host.RemoveWorkspace(r.Context(), v.Name); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) suspendWorkspace(w http.ResponseWriter, r *http.Request) error {
	return changeWorkspace(w, r, &api.SuspendWorkspaceRequest{}, s.Host.SuspendWorkspace)
}

func (s *Server) resumeWorkspace(w http.ResponseWriter, r *http.Request) error {
	return changeWorkspace(w, r, &struct{}{}, s.Host.ResumeWorkspace)
}

func changeWorkspace(w http.ResponseWriter, r *http.Request, body any,
	to func(ctx context.Context, name string) (host.WorkspaceView, error),
) error {
	if err := decode(w, r, body); err != nil {
		return err
	}
	v, err := to(r.Context(), r.PathValue("name"))
	if err != nil {
		return err
	}
	noteTouched(r, "sandbox", v.Sandbox)
	return Reply(w, http.StatusOK, workspace(v))
}

func workspace(v host.WorkspaceView) api.Workspace {
	out := api.Workspace{
		ID: "ws-" + v.Sandbox, Name: v.Name, SourceSnapshotTag: v.Source, Status: string(v.Status), Reason: v.Reason,
		Warnings: v.Warnings, SandboxID: v.Sandbox, CreatedAtUnix: v.CreatedAt.Unix(), LastActiveUnix: v.LastActive.Unix(),
	}
	if v.Status == host.WorkspaceRunning {
		out.LiveSandboxID = &out.SandboxID
	}
	return out
}
