package e2e

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// remote is a daemon over TCP.
type remote struct {
	*forkd
	port, pin string
	tokens    []string // made so far, none of which may be found anywhere
}

// serveTCP has a daemon with a token for managers serve every address of this host.
func serveTCP(f *forkd) (r *remote, manage string) {
	f.t.Helper()
	r = &remote{forkd: f}
	manage = r.token("manager", "--scope", "manage")
	f.run("daemon", "stop")
	f.run("daemon", "start", "--bind", "0.0.0.0:0")
	r.find()
	return r, manage
}

// find asks where the daemon serves.
func (r *remote) find() {
	r.t.Helper()
	var status struct{ Address, Fingerprint string }
	r.json(&status, "daemon", "status")
	if !strings.HasPrefix(status.Address, "https://") || status.Fingerprint == "" {
		r.t.Fatalf("%+v", status)
	}
	r.port, r.pin = status.Address[strings.LastIndex(status.Address, ":")+1:], status.Fingerprint
}

func (r *remote) token(args ...string) string {
	r.t.Helper()
	text := strings.TrimSpace(r.run(append([]string{"token", "create"}, args...)...))
	if !strings.HasPrefix(text, "fkd_") {
		r.t.Fatalf("token create printed %q", text)
	}
	r.tokens = append(r.tokens, text)
	return text
}

// as is the command line from elsewhere, with a token.
func (r *remote) as(token string) *forkd {
	return &forkd{t: r.t, bin: r.bin, home: filepath.Join(r.t.TempDir(), "elsewhere"), env: []string{
		"FORKD_HOST=https://127.0.0.1:" + r.port, "FORKD_FINGERPRINT=" + r.pin, "FORKD_TOKEN=" + token,
	}}
}

func (r *remote) client() *http.Client {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // the command line checks it
	r.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: testenv.Timeout(time.Minute)}
}

