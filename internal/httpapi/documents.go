package httpapi

import (
	"maps"
	"net/http"

	"forkd.dev/forkd/api"
)

const (
	plainText = "text/plain; charset=utf-8"
	bytesType = "application/octet-stream"
	tarType   = "application/x-tar"
)

// documents has a document for every operation, by its pattern.
func documents() map[string]*document {
	all := map[string]*document{}
	for _, part := range []map[string]*document{
		hostDocuments(), snapshotDocuments(), sandboxDocuments(), guestDocuments(), contextDocuments(), fileDocuments(),
		workspaceDocuments(), eventDocuments(), tokenDocuments(), egressDocuments(), portDocuments(), listenDocuments(),
		packDocuments(), registryDocuments(), gcDocuments(),
	} {
		maps.Copy(all, part)
	}
	return all
}

func ok(of any) []response      { return []response{{status: http.StatusOK, of: of}} }
func created(of any) []response { return []response{{status: http.StatusCreated, of: of}} }
func noContent() []response     { return []response{{status: http.StatusNoContent}} }

func hostDocuments() map[string]*document {
	return map[string]*document{
		"GET /healthz":         {id: "health", replies: ok(api.Health{})},
		"GET /version":         {id: "version", replies: ok(api.VersionInfo{})},
		"GET /v1/host":         {id: "host", replies: ok(api.HostInfo{})},
		"GET /v1/leftovers":    {id: "listLeftovers", replies: ok([]api.Leftover{})},
		"DELETE /v1/leftovers": {id: "removeLeftovers", replies: ok([]api.Leftover{})},
		"GET /openapi.json":    {id: "openAPI", replies: []response{{status: http.StatusOK, of: map[string]any{}, about: "This document."}}},
		"GET /docs/{file...}": {id: "docs", replies: []response{
			{status: http.StatusOK, media: "text/html; charset=utf-8", about: "A page that needs nothing from elsewhere."},
		}},
	}
}

func snapshotDocuments() map[string]*document {
	wait := parameter{name: "wait", kind: number, most: maxWait.Seconds(), unit: "seconds", about: "Wait that many seconds at most for a snapshot that is being written."}
	all := parameter{name: "all", kind: boolean, about: "With the steps of builds, which are kept for later builds."}
	return map[string]*document{
		"POST /v1/builds": {
			id: "build", query: buildParameters(), media: []string{tarType},
			about: "The body is a tar stream: `recipe.yaml` first and then the files that it names; or, with `dockerfile`, a `Dockerfile` and its " +
				"context below `context/`. The reply is one JSON object a line while it is built; the last has `snapshot` or `error`.",
			replies: []response{{status: http.StatusOK, of: api.BuildEvent{}, media: jsonLines}},
		},
		"GET /v1/images":         {id: "listImages", query: paged(), replies: ok([]api.Image{})},
		"DELETE /v1/images/{id}": {id: "removeImage", replies: noContent()},
		"GET /v1/snapshots": {id: "listSnapshots", query: paged(
			all,
			parameter{name: "status", oneOf: []string{"ready", "writing", "failed"}, about: "Those of this status."},
			parameter{name: "parent", about: "Those that stand on this snapshot."},
			parameter{name: "branched_from", about: "Branches of this sandbox."},
			parameter{name: "image", about: "Those that stand on this image."},
		), replies: ok([]api.Snapshot{})},
		"POST /v1/snapshots": {
			id: "createSnapshot", once: true, body: api.CreateSnapshotRequest{}, replies: created(api.Snapshot{}),
			about: "Boots a copy of a root file system that is in a file of the daemon's host and freezes the machine when its agent " +
				"has answered. Of the existing forkd's clients; recipes, which warm it up as well, are POST /v1/builds.",
		},
		"GET /v1/snapshots/{tag}": {
			id: "snapshot", query: []parameter{wait}, replies: ok(api.SnapshotInfo{}),
		},
		"GET /v1/snapshots/{tag}/info": {
			id: "snapshotInfo", query: []parameter{wait}, replies: ok(api.SnapshotInfo{}),
		},
		"POST /v1/snapshots/{tag}/compact": {id: "compactSnapshot", once: true, body: api.CompactRequest{}, replies: ok(api.Snapshot{})},
		"DELETE /v1/snapshots/{tag}": {
			id: "removeSnapshot", query: []parameter{
				{name: "cascade", kind: boolean, about: "Remove what stands on it as well."},
				{name: "force", kind: boolean, about: "Remove it alone; what stands on it keeps what it needs."},
			},
			replies: []response{
				{status: http.StatusNoContent},
				{status: http.StatusOK, of: api.RemoveReply{}, about: "With cascade or force: what is gone."},
			},
		},
		"GET /v1/tree": {id: "tree", query: []parameter{all}, replies: ok([]api.TreeNode{})},
	}
}

