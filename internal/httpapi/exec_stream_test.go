package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/agent/account"
	agentprocess "forkd.dev/forkd/internal/agent/process"
	"forkd.dev/forkd/internal/agent/reap"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/testenv"
)

// execServer is the routes for commands over a real listener, which run on this machine by the agent's own code.
func execServer(t *testing.T) (url string, dir string) {
	t.Helper()
	return execServerOf(t, &Server{})
}

func execServerOf(t *testing.T, s *Server) (url string, dir string) {
	t.Helper()
	dir = t.TempDir()
	reaper := reap.New()
	manager := agentprocess.New(agentprocess.Config{
		Reaper: reaper, Accounts: account.New("/", account.Defaults{User: strconv.Itoa(os.Getuid()), Workdir: dir}), Retain: time.Minute,
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), testenv.Timeout(10*time.Second))
		defer cancel()
		if err := manager.Close(ctx); err != nil {
			t.Error(err)
		}
		reaper.Wait()
	})
	guest := &localGuest{t: t, handlers: manager.Handlers()}
	s.Log = slog.New(slog.DiscardHandler)
	server := httptest.NewServer(s.Patient(asOwner(s.router([]operation{
		{"POST /exec", access.Use, "", func(w http.ResponseWriter, r *http.Request) error {
			return s.runExec(w, r, func(context.Context) (call.Opener, error) { return guest, nil })
		}},
		{"GET /exec", access.Use, "", func(w http.ResponseWriter, r *http.Request) error {
			if err := wantsSocket(r); err != nil {
				return err
			}
			return s.serveSocket(w, r, guest)
		}},
	}))))
	t.Cleanup(server.Close)
	return server.URL + "/exec", dir
}

func post(t *testing.T, url, accept string, req api.ExecRequest) *answer {
	t.Helper()
	body, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept", accept)
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return &answer{resp.Status, resp.StatusCode, resp.Header, resp.ContentLength, resp.Body}
}

// toldEvents is a stream of events as a text that tests compare with.
func toldEvents(t *testing.T, body io.Reader) string {
	t.Helper()
	var b strings.Builder
	for d := json.NewDecoder(body); ; {
		var e api.ExecEvent
		if err := d.Decode(&e); err != nil {
			return b.String()
		}
		tell(t, &b, e)
	}
}

func tell(t *testing.T, b *strings.Builder, e api.ExecEvent) {
	t.Helper()
	if (e.Type == "stdout" || e.Type == "stderr") && e.Timestamp == 0 {
		t.Errorf("no time: %+v", e)
	}
	fmt.Fprintf(b, "%s %s%s", e.Type, e.Text, e.Data)
	switch e.Type {
	case "start":
		fmt.Fprintf(b, "%t", e.PID > 0)
	case "exit":
		fmt.Fprintf(b, "%d %d %s %t %s", *e.ExitCode, e.Signal, e.Status, e.TimedOut, e.Error)
	case "error", "refused":
		fmt.Fprintf(b, " %s", e.Code)
	}
	b.WriteString("\n")
}

func TestExecStream(t *testing.T) {
	url, _ := execServer(t)
	sh := func(script string) []string { return []string{"sh", "-c", script} }
	for _, tt := range []struct {
		req  api.ExecRequest
		want string
	}{
		{api.ExecRequest{Args: sh("printf é; exit 3")}, "start true\nstdout é\nexit 3 0 exit status 3 false \n"},
		{api.ExecRequest{Args: sh("cat >&2"), Stdin: "in"}, "start true\nstderr in\nexit 0 0 exit status 0 false \n"},
		{api.ExecRequest{Args: sh(`printf '\377'`)}, "start true\nstdout \uFFFD\nexit 0 0 exit status 0 false \n"},
		{api.ExecRequest{Args: sh(`printf '\377'`), Base64: true}, "start true\nstdout \xff\nexit 0 0 exit status 0 false \n"},
		{api.ExecRequest{Args: sh("kill -TERM $$")}, "start true\nexit 143 15 signal: terminated false \n"},
	} {
		resp := post(t, url, jsonLines, tt.req)
		if got := toldEvents(t, resp.Body); got != tt.want || resp.StatusCode != http.StatusOK {
			t.Errorf("%v: %d\n%s, want\n%s", tt.req, resp.StatusCode, got, tt.want)
		}
	}
	resp := post(t, url, jsonLines, api.ExecRequest{Args: sh("sleep 60"), TimeoutSecs: 0.2})
	if got := toldEvents(t, resp.Body); !strings.Contains(got, "signal: killed true") {
		t.Error(got)
	}
	for _, tt := range []struct {
		accept string
		req    api.ExecRequest
	}{{jsonLines, api.ExecRequest{}}, {jsonLines, api.ExecRequest{Args: []string{"/no/such"}}}, {"", api.ExecRequest{Args: []string{"true"}, Base64: true}}} {
		resp := post(t, url, tt.accept, tt.req)
		if resp.StatusCode != http.StatusBadRequest || resp.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%+v: %d, %s", tt, resp.StatusCode, resp.Header.Get("Content-Type"))
		}
	}
}

