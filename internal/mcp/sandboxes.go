package mcp

import (
	"context"
	"slices"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

type sandboxIn struct {
	SandboxID string `json:"sandbox_id" jsonschema:"id of a sandbox, or name of a workspace"`
}

// bounds are the wishes of a fork that have the same names everywhere.
type bounds struct {
	Labels      map[string]string `json:"labels,omitempty" jsonschema:"to find them again by: list_sandboxes takes them"`
	Env         map[string]string `json:"env,omitempty" jsonschema:"variables of everything that is started in them"`
	TTLSeconds  float64           `json:"ttl_seconds,omitempty" jsonschema:"they live so long; until killed if not given"`
	TTLAction   string            `json:"ttl_action,omitempty" jsonschema:"then: kill (default), pause or suspend"`
	IdleSeconds float64           `json:"idle_seconds,omitempty" jsonschema:"so long without a call"`
	IdleAction  string            `json:"idle_action,omitempty" jsonschema:"then: suspend (default), pause or kill"`
	AutoResume  bool              `json:"auto_resume,omitempty" jsonschema:"a call resumes or wakes them first"`
	Egress      *egress           `json:"egress,omitempty" jsonschema:"what they may reach outside; the snapshot's if not given, which is mostly nothing"`
}

// egress is what a sandbox may reach.
type egress struct {
	Preset string   `json:"preset,omitempty" jsonschema:"none, dns-only, packages (what package managers need) or open"`
	Allow  []string `json:"allow,omitempty" jsonschema:"rules beyond the preset: DOMAIN, *.DOMAIN, ADDRESS/BITS, each with :PORT if wanted"`
	Deny   []string `json:"deny,omitempty" jsonschema:"rules that go before all others"`
}

func (e *egress) api() *api.Egress {
	if e == nil {
		return nil
	}
	return &api.Egress{Preset: e.Preset, Allow: e.Allow, Deny: e.Deny}
}

type setTTLIn struct {
	SandboxID  string  `json:"sandbox_id"`
	TTLSeconds float64 `json:"ttl_seconds" jsonschema:"from now on; 0: until it is killed"`
}

type setEgressIn struct {
	SandboxID string `json:"sandbox_id"`
	egress
}

func (b bounds) api() api.Bounds {
	return api.Bounds{TTLAction: b.TTLAction, IdleSeconds: b.IdleSeconds, IdleAction: b.IdleAction, AutoResume: b.AutoResume}
}

type spawnIn struct {
	SnapshotTag string `json:"snapshot_tag" jsonschema:"of list_snapshots"`
	N           *int   `json:"n,omitempty" jsonschema:"how many, 1 to 1000; 1 if not given"`
	bounds

	PerChildNetns  bool `json:"per_child_netns,omitempty" jsonschema:"accepted; every sandbox is isolated"`
	MemoryLimitMiB int  `json:"memory_limit_mib,omitempty" jsonschema:"raised to what the machine takes; the answer's warnings say so"`
	Prewarm        bool `json:"prewarm,omitempty" jsonschema:"accepted"`
	LiveFork       bool `json:"live_fork,omitempty" jsonschema:"accepted"`
}

type listSandboxesIn struct {
	State    string            `json:"state,omitempty" jsonschema:"running, paused, suspended or failed"`
	Snapshot string            `json:"snapshot_tag,omitempty" jsonschema:"those that were forked from it"`
	Labels   map[string]string `json:"labels,omitempty" jsonschema:"those that have all of these"`
}

type killed struct {
	ID     string `json:"id"`
	Killed bool   `json:"killed"`
}

type forkIn struct {
	SandboxID string `json:"sandbox_id" jsonschema:"the sandbox to copy; it runs on"`
	N         int    `json:"n,omitempty" jsonschema:"how many copies; 1 if not given"`
	Tag       string `json:"tag,omitempty" jsonschema:"name of the snapshot in between; one is made up if not given"`
	bounds
}

// forked is the answer to fork_sandbox.
type forked struct {
	SnapshotTag string        `json:"snapshot_tag"` // delete_snapshot takes it when the copies are gone
	PauseMS     float64       `json:"pause_ms"`
	Children    []api.Sandbox `json:"children"`
}

func (s *server) sandboxTools(m *mcp.Server) {
	tool(s, m, "list_sandboxes", "List sandboxes: those that run, are paused, suspended or have failed.", reads,
		func(ctx context.Context, c *call, in listSandboxesIn) (any, error) {
			filter := client.SandboxFilter{State: in.State, Snapshot: in.Snapshot}
			for k, v := range in.Labels {
				filter.Labels = append(filter.Labels, k+"="+v)
			}
			slices.Sort(filter.Labels)
			list, err := c.FilterSandboxes(ctx, filter)
			return brief(list...), err
		})
	tool(s, m, "get_sandbox", "Describe a sandbox: its state, sizes, time to live.", reads, func(ctx context.Context, c *call, in sandboxIn) (any, error) {
		v, err := c.Sandbox(ctx, in.SandboxID)
		if err != nil {
			return nil, err
		}
		return brief(*v)[0], nil
	})
	tool(s, m, "spawn_sandboxes", "Fork sandboxes from a snapshot. Each is a microVM of its own that begins in the snapshot's state: "+
		"interpreters started, libraries imported. The answer lists them with their ids.", adds, spawn)
	tool(s, m, "fork_sandbox", "Copy a running sandbox: n sandboxes that begin exactly as it is now, with its files, processes and "+
		"variables. It runs on, and nothing that happens in one reaches another. Use it to try several ways from one state.", adds, fork)
	for _, change := range []struct {
		name, about string
		do          func(*client.Client, context.Context, string) (*api.Sandbox, error)
	}{
		{"pause_sandbox", "Halt a sandbox's CPUs; its memory stays. resume_sandbox lets it run on.", (*client.Client).Pause},
		{"resume_sandbox", "Let a paused sandbox run on.", (*client.Client).Resume},
		{"suspend_sandbox", "Store a sandbox on disk and free its memory; it keeps its id. wake_sandbox lets it run on.", (*client.Client).Suspend},
		{"wake_sandbox", "Let a suspended sandbox run on where it was.", (*client.Client).Wake},
	} {
		tool(s, m, change.name, change.about, adds, func(ctx context.Context, c *call, in sandboxIn) (any, error) {
			v, err := change.do(c.Client, ctx, in.SandboxID)
			if err != nil {
				return nil, err
			}
			return brief(*v)[0], nil
		})
	}
	tool(s, m, "set_ttl", "Give a sandbox another time to live, from now on.", adds, func(ctx context.Context, c *call, in setTTLIn) (any, error) {
		v, err := c.SetTTL(ctx, in.SandboxID, api.TTLRequest{TTLSeconds: in.TTLSeconds})
		if err != nil {
			return nil, err
		}
		return brief(*v)[0], nil
	})
	tool(s, m, "kill_sandbox", "End a sandbox: all that is in it is gone, snapshots and copies of it stay.", destroys,
		func(ctx context.Context, c *call, in sandboxIn) (any, error) {
			return killed{in.SandboxID, true}, c.Kill(ctx, in.SandboxID)
		})
	tool(s, m, "ping_sandbox", "Ask a sandbox for a sign of life.", reads, func(ctx context.Context, c *call, in sandboxIn) (any, error) {
		return map[string]bool{"pong": true}, c.Ping(ctx, in.SandboxID)
	})
	tool(s, m, "sandbox_logs", "The newest part of a sandbox's console: its kernel and what went wrong there.", reads,
		func(ctx context.Context, c *call, in sandboxIn) (any, error) {
			text, err := c.Logs(ctx, in.SandboxID)
			return map[string]string{"text": strings.ToValidUTF8(string(text), "\uFFFD")}, err
		})
	tool(s, m, "get_egress", "What a sandbox may reach outside, and what it has sent and received.", reads,
		func(ctx context.Context, c *call, in sandboxIn) (any, error) { return c.Egress(ctx, in.SandboxID) })
	tool(s, m, "set_egress", "Say what a sandbox may reach outside from now on.", destroys, func(ctx context.Context, c *call, in setEgressIn) (any, error) {
		return c.SetEgress(ctx, in.SandboxID, *in.egress.api())
	})
	tool(s, m, "list_ports", "TCP ports that something in a sandbox listens on, and where the daemon serves them.", reads,
		func(ctx context.Context, c *call, in sandboxIn) (any, error) {
			list, err := c.Ports(ctx, in.SandboxID)
			return map[string]any{"ports": list}, err
		})
	tool(s, m, "tree", "Images, snapshots and sandboxes as a family tree: what stands on what, and what each adds.", reads,
		func(ctx context.Context, c *call, _ struct{}) (any, error) { return c.Tree(ctx) })
}

func spawn(ctx context.Context, c *call, in spawnIn) (any, error) {
	n := 1
	if in.N != nil {
		n = *in.N
	}
	c.progress(ctx, 0, float64(n), "forking %d of %s", n, in.SnapshotTag)
	made, err := c.Fork(ctx, api.ForkRequest{
		SnapshotTag: in.SnapshotTag, N: in.N, Labels: in.Labels, Env: in.Env, TTLSeconds: in.TTLSeconds, Bounds: in.bounds.api(),
		Egress: in.Egress.api(), PerChildNetns: in.PerChildNetns, MemoryLimitMiB: in.MemoryLimitMiB, Prewarm: in.Prewarm, LiveFork: in.LiveFork,
	})
	if err != nil {
		return nil, err
	}
	c.progress(ctx, float64(n), float64(n), "%d ready", len(made))
	return brief(made...), nil
}

func fork(ctx context.Context, c *call, in forkIn) (any, error) {
	n, wait := max(in.N, 1), false
	c.progress(ctx, 0, float64(n), "copying %s", in.SandboxID)
	v, err := c.Branch(ctx, in.SandboxID, api.BranchRequest{
		Tag: in.Tag, Wait: &wait, N: n, Labels: in.Labels, Env: in.Env, TTLSeconds: in.TTLSeconds, Bounds: in.bounds.api(), Egress: in.Egress.api(),
	})
	if err != nil {
		return nil, err
	}
	for i := range v.Children {
		if e := v.Children[i].Error; e != nil {
			return nil, e
		}
	}
	c.progress(ctx, float64(n), float64(n), "%d ready", len(v.Children))
	return forked{SnapshotTag: v.Tag, PauseMS: v.PauseMS, Children: brief(v.Children...)}, nil
}

// brief leaves away what a model has no use for.
func brief(list ...api.Sandbox) []api.Sandbox {
	out := make([]api.Sandbox, len(list))
	for i := range list {
		out[i] = list[i]
		out[i].CloneReport, out[i].Config, out[i].Confinement = nil, nil, nil
	}
	return out
}