func buildParameters() []parameter {
	const mib = 1 << 20
	return []parameter{
		{name: "tag", about: "Of the snapshot.", required: true, pattern: tagPattern, form: tagForm},
		{name: "kernel", about: "A kernel's path on the daemon's host, which needs scope admin; without it Debian's is taken."},
		{name: "replace", kind: boolean, about: "Replace a snapshot of this tag, once the new one is ready."},
		{name: "no_cache", kind: boolean, about: "Do all steps again."},
		{name: "dockerfile", about: "A Dockerfile is sent, and this is its name in messages."},
		{name: "target", about: "The stage of the Dockerfile to build."},
		{name: "build_arg", repeated: true, about: "NAME=VALUE of an ARG.", pattern: `^[^=]+=`, form: "NAME=VALUE"},
		{name: "base", about: "The base, as FROM says it, whose files are sent along."},
		{name: "cpus", kind: integer, least: 1, most: 64, about: "Of the machine."},
		{name: "memory_bytes", kind: integer, least: 128 * mib, most: 1 << 40, about: "Of the machine, whole MiB."},
		{name: "disk_bytes", kind: integer, least: 1 << 30, most: 16 << 40, about: "Of the machine, whole MiB."},
		{name: "network", about: "What a recipe would have under network, in a line: a preset, or {build: packages}."},
	}
}

// tagPattern says what package lineage checks.
const (
	tagPattern = `^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$`
	tagForm    = "1 to 64 letters, digits and _ . - (the first a letter, digit or _)"
)

func sandboxDocuments() map[string]*document {
	const one = " /v1/sandboxes/{id}"
	return map[string]*document{
		"POST /v1/sandboxes": {
			id: "fork", once: true, body: api.ForkRequest{},
			about:   "All children or none, unless `partial` is set: then a child that failed is told in its place, with `error` and no `id`.",
			replies: []response{{status: http.StatusCreated, of: []api.Sandbox{}}},
		},
		"GET /v1/sandboxes": {id: "listSandboxes", query: paged(
			parameter{name: "state", oneOf: []string{"running", "paused", "suspended", "failed"}, about: "Those in this state."},
			parameter{name: "snapshot", about: "Those that were forked from this snapshot."},
			parameter{name: "label", repeated: true, pattern: `^[^=]+=`, form: "KEY=VALUE", about: "KEY=VALUE: those that have it; of several, all."},
		), replies: ok([]api.Sandbox{})},
		"GET" + one:    {id: "sandbox", replies: ok(api.Sandbox{})},
		"DELETE" + one: {id: "kill", replies: noContent()},
		"POST" + one + "/branch": {
			id: "branch", once: true, body: api.BranchRequest{},
			about: "The sandbox runs on. With `n` children of the new snapshot are forked in the same call; they tell their own errors.",
			replies: []response{
				{status: http.StatusCreated, of: api.Snapshot{}, about: "It is ready."},
				{status: http.StatusAccepted, of: api.Snapshot{}, about: "It is being written (`wait` is false)."},
			},
		},
		"POST" + one + "/pause":   {id: "pause", body: struct{}{}, replies: ok(api.Sandbox{})},
		"POST" + one + "/resume":  {id: "resume", body: struct{}{}, replies: ok(api.Sandbox{})},
		"POST" + one + "/suspend": {id: "suspend", body: struct{}{}, replies: ok(api.Sandbox{})},
		"POST" + one + "/wake":    {id: "wake", body: struct{}{}, replies: ok(api.Sandbox{})},
		"PUT" + one + "/ttl": {
			id: "setTTL", body: api.TTLRequest{}, replies: ok(api.Sandbox{}),
			about: "From now on; what happens at its end stays as it is. A suspended sandbox's time stands still.",
		},
	}
}

