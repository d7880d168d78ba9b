package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/e2e/standin"
	"forkd.dev/forkd/internal/testenv"
)

// outside is a world of stand-ins that a daemon's sandboxes see in the place of the Internet.
type outside struct {
	*standin.World
	t    testing.TB
	file string // that describes it
	log  string // of all that was dialled and looked up
}

func newOutside(t testing.TB) *outside {
	t.Helper()
	w, err := standin.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil { // the process of networks may be another user
		t.Fatal(err)
	}
	o := &outside{World: w, t: t, file: filepath.Join(dir, "outside.json"), log: filepath.Join(dir, "outside.log")}
	names := map[string][]netip.Addr{}
	for name, addr := range w.Names() {
		names[name] = []netip.Addr{addr}
	}
	text, err := json.Marshal(map[string]any{"names": names, "hosts": w.Dials(), "log": o.log})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.file, text, 0o644); err != nil { //nolint:gosec // As the directory.
		t.Fatal(err)
	}
	return o
}

// env has a daemon take it for the Internet.
func (o *outside) env() string { return "FORKD_NETWORK_OUTER=" + o.file }

// trust has a sandbox's programs trust the stand-ins, as an administrator would.
func (o *outside) trust(f *forkd, id string) {
	o.t.Helper()
	ca := filepath.Join(o.t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, o.CA, 0o600); err != nil {
		o.t.Fatal(err)
	}
	f.run("cp", ca, id+":/root/ca.pem")
	f.run("exec", id, "--", "sh", "-ec", "mkdir -p /etc/ssl/certs && cat /root/ca.pem >> /etc/ssl/certs/ca-certificates.crt")
}

// dialled is every line of the log that has all words.
func (o *outside) dialled(words ...string) (lines []string) {
	o.t.Helper()
	text, err := os.ReadFile(o.log)
	if err != nil {
		o.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			lines = append(lines, line)
		}
	}
	return lines
}

// flows of a sandbox with a verdict.
func (f *forkd) flows(id, verdict string) (list []api.Flow) {
	f.t.Helper()
	d := json.NewDecoder(strings.NewReader(f.run("egress", "--json", id, "log", "--verdict", verdict)))
	for d.More() {
		var flow api.Flow
		if err := d.Decode(&flow); err != nil {
			f.t.Fatal(err)
		}
		list = append(list, flow)
	}
	return list
}

// apt installs with Debian's apt from Debian's own host.
const apt = `
echo 'deb [trusted=yes] http://deb.debian.org/debian standin main' > /etc/apt/sources.list
rm -rf /etc/apt/sources.list.d/*
apt-get -q update >&2
apt-get -q install -y forkd-standin >&2
forkd-standin`

// fetch reads a page, and says what came or what went wrong.
const fetch = `
import urllib.request, ssl
def fetch(url, host=None):
    try:
        r = urllib.request.Request(url, headers={"Host": host} if host else {})
        return urllib.request.urlopen(r, timeout=20, context=ssl.create_default_context(cafile="/root/ca.pem")).read()[:15].decode()
    except Exception as e:
        e = getattr(e, "reason", e)
        return type(e).__name__ + ": " + str(e)
`

