package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// TestBadInput: each is a clear error with the right exit code, and nothing is created.
func TestBadInput(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	before := f.run("ls", "-q")
	long := strings.Repeat("a", 300)
	tests := []struct {
		args []string
		code int
		want string
	}{
		{[]string{"fork", "nosuchtag"}, 1, "not found"},
		{[]string{"fork", "a/b"}, 1, "tag"},
		{[]string{"fork", ".."}, 1, "tag"},
		{[]string{"fork", "a\x01b"}, 1, "tag"},
		{[]string{"fork", long}, 1, "300 characters"},
		{[]string{"fork"}, 2, "name the snapshot"},
		{[]string{"fork", parentTag, "-n", "0"}, 1, "n is 0"},
		{[]string{"fork", parentTag, "-n", "-1"}, 1, "n is -1"},
		{[]string{"fork", parentTag, "-n", "10000"}, 1, "n is 10000"},
		{[]string{"fork", parentTag, "-n", "x"}, 2, "invalid"},
		{[]string{"fork", parentTag, "--ttl", "-3s"}, 1, "ttl"},
		{[]string{"fork", parentTag, "--cpus", "7"}, 1, "cpus"},
		{[]string{"fork", parentTag, "--memory", "64GiB"}, 1, "memory"},
		{[]string{"fork", parentTag, "--memory", "-1"}, 2, "size"},
		{[]string{"fork", parentTag, "--label", "novalue"}, 2, "KEY=VALUE"},
		{[]string{"fork", parentTag, "--env", "=x"}, 2, "KEY=VALUE"},
		{[]string{"inspect", "sbnosuchsandbox"}, 1, "not found"},
		{[]string{"inspect", "../../etc"}, 1, "sandbox id"},
		{[]string{"inspect", long}, 1, "sandbox id"},
		{[]string{"kill"}, 2, "--all"},
		{[]string{"kill", "--all", "sbx"}, 2, "not both"},
		{[]string{"rmi", "nosuchtag"}, 1, "not found"},
		{[]string{"pack", parentTag, "-o", "/"}, 1, "is a directory"},
		{[]string{"pack", parentTag, "-o", "/nosuchdir/x.forkd"}, 1, "/nosuchdir: no such file"},
		{[]string{"unpack", "nosuchfile.forkd"}, 1, "no such file"},
		{[]string{"unpack", "/etc/passwd"}, 1, "not a valid pack"},
		{[]string{"verify", "nosuchtag"}, 1, "not found"},
		{[]string{"push", parentTag, "localhost:1/UPPER"}, 1, "lower case"},
		{[]string{"pull", "warm"}, 1, "REGISTRY/NAME:TAG"},
		{[]string{"gc", "--older-than", "x"}, 2, "30d"},
		{[]string{"rmi", "../images"}, 1, "tag"},
		{[]string{"snapshot-info", "nosuchtag"}, 1, "not found"},
		{[]string{"images", "rm", "nosuchimage"}, 1, "not found"},
		{[]string{"build", "/no/such/recipe", "-t", "x"}, 1, "recipe"},
		{[]string{"build", parentTag}, 2, "-t TAG"},
		{[]string{"build", parentTag, "-t", "a/b"}, 1, "tag"},
		{[]string{"exec", "sbnosuchsandbox"}, 2, "usage"},
		{[]string{"cp", "a", "b"}, 2, "ID:PATH"},
		{[]string{"frok"}, 2, "unknown command"},
		{[]string{"fork", "--no-such-flag"}, 2, "unknown flag"},
	}
	for _, tt := range tests {
		if strings.ContainsRune(strings.Join(tt.args, ""), 0) {
			continue // no program can be given it
		}
		r := f.try(tt.args...)
		if r.code != tt.code || !strings.Contains(r.stderr, tt.want) || r.stdout != "" {
			t.Errorf("forkd %.60q: code %d, stdout %q, stderr %q; want %d and %q", tt.args, r.code, r.stdout, r.stderr, tt.code, tt.want)
		}
		if strings.Contains(r.stderr, "goroutine ") {
			t.Errorf("forkd %.60q: a stack trace:\n%s", tt.args, r.stderr)
		}
	}
	if after := f.run("ls", "-q"); after != before {
		t.Errorf("sandboxes before %q, after %q", before, after)
	}
}

// TestBadBodies: the API answers every malformed body in one shape, and survives.
func TestBadBodies(t *testing.T) {
	testenv.OncePerRun(t)
	f := shared(t)
	f.run("daemon", "start")
	socket := filepath.Join(f.home, "forkd.sock")
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}}
	defer c.CloseIdleConnections()
	tests := []struct {
		method, path, body string
		status             int
	}{
		{"POST", "/v1/sandboxes", "{", 400},
		{"POST", "/v1/sandboxes", "[]", 400},
		{"POST", "/v1/sandboxes", "null", 400},
		{"POST", "/v1/sandboxes", "", 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":1}`, 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"python-numpy","nn":1}`, 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"python-numpy","n":1e99}`, 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"python-numpy","n":0}`, 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"python-numpy","ttl_seconds":-1}`, 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"python-numpy","memory_limit_mib":-1}`, 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"python-numpy"} {}`, 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"python-numpy","env":{"A=B":"x"}}`, 400},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"../../etc"}`, 400},
		{"POST", "/v1/sandboxes", "\xff\xfe", 400},
		{"POST", "/v1/sandboxes/sbnosuchsandbox/exec", `{"args":["true"]}`, 404},
		{"POST", "/v1/sandboxes/sbnosuchsandbox/exec", `{"args":[]}`, 400},
		{"POST", "/v1/sandboxes/sbnosuchsandbox/eval", `{"code":"1"}`, 404},
		{"POST", "/v1/sandboxes/..%2f..%2fetc/eval", `{"code":"1"}`, 400},
		{"POST", "/v1/sandboxes/sbnosuchsandbox/call", "", 400},
		{"POST", "/v1/builds?tag=x", "no tar", 400},
		{"POST", "/v1/builds?tag=..", "", 400},
		{"GET", "/v1/snapshots/nosuch/info", "", 404},
		{"GET", "/v1/nosuch", "", 404},
		{"DELETE", "/v1/sandboxes/" + strings.Repeat("a", 300), "", 400},
	}
	for _, tt := range tests {
		req, err := http.NewRequestWithContext(t.Context(), tt.method, "http://forkd"+tt.path, bytes.NewReader([]byte(tt.body)))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Errorf("%s %s %q: %v", tt.method, tt.path, tt.body, err)
			continue
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		var e api.Error
		if json.Unmarshal(body, &e) != nil || resp.StatusCode != tt.status || e.Message == "" || e.Code == "" || e.RequestID == "" {
			t.Errorf("%s %.80s %.80q: status %d, body %s; want %d", tt.method, tt.path, tt.body, resp.StatusCode, body, tt.status)
		}
	}
}