func TestExecServerSentEvents(t *testing.T) {
	url, dir := execServer(t)
	// The first output is there before the command ends: it ends only then.
	fifo := filepath.Join(dir, "go")
	resp := post(t, url, eventStream, api.ExecRequest{Args: []string{"sh", "-c", "echo one; while [ ! -e " + fifo + " ]; do sleep 0.02; done; echo two"}})
	if got := resp.Header.Get("Content-Type"); got != eventStream {
		t.Error(got)
	}
	var all []byte
	buf := make([]byte, 4096)
	for !bytes.Contains(all, []byte("one")) {
		n, err := resp.Body.Read(buf)
		if err != nil {
			t.Fatalf("%v after %s", err, all)
		}
		all = append(all, buf[:n]...)
	}
	if err := os.WriteFile(fifo, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	all = append(all, rest...)
	for _, want := range []string{"event: start\ndata: {", "event: stdout\ndata: {", "two\\n", "event: exit\ndata: {", "\n\n"} {
		if !bytes.Contains(all, []byte(want)) {
			t.Errorf("no %q in %s", want, all)
		}
	}
}

// socketClient is a client's side.
type socketClient struct {
	t    *testing.T
	conn *websocket.Conn
	got  string // that nobody has waited for yet
}

func dialExec(t *testing.T, url string, start any) *socketClient {
	t.Helper()
	conn, resp, err := websocket.Dial(t.Context(), url, &websocket.DialOptions{Subprotocols: []string{execProtocol}})
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body != nil {
		_ = resp.Body.Close()
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	conn.SetReadLimit(1 << 20)
	c := &socketClient{t: t, conn: conn}
	c.say(start)
	return c
}

func (c *socketClient) say(v any) {
	c.t.Helper()
	text, ok := v.(string)
	if !ok {
		b, err := json.Marshal(v)
		if err != nil {
			c.t.Fatal(err)
		}
		text = string(b)
	}
	if err := c.conn.Write(c.t.Context(), websocket.MessageText, []byte(text)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *socketClient) input(text string) {
	c.t.Helper()
	if err := c.conn.Write(c.t.Context(), websocket.MessageBinary, append([]byte{channelStdin}, text...)); err != nil {
		c.t.Fatal(err)
	}
}

// until reads until what was told contains the text, or to the end.
func (c *socketClient) until(text string) string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), testenv.Timeout(20*time.Second))
	defer cancel()
	var b strings.Builder
	b.WriteString(c.got)
	c.got = ""
	for text == "" || !strings.Contains(b.String(), text) {
		kind, p, err := c.conn.Read(ctx)
		if err != nil {
			if text != "" || websocket.CloseStatus(err) == -1 {
				c.t.Fatalf("%v after %q, waiting for %q", err, b.String(), text)
			}
			fmt.Fprintf(&b, "closed %d", websocket.CloseStatus(err))
			return b.String()
		}
		if kind == websocket.MessageBinary {
			fmt.Fprintf(&b, "%d:%s", p[0], p[1:])
			continue
		}
		var e api.ExecEvent
		if err := json.Unmarshal(p, &e); err != nil {
			c.t.Fatalf("%v: %s", err, p)
		}
		tell(c.t, &b, e)
	}
	before, after, _ := strings.Cut(b.String(), text)
	c.got = after
	return before + text
}

func TestExecSocket(t *testing.T) {
	url, _ := execServer(t)
	sh := func(script string) []string { return []string{"sh", "-c", script} }
	const end = "exit 0 0 exit status 0 false \nclosed 1000"
	if got := dialExec(t, url, api.ExecStart{Args: sh("echo out; exit 5")}).until(""); got != "start true\n1:out\nexit 5 0 exit status 5 false \nclosed 1000" {
		t.Errorf("%q", got)
	}
	c := dialExec(t, url, api.ExecStart{Args: sh("cat; cat >&2"), Stdin: true})
	c.input("one")
	c.say(api.ExecControl{Type: "stdin", Text: "two"})
	c.say(api.ExecControl{Type: "eof"})
	if got := strings.ReplaceAll(c.until(""), "1:two", "two"); got != "start true\n1:onetwo"+end {
		t.Errorf("%q", got)
	}
	c = dialExec(t, url, api.ExecStart{Args: sh("trap 'echo got; exit 0' USR1; echo ready; while :; do sleep 0.05; done")})
	c.until("ready")
	c.say(api.ExecControl{Type: "signal", Signal: "USR1"})
	if got := c.until(""); !strings.Contains(got, "got") || !strings.HasSuffix(got, end) {
		t.Errorf("%q", got)
	}
}