// TestEgress: what a policy allows works with programs as they are, the rest is refused where it should be, a change cuts, and all of it
// is written down and counted.
func TestEgress(t *testing.T) {
	out := newOutside(t)
	f := copied(t, out.env())
	child := f.forkOf(parentTag, 1, "--egress", "packages")[0]
	if child.Egress == nil || child.Egress.Preset != "packages" {
		t.Errorf("the fork says %+v", child.Egress)
	}
	id := child.ID
	if !testenv.Again() { // half a minute, and nothing of it depends on privileges
		if got := f.run("exec", id, "--", "sh", "-ec", apt); got != standin.Says+"\n" {
			t.Errorf("apt-get install: %q", got)
		}
	}
	out.trust(f, id)
	f.eval(id, fetch)
	ask := func(what, url, host, want string) {
		t.Helper()
		if got := f.eval(id, fmt.Sprintf("print(fetch(%q, %q or None))", url, host)); !strings.Contains(got, want) {
			t.Errorf("%s: %s gives %q, want %q", what, url, got, want)
		}
	}
	const page = "<!DOCTYPE html>"
	ask("allowed", "https://pypi.org/simple/forkd-standin/", "", page)
	ask("no rule", "https://example.com/", "", "gaierror")
	ask("no rule for the address", "https://"+out.Names()["pypi.org"].Next().Next().String()+":8443/", "", "Connection refused")
	ask("another host's name", "http://deb.debian.org/", "pypi.org", "ConnectionResetError")

	f.run("egress", id, "deny", "pypi.org")
	ask("denied", "https://pypi.org/simple/forkd-standin/", "", "gaierror")
	f.run("egress", id, "forget", "pypi.org")
	ask("allowed again", "https://pypi.org/simple/forkd-standin/", "", page)

	checkEgressAccounts(t, f, out, id)

	// A branch has it, and its children; a token of scope manage narrows and does not widen.
	f.branch(id, "-t", "networked")
	if s := f.info("networked"); s.Egress == nil || s.Egress.Preset != "packages" {
		t.Errorf("the branch says %+v", s.Egress)
	}
	grandchild := f.forkOf("networked", 1, "--deny", "pypi.org")[0].ID
	f.eval(grandchild, fetch)
	if got := f.eval(grandchild, `print(fetch("https://pypi.org/"), fetch("http://deb.debian.org/debian/dists/standin/Release"))`); !strings.Contains(got, "gaierror") ||
		!strings.Contains(got, "Origin: Debian") {
		t.Errorf("a narrowed child: %q", got)
	}
	closed := f.forkOf("networked", 1, "--egress", "none")[0].ID
	f.eval(closed, fetch)
	if got := f.eval(closed, `print(fetch("https://pypi.org/"))`); !strings.Contains(got, "gaierror") {
		t.Errorf("a child without any: %q", got)
	}

	// A budget that is spent ends everything.
	f.run("egress", closed, "set", "packages", "--budget", "1KiB")
	got := f.eval(closed, `print([fetch("https://pypi.org/simple/forkd-standin/") for _ in range(4)][-1])`)
	if strings.Contains(got, page) {
		t.Errorf("beyond its budget: %q", got)
	}
	// Nor does another daemon, or another machine of the same sandbox, begin anew.
	spent := f.usage(closed)
	f.restart()
	f.run("suspend", closed)
	f.run("wake", closed)
	if got := f.eval(closed, `print(fetch("https://pypi.org/simple/forkd-standin/"))`); strings.Contains(got, page) {
		t.Errorf("beyond its budget, after a suspend: %q", got)
	}
	if now := f.usage(closed); now.NetworkSentBytes < spent.NetworkSentBytes || now.NetworkReceivedBytes < spent.NetworkReceivedBytes || now.NetworkFlows < spent.NetworkFlows {
		t.Errorf("counted %+v, and after a suspend %+v", spent, now)
	}
	f.run("egress", closed, "set", "packages", "--budget", "1MiB")
	if got := f.eval(closed, `print(fetch("https://pypi.org/simple/forkd-standin/"))`); got != page {
		t.Errorf("with a larger budget: %q", got)
	}
}

// checkEgressAccounts looks at what is told of what a sandbox did.
func checkEgressAccounts(t *testing.T, f *forkd, out *outside, id string) {
	t.Helper()
	allowed := f.flows(id, "allowed")
	if !slices.ContainsFunc(allowed, func(f api.Flow) bool {
		return f.Protocol == "tcp" && f.Name == "pypi.org" && f.Rule == "pypi.org:443/tcp" && f.SentBytes > 0 && f.ReceivedBytes > 0 && f.EndedAt != nil
	}) {
		t.Errorf("no flow to pypi.org among %+v", allowed)
	}
	refused := f.flows(id, "refused")
	for _, want := range []struct{ protocol, name, reason string }{
		{"dns", "example.com", "no rule allows this name"},
		{"dns", "pypi.org", "denied by rule"},
		{"tcp", "", "no rule"},
		{"tcp", "pypi.org", "which was not given this address"},
	} {
		if !slices.ContainsFunc(refused, func(f api.Flow) bool {
			return f.Protocol == want.protocol && f.Name == want.name && strings.Contains(f.Reason, want.reason)
		}) {
			t.Errorf("no refusal %+v among %+v", want, refused)
		}
	}
	if lines := out.dialled("example.com"); len(lines) > 0 {
		t.Errorf("asked outside for what is not allowed: %q", lines)
	}
	if lines := out.dialled(`"dial"`, ":8443"); len(lines) > 0 {
		t.Errorf("dialled what is not allowed: %q", lines)
	}
	u := f.usage(id)
	if u.NetworkSentBytes == 0 || u.NetworkReceivedBytes == 0 || u.NetworkFlows < 5 || u.NetworkRefused < 4 {
		t.Errorf("usage: %+v", u)
	}
	if got := f.sample(`forkd_network_bytes_total{direction="sent"}`); got < float64(u.NetworkSentBytes) {
		t.Errorf("of all sandboxes %v bytes were sent, of one %d", got, u.NetworkSentBytes)
	}
	var state api.EgressState
	f.json(&state, "egress", id)
	if state.Preset != "packages" || len(state.Rules) < 10 || state.FlowsRefused != u.NetworkRefused || state.SentBytes != u.NetworkSentBytes {
		t.Errorf("state %+v, usage %+v", state, u)
	}
}

