package httpapi

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
)

func (s *Server) fork(w http.ResponseWriter, r *http.Request) error {
	var req api.ForkRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	noteTouched(r, "snapshot", req.SnapshotTag)
	spec, err := forkSpec(req)
	if err != nil {
		return err
	}
	noteEgress(r, req.Egress)
	spec.MayWiden = s.mayWiden(r)
	results, err := s.Host.Fork(r.Context(), spec)
	if err != nil {
		return err
	}
	if r.Context().Err() != nil { // nobody is there to be told the ids
		s.killAll(r, results)
		return r.Context().Err()
	}
	if first := firstError(results); first != nil && !req.Partial {
		s.killAll(r, results)
		return fmt.Errorf("%w (the other children were ended; ask for partial results to keep them)", first)
	}
	list := make([]api.Sandbox, len(results))
	for i, res := range results {
		list[i] = forkResult(res, spec)
		noteForked(r, list[i])
		if res.Err == nil {
			list[i].Warnings = append(list[i].Warnings, forkWarnings(req)...)
		}
	}
	return Reply(w, http.StatusCreated, list)
}

func forkSpec(req api.ForkRequest) (host.ForkSpec, error) {
	n := 1
	if req.N != nil {
		n = *req.N
	}
	if req.MemoryLimitMiB < 0 || req.MemoryLimitMiB > 1<<40 {
		return host.ForkSpec{}, fmt.Errorf("%w: memory_limit_mib is %d", host.ErrInvalid, req.MemoryLimitMiB)
	}
	if err := secondsOK("ttl_seconds", req.TTLSeconds); err != nil {
		return host.ForkSpec{}, err
	}
	spec := host.ForkSpec{
		Tag: req.SnapshotTag, N: n, Labels: req.Labels, Env: req.Env, TTL: seconds(req.TTLSeconds), CPUs: req.CPUs,
		MemoryBytes: req.MemoryBytes, MemoryWish: int64(req.MemoryLimitMiB) << 20,
	}
	var err error
	if spec.Egress, err = policyOf(req.Egress); err != nil {
		return spec, err
	}
	return spec, bounds(&spec, req.Bounds)
}

// forkWarnings say what the existing forkd's clients ask for and do not get: some of them always ask.
func forkWarnings(req api.ForkRequest) (warnings []string) {
	if req.Hugepages {
		warnings = append(warnings, "hugepages: there are none here; memory is in pages of the usual size")
	}
	return warnings
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func firstError(results []host.ForkResult) error {
	for _, r := range results {
		if r.Err != nil {
			return r.Err
		}
	}
	return nil
}

func (s *Server) killAll(r *http.Request, results []host.ForkResult) {
	for _, res := range results {
		if res.Err != nil {
			continue
		}
		if err := s.Host.Kill(r.Context(), res.Sandbox.ID); err != nil && !errors.Is(err, host.ErrNotFound) {
			s.Log.Warn("end a child nobody asked for", "sandbox", res.Sandbox.ID, "error", err)
		}
	}
}

func forkResult(res host.ForkResult, spec host.ForkSpec) api.Sandbox {
	if res.Err != nil {
		return api.Sandbox{Index: res.Index, Count: spec.N, SnapshotTag: spec.Tag, Error: toAPI(res.Err)}
	}
	return sandbox(res.Sandbox)
}

func sandbox(v host.View) api.Sandbox {
	out := api.Sandbox{
		ID: v.ID, Index: v.Index, Count: v.Count, SnapshotTag: v.SnapshotTag, State: string(v.State), Reason: v.Reason,
		CreatedAtUnix: v.Created.Unix(), PID: v.PID, Hostname: v.Hostname, Labels: v.Labels, CPUs: v.Format.CPUs,
		MemoryBytes: v.Format.MemoryBytes, MemoryOwnBytes: v.Usage.OwnBytes, Accelerator: v.Format.Accelerator,
		ReadyMS: float64(v.Ready.Microseconds()) / 1000, WaitedMS: float64(v.Waited.Microseconds()) / 1000, MemorySharedBytes: v.Usage.SharedBytes, DiskOwnBytes: v.DiskOwn,
		BranchCount: v.Branches, LatestBranch: v.LatestBranch, HasBranched: v.Branches > 0, Workspace: v.Workspace,
		Confinement: v.Layers,
	}
	out.Bounds, out.Egress, out.Warnings = boundsOf(v), egressOf(v.Egress), v.Warnings
	if v.Limits.MemoryBytes > 0 {
		out.MemoryLimitMiB = new(v.Limits.MemoryBytes >> 20)
	}
	if !v.Expires.IsZero() {
		out.ExpiresAtUnix = v.Expires.Unix()
	}
	if v.Report != nil {
		out.CloneReport = &api.CloneReport{Renewed: v.Report.Renewed, NotRenewed: []api.NotRenewed{}, GuestMS: v.Report.MS}
		for _, n := range v.Report.NotRenewed {
			out.CloneReport.NotRenewed = append(out.CloneReport.NotRenewed, api.NotRenewed(n))
		}
	}
	return out
}

// labelFilter reads ?label=KEY=VALUE, as often as one likes.
func labelFilter(r *http.Request) (map[string]string, error) {
	labels := map[string]string{}
	for _, l := range r.URL.Query()["label"] {
		k, v, ok := strings.Cut(l, "=")
		if !ok {
			return nil, fmt.Errorf("%w: label %.80q: give KEY=VALUE", host.ErrInvalid, l)
		}
		labels[k] = v
	}
	return labels, nil
}

func (s *Server) sandboxes(w http.ResponseWriter, r *http.Request) error {
	labels, err := labelFilter(r)
	if err != nil {
		return err
	}
	list := []api.Sandbox{}
	disks := map[string]int64{}
	for _, v := range s.Host.Snapshots() {
		disks[v.Tag] = v.DiskOwn + v.DiskShared
	}
	q := r.URL.Query()
	for _, v := range s.Host.Sandboxes(labels) {
		if !asked(q, "state", string(v.State)) || !asked(q, "snapshot", v.SnapshotTag) {
			continue
		}
		out := sandbox(v)
		out.DiskSharedBytes = disks[v.SnapshotTag]
		list = append(list, out)
	}
	list, err = page(w, r, list, func(s *api.Sandbox) string { return oldestFirst(s.CreatedAtUnix, s.ID) })
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, list)
}

func (s *Server) sandbox(w http.ResponseWriter, r *http.Request) error {
	v, err := s.Host.Sandbox(r.PathValue("id"))
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, s.sandboxView(v))
}

// sandboxView is a sandbox with what its disk has of its snapshot's.
func (s *Server) sandboxView(v host.View) api.Sandbox {
	out := sandbox(v)
	if snap, err := s.Host.Snapshot(v.SnapshotTag); err == nil { // it may be gone by now
		out.DiskSharedBytes = snap.DiskOwn + snap.DiskShared
		out.Config = imageConfig(snap.Config)
	}
	return out
}

func (s *Server) kill(w http.ResponseWriter, r *http.Request) error {
	if err := s.Host.Kill(r.Context(), r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) logs(w http.ResponseWriter, r *http.Request) error {
	switch follow, err := flag(r, "follow"); {
	case err != nil:
		return err
	case follow:
		return s.followLogs(w, r)
	}
	text, err := s.Host.Logs(r.PathValue("id"))
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	_, err = io.WriteString(w, strings.ToValidUTF8(string(text), "\uFFFD"))
	return err
}
