package e2bapi

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/image/dockerfile"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network/egress"
)

func TestHostTarget(t *testing.T) {
	for name, want := range map[string]target{
		"49983-sbabc.example.test":      {id: "sbabc", port: 49983, byHost: true},
		"49999-sbabc.example.test:8889": {id: "sbabc", port: 49999, byHost: true},
		"80-sbabc.localhost":            {id: "sbabc", port: 80, byHost: true},
		"sandbox.example.test":          {},
		"127.0.0.1:8889":                {},
		"[::1]:8889":                    {},
		"forkd":                         {},
		"99999-sbabc.example.test":      {},
		"x-sbabc.example.test":          {},
		"8889-other.example.test":       {},
		"80-sbabc":                      {},
	} {
		got, ok := hostTarget(name)
		if got != want || ok != (want != target{}) {
			t.Errorf("%s: %+v, %v; want %+v", name, got, ok, want)
		}
	}
}

func TestTagOf(t *testing.T) {
	for name, want := range map[string]string{
		"base": "base", "base:default": "base", "base:latest": "base", "team/base": "base", "team/base:v1": "base.v1", "": "",
	} {
		if got := tagOf(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

// TestMetadataFilter: clients escape once, twice and three times.
func TestMetadataFilter(t *testing.T) {
	for query, want := range map[string]map[string]string{
		"metadata=a%3Db%252520c%26d%3De": {"a": "b c", "d": "e"},
		"metadata=a%3Db%2520c":           {"a": "b c"},
		"metadata=a%3Db":                 {"a": "b"},
		"metadata=a%3D100%2525":          {"a": "100%"},
		"":                               nil,
	} {
		q, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		got, err := metadataFilter(q.Get("metadata"))
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: %v\n%s", query, err, diff)
		}
	}
}

// TestPage: whatever comes and goes between two pages, what stays is in one of them.
func TestPage(t *testing.T) {
	list := []string{"a", "b", "c", "d", "e"}
	id := func(s string) string { return s }
	get := func(list []string, token string) ([]string, string) {
		t.Helper()
		w := httptest.NewRecorder()
		got, err := page(w, url.Values{"limit": {"2"}, "nextToken": {token}}, list, id)
		if err != nil {
			t.Fatal(err)
		}
		return got, w.Header().Get("X-Next-Token")
	}
	var seen []string
	token := ""
	for range 3 {
		var got []string
		got, token = get(list, token)
		seen = append(seen, got...)
	}
	if diff := cmp.Diff(list, seen); diff != "" || token != "" {
		t.Errorf("token %q at the end\n%s", token, diff)
	}
	_, token = get(list, "")
	if got, _ := get([]string{"a", "c", "d", "e"}, token); cmp.Diff([]string{"d", "e"}, got) != "" {
		t.Errorf("the last of the page before is gone: %q", got) // c was moved to its place
	}
	if got, _ := get(list, hex.EncodeToString([]byte("x -5"))); cmp.Diff([]string{"a", "b"}, got) != "" {
		t.Errorf("a place before the first: %q", got)
	}
	for _, bad := range []url.Values{{"limit": {"0"}}, {"limit": {"101"}}, {"limit": {"x"}}, {"nextToken": {"zz"}}} {
		if _, err := page(httptest.NewRecorder(), bad, list, id); err == nil {
			t.Errorf("%v is taken", bad)
		}
	}
}

func TestFrames(t *testing.T) {
	w := httptest.NewRecorder()
	s := &stream{w: w}
	var e processEvent
	e.Event.Data = &eventData{Stdout: []byte("hi")}
	if err := errors.Join(s.send(e), s.end(nil)); err != nil {
		t.Fatal(err)
	}
	body := w.Body
	var got []string
	for {
		flags, text, err := frame(body)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%d %s", flags, text))
	}
	want := []string{`0 {"event":{"data":{"stdout":"aGk="}}}`, "2 {}"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if kind := w.Header().Get("Content-Type"); kind != streamType {
		t.Errorf("the stream is %q", kind)
	}
	w = httptest.NewRecorder()
	_ = (&stream{w: w}).end(wire.Errorf(wire.CodeNotFound, "no such process"))
	if !strings.Contains(w.Body.String(), `{"error":{"code":"not_found","message":"no such process"}}`) || w.Code != http.StatusOK {
		t.Errorf("%d %q", w.Code, w.Body)
	}
}

func FuzzFrame(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 2, '{', '}'})
	f.Add([]byte{1, 0, 0, 0, 0})
	f.Add([]byte{0, 255, 255, 255, 255})
	f.Add([]byte{0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		_, message, err := frame(bytes.NewReader(b))
		if err == nil && uint32(len(message)) != binary.BigEndian.Uint32(b[1:5]) {
			t.Errorf("%d bytes of %x", len(message), b)
		}
	})
}

// TestSigned: a signature opens one path, for one operation, as one user, until its time; nothing else.
func TestSigned(t *testing.T) {
	seed, err := access.OpenSeed(filepath.Join(t.TempDir(), "seed"))
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{Seed: seed})
	sign := func(path, operation, user, until string) string {
		text := path + ":" + operation + ":" + user + ":" + seed.Token(forEnvd, "sba")
		if until != "" {
			text += ":" + until
		}
		sum := sha256.Sum256([]byte(text))
		return "v1_" + strings.TrimRight(base64.StdEncoding.EncodeToString(sum[:]), "=")
	}
	later, before := fmt.Sprint(time.Now().Unix()+60), fmt.Sprint(time.Now().Unix()-1)
	for _, c := range []struct {
		name, method, path, user, until, signature, sandbox string
		want                                                bool
	}{
		{"reading", "GET", "/a", "", "", sign("/a", "read", "", ""), "sba", true},
		{"HEAD", "HEAD", "/a", "", "", sign("/a", "read", "", ""), "sba", true},
		{"writing", "POST", "/a", "u", later, sign("/a", "write", "u", later), "sba", true},
		{"another path", "GET", "/b", "", "", sign("/a", "read", "", ""), "sba", false},
		{"another operation", "POST", "/a", "", "", sign("/a", "read", "", ""), "sba", false},
		{"another user", "GET", "/a", "root", "", sign("/a", "read", "", ""), "sba", false},
		{"another sandbox", "GET", "/a", "", "", sign("/a", "read", "", ""), "sbb", false},
		{"over", "GET", "/a", "", before, sign("/a", "read", "", before), "sba", false},
		{"time taken away", "GET", "/a", "", "", sign("/a", "read", "", before), "sba", false},
		{"no time", "GET", "/a", "", "x", sign("/a", "read", "", "x"), "sba", false},
	} {
		q := url.Values{"path": {c.path}, "signature": {c.signature}}
		if c.user != "" {
			q.Set("username", c.user)
		}
		if c.until != "" {
			q.Set("signature_expiration", c.until)
		}
		r := httptest.NewRequestWithContext(t.Context(), c.method, "/files?"+q.Encode(), nil)
		sig, ok := signatureOf(r)
		if got := ok && s.signed(sig, c.sandbox); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
		if r.SetBasicAuth("root", ""); fileUser(r) != c.user {
			t.Errorf("%s: a header makes it %q's, signed is %q", c.name, fileUser(r), c.user)
		}
	}
	for name, q := range map[string]url.Values{
		"a short signature": {"path": {"/a"}, "signature": {"v1_x"}},
		"a long one":        {"path": {"/a"}, "signature": {strings.Repeat("x", 1<<16)}},
		"a long path":       {"path": {strings.Repeat("a", maxSigned+1)}, "signature": {sign("/a", "read", "", "")}},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/files?"+q.Encode(), nil)
		if _, ok := signatureOf(r); ok {
			t.Errorf("%s is tried on every sandbox", name)
		}
	}
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/files?path=a", nil)
	if r.SetBasicAuth("me", ""); fileUser(r) != "me" {
		t.Errorf("a URL that is not signed is %q's", fileUser(r))
	}
}

