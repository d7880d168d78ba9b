package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
)

// canned is a daemon that gives one reply to each request, and remembers what it was asked.
type canned struct {
	replies map[string]any // "METHOD path?query" → reply; an *api.Error is a refusal
	asked   []string
	bodies  []string
}

func (d *canned) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/version" {
		_ = json.NewEncoder(w).Encode(api.VersionInfo{API: api.Version})
		return
	}
	request := r.Method + " " + r.URL.RequestURI()
	body, _ := io.ReadAll(r.Body)
	d.asked, d.bodies = append(d.asked, request), append(d.bodies, string(body))
	reply, ok := d.replies[request]
	if !ok {
		reply = &api.Error{Code: api.CodeNotFound, Message: request + ": not found"}
	}
	switch reply := reply.(type) {
	case nil:
		w.WriteHeader(http.StatusNoContent)
		return
	case *api.Error:
		w.WriteHeader(http.StatusConflict)
		_ = json.NewEncoder(w).Encode(reply)
	case string:
		_, _ = io.WriteString(w, reply)
	default:
		_ = json.NewEncoder(w).Encode(reply)
	}
}

// run gives a command line to a program that talks to the daemon.
func (d *canned) run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	server := httptest.NewServer(d)
	defer server.Close()
	var out, errs bytes.Buffer
	a := &App{Out: &out, Err: &errs, Name: "forkd", Getenv: func(name string) string {
		if name == "FORKD_HOST" {
			return server.URL
		}
		return ""
	}}
	code = a.Main(t.Context(), args)
	return code, out.String(), errs.String()
}

func branched() *api.Snapshot {
	return &api.Snapshot{
		Tag: "t", Status: "ready", Mode: "live", ModeReason: "this host can", Parent: "p", BranchedFrom: "sb1", PauseMS: 30, FrozenMS: 41,
		SetupMS: 5, CopyMS: 200, WriteMS: 80, MemoryOwnBytes: 3 * mib, MemorySharedBytes: 100 * mib, DiskOwnBytes: 65536,
		DiskSharedBytes: 300 * mib, StoredBytes: mib,
	}
}

func TestBranchCommandLine(t *testing.T) {
	const request = "POST /v1/sandboxes/sb1/branch"
	for _, tt := range []struct {
		args string
		want string // body
	}{
		{"branch sb1", `{"mode":"auto","wait":true}`},
		{"branch sb1 -t x --mode full", `{"tag":"x","mode":"full","wait":true}`},
		{"branch sb1 --no-wait --mode diff", `{"mode":"diff","wait":false}`},
		{"branch sb1 -n 2 -l a=b -e C=d --ttl 90s", `{"mode":"auto","wait":true,"n":2,"labels":{"a":"b"},"env":{"C":"d"},"ttl_seconds":90}`},
		{"snapshot --from-sandbox sb1", `{"mode":"auto","wait":true}`},
		{"snapshot --from-sandbox sb1 --tag x --live --no-wait", `{"tag":"x","mode":"live","wait":false}`},
		{"snapshot --from-sandbox sb1 --diff", `{"mode":"diff","wait":true}`},
		{"snapshot --from-sandbox sb1 --full", `{"mode":"full","wait":true}`},
		{"snapshot --from-sandbox sb1 --mode live", `{"mode":"live","wait":true}`},
	} {
		d := &canned{replies: map[string]any{request: branched()}}
		code, stdout, stderr := d.run(t, strings.Fields(tt.args)...)
		if code != 0 || len(d.bodies) != 1 {
			t.Errorf("%s: code %d, %s", tt.args, code, stderr)
			continue
		}
		if diff := cmp.Diff(tt.want, d.bodies[0]); diff != "" {
			t.Errorf("%s: %s", tt.args, diff)
		}
		for _, word := range []string{"t", "live: this host can", "30.0 ms", "41.0 ms", "3.0 MiB", "100.0 MiB", "300.0 MiB"} {
			if !strings.Contains(stdout, word) {
				t.Errorf("%s: %q is not in:\n%s", tt.args, word, stdout)
			}
		}
	}
}

// TestFollowedConsole: the last lines are those of all that is kept, however the reply is cut in pieces.
func TestFollowedConsole(t *testing.T) {
	var console strings.Builder
	for i := range 4000 {
		fmt.Fprintf(&console, "%d €€€€€\x1b\n", i)
	}
	const path = "GET /v1/sandboxes/sb1/logs"
	all := strings.ReplaceAll(console.String(), "\x1b", "")
	for args, want := range map[string]string{
		"logs -f sb1": all, "logs -f -n 2 sb1": "3998 €€€€€\n3999 €€€€€\n", "logs -n 1 sb1": "3999 €€€€€\n", "logs -f -n 0 sb1": "",
	} {
		d := &canned{replies: map[string]any{path: console.String(), path + "?follow=true": console.String()}}
		code, stdout, stderr := d.run(t, strings.Fields(args)...)
		if code != 0 || stdout != want {
			t.Errorf("%s: code %d, %d bytes of output, want %d; %s", args, code, len(stdout), len(want), stderr)
		}
	}
}

