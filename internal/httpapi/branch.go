package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/lineage"
)

// branch captures a sandbox and, if the request has n, forks children of what it captured. The snapshot is made when a
// child fails: children report their own errors, in the reply.
func (s *Server) branch(w http.ResponseWriter, r *http.Request) error {
	var req api.BranchRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if req.N > 0 {
		if err := manyAllowed(r); err != nil {
			return err
		}
	}
	spec, err := branchSpec(req)
	if err != nil {
		return err
	}
	children, err := childrenSpec(req)
	if err != nil {
		return err
	}
	noteEgress(r, req.Egress)
	if req.Tag != "" {
		noteTouched(r, "snapshot", req.Tag)
	}
	wait := !spec.NoWait
	spec.NoWait = spec.NoWait || req.N > 0 // children begin when the memory is complete, and need not wait for the disk
	v, err := s.Host.Branch(r.Context(), r.PathValue("id"), spec)
	if err != nil {
		return err
	}
	noteCreated(r, "snapshot", v.Tag)
	var born []api.Sandbox
	if req.N > 0 {
		children.Tag, children.MayWiden = v.Tag, s.mayWiden(r)
		if born, err = s.forkBranch(r, children); err != nil {
			return err
		}
		if v, err = s.branchWritten(r, v, wait); err != nil {
			s.endAll(r, born)
			return err
		}
	}
	noteForked(r, born...)
	out := snapshot(v)
	out.Children = born
	status := http.StatusCreated
	if v.Status == lineage.Writing {
		status = http.StatusAccepted
	}
	return Reply(w, status, out)
}

// branchWritten waits for a branch that has children already.
func (s *Server) branchWritten(r *http.Request, v host.SnapshotView, wait bool) (host.SnapshotView, error) {
	if !wait {
		return v, nil
	}
	v, err := s.Host.AwaitSnapshot(r.Context(), v.Tag)
	switch {
	case err != nil:
		return v, err
	case r.Context().Err() != nil:
		return v, r.Context().Err()
	case v.Status == lineage.FailedSnap:
		return v, fmt.Errorf("snapshot %s: %w: %s", v.Tag, lineage.ErrState, v.Reason)
	}
	return v, nil
}

func (s *Server) endAll(r *http.Request, children []api.Sandbox) {
	for _, c := range children {
		if c.ID == "" {
			continue
		}
		if err := s.Host.Kill(context.WithoutCancel(r.Context()), c.ID); err != nil {
			s.Log.Warn("end a child of a branch that failed", "sandbox", c.ID, "error", err)
		}
	}
}

func (s *Server) forkBranch(r *http.Request, spec host.ForkSpec) ([]api.Sandbox, error) {
	results, err := s.Host.Fork(r.Context(), spec)
	if r.Context().Err() != nil { // nobody is there to be told the ids
		s.killAll(r, results)
		return nil, r.Context().Err()
	}
	list := make([]api.Sandbox, spec.N)
	for i := range list {
		res := host.ForkResult{Index: i, Err: err}
		if err == nil {
			res = results[i]
		}
		list[i] = forkResult(res, spec)
	}
	return list, nil
}

// branchSpec translates the words of this API, and those of the existing forkd's clients.
func branchSpec(req api.BranchRequest) (host.BranchSpec, error) {
	spec := host.BranchSpec{
		Tag: req.Tag, Mode: host.BranchMode(req.Mode), Parent: req.ParentTag, NoWait: req.Wait != nil && !*req.Wait,
	}
	var legacy []string
	for _, b := range []struct {
		set  bool
		name string
		mode host.BranchMode
	}{
		{req.Diff, "diff", host.BranchDiff},
		{req.Live, "live", host.BranchLive},
		{req.MeasureDiff, "measure_diff", host.BranchAuto}, // own pages are always measured
	} {
		if b.set {
			legacy, spec.Mode = append(legacy, b.name), b.mode
		}
	}
	switch {
	case req.Mode != "" && len(legacy) > 0:
		return spec, fmt.Errorf("%w: mode %.20q and %s are both given; give mode alone", host.ErrInvalid, req.Mode, legacy[0])
	case len(legacy) > 1:
		return spec, fmt.Errorf("%w: %s are given together; give one of them, or mode", host.ErrInvalid, strings.Join(legacy, " and "))
	}
	switch spec.Mode {
	case "":
		spec.Mode = host.BranchAuto
	case host.BranchAuto, host.BranchLive, host.BranchDiff, host.BranchFull:
	default:
		return spec, fmt.Errorf("%w: mode is %.20q; give auto, live, diff or full", host.ErrInvalid, req.Mode)
	}
	for _, tag := range []string{req.Tag, req.ParentTag} {
		if tag == "" {
			continue
		}
		if err := lineage.CheckTag(tag); err != nil {
			return spec, err
		}
	}
	return spec, nil
}

