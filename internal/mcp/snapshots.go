package mcp

import (
	"context"
	"fmt"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/api"
)

type branchIn struct {
	SandboxID   string `json:"sandbox_id" jsonschema:"the sandbox to capture; it runs on"`
	Tag         string `json:"tag,omitempty" jsonschema:"name of the snapshot; one is made up if not given"`
	Mode        string `json:"mode,omitempty" jsonschema:"auto (default), live, diff or full"`
	Wait        *bool  `json:"wait,omitempty" jsonschema:"false: answer when the sandbox runs again, while the snapshot is still being written"`
	Diff        bool   `json:"diff,omitempty" jsonschema:"the same as mode diff"`
	MeasureDiff bool   `json:"measure_diff,omitempty" jsonschema:"accepted; it is always measured"`
}

type snapshotIn struct {
	Tag string `json:"tag" jsonschema:"of list_snapshots"`
}

type deleteSnapshotIn struct {
	Tag     string `json:"tag" jsonschema:"of list_snapshots"`
	Cascade bool   `json:"cascade,omitempty" jsonschema:"with all snapshots that stand on it"`
	Force   bool   `json:"force,omitempty" jsonschema:"alone; what stands on it keeps what it needs"`
}

// createSnapshotIn is what the existing forkd's server takes.
type createSnapshotIn struct {
	Tag          string `json:"tag"`
	Kernel       string `json:"kernel"`
	Rootfs       string `json:"rootfs"`
	RW           bool   `json:"rw,omitempty"`
	Tap          string `json:"tap,omitempty"`
	BootWaitSecs int    `json:"boot_wait_secs,omitempty"`
}

func (s *server) snapshotTools(m *mcp.Server) {
	tool(s, m, "list_snapshots", "List snapshots: frozen machines that sandboxes are forked from, and the branches of sandboxes.", reads,
		func(ctx context.Context, c *call, _ struct{}) (any, error) { return c.Snapshots(ctx) })
	tool(s, m, "get_snapshot", "Describe a snapshot: what it is made of, what stands on it, whether it is ready.", reads,
		func(ctx context.Context, c *call, in snapshotIn) (any, error) { return c.SnapshotInfo(ctx, in.Tag) })
	tool(s, m, "branch_sandbox", "Keep a running sandbox's state as a snapshot. It runs on after a pause of milliseconds, which the "+
		"answer names (pause_ms). spawn_sandboxes makes sandboxes of it at any time.", adds, branch)
	tool(s, m, "delete_snapshot", "Remove a snapshot.", destroys, func(ctx context.Context, c *call, in deleteSnapshotIn) (any, error) {
		switch {
		case in.Cascade && in.Force:
			return nil, &api.Error{Code: api.CodeInvalid, Message: "cascade and force are both given; give one of them"}
		case in.Cascade:
			removed, err := c.RemoveSnapshotCascade(ctx, in.Tag)
			return api.RemoveReply{Removed: removed}, err
		case in.Force:
			removed, err := c.RemoveSnapshotForce(ctx, in.Tag)
			return api.RemoveReply{Removed: removed}, err
		}
		return api.RemoveReply{Removed: []string{in.Tag}}, c.RemoveSnapshot(ctx, in.Tag)
	})
	tool(s, m, "create_snapshot", "Boot a copy of a root file system that is in a file on the daemon's host, and keep the machine as a snapshot: for "+
		"administrators. To keep a sandbox's state use branch_sandbox.", adds, func(ctx context.Context, c *call, in createSnapshotIn) (any, error) {
		return c.CreateSnapshot(ctx, api.CreateSnapshotRequest{
			Tag: in.Tag, Kernel: in.Kernel, Rootfs: in.Rootfs, RW: in.RW, Tap: in.Tap, BootWaitSecs: in.BootWaitSecs,
		})
	})
}

// progressEvery is how often a branch that is being written is looked at for somebody who wants to know.
const progressEvery = time.Second

func branch(ctx context.Context, c *call, in branchIn) (any, error) {
	wait := in.Wait == nil || *in.Wait
	watch := wait && c.wantsProgress()
	now := wait && !watch
	v, err := c.Branch(ctx, in.SandboxID, api.BranchRequest{Tag: in.Tag, Mode: in.Mode, Wait: &now, Diff: in.Diff, MeasureDiff: in.MeasureDiff})
	if err != nil || !watch {
		return v, err
	}
	for v.Status == "writing" {
		c.progress(ctx, 100*v.Progress, 100, "%s runs again after %.1f ms; writing %s", in.SandboxID, v.PauseMS, v.Tag)
		info, err := c.WaitSnapshot(ctx, v.Tag, progressEvery)
		if err != nil {
			return nil, err
		}
		v = &info.Snapshot
	}
	if v.Status != "ready" {
		return nil, &api.Error{Code: api.CodeInternal, Message: fmt.Sprintf("snapshot %s: %s: %s", v.Tag, v.Status, v.Error)}
	}
	c.progress(ctx, 100, 100, "%s is ready", v.Tag)
	return v, nil
}