func TestBranchUsage(t *testing.T) {
	for _, args := range []string{
		"branch", "branch a b", "branch sb1 --mode fast", "branch sb1 -n -1", "branch sb1 --ttl 5s", "branch sb1 -l a=b", "branch sb1 -n 1 -l a",
		"snapshot", "snapshot sb1", "snapshot --from-sandbox sb1 --live --diff", "snapshot --from-sandbox sb1 --mode diff --full",
		"compact t", "compact -t x", "rmi", "rmi t --cascade --force", "pause", "snapshot-info t --wait -1s",
		"bench branch --mode auto", "bench branch --used 1500", "bench branch --runs 0", "bench fork -n 0",
	} {
		d := &canned{}
		code, stdout, stderr := d.run(t, strings.Fields(args)...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, "try: ") {
			t.Errorf("%s: code %d, output %q, %q; want code %d and something to try", args, code, stdout, stderr, exitUsage)
		}
		if len(d.asked) > 0 {
			t.Errorf("%s: the daemon was asked %v", args, d.asked)
		}
	}
}

func TestBranchWithChildren(t *testing.T) {
	snap := branched()
	snap.Children = []api.Sandbox{
		{ID: "sbx", Index: 0, ReadyMS: 100}, {Index: 1, Error: &api.Error{Code: api.CodeExhausted, Message: "no memory", Hint: "kill some"}},
	}
	d := &canned{replies: map[string]any{"POST /v1/sandboxes/sb1/branch": snap}}
	code, stdout, stderr := d.run(t, "branch", "sb1", "-n", "2", "-q")
	if code != exitFailed || stdout != "t\nsbx\n" || !strings.Contains(stderr, "1 of 2 children failed") || !strings.Contains(stderr, "try: kill some") {
		t.Errorf("code %d, output %q, %q", code, stdout, stderr)
	}
	code, stdout, _ = d.run(t, "branch", "sb1", "-n", "2", "--json")
	var got api.Snapshot
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	if code != exitFailed || got.Tag != "t" || len(got.Children) != 2 {
		t.Errorf("code %d, %+v", code, got)
	}
}

func TestBranchThatIsWriting(t *testing.T) {
	snap := branched()
	snap.Status, snap.Progress, snap.StoredBytes = "writing", 0.5, 0
	d := &canned{replies: map[string]any{"POST /v1/sandboxes/sb1/branch": snap}}
	code, stdout, stderr := d.run(t, "branch", "sb1", "--no-wait")
	if code != 0 || !strings.Contains(stdout, "writing 50 %") || strings.Contains(stdout, "stored") || !strings.Contains(stderr, "snapshot-info t --wait") {
		t.Errorf("code %d, output %q, %q", code, stdout, stderr)
	}
}

func TestRefusedModeIsExplained(t *testing.T) {
	d := &canned{replies: map[string]any{"POST /v1/sandboxes/sb1/branch": &api.Error{
		Code: api.CodeIncompatible, Message: "live capture unavailable: no userfaultfd", Hint: "mode auto",
	}}}
	code, stdout, stderr := d.run(t, "branch", "sb1", "--mode", "live")
	if code != exitFailed || stdout != "" || stderr != "forkd: live capture unavailable: no userfaultfd\ntry: mode auto\n" {
		t.Errorf("code %d, output %q, %q", code, stdout, stderr)
	}
}

func TestChangesOfState(t *testing.T) {
	for verb, state := range map[string]string{"pause": "paused", "resume": "running", "suspend": "suspended", "wake": "running"} {
		d := &canned{replies: map[string]any{
			"POST /v1/sandboxes/sb1/" + verb: api.Sandbox{ID: "sb1", State: state},
			"POST /v1/sandboxes/sb2/" + verb: &api.Error{Code: api.CodeWrongState, Message: "wrong state"},
		}}
		if code, stdout, stderr := d.run(t, verb, "sb1"); code != 0 || stdout != "sb1 "+state+"\n" {
			t.Errorf("%s: code %d, %q, %q", verb, code, stdout, stderr)
		}
		code, stdout, stderr := d.run(t, verb, "sb2", "sb1")
		if code != exitFailed || stdout != "sb1 "+state+"\n" || !strings.Contains(stderr, "wrong state") {
			t.Errorf("%s of two: code %d, %q, %q", verb, code, stdout, stderr)
		}
		var one api.Sandbox
		if _, stdout, _ = d.run(t, verb, "sb1", "--json"); json.Unmarshal([]byte(stdout), &one) != nil || one.State != state {
			t.Errorf("%s --json: %q", verb, stdout)
		}
		var two []api.Sandbox
		if _, stdout, _ = d.run(t, verb, "sb1", "sb2", "--json"); json.Unmarshal([]byte(stdout), &two) != nil || len(two) != 1 {
			t.Errorf("%s of two --json: %q", verb, stdout)
		}
	}
}

