package cli

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
)

func TestTokenCommandLine(t *testing.T) {
	made := &api.Token{ID: "tk1", Name: "ci", Scope: "use", Token: "fkd_tk1_secret"}
	list := []api.Token{
		{ID: "tk1", Name: "ci", Scope: "use"}, {ID: "tk2", Name: "ops", Scope: "manage", ExpiresAtUnix: 1}, {ID: "tk3", Name: "ops", Scope: "read", Expired: true},
	}
	for _, tt := range []struct {
		args    string
		request string
		body    string
		stdout  string
		code    int
	}{
		{"token create", "POST /v1/tokens", `{"scope":"use"}`, "fkd_tk1_secret\n", 0},
		{"token create ci --scope admin --expires 24h", "POST /v1/tokens", `{"name":"ci","scope":"admin","ttl_seconds":86400}`, "fkd_tk1_secret\n", 0},
		{"token create --sandbox sb1", "POST /v1/sandboxes/sb1/tokens", `{"scope":"use","sandbox":"sb1"}`, "fkd_tk1_secret\n", 0},
		{"token revoke tk2", "DELETE /v1/tokens/tk2", "", "tk2\n", 0},
		{"token revoke ci", "DELETE /v1/tokens/tk1", "", "tk1\n", 0},
		{"token revoke --sandbox sb1 ci", "DELETE /v1/sandboxes/sb1/tokens/tk1", "", "tk1\n", 0},
		{"token revoke ops", "", "", "", exitUsage},
		{"token revoke nobody", "", "", "", exitFailed},
		{"token revoke fkd_tk1_verysecret", "", "", "", exitFailed},
	} {
		d := &canned{replies: map[string]any{
			"POST /v1/tokens": made, "POST /v1/sandboxes/sb1/tokens": made, "GET /v1/tokens": list, "GET /v1/sandboxes/sb1/tokens": list,
			"DELETE /v1/tokens/tk1": nil, "DELETE /v1/tokens/tk2": nil, "DELETE /v1/sandboxes/sb1/tokens/tk1": nil,
		}}
		code, stdout, stderr := d.run(t, strings.Fields(tt.args)...)
		if code != tt.code || stdout != tt.stdout || strings.Contains(stderr, "secret") {
			t.Errorf("%s: code %d, %q, %q", tt.args, code, stdout, stderr)
		}
		if i := slices.Index(d.asked, tt.request); tt.request != "" && (i < 0 || d.bodies[i] != tt.body) {
			t.Errorf("%s: asked %v %v, want %s %s", tt.args, d.asked, d.bodies, tt.request, tt.body)
		}
	}
	for _, args := range []string{"token create a b", "token revoke", "token create --expires 0s", "token create --expires -1h", "token ls x"} {
		d := &canned{}
		if code, _, stderr := d.run(t, strings.Fields(args)...); code != exitUsage || len(d.asked) > 0 {
			t.Errorf("%s: code %d, %q, asked %v", args, code, stderr, d.asked)
		}
	}
	d := &canned{replies: map[string]any{"GET /v1/tokens": list}}
	_, stdout, _ := d.run(t, "token", "ls")
	for _, want := range []string{"tk1", "never", "expired"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
}

// TestSettings: what a flag says counts before what the environment says, for a daemon in either place.
func TestSettings(t *testing.T) {
	a := &App{}
	cmd := &cobra.Command{Use: "x", Run: func(*cobra.Command, []string) {}}
	a.addSettings(cmd)
	a.addSettings(&cobra.Command{Use: "another"})
	cmd.SetArgs([]string{"--bind", "127.0.0.1:1", "--tls-key", "/k"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"FORKD_BIND": "0.0.0.0:2", "FORKD_TLS_CERT": "/c", "OTHER": "o"}
	get := a.settings.over(func(name string) string { return env[name] })
	for name, want := range map[string]string{"FORKD_BIND": "127.0.0.1:1", "FORKD_TLS_CERT": "/c", "FORKD_TLS_KEY": "/k", "OTHER": "o"} {
		if got := get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	got := a.settings.environ([]string{"FORKD_BIND=0.0.0.0:2", "FORKD_TOKEN=secret", "A=b"})
	slices.Sort(got)
	if diff := cmp.Diff([]string{"A=b", "FORKD_BIND=127.0.0.1:1", "FORKD_TLS_KEY=/k"}, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"--bind", "--tls-key"}, a.settings.given()); diff != "" {
		t.Error(diff)
	}
	first := &App{}
	first.socketOnly()
	got = first.settings.environ([]string{"FORKD_BIND=0.0.0.0:2", "FORKD_TLS_CERT=/c"})
	if diff := cmp.Diff([]string{"FORKD_BIND=", "FORKD_TLS_CERT=", "FORKD_TLS_KEY="}, got); diff != "" {
		t.Error(diff)
	}
}