func guestDocuments() map[string]*document {
	const one = " /v1/sandboxes/{id}"
	return map[string]*document{
		"POST" + one + "/exec": {
			id: "exec", body: api.ExecRequest{}, about: "The reply comes when the command has ended, and has the first 16 MiB of each output; or " +
				"as it runs, if `" + eventStream + "` or `" + jsonLines + "` is accepted. It goes on when the client leaves, until its time is up.",
			replies: []response{
				{status: http.StatusOK, of: api.ExecResponse{}},
				{status: http.StatusOK, of: api.ExecEvent{}, media: eventStream},
				{status: http.StatusOK, of: api.ExecEvent{}, media: jsonLines},
			},
		},
		"GET" + one + "/exec": {
			id: "execSocket", about: "A WebSocket (protocol `" + execProtocol + "`); x-forkd-messages are what is said. A message that cannot be obeyed is " +
				"answered, and changes nothing. A browser, which cannot send a header, names its token as a second protocol: `" + tokenProtocol + "TOKEN`.",
			headers: []parameter{{name: "Upgrade", required: true, oneOf: []string{"websocket"}, about: "The protocol."}},
			socket: []message{
				{"client", api.ExecStart{}, "The first message, once: what to run, or to come to."},
				{"client", api.ExecControl{}, "Any later text."},
				{"client", nil, "A byte 0, then input: what standard input gets."},
				{"server", api.ExecEvent{}, `"start" once; "lost" and "refused" at any time; "exit" or "error" is the last message.`},
				{"server", nil, "A byte 1 (standard output, and all of a terminal's) or 2 (standard error), then output."},
			},
			replies: []response{{status: http.StatusSwitchingProtocols, about: "The connection is a WebSocket now."}},
		},
		"POST" + one + "/ping":   {id: "ping", body: struct{}{}, replies: ok(api.Pong{})},
		"GET" + one + "/metrics": {id: "sandboxMetrics", replies: ok(api.Metrics{})},
		"GET" + one + "/logs": {
			id: "logs", query: []parameter{{name: "follow", kind: boolean, about: "Send what is printed from now on, until the client leaves."}},
			replies: []response{{status: http.StatusOK, media: plainText, about: "The newest part of the console."}},
		},
		"GET" + one + "/processes": {
			id: "listProcesses", replies: ok([]api.Process{}),
			query: []parameter{{name: "ended", kind: boolean, about: "With those that have ended and can still be asked for."}},
		},
		"POST" + one + "/processes/{process}/signal": {id: "signalProcess", body: api.SignalRequest{}, replies: noContent()},
		"POST" + one + "/call": {
			id: "call", about: "Upgrades the connection to `" + callProtocol + "`: the frames of the guest's protocol (docs/guest-protocol.md).",
			headers: []parameter{{name: "Upgrade", required: true, oneOf: []string{callProtocol}, about: "The protocol."}},
			replies: []response{{status: http.StatusSwitchingProtocols, about: "The connection carries frames now."}},
		},
	}
}

func contextDocuments() map[string]*document {
	const one = " /v1/sandboxes/{id}"
	return map[string]*document{
		"POST" + one + "/eval": {
			id: "eval", body: api.EvalRequest{},
			about: "With `Accept: application/x-ndjson` or `text/event-stream` the reply is a stream of events while the code runs.",
			replies: []response{
				{status: http.StatusOK, of: api.EvalResponse{}},
				{status: http.StatusOK, of: api.EvalEvent{}, media: jsonLines},
				{status: http.StatusOK, of: api.EvalEvent{}, media: eventStream},
			},
		},
		"GET" + one + "/contexts":                  {id: "listContexts", replies: ok([]api.Context{})},
		"POST" + one + "/contexts":                 {id: "createContext", once: true, body: api.ContextRequest{}, replies: created(api.Context{})},
		"DELETE" + one + "/contexts/{ctx}":         {id: "removeContext", replies: noContent()},
		"POST" + one + "/contexts/{ctx}/restart":   {id: "restartContext", body: struct{}{}, replies: ok(api.Context{})},
		"POST" + one + "/contexts/{ctx}/interrupt": {id: "interruptContext", body: struct{}{}, replies: noContent()},
	}
}