// TestEgressScopes: less is for who manages, more for who administers.
func TestEgressScopes(t *testing.T) {
	testenv.OncePerRun(t)
	f := copied(t)
	r, manage := serveTCP(f)
	r.find()
	as := r.as(manage)
	id := f.forkOf(parentTag, 1, "--egress", "packages")[0].ID
	for _, tt := range []struct {
		args   string
		denied bool
	}{
		{"fork " + parentTag + " --egress none", false},
		{"fork " + parentTag + " --egress packages", true},
		{"fork " + parentTag + " --allow a.org", true},
		{"egress " + id + " deny pypi.org", false},
		{"egress " + id + " forget pypi.org", true},
		{"egress " + id + " allow a.org", true},
		{"egress " + id + " set none", false},
		{"build --network packages snapshot:" + parentTag + " -t wide", true},
	} {
		got := as.try(strings.Fields(tt.args)...)
		if refused := strings.Contains(got.stderr, "wider"); refused != tt.denied || (got.code != 0) != tt.denied {
			t.Errorf("%s: code %d, %s", tt.args, got.code, got.stderr)
		}
	}
}

// TestBuildNetwork: a build's commands reach what its recipe says, and its sandboxes what that says of them.
func TestBuildNetwork(t *testing.T) {
	testenv.OncePerRun(t)
	out := newOutside(t)
	f := copied(t, out.env())
	build := func(network, tag string) result {
		t.Helper()
		dir := recipeText(t, "base: snapshot:"+parentTag+"\n"+network+"run:\n  - |\n"+
			"    python3 -c 'import urllib.request as u; open(\"/root/got\", \"wb\").write(u.urlopen(\"http://deb.debian.org/debian/dists/standin/Release\").read())'\n")
		return f.try("build", dir, "-t", tag)
	}
	if r := build("", "closed"); r.code == 0 || !strings.Contains(r.stderr, "run 1") {
		t.Errorf("without a network: code %d, %s", r.code, r.stderr)
	}
	if r := build("network: {build: {allow: [deb.debian.org]}}\n", "fetched"); r.code != 0 {
		t.Fatalf("with one: %s", r.stderr)
	}
	if got := f.info("fetched").Egress; got != nil {
		t.Errorf("its children reach %+v", got)
	}
	id := f.forkOf("fetched", 1)[0].ID
	if got := f.run("exec", id, "--", "sh", "-c", "head -n 1 /root/got; getent hosts deb.debian.org || echo closed"); got != "Origin: Debian\nclosed\n" {
		t.Errorf("a child has %q", got)
	}
	// The same commands with another network are other commands; other children of the same are not.
	if r := build("network: {build: {allow: [deb.debian.org]}, deny: [a.org]}\n", "same"); r.code != 0 || !strings.Contains(r.stderr, "(cached)") {
		t.Errorf("built anew: %s", r.stderr)
	}
	requests := len(out.Requests())
	if r := build("network: packages\n", "both"); r.code != 0 || len(out.Requests()) == requests {
		t.Errorf("not built anew: code %d, %s", r.code, r.stderr)
	}
	if got := f.info("both").Egress; got == nil || got.Preset != "packages" {
		t.Errorf("its children reach %+v", got)
	}

	dir := dockerContext(t, "FROM snapshot:"+parentTag+"\nRUN python3 -c 'import urllib.request as u; u.urlopen(\"http://deb.debian.org/debian/dists/standin/Release\")'\n", nil)
	if r := f.try("build", dir, "-t", "docker"); r.code == 0 {
		t.Error("a Dockerfile's command has a network that nobody gave it")
	}
	f.run("build", "--network", "{build: {allow: [deb.debian.org]}}", dir, "-t", "docker")
	if got := f.info("docker").Egress; got != nil {
		t.Errorf("children of the Dockerfile reach %+v", got)
	}
}

