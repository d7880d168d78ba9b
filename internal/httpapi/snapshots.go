package httpapi

import (
	"net/http"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
)

// snapshots lists those that users have named; with all=true the steps of builds as well.
func (s *Server) snapshots(w http.ResponseWriter, r *http.Request) error {
	all, err := flag(r, "all")
	if err != nil {
		return err
	}
	q := r.URL.Query()
	list := []api.Snapshot{}
	for _, v := range s.Host.Snapshots() {
		if lineage.IsStep(v.Tag) && !all {
			continue
		}
		out := snapshot(v)
		if asked(q, "status", out.Status) && asked(q, "parent", out.Parent) && asked(q, "branched_from", out.BranchedFrom) && asked(q, "image", out.Image) {
			list = append(list, out)
		}
	}
	list, err = page(w, r, list, func(s *api.Snapshot) string { return newestFirst(s.CreatedAtUnix, s.Tag) })
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, list)
}

func snapshot(v host.SnapshotView) api.Snapshot {
	out := api.Snapshot{
		Tag: v.Tag, Status: string(v.Status), Bootable: v.Status == lineage.Ready, CreatedAtUnix: v.CreatedAt.Unix(),
		Parent: v.Parent, Image: v.Image, Recipe: v.Recipe, Warm: notNil(v.Warm), CPUs: v.Engine.CPUs,
		MemoryBytes: v.Engine.MemoryBytes, MemoryOwnBytes: v.MemoryOwn, DiskOwnBytes: v.DiskOwn, StoredBytes: v.Stored,
		Hot: v.Hot, Sandboxes: v.Sandboxes, MemorySharedBytes: v.MemoryShared, DiskSharedBytes: v.DiskShared,
		Error: v.Reason, Step: lineage.IsStep(v.Tag), Dir: v.Dir, Egress: egressOf(v.Egress), Pinned: v.Pinned,
	}
	if v.Status == lineage.Ready { // before that there is no manifest yet whose digest it could be
		out.ID = v.ID()
	} else {
		out.Progress = v.Progress
	}
	if b := v.Branch; b != nil {
		out.BranchedFrom, out.Mode, out.ModeReason = b.From, b.Mode, b.ModeReason
		out.PauseMS, out.FrozenMS, out.SetupMS, out.CopyMS, out.WriteMS = b.PauseMS, b.FrozenMS, b.SetupMS, b.CopyMS, b.WriteMS
		if b.Mode == string(host.BranchDiff) {
			out.DiffMS, out.DiffPhysicalBytes, out.DiffLogicalBytes = b.PauseMS, v.MemoryOwn, v.Engine.MemoryBytes
		}
	}
	return out
}

func (s *Server) snapshotInfo(w http.ResponseWriter, r *http.Request) error {
	most, err := waitTime(r)
	if err != nil {
		return err
	}
	v, err := s.wait(r.Context(), r.PathValue("tag"), most)
	if err != nil {
		return err
	}
	info := api.SnapshotInfo{
		Snapshot: snapshot(v), Engine: asMap(v.Engine), Kernel: v.Kernel, Agent: v.Agent, MemoryLayer: v.Memory.String(),
		DiskLayer: v.Disk.String(), StateBytes: v.StateBytes, RecipeText: v.RecipeText, BootMS: v.BootMS, WarmMS: v.WarmMS,
		ChainDepth: len(v.Ancestors), Ancestors: notNil(v.Ancestors), Dependents: notNil(v.Dependents),
		Config: imageConfig(v.Config), MemoryLogicalBytes: v.Engine.MemoryBytes, MemoryPhysicalBytes: v.MemoryOwn,
	}
	if v.Parent != "" {
		info.ParentTag, info.ParentContentHash = &v.Parent, &v.ParentID
	}
	return Reply(w, http.StatusOK, info)
}

// imageConfig is nil for a snapshot from before there was one.
func imageConfig(c *store.Config) *api.ImageConfig {
	if c == nil {
		return nil
	}
	out := api.ImageConfig(*c)
	return &out
}

func notNil(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func (s *Server) removeSnapshot(w http.ResponseWriter, r *http.Request) error {
	opts, err := removeOptions(r)
	if err != nil {
		return err
	}
	removed, err := s.Host.RemoveSnapshot(r.Context(), r.PathValue("tag"), opts)
	if err != nil {
		return err
	}
	if opts.Cascade || opts.Force {
		return Reply(w, http.StatusOK, api.RemoveReply{Removed: notNil(removed)})
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) images(w http.ResponseWriter, r *http.Request) error {
	list := []api.Image{}
	for _, m := range s.Host.Images() {
		list = append(list, api.Image{
			ID: m.ID, Name: m.Name, Base: m.Base, Packages: len(m.Packages), CreatedAtUnix: m.CreatedAt.Unix(),
			DiskBytes: m.DiskBytes, OwnBytes: m.OwnBytes, StoredBytes: m.StoredBytes, Snapshots: m.Snapshots,
		})
	}
	list, err := page(w, r, list, func(i *api.Image) string { return newestFirst(i.CreatedAtUnix, i.ID) })
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, list)
}

func (s *Server) removeImage(w http.ResponseWriter, r *http.Request) error {
	if err := s.Host.RemoveImage(r.Context(), r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) tree(w http.ResponseWriter, r *http.Request) error {
	all, err := flag(r, "all")
	if err != nil {
		return err
	}
	return Reply(w, http.StatusOK, nodes(s.Host.Tree(all)))
}

func nodes(in []host.Node) []api.TreeNode {
	out := []api.TreeNode{}
	for _, n := range in {
		out = append(out, api.TreeNode{
			Kind: n.Kind, Name: n.Name, State: n.State, OwnBytes: n.OwnBytes, MemoryOwnBytes: n.MemoryOwn,
			MemorySharedBytes: n.MemoryShared, DiskOwnBytes: n.DiskOwn, DiskSharedBytes: n.DiskShared, Children: nodes(n.Children),
		})
	}
	return out
}