// childrenSpec is what to fork of the branch; its tag is not known yet. Whatever can be refused is refused before
// anything is captured.
func childrenSpec(req api.BranchRequest) (host.ForkSpec, error) {
	if req.N < 0 || req.N > host.MaxForkN {
		return host.ForkSpec{}, fmt.Errorf("%w: n is %d; a branch forks 0 to %d children", host.ErrInvalid, req.N, host.MaxForkN)
	}
	if req.N == 0 && (len(req.Labels) > 0 || len(req.Env) > 0 || req.TTLSeconds != 0 || req.Bounds != (api.Bounds{}) ||
		req.Egress != nil) {
		return host.ForkSpec{}, fmt.Errorf("%w: labels, env, limits, times and egress are of children, and n is 0", host.ErrInvalid)
	}
	spec, err := forkSpec(api.ForkRequest{N: &req.N, Labels: req.Labels, Env: req.Env, TTLSeconds: req.TTLSeconds, Bounds: req.Bounds, Egress: req.Egress})
	if err != nil || req.N == 0 {
		return spec, err
	}
	return spec, spec.Check()
}

// change is a transition of one sandbox.
func (s *Server) change(to func(ctx context.Context, id string) (host.View, error)) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		if err := decode(w, r, &struct{}{}); err != nil {
			return err
		}
		v, err := to(r.Context(), r.PathValue("id"))
		if err != nil {
			return err
		}
		return Reply(w, http.StatusOK, s.sandboxView(v))
	}
}

func (s *Server) compact(w http.ResponseWriter, r *http.Request) error {
	var req api.CompactRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := lineage.CheckTag(req.To); err != nil {
		return fmt.Errorf("field to: %w", err)
	}
	v, err := s.Host.Compact(r.Context(), r.PathValue("tag"), req.To)
	if err != nil {
		return err
	}
	noteCreated(r, "snapshot", v.Tag)
	return Reply(w, http.StatusOK, snapshot(v))
}

const maxWait = time.Hour

// wait returns a snapshot once it is no longer being written, or after that time as it is then.
func (s *Server) wait(ctx context.Context, tag string, most time.Duration) (host.SnapshotView, error) {
	if most == 0 {
		return s.Host.Snapshot(tag)
	}
	limited, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	v, err := s.Host.AwaitSnapshot(limited, tag)
	if ctx.Err() != nil { // nobody waits any more
		return v, context.Cause(ctx)
	}
	return v, err
}

// waitTime reads ?wait=SECONDS.
func waitTime(r *http.Request) (time.Duration, error) {
	text := r.URL.Query().Get("wait")
	if text == "" {
		return 0, nil
	}
	secs, err := strconv.ParseFloat(text, 64)
	if err != nil || !(secs >= 0 && secs <= maxWait.Seconds()) { // not a number fails both comparisons
		return 0, fmt.Errorf("%w: wait is %.20q; give seconds, up to %g", host.ErrInvalid, text, maxWait.Seconds())
	}
	return seconds(secs), nil
}

// flag reads a boolean of the query.
func flag(r *http.Request, name string) (bool, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return false, nil
	}
	b, err := strconv.ParseBool(text)
	if err != nil {
		return false, fmt.Errorf("%w: %s is %.20q; give true or false", host.ErrInvalid, name, text)
	}
	return b, nil
}

func removeOptions(r *http.Request) (host.RemoveOptions, error) {
	cascade, err := flag(r, "cascade")
	if err != nil {
		return host.RemoveOptions{}, err
	}
	force, err := flag(r, "force")
	if err != nil {
		return host.RemoveOptions{}, err
	}
	if cascade && force {
		return host.RemoveOptions{}, fmt.Errorf("%w: cascade removes what stands on the snapshot, force keeps it; give one of them",
			host.ErrInvalid)
	}
	return host.RemoveOptions{Cascade: cascade, Force: force}, nil
}
