package cli

import (
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
)

func TestEgressCommandLine(t *testing.T) {
	state := &api.EgressState{
		Egress: api.Egress{Preset: "packages", Allow: []string{"a.org:443"}, Deny: []string{"pypi.org"}, BudgetBytes: 2 * mib},
		Rules:  []string{"pypi.org:443/tcp"}, SentBytes: 1024, ReceivedBytes: 2048, Flows: 3, FlowsOpen: 1, FlowsRefused: 7, Questions: 2,
		BudgetLeftBytes: new(int64(mib)),
	}
	const path = " /v1/sandboxes/sb1/egress"
	for _, tt := range []struct {
		args, request, body string
	}{
		{"egress sb1", "GET" + path, ""},
		{"egress sb1 show", "GET" + path, ""},
		{"egress sb1 allow b.org *.c.org:443", "PATCH" + path, `{"allow":["b.org","*.c.org:443"]}`},
		{"egress sb1 deny b.org", "PATCH" + path, `{"deny":["b.org"]}`},
		{
			"egress sb1 set packages --allow a.org --deny b.org --budget 2MiB", "PUT" + path,
			`{"preset":"packages","allow":["a.org"],"deny":["b.org"],"budget_bytes":2097152}`,
		},
		{"egress sb1 set none", "PUT" + path, `{"preset":"none"}`},
	} {
		d := &canned{replies: map[string]any{tt.request: state}}
		code, out, errs := d.run(t, strings.Fields(tt.args)...)
		if code != 0 || len(d.asked) != 1 || d.asked[0] != tt.request || d.bodies[0] != tt.body {
			t.Errorf("%s: %d %s; asked %q with %q", tt.args, code, errs, d.asked, d.bodies)
		}
		for _, line := range []string{
			"preset   packages", "allow    a.org:443", "deny     pypi.org", "budget   2.0 MiB, 1.0 MiB of it left", "bytes    1.0 KiB sent, 2.0 KiB received",
			"flows    3, 1 of them open; 7 attempts refused, 0 cut; 2 names asked for",
		} {
			if !strings.Contains(out, line+"\n") {
				t.Errorf("%s: no %q in\n%s", tt.args, line, out)
			}
		}
	}
	d := &canned{replies: map[string]any{"GET" + path: state, "PATCH" + path: state}}
	if code, _, errs := d.run(t, "egress", "sb1", "forget", "pypi.org", "a.org:443"); code != 0 || len(d.bodies) != 2 ||
		d.bodies[1] != `{"remove_allow":["a.org:443"],"remove_deny":["pypi.org"]}` {
		t.Errorf("forget: %d %s %q", code, errs, d.bodies)
	}
}

func TestEgressMistyped(t *testing.T) {
	for args, says := range map[string]string{
		"egress":                         "requires at least 1 arg",
		"egress sb1 open":                `"open" is nothing that egress does`,
		"egress sb1 allow":               "give the rules to allow",
		"egress sb1 forget":              "give the rules to forget",
		"egress sb1 show me":             "show takes nothing",
		"egress sb1 set":                 "give the one preset",
		"egress sb1 set open --budget x": `"x" is no size`,
		"egress sb1 allow a.org -f":      "--follow is for log, not for allow",
		"egress sb1 log --budget 1G":     "--budget is for set, not for log",
		"fork t --egress-budget much":    `--egress-budget: "much" is no size`,
		"branch sb1 --egress none":       "say how many with -n",
		"build -f D --network all -t x":  `network "all": no such preset`,
	} {
		d := &canned{}
		code, _, errs := d.run(t, strings.Fields(args)...)
		if code != exitUsage || !strings.Contains(errs, says) || len(d.asked) > 0 {
			t.Errorf("%s: %d %q", args, code, errs)
		}
	}
}

func TestEgressFlags(t *testing.T) {
	d := &canned{replies: map[string]any{"POST /v1/sandboxes": []api.Sandbox{{ID: "sb1"}}}}
	d.run(t, "fork", "t", "--egress", "packages", "--allow", "a.org", "--deny", "b.org", "--egress-budget", "1MiB")
	if len(d.bodies) != 1 || !strings.Contains(d.bodies[0], `"egress":{"preset":"packages","allow":["a.org"],"deny":["b.org"],"budget_bytes":1048576}`) {
		t.Errorf("asked %q", d.bodies)
	}
}

func TestFlowLine(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
	for want, f := range map[string]api.Flow{
		"2026-01-02 03:04:05  allowed tcp   pypi.org (1.2.3.4:443)  1.0 KiB sent, 0 B received; open; rule pypi.org:443": {
			StartedAt: at, Protocol: "tcp", To: "1.2.3.4:443", Name: "pypi.org", Verdict: "allowed", SentBytes: 1024, Rule: "pypi.org:443",
		},
		"2026-01-02 03:04:05  refused dns   evil.org  3 times; no rule allows this name": {
			StartedAt: at, EndedAt: &at, Protocol: "dns", To: "192.0.0.1:53", Name: "evil.org", Verdict: "refused", Attempts: 3, Reason: "no rule allows this name",
		},
	} {
		if got := flowLine(&f); got != want {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	}
}