func TestRemoval(t *testing.T) {
	d := &canned{replies: map[string]any{
		"DELETE /v1/snapshots/a":              nil,
		"DELETE /v1/snapshots/b?cascade=true": api.RemoveReply{Removed: []string{"b", "c"}},
		"DELETE /v1/snapshots/b?force=true":   api.RemoveReply{Removed: []string{"b"}},
		"DELETE /v1/snapshots/b":              &api.Error{Code: api.CodeBusy, Message: "snapshots c stand on it", Hint: "--cascade or --force"},
	}}
	for args, want := range map[string]string{
		"rmi a": "a\n", "rmi --cascade b c": "b\nc\n", "rmi --force b": "b\n", "rmi a --json": "[\n  \"a\"\n]\n",
	} {
		if code, stdout, stderr := d.run(t, strings.Fields(args)...); code != 0 || stdout != want {
			t.Errorf("%s: code %d, %q, %q; want %q", args, code, stdout, stderr, want)
		}
	}
	code, stdout, stderr := d.run(t, "rmi", "b", "a")
	if code != exitFailed || stdout != "a\n" || !strings.Contains(stderr, "try: --cascade or --force") {
		t.Errorf("code %d, %q, %q", code, stdout, stderr)
	}
}

func TestSnapshotInfoWaits(t *testing.T) {
	info := func(status, problem string) any {
		s := branched()
		s.Status, s.Error = status, problem
		return api.SnapshotInfo{Snapshot: *s}
	}
	for _, tt := range []struct {
		status, problem string
		code            int
		says            string
	}{
		{"ready", "", 0, ""}, {"writing", "", exitFailed, "still being written"}, {"failed", "disk full", exitFailed, "disk full"},
	} {
		d := &canned{replies: map[string]any{
			"GET /v1/snapshots/t?wait=2": info(tt.status, tt.problem), "GET /v1/snapshots/t?wait=0": info(tt.status, tt.problem),
		}}
		if code, stdout, stderr := d.run(t, "snapshot-info", "t", "--wait", "2s"); code != tt.code || !strings.Contains(stderr, tt.says) {
			t.Errorf("%s: code %d, %q, %q", tt.status, code, stdout, stderr)
		}
		if code, stdout, stderr := d.run(t, "snapshot-info", "t"); code != 0 || !strings.Contains(stdout, tt.status) {
			t.Errorf("%s: code %d, %q, %q", tt.status, code, stdout, stderr)
		}
	}
}

func TestCompactAndLists(t *testing.T) {
	d := &canned{replies: map[string]any{
		"POST /v1/snapshots/t/compact": api.Snapshot{Tag: "u", Status: "ready"},
		"GET /v1/snapshots": []api.Snapshot{
			*branched(), {Tag: "w", Status: "writing", Progress: 0.3}, {Tag: "f", Status: "failed", Error: "the daemon ended"},
		},
		"GET /v1/sandboxes": []api.Sandbox{{
			ID: "sb1", SnapshotTag: "t", State: "suspended", LatestBranch: "check", DiskOwnBytes: 65536, DiskSharedBytes: mib, Count: 1,
		}},
		"GET /v1/tree": family(),
	}}
	for args, words := range map[string][]string{
		"compact t -t u": {"u\n"},
		"snapshots":      {"live", "3.0 MiB + 100.0 MiB", "writing 30 %", "failed: the daemon ended"},
		"ls":             {"suspended", "check", "64.0 KiB + 1.0 MiB"},
		"tree":           {"|  |  `- sandbox sbaaaaaaaaaaaaa"},
		"tree --json":    {`"memory_shared_bytes": 110100480`},
		// What a shell asks at the tab key.
		"__complete branch ":                  {"sb1\tsuspended, of t"},
		"__complete suspend sb1 ":             {"sb1"},
		"__complete rmi ":                     {"t\tready", "w\twriting"},
		"__complete compact ":                 {"t\tready"},
		"__complete branch sb1 --mode ":       {"auto", "live", "diff", "full"},
		"__complete snapshot --from-sandbox ": {"sb1"},
		"__complete bench branch --mode ":     {"all"},
	} {
		code, stdout, stderr := d.run(t, strings.Split(args, " ")...)
		if code != 0 {
			t.Errorf("%s: code %d, %q", args, code, stderr)
		}
		for _, word := range words {
			if !strings.Contains(stdout, word) {
				t.Errorf("%s: %q is not in:\n%s", args, word, stdout)
			}
		}
	}
	_, stdout, _ := d.run(t, "__complete", "branch", "sb1", "")
	if strings.Contains(stdout, "sb1") {
		t.Errorf("a second sandbox is offered to branch: %s", stdout)
	}
}