func TestPolicy(t *testing.T) {
	s := New(Config{Egress: egress.Packages})
	yes, no := true, false
	for _, c := range []struct {
		name     string
		internet *bool
		network  *network
		want     string
	}{
		{"nothing said", nil, nil, "packages [] []"},
		{"no internet", &no, nil, "none [] []"},
		{"internet, as older clients always say", &yes, nil, "packages [] []"},
		{
			"some allowed", nil, &network{AllowOut: []string{"1.1.1.1", "*.example.com", "2001:db8::/32"}, DenyOut: []string{"0.0.0.0/0"}},
			"none [1.1.1.1 *.example.com:80,443/tcp [2001:db8::]/32] []",
		},
		{"some denied", nil, &network{DenyOut: []string{"10.0.0.0/8"}}, "packages [] [10.0.0.0/8]"},
	} {
		p, _, err := s.policy(c.internet, c.network)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		texts := func(rules []egress.Rule) (list []string) {
			for _, r := range rules {
				list = append(list, r.String())
			}
			return list
		}
		if got := fmt.Sprint(p.Preset, " ", texts(p.Allow), " ", texts(p.Deny)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
	for field, n := range map[string]*network{
		"allowPublicTraffic": {AllowPublic: &yes}, "egressProxy": {Proxy: json.RawMessage(`{"address":"x"}`)},
		"rules": {Rules: json.RawMessage(`{"a":[]}`)}, "maskRequestHost": {MaskHost: "x"}, "dnsServers": {DNS: []string{"1.1.1.1"}},
		"allowOut[0]": {AllowOut: []string{"not a rule"}}, "denyOut[1]": {DenyOut: []string{"1.1.1.1", "%"}},
	} {
		if _, _, err := s.policy(nil, n); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestGiven: who may not widen keeps what a snapshot denies and how much may be carried, and gets no more than the daemon's preset.
func TestGiven(t *testing.T) {
	s := New(Config{Egress: egress.Packages})
	rule, err := egress.ParseRule("pypi.org")
	if err != nil {
		t.Fatal(err)
	}
	snapshot := egress.Policy{Deny: []egress.Rule{rule}, BudgetBytes: 1000}
	for _, c := range []struct {
		name  string
		asked egress.Policy
		said  bool
		gives bool
	}{
		{"nothing said", egress.Policy{Preset: egress.Packages}, false, true},
		{"none", egress.Policy{Preset: egress.None}, true, true},
		{"all", egress.Policy{Preset: egress.Open}, true, false},
		{"a larger budget", egress.Policy{Preset: egress.Packages, BudgetBytes: 5000}, true, true},
	} {
		p, gives := s.given(c.asked, snapshot, c.said)
		if gives != c.gives || p.BudgetBytes != 1000 || len(p.Deny) != 1 {
			t.Errorf("%s: %v, %+v", c.name, gives, p)
		}
	}
	n := s.networkOn(snapshot)
	if n.Build.Preset != egress.Packages || n.Sandboxes.Preset != "" || len(n.Build.Deny) != 1 || len(n.Sandboxes.Deny) != 1 {
		t.Errorf("a template on it: %+v", n)
	}
}

// TestDockerfile: a template's steps are those of a Dockerfile that says the same, whatever characters are in them.
func TestDockerfile(t *testing.T) {
	hash := strings.Repeat("ab", 32)
	s := New(Config{})
	f, err := s.dockerfileOf(&templateSpec{FromImage: "python:3.12", Steps: []templateStep{
		{Type: "ENV", Args: []string{"A", `x "y" $Z \ z`, "B", "2"}},
		{Type: "RUN", Args: []string{"echo \"$A\"\necho '$B' \\", "root"}},
		{Type: "WORKDIR", Args: []string{"/with space"}},
		{Type: "COPY", Args: []string{"app/", "/srv/app", "", "0755"}, Hash: hash},
		{Type: "USER", Args: []string{"root"}},
		{Type: "RUN", Args: []string{"id"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	text, steps := f.text, f.lines
	if _, err := dockerfile.Parse("template", text); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for _, want := range []string{
		`ENV A="x \"y\" \$Z \\ z" B="2"`, `COPY --chown=user --chmod=0755 ["` + hash + `/app","/srv/app"]`, "WORKDIR /with\\ space", "USER root",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	for i, line := range lines[:len(steps)] {
		if strings.Contains(line, `"id"`) && steps[i] != 6 {
			t.Errorf("line %d is of step %d", i+1, steps[i])
		}
		if strings.Contains(line, `"id"`) && f.titles[i+1] != "RUN id" {
			t.Errorf("line %d is called %q", i+1, f.titles[i+1])
		}
		if strings.HasPrefix(line, "FROM") && steps[i] != 0 {
			t.Errorf("FROM is of step %d", steps[i])
		}
	}
	if got := (&templateJob{lines: steps}).stepOf("build x: template:2: no"); got != "base" {
		t.Errorf("line 2 is of step %q", got)
	}
	for _, bad := range []templateStep{
		{Type: "RUM"},
		{Type: "ENV", Args: []string{"A"}},
		{Type: "ENV", Args: []string{"A", "x\ny"}},
		{Type: "WORKDIR", Args: []string{"rel"}},
		{Type: "USER", Args: []string{"a b"}},
		{Type: "COPY", Args: []string{"a", "b"}, Hash: "../x"},
		{Type: "COPY", Args: []string{"a"}, Hash: hash},
		{Type: "COPY", Args: []string{"a", "b", "root --from=snapshot:x"}, Hash: hash},
		{Type: "COPY", Args: []string{"a", "b", "", "0755 --from=snapshot:x"}, Hash: hash},
		{Type: "RUN", Args: []string{"id", "root\nFROM snapshot:x"}},
		{Type: "RUN", Args: []string{"id", "$USER"}},
	} {
		if _, err := s.dockerfileOf(&templateSpec{FromImage: "x", Steps: []templateStep{bad}}); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

// TestUploads: a link is of one digest and for a while, and what was uploaded first stays.
func TestUploads(t *testing.T) {
	dir := t.TempDir()
	seed, err := access.OpenSeed(filepath.Join(dir, "seed"))
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{Seed: seed, Uploads: filepath.Join(dir, "uploads")})
	hash, other := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	request := func(method, hash, query, body string) *http.Request {
		r := httptest.NewRequestWithContext(t.Context(), method, "/x?"+query, strings.NewReader(body))
		r.SetPathValue("hash", hash)
		return r
	}
	w := httptest.NewRecorder()
	if err := s.uploadLink(w, request("GET", hash, "", "")); err != nil {
		t.Fatal(err)
	}
	var link struct{ URL string }
	if err := json.Unmarshal(w.Body.Bytes(), &link); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(link.URL)
	if err != nil {
		t.Fatal(err)
	}
	token, before := u.Query().Get("token"), fmt.Sprint(time.Now().Unix()-1)
	for name, c := range map[string]struct {
		hash, query, shown string
		want               bool
	}{
		"as given":       {hash, u.RawQuery, token, true},
		"another digest": {other, u.RawQuery, token, false},
		"no time":        {hash, "", token, false},
		"another time":   {hash, "until=99999999999", token, false},
		"over":           {hash, "until=" + before, seed.Token(forUpload, hash+" "+before), false},
	} {
		if got := s.linked(request("PUT", c.hash, c.query, ""), c.shown); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	for _, text := range []string{"first", "second"} {
		if err := s.takeUpload(httptest.NewRecorder(), request("PUT", hash, "", text)); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(filepath.Join(s.Uploads, hash)); string(got) != "first" || err != nil {
		t.Errorf("%q, %v: another's upload took its place", got, err)
	}
	if err := os.WriteFile(filepath.Join(s.Uploads, "part-1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		later time.Duration
		left  int
	}{{uploadsKept / 2, 1}, {2 * uploadsKept, 0}} {
		if err := SweepUploads(s.Uploads, time.Now().Add(c.later)); err != nil {
			t.Error(err)
		}
		if list, err := os.ReadDir(s.Uploads); len(list) != c.left || err != nil {
			t.Errorf("after %s %d files are left, %v", c.later, len(list), err)
		}
	}
}

// TestStartedTwice: who starts a build twice changes nothing of it, whenever it comes (with -race).
func TestStartedTwice(t *testing.T) {
	s := New(Config{})
	j := &templateJob{id: "b", tag: "t", status: buildRuns, lines: []int{0, 1}}
	s.builds.add(j)
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			r := httptest.NewRequestWithContext(t.Context(), "POST", "/", strings.NewReader(`{"fromImage":"x","steps":[{"type":"RUN","args":["id"]}]}`))
			r.SetPathValue("build", "b")
			r.SetPathValue("template", "t")
			if err := s.startBuild(httptest.NewRecorder(), r); err == nil || !strings.Contains(err.Error(), "has begun already") {
				t.Errorf("it is begun again: %v", err)
			}
		})
	}
	both.Wait()
	if diff := cmp.Diff([]int{0, 1}, j.lines); diff != "" {
		t.Error(diff)
	}
}

// TestLogsBounded: a step that prints without end takes no memory without end, and the last line says that some are missing.
func TestLogsBounded(t *testing.T) {
	for name, line := range map[string]string{"long": strings.Repeat("x", 100_000), "short": "x"} {
		j := &templateJob{}
		for range maxLogs + 10 {
			j.say("info", "%s", line)
		}
		bytes := 0
		for _, l := range j.logs {
			bytes += len(l.Message)
		}
		if last := j.logs[len(j.logs)-1]; bytes > maxLogBytes+1000 || len(j.logs) > maxLogs || last.Level != "warn" {
			t.Errorf("%s lines: %d of %d bytes, the last is %.40q", name, len(j.logs), bytes, last.Message)
		}
	}
}

// TestBrokenInput: a message that is none ends the call, though the guest knows of nothing and waits for more.
func TestBrokenInput(t *testing.T) {
	for name, body := range map[string]string{
		"no JSON": "\x00\x00\x00\x00\x01{", "cut off": "\x00\x00\x00\x00\x09{", "too large": "\x00\xff\xff\xff\xff",
	} {
		ours, guests := net.Pipe()
		go io.Copy(io.Discard, guests) //nolint:errcheck // It ends with the pipe.
		err := passInput(strings.NewReader(body), wire.NewStream(ours))
		if err == nil || errors.Is(err, errNotTaken) || errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("%s: %v", name, err)
		}
		_ = guests.Close()
	}
}

// TestNewTemplate: a name that cannot be a snapshot's is refused when the client hears of it, and is not kept.
func TestNewTemplate(t *testing.T) {
	s := New(Config{})
	for name, want := range map[string]bool{
		"app": true, "team/app:v1": true, "": false, "with space": false, "a:b:c": false, strings.Repeat("x", 1<<20): false,
	} {
		text, err := json.Marshal(map[string]string{"name": name})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/", bytes.NewReader(text))
		if err := s.newTemplate(httptest.NewRecorder(), r); (err == nil) != want {
			t.Errorf("%.40q: %v", name, err)
		}
	}
	if len(s.builds.all) != 2 {
		t.Errorf("%d builds are kept", len(s.builds.all))
	}
}

func TestSnapshotIn(t *testing.T) {
	for text, want := range map[string]string{"FROM snapshot:a\nUSER x\n": "a", "FROM python\nFROM snapshot:a\n": "", "": ""} {
		if got, ok := snapshotIn([]byte(text)); ok != (want != "") || ok && got != want {
			t.Errorf("%q: %q, %v", text, got, ok)
		}
	}
}

func TestState(t *testing.T) {
	for in, want := range map[string]string{"running": "running", "paused": "paused", "suspended": "paused", "failed": ""} {
		if got := state(host.View{State: lineage.State(in)}); got != want {
			t.Errorf("%s: %q, want %q", in, got, want)
		}
	}
}

// TestInAddress: what a URL shows is a signature or a link's, and never a token of the daemon's own.
func TestInAddress(t *testing.T) {
	tokens, err := access.Open(filepath.Join(t.TempDir(), "tokens"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e2b := range []bool{false, true} {
		_, secret, err := tokens.Create(access.Spec{Scope: access.Manage, By: access.Owner(), E2B: e2b})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/files?path=a&signature="+secret, nil)
		if shown, ok := shownForFiles(r); shown != "" || !ok {
			t.Errorf("a token in an address is taken: %q, %v", shown, ok)
		}
	}
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/files?signature=v1_x", nil)
	if shown, ok := shownForFiles(r); shown != "v1_x" || !ok {
		t.Errorf("a signature: %q, %v", shown, ok)
	}
}

// TestPurposes: what is for a sandbox's ports is not for its files, and nothing is for another sandbox.
func TestPurposes(t *testing.T) {
	seed, err := access.OpenSeed(filepath.Join(t.TempDir(), "seed"))
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{Seed: seed})
	traffic, envd := seed.Token(forTraffic, "sba"), seed.Token(forEnvd, "sba")
	for _, c := range []struct {
		sandbox, shown string
		purposes       []string
		want           bool
	}{
		{"sba", envd, []string{forEnvd}, true},
		{"sba", traffic, []string{forEnvd}, false},
		{"sba", traffic, []string{forTraffic, forEnvd}, true},
		{"sbb", envd, []string{forTraffic, forEnvd}, false},
		{"sba", "", []string{forTraffic, forEnvd}, false},
	} {
		token, ok := s.sandboxToken(c.sandbox, c.shown, c.purposes...)
		if ok != c.want || ok && (token.Scope != access.Use || token.Sandbox != c.sandbox) {
			t.Errorf("%s %v: %v %+v", c.sandbox, c.purposes, ok, token)
		}
	}
}

// TestWarmup: what a template starts and waits for, with the client's own way to wait for a port without ss.
func TestWarmup(t *testing.T) {
	const port = `[ -n "$(ss -Htuln sport = :8080)" ]`
	for _, c := range []struct {
		start, ready string
		service      bool
		want         string // in what is waited for
	}{
		{"", "", false, ""},
		{"serve", "", true, usualWait},
		{"serve", port, true, ":1F90 "},
		{"serve", `[ -f "/tmp/x y" ] # '`, true, `[ -f "/tmp/x y" ] # '`},
		{"", port, false, ":1F90 "},
		{"serve", `[ -n "$(ss -Htuln sport = :99999)" ]`, true, "ss -Htuln"},
	} {
		w, err := warmupOf(&templateSpec{Start: c.start, Ready: c.ready})
		if err != nil {
			t.Errorf("%q, %q: %v", c.start, c.ready, err)
			continue
		}
		switch {
		case c.want == "":
			if w != nil {
				t.Errorf("of nothing: %+v", w)
			}
		case c.service:
			if len(w.Services) != 1 || w.Services[0].Command[3] != c.start || !strings.Contains(w.Services[0].Ready[0].Command[3], c.want) {
				t.Errorf("%q, %q: %+v", c.start, c.ready, w)
			}
		case len(w.Services) > 0 || !strings.Contains(w.Command[3], c.want):
			t.Errorf("%q, %q: %+v", c.start, c.ready, w)
		}
	}
	for ready, want := range map[string]string{
		`curl -s -o /dev/null -w "%{http_code}" http://localhost/ | grep -q "200"`: "curl", "pgrep nginx > /dev/null": "pgrep", port: "", "true": "",
	} {
		if got, _ := toolOf(ready); got != want {
			t.Errorf("%s needs %q", ready, got)
		}
	}
}

func TestMachineOf(t *testing.T) {
	for _, c := range []struct {
		cpus         int
		memory, free int64
		word         string
	}{
		{0, 0, 0, ""},
		{2, 512, 1024, ""},
		{65, 0, 0, "cpuCount"},
		{-1, 0, 0, "cpuCount"},
		{0, 64, 0, "memoryMB"},
		{0, 1 << 50, 0, "memoryMB"},
		{0, 0, -1, "minFreeDiskMb"},
		{0, 0, 1 << 60, "minFreeDiskMb"},
	} {
		m, err := machineOf(c.cpus, c.memory, c.free)
		if c.word == "" {
			if err != nil || m.CPUs != c.cpus || m.MemoryBytes != c.memory<<20 || (m.DiskBytes > 0) != (c.free > 0) {
				t.Errorf("%+v: %+v, %v", c, m, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestTitles(t *testing.T) {
	for _, c := range []struct {
		step templateStep
		want string
	}{
		{templateStep{Type: "RUN", Args: []string{"a\n  b", "root"}}, "RUN a b (as root)"},
		{templateStep{Type: "COPY", Args: []string{"a", "/b", "", ""}}, "COPY a /b"},
		{templateStep{Type: "RUN", Args: []string{strings.Repeat("ä", 500)}}, "RUN " + strings.Repeat("ä", 195) + "…"},
	} {
		if got := c.step.title(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	e := &api.Error{Message: "it failed\noutput:\nwords\n", Hint: "look"}
	if got := words(e); got != "it failed\noutput:\nwords\ntry: look" {
		t.Errorf("%q", got)
	}
}

// TestBuildStatus: clients ask on without a pause until a reply has no entries, which those after the last one have.
func TestBuildStatus(t *testing.T) {
	s := New(Config{})
	j := &templateJob{id: "b", tag: "t", status: buildReady}
	for n := range logsPerPage + 5 {
		j.say("info", "%d", n)
	}
	s.builds.add(j)
	for query, want := range map[string]int{
		"": logsPerPage, "logsOffset=0&limit=3": 3, "logsOffset=100": 5, "logsOffset=105": 0, "logsOffset=1000000": 0, "logsOffset=-7": logsPerPage,
		"logsOffset=100&limit=100000": 5, "logsOffset=9223372036854775808": 0,
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/?"+query, nil)
		r.SetPathValue("build", "b")
		r.SetPathValue("template", "t")
		w := httptest.NewRecorder()
		if err := s.buildStatus(w, r); err != nil {
			t.Fatal(err)
		}
		var reply struct {
			Entries []json.RawMessage `json:"logEntries"`
			Logs    []string          `json:"logs"`
		}
		if err := json.Unmarshal(w.Body.Bytes(), &reply); err != nil || reply.Entries == nil || len(reply.Entries) != want || len(reply.Logs) != want {
			t.Errorf("?%s: %d entries, want %d: %v", query, len(reply.Entries), want, err)
		}
	}
}