func fileDocuments() map[string]*document {
	const base = " /v1/sandboxes/{id}/files"
	file := func(others ...parameter) []parameter {
		return append([]parameter{
			{name: "path", required: true, pattern: `^[\s\S]`, form: "a path", about: "Relative ones and ~ begin in the user's home."},
			{name: "user", about: "Who does it; without it the image's user."},
		}, others...)
	}
	mode := parameter{name: "mode", about: "Permission bits in octal.", pattern: `^[0-7]{1,4}$`, form: "an octal number up to 7777"}
	metadata := parameter{name: "X-Metadata-NAME", about: "Becomes metadata of the file. Any number of such headers."}
	upload := func(id, about string) *document {
		query := file(mode)
		query[0].required, query[0].pattern = false, "" // a form has paths of its own
		return &document{
			id: id, about: about, query: query, headers: []parameter{metadata}, media: []string{bytesType, "multipart/form-data"},
			replies: ok([]api.File{}),
		}
	}
	return map[string]*document{
		"GET" + base: {
			id: "readFile", query: file(), about: "Ranges, `If-None-Match` and `Accept-Encoding: gzip` are understood.",
			replies: []response{{status: http.StatusOK, media: bytesType}, {status: http.StatusPartialContent, media: bytesType}},
		},
		"POST" + base:   upload("writeFiles", "One file as the body, or the files of a form: each goes to the path in its file name."),
		"PUT" + base:    upload("writeFile", "One file as the body."),
		"DELETE" + base: {id: "removeFile", query: file(), replies: noContent()},
		"GET" + base + "/list": {id: "listFiles", query: file(
			parameter{name: "depth", kind: integer, least: 1, most: 1<<32 - 1, about: "How many levels; 1 if not given."}), replies: ok([]api.File{})},
		"GET" + base + "/stat":     {id: "statFile", query: file(), replies: ok(api.File{})},
		"POST" + base + "/mkdir":   {id: "makeDirectory", body: api.FileRequest{}, replies: ok(api.File{})},
		"POST" + base + "/move":    {id: "moveFile", body: api.MoveRequest{}, replies: ok(api.File{})},
		"POST" + base + "/remove":  {id: "removePath", body: api.FileRequest{}, replies: noContent()},
		"POST" + base + "/compose": {id: "composeFile", body: api.ComposeRequest{}, replies: ok(api.File{})},
		"GET" + base + "/watch": {
			id: "watchDirectory", query: file(
				parameter{name: "recursive", kind: boolean, about: "With all directories below it."},
				parameter{name: "entries", kind: boolean, about: "Describe what was created, written or changed."},
				parameter{name: "allow_network_mounts", kind: boolean, about: "Also where the kernel does not see the changes of others."},
			),
			about:   "One JSON object a line, until the client leaves.",
			replies: []response{{status: http.StatusOK, of: api.FileEvent{}, media: jsonLines}},
		},
		"POST" + base + "/watchers":             {id: "createWatcher", body: api.WatchRequest{}, replies: created(api.Watcher{})},
		"GET" + base + "/watchers/{watcher}":    {id: "watcherEvents", replies: ok(api.FileEvents{})},
		"DELETE" + base + "/watchers/{watcher}": {id: "removeWatcher", replies: noContent()},
	}
}

func workspaceDocuments() map[string]*document {
	const one = " /v1/workspaces/{name}"
	return map[string]*document{
		"GET /v1/workspaces":      {id: "listWorkspaces", query: paged(), replies: ok([]api.Workspace{})},
		"POST /v1/workspaces":     {id: "createWorkspace", once: true, body: api.WorkspaceRequest{}, replies: created(api.Workspace{})},
		"GET" + one:               {id: "workspace", replies: ok(api.Workspace{})},
		"DELETE" + one:            {id: "removeWorkspace", replies: noContent()},
		"POST" + one + "/suspend": {id: "suspendWorkspace", body: api.SuspendWorkspaceRequest{}, replies: ok(api.Workspace{})},
		"POST" + one + "/resume":  {id: "resumeWorkspace", body: struct{}{}, replies: ok(api.Workspace{})},
	}
}

func eventDocuments() map[string]*document {
	const most = 1<<53 - 1 // what every reader of JSON keeps
	return map[string]*document{
		"GET /metrics":                 {id: "metrics", replies: []response{{status: http.StatusOK, media: "text/plain; version=0.0.4; charset=utf-8; escaping=underscores"}}},
		"GET /v1/sandboxes/{id}/usage": {id: "usage", about: "What is counted goes on over a suspend and never gets less.", replies: ok(api.Usage{})},
		"GET /v1/usage": {id: "listUsage", query: paged(
			parameter{name: "label", repeated: true, pattern: `^[^=]+=`, form: "KEY=VALUE", about: "KEY=VALUE: those that have it; of several, all."},
		), replies: ok([]api.Usage{})},
		"GET /v1/events": {
			id: "events", about: "One JSON object a line, or server-sent events with `Accept: text/event-stream`.",
			query: []parameter{
				{name: "follow", kind: boolean, about: "Go on until the client leaves; true if not given."},
				{name: "since", kind: integer, most: most, about: "Begin after the event of this sequence number; not with tail."},
				{name: "tail", kind: integer, most: 1<<31 - 1, about: "Begin with so many of those that are kept."},
				{name: "type", repeated: true, about: "Those of this type, or of the part before its dot."},
				{name: "sandbox", repeated: true, about: "Those of this sandbox."},
				{name: "snapshot", repeated: true, about: "Those of this snapshot."},
			},
			headers: []parameter{{name: "Last-Event-ID", kind: integer, most: most, about: "As since; sent by readers of server-sent events that come back."}},
			replies: []response{
				{status: http.StatusOK, of: api.Event{}, media: jsonLines},
				{status: http.StatusOK, of: api.Event{}, media: eventStream},
			},
		},
	}
}