func TestExecSocketTerminal(t *testing.T) {
	url, _ := execServer(t)
	c := dialExec(t, url, api.ExecStart{Args: []string{"sh"}, TTY: &api.TTY{Cols: 91, Rows: 37}, Env: map[string]string{"PS1": "> "}})
	c.until("> ")
	c.input("stty size\r")
	c.until("37 91")
	c.say(api.ExecControl{Type: "resize", Cols: 101, Rows: 41})
	c.input("stty size\r")
	c.until("41 101")
	// What is typed is shown, and is not what is waited for.
	c.input("sh -c \"trap 'echo interr''upted; exit' INT; echo run''ning; while :; do sleep 0.05; done\"\r")
	c.until("running")
	c.input("\x03")
	c.until("interrupted")
	c.until("> ")
	c.input("exit 7\r")
	if got := c.until(""); !strings.Contains(got, "exit 7 ") {
		t.Errorf("%q", got)
	}
}

func TestExecSocketRefusals(t *testing.T) {
	url, _ := execServer(t)
	for _, start := range []any{
		"x", "{}", `{"args":["true"]} x`, `{"arg":["true"]}`, `{"args":["true"],"shell":true}`, `{"args":["true"],"attach":"1"}`,
		`{"args":["true"],"replay":true}`, `{"attach":"1","cwd":"/"}`, `{"args":["true"],"timeout_secs":-1}`, `{"args":[""]}`,
		`{"args":["/no/such/program"]}`,
	} {
		if got := dialExec(t, url, start).until(""); !strings.HasPrefix(got, "error ") || !strings.HasSuffix(got, " invalid\nclosed 1008") {
			t.Errorf("%v: %q", start, got)
		}
	}
	if got := dialExec(t, url, `{"attach":"no-such-tag"}`).until(""); !strings.Contains(got, "not_found") {
		t.Errorf("%q", got)
	}
	c := dialExec(t, url, api.ExecStart{Args: []string{"sleep", "60"}})
	for _, message := range []any{
		"x", "{}", `{"type":"stdin","text":"a"}`, `{"type":"signal","signal":"NOPE"}`, `{"type":"resize","cols":1,"rows":1}`, `{"type":"signals"}`,
	} {
		c.say(message)
		c.until("refused ")
	}
	if err := c.conn.Write(t.Context(), websocket.MessageBinary, []byte{9, 9}); err != nil {
		t.Fatal(err)
	}
	c.until("refused ")
	c.say(api.ExecControl{Type: "signal", Signal: "KILL"})
	if got := c.until(""); !strings.Contains(got, "signal: killed") {
		t.Errorf("%q", got)
	}
	for _, headers := range [][]string{{}, {"Upgrade", "websocket"}, {"Upgrade", "websocket", "Connection", "Upgrade"}} {
		if a := ask(t, http.MethodGet, url, nil, headers...); a.StatusCode != http.StatusBadRequest {
			t.Errorf("%v: %d", headers, a.StatusCode)
		}
	}
}

// TestExecSocketLeft: a command goes on when its client leaves, unless the client asked for its end, and can be come back to.
func TestExecSocketLeft(t *testing.T) {
	url, dir := execServer(t)
	script := []string{"sh", "-c", "echo begun; while [ ! -e go ]; do sleep 0.02; done; echo after"}
	c := dialExec(t, url, api.ExecStart{Args: script, Tag: "job", Cwd: dir})
	c.until("begun")
	_ = c.conn.CloseNow()
	back := dialExec(t, url, api.ExecStart{Attach: "job", Replay: true})
	back.until("begun")
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := back.until(""); !strings.Contains(got, "after") || !strings.Contains(got, "exit 0") {
		t.Errorf("%q", got)
	}
	c = dialExec(t, url, api.ExecStart{Args: []string{"sh", "-c", "echo begun; sleep 60"}, Tag: "doomed", KillOnClose: true})
	c.until("begun")
	watcher := dialExec(t, url, api.ExecStart{Attach: "doomed", Observe: true})
	watcher.until("start")
	_ = c.conn.CloseNow()
	if got := watcher.until(""); !strings.Contains(got, "signal: killed") {
		t.Errorf("%q", got)
	}
}

func FuzzExecMessages(f *testing.F) {
	f.Add([]byte(`{"args":["true"],"tty":{"cols":1,"rows":1},"stdin":true}`))
	f.Add([]byte(`{"type":"signal","signal":"TERM","group":true}`))
	f.Add([]byte(`{"attach":"1","replay":true}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var c api.ExecControl
		_ = decodeMessage(text, &c)
		start := &api.ExecStart{}
		if decodeMessage(text, start) != nil {
			return
		}
		x := &socket{}
		if run, err := x.plan(start); (run == nil) == (err == nil) {
			t.Errorf("%s: %v", text, err)
		}
	})
}