// clients has the programs that fetch packages, from Debian.
const clients = `
name: clients
base: debian:bookworm
packages: [ca-certificates, git, golang-go, npm, python3-pip]
machine: {memory: 1GiB}
network: packages
`

// fetchers are what users type, each printing what the package says.
func fetchers() map[string]string {
	return map[string]string{
		"apt-get install": apt,
		"pip install":     `pip install --break-system-packages --no-input ` + standin.Package + ` >&2; python3 -c 'import forkd_standin; print(forkd_standin.says)'`,
		"npm install": `mkdir -p /root/npm && cd /root/npm && export NODE_EXTRA_CA_CERTS=/root/ca.pem
npm install --no-audit --no-fund ` + standin.Package + ` >&2; node -e 'console.log(require("` + standin.Package + `"))'`,
		"git clone": `git clone -q ` + standin.Repository + ` /root/clone >&2; cat /root/clone/README`,
		"go mod download": `mkdir -p /root/go-user && cd /root/go-user && export GONOSUMDB=example.com/*
printf 'module user\n\ngo 1.19\n\nrequire ` + standin.Module + ` v` + standin.Version + `\n' > go.mod
printf 'package main\n\nimport "` + standin.Module + `"\n\nfunc main() { println(standin.Says) }\n' > main.go
go mod download -x >&2; sed -n 's/.*"\(.*\)"/\1/p' "$(go env GOMODCACHE)/` + standin.Module + `@v` + standin.Version + `/standin.go"`,
	}
}

// patiently runs a command that may take long under emulation.
func (f *forkd) patiently(args ...string) result {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), testenv.Timeout(20*time.Minute))
	defer cancel()
	return runIn(ctx, f.bin, f.home, f.env, nil, args...)
}

// TestPackageManagers: under the preset packages the package managers work as they are.
func TestPackageManagers(t *testing.T) {
	if !testenv.Soak() && os.Getenv("FORKD_TEST_CLIENTS") == "" {
		t.Skipf("builds an image of 500 packages; set %s=1", testenv.EnvSoak)
	}
	out := newOutside(t)
	var f *forkd
	if home := os.Getenv("FORKD_TEST_CLIENTS"); home != "" { // a home that has it already
		f = alone(t, out.env())
		for _, sub := range []string{"layers", "images", "snapshots"} {
			if err := os.CopyFS(filepath.Join(f.home, sub), os.DirFS(filepath.Join(home, sub))); err != nil {
				t.Fatal(err)
			}
		}
	} else {
		testenv.Need(t, "net", "keyring", "agent", "mke2fs")
		f = alone(t, out.env())
		if r := f.patiently("build", recipeText(t, clients), "-t", "clients"); r.code != 0 {
			t.Fatal(r.stderr)
		}
	}
	id := f.forkOf("clients", 1)[0].ID
	out.trust(f, id)
	for what, script := range fetchers() {
		start := time.Now()
		r := f.patiently("exec", "--timeout", "10m", id, "--", "sh", "-ec", script)
		if r.code != 0 || r.stdout != standin.Says+"\n" {
			t.Errorf("%s: code %d, %q\n%s", what, r.code, r.stdout, tail(r.stderr, 30))
			continue
		}
		t.Logf("%s: %.1f s", what, time.Since(start).Seconds())
	}
	for _, flow := range f.flows(id, "refused") {
		t.Logf("refused: %+v", flow)
	}
	// Under no policy none of them gets anywhere.
	closed := f.forkOf("clients", 1, "--egress", "none")[0].ID
	out.trust(f, closed)
	requests := len(out.Requests())
	for what, script := range fetchers() {
		if r := f.patiently("exec", "--timeout", "2m", closed, "--", "sh", "-ec", "timeout 60 sh -ec '"+strings.ReplaceAll(script, "'", `'\''`)+"'"); r.code == 0 {
			t.Errorf("%s works without a network: %s", what, r.stdout)
		}
	}
	if now := out.Requests(); len(now) != requests {
		t.Errorf("a sandbox without a network was heard: %q", now[requests:])
	}
}