func (r *remote) ask(c *http.Client, method, path, token, body string) (int, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, "https://127.0.0.1:"+r.port+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// TestAccess: a daemon over TCP, from its first token to its last.
func TestAccess(t *testing.T) {
	f := copied(t)
	refused := f.try("serve", "--bind", "127.0.0.1:0")
	if refused.code != 1 || !strings.Contains(refused.stderr, "forkd token create") {
		t.Fatalf("without a token it serves TCP, or does not say what to do: %+v", refused)
	}
	r, manage := serveTCP(f)
	ids := r.as(manage).fork(2)
	mine, other := ids[0].ID, ids[1].ID
	its := r.token("--sandbox", mine)

	t.Run("command line", func(t *testing.T) {
		agent := r.as(its)
		agent.t = t
		if got := agent.run("exec", mine, "--", "echo", "hello"); got != "hello\n" {
			t.Errorf("%q", got)
		}
		for _, args := range [][]string{{"exec", other, "--", "true"}, {"ls"}, {"kill", mine}, {"fork", parentTag}, {"token", "ls"}} {
			if got := agent.try(args...); got.code == 0 || !strings.Contains(got.stderr, "token") {
				t.Errorf("%v: %+v", args, got)
			}
		}
		wrong := r.as(its)
		wrong.env = append(wrong.env, "FORKD_FINGERPRINT=sha256//"+strings.Repeat("A", 43)+"=")
		if got := wrong.try("exec", mine, "--", "true"); got.code == 0 || !strings.Contains(got.stderr, r.pin) {
			t.Errorf("another key: %+v", got)
		}
	})
	t.Run("terminal", func(t *testing.T) { testSocketTerminal(t, r, mine, its) })
	t.Run("stream", func(t *testing.T) { testExecStream(t, r, mine) })
	// From here on this address has shown many wrong tokens: only those are heard that were good before.
	t.Run("every route", func(t *testing.T) { testEveryRoute(t, r, mine, other) })
	t.Run("killed daemon", func(t *testing.T) {
		gone := r.token("gone", "--scope", "read")
		r.run("token", "revoke", "gone")
		var status struct{ PID int }
		r.json(&status, "daemon", "status")
		if err := syscall.Kill(status.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		r.run("daemon", "start", "--bind", "0.0.0.0:"+r.port)
		before := r.pin
		r.find()
		if r.pin != before {
			t.Error("the key is another")
		}
		if got := r.as(its).run("exec", mine, "--", "echo", "still"); got != "still\n" {
			t.Errorf("%q", got)
		}
		if got := r.as(gone).try("ls"); got.code == 0 {
			t.Error("a revoked token is good again")
		}
	})
	t.Run("removed sandbox", func(t *testing.T) {
		r.as(manage).run("kill", mine)
		if status, text := r.ask(r.client(), http.MethodGet, "/version", its, ""); status != http.StatusUnauthorized {
			t.Errorf("%d %s", status, text)
		}
		var list []api.Token
		r.json(&list, "token", "ls")
		for _, tok := range list {
			if tok.Sandbox == mine {
				t.Errorf("it is still there: %+v", tok)
			}
		}
	})
	testNoSecrets(t, r)
}

var pathParameter = regexp.MustCompile(`\{[^}]*\}`)

// testEveryRoute asks for all that the document has with what must not open it, over a real connection.
func testEveryRoute(t *testing.T, r *remote, mine, other string) {
	c := r.client()
	status, text := r.ask(c, http.MethodGet, "/openapi.json", "", "")
	var document struct {
		Paths map[string]map[string]struct {
			Scope string `json:"x-forkd-scope"`
		} `json:"paths"`
	}
	if err := json.Unmarshal([]byte(text), &document); err != nil || status != http.StatusOK {
		t.Fatalf("%d, %v", status, err)
	}
	revoked := r.token("revoked", "--scope", "admin")
	r.run("token", "revoke", "revoked")
	expired := r.token("expired", "--scope", "admin", "--expires", "1ms")
	scopes := map[string]int{"none": 0, "": 0, "read": 1, "use": 2, "manage": 3, "admin": 4}
	tokens := map[string]string{}
	for name := range scopes {
		if scopes[name] > 0 {
			tokens[name] = r.token("all-"+name, "--scope", name)
		}
	}
	others := r.token("--sandbox", other, "--scope", "manage")
	for _, token := range append(slices.Collect(maps.Values(tokens)), others) {
		if got, text := r.ask(c, http.MethodGet, "/version", token, ""); got != http.StatusOK {
			t.Fatalf("%d %s", got, text)
		}
	}
	asked := 0
	for path, operations := range document.Paths {
		url := pathParameter.ReplaceAllString(strings.Replace(path, "/v1/sandboxes/{id}", "/v1/sandboxes/"+mine, 1), "x")
		for method, op := range operations {
			need := scopes[op.Scope]
			if need == 0 {
				continue
			}
			want := map[string]int{"": 401, revoked: 401, expired: 401}
			if path != "/version" {
				want[others] = 403
			}
			for name, token := range tokens {
				if scopes[name] < need {
					want[token] = 403
				}
			}
			for token, status := range want {
				asked++
				got, text := r.ask(c, strings.ToUpper(method), url, token, "")
				// Who shows too many wrong tokens is not even told that they are wrong.
				if got != status && (status != 401 || got != 429) {
					t.Errorf("%s %s needs %s, with %.14s…: %d %s", method, path, op.Scope, token, got, text)
				}
			}
		}
	}
	if asked < 300 {
		t.Errorf("only %d requests: the document has lost routes", asked)
	}
}

// testSocketTerminal uses a terminal over a WebSocket, and then takes the token away.
func testSocketTerminal(t *testing.T, r *remote, id, token string) {
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(time.Minute))
	defer cancel()
	page := r.token("page", "--sandbox", id)
	conn, resp, err := websocket.Dial(ctx, "wss://127.0.0.1:"+r.port+"/v1/sandboxes/"+id+"/exec", &websocket.DialOptions{
		HTTPClient: r.client(), Subprotocols: []string{"forkd.exec.v1", "forkd.token." + page}, HTTPHeader: http.Header{"Origin": {"https://elsewhere.example"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body != nil {
		_ = resp.Body.Close()
	}
	defer conn.CloseNow() //nolint:errcheck // it is closed already
	start, err := json.Marshal(api.ExecStart{Args: []string{"sh"}, TTY: &api.TTY{Cols: 77, Rows: 33}})
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Write(ctx, websocket.MessageText, start); err != nil {
		t.Fatal(err)
	}
	if err := conn.Write(ctx, websocket.MessageBinary, []byte("\x00stty size; id -u\r")); err != nil {
		t.Fatal(err)
	}
	var seen strings.Builder
	for !strings.Contains(seen.String(), "33 77") {
		_, p, err := conn.Read(ctx)
		if err != nil {
			t.Fatalf("%v after %q", err, seen.String())
		}
		seen.Write(p)
	}
	r.run("token", "revoke", "page")
	for {
		if _, _, err := conn.Read(ctx); err != nil {
			break
		}
	}
	if ctx.Err() != nil {
		t.Error("a terminal outlives its token")
	}
	if got := r.as(token).run("exec", id, "--", "true"); got != "" {
		t.Errorf("%q", got)
	}
}

// testExecStream follows a command, and takes the token away in the middle of it.
func testExecStream(t *testing.T, r *remote, id string) {
	token := r.token("follower", "--sandbox", id)
	body := `{"args": ["sh", "-c", "echo one; echo two >&2; while :; do sleep 0.1; done"], "tag": "endless", "timeout_secs": 60}`
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://127.0.0.1:"+r.port+"/v1/sandboxes/"+id+"/exec", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{"Authorization": "Bearer " + token, "Accept": "application/x-ndjson", "Content-Type": "application/json"} {
		req.Header.Set(name, value)
	}
	resp, err := r.client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	seen := map[string]string{}
	for d := json.NewDecoder(resp.Body); ; {
		var e api.ExecEvent
		if err := d.Decode(&e); err != nil {
			t.Fatalf("%v after %v", err, seen)
		}
		seen[e.Type] += e.Text
		if e.Type == "error" {
			if e.Code != api.CodeUnauthorized {
				t.Errorf("%+v", e)
			}
			break
		}
		if seen["stdout"] == "one\n" && seen["stderr"] == "two\n" {
			r.run("token", "revoke", "follower")
		}
	}
	// It goes on without its caller, and can be ended.
	r.run("signal", id, "endless", "KILL")
}

// testNoSecrets looks for tokens wherever the daemon writes, and where everybody may look.
func testNoSecrets(t *testing.T, r *remote) {
	t.Helper()
	var status struct{ PID int }
	r.json(&status, "daemon", "status")
	files := []string{filepath.Join("/proc", strconv.Itoa(status.PID), "cmdline"), filepath.Join("/proc", strconv.Itoa(status.PID), "environ")}
	err := filepath.WalkDir(r.home, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && (d.Name() == "layers" || d.Name() == "images" || d.Name() == "hot" || d.Name() == "machines") {
			return fs.SkipDir
		}
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	logs := 0
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(name, ".log") {
			logs++
		}
		for _, token := range r.tokens {
			if secret := token[strings.LastIndex(token, "_")+1:]; strings.Contains(string(text), secret) || strings.Contains(string(text), token) {
				t.Errorf("a token is in %s", name)
			}
		}
	}
	if logs == 0 {
		t.Error("no log was looked at")
	}
}

// TestPlainTCP: on loopback nothing need be encrypted, and nothing of a wrong beginning lasts.
func TestPlainTCP(t *testing.T) {
	testenv.OncePerRun(t)
	f := alone(t, "FORKD_BIND=127.0.0.1:0") // which does not keep the first token from being made
	token := strings.TrimSpace(f.run("token", "create"))
	f.run("daemon", "stop")
	f.run("daemon", "start", "--bind", "127.0.0.1:0")
	if got := f.try("daemon", "start", "--bind", "127.0.0.1:1"); got.code == 0 || !strings.Contains(got.stderr, "--bind") {
		t.Errorf("a setting that comes too late is ignored: %+v", got)
	}
	var status struct{ Address string }
	f.json(&status, "daemon", "status")
	address, ok := strings.CutPrefix(status.Address, "http://")
	if !ok {
		t.Fatal(status.Address)
	}
	there := &forkd{t: t, bin: f.bin, home: filepath.Join(t.TempDir(), "elsewhere"), env: []string{"FORKD_HOST=" + status.Address, "FORKD_TOKEN=" + token}}
	there.run("ls")
	there.env = append(there.env, "FORKD_TOKEN="+token+"x")
	if got := there.try("ls"); got.code != 1 || !strings.Contains(got.stderr, "FORKD_TOKEN") || strings.Contains(got.stderr+got.stdout, token) {
		t.Errorf("a wrong token: %+v", got)
	}
	there.env = append(there.env, "FORKD_HOST=http://192.0.2.1:1")
	if got := there.try("ls"); got.code != 2 || !strings.Contains(got.stderr, "unencrypted") {
		t.Errorf("a token in clear text to elsewhere: %+v", got)
	}
	for _, text := range []string{"\x16\x03\x01\x00\x05hello", "GET / HTTP/9.9\r\n\r\n", strings.Repeat("\x00", 64), "GET /v1/sandboxes HTTP/1.1\r\nAuthorization: Bearer " + strings.Repeat("x", 1<<21)} {
		var d net.Dialer
		conn, err := d.DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(testenv.Timeout(time.Minute)))
		_, _ = io.WriteString(conn, text+"\r\n\r\n")
		reply, _ := io.ReadAll(conn)
		_ = conn.Close()
		if len(reply) > 0 && !strings.Contains(string(reply[:min(len(reply), 20)]), " 4") && !strings.Contains(string(reply), "505") {
			t.Errorf("%.40q: %.200q", text, reply)
		}
	}
	f.run("ls")
}
