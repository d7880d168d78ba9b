package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	bigendian "encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// streamed is what a daemon streams of one sandbox, as its own clients and E2B's ask for it.
type streamed struct {
	t     *testing.T
	f     *forkd
	id    string
	url   string
	token string
	http  *http.Client
}

// counts are how much is streamed at once, and how many streams there are at a time.
func counts() (size int64, streams int) {
	if testenv.Soak() {
		return 1 << 30, 200
	}
	return 64 << 20, 50
}

// mostGrowth is by how much a daemon, or a client, may grow while one stream passes, whatever its length.
const mostGrowth = 40 << 20

// TestStreams: what is streamed takes the same memory however much it is, on both ends; who stops reading is in nobody's way;
// who leaves ends nothing but the stream; and there may be many at a time. Of commands, files and their like, over the routes
// of this daemon's own clients and of E2B's. TestSDKStreams has the SDKs measure themselves.
func TestStreams(t *testing.T) {
	testenv.Need(t, "root")
	f, env := served(t)
	x := &streamed{
		t: t, f: f, id: f.one("--ttl", "0"), url: strings.TrimPrefix(env[0], "FORKD_URL="), token: strings.TrimPrefix(env[1], "FORKD_TOKEN="),
		http: &http.Client{Transport: &http.Transport{}},
	}
	defer x.http.CloseIdleConnections()
	size, streams := counts()
	t.Run("memory", func(t *testing.T) { x.memory(t, size) })
	t.Run("stopped", x.stopped)
	if testenv.Soak() {
		t.Run("stalled", x.stalled)
	}
	t.Run("many", func(t *testing.T) { x.many(t, streams) })
}

// memory streams so many bytes over each route, one after the other.
func (x *streamed) memory(t *testing.T, size int64) {
	script := fmt.Sprintf("head -c %d /dev/zero", size)
	e2bHeaders := []string{"E2b-Sandbox-Id", x.id, "E2b-Sandbox-Port", "49983"}
	type route struct {
		name string
		long bool // in the long run alone
		pass func(ctx context.Context, t *testing.T) int64
	}
	for _, r := range []route{
		{"e2b upload", false, func(ctx context.Context, t *testing.T) int64 {
			x.take(ctx, t, "POST", "/files?path=/tmp/big", io.LimitReader(zeros{}, size), "application/octet-stream", e2bHeaders...)
			return x.sizeOf(t, "/tmp/big")
		}},
		{"e2b download", false, func(ctx context.Context, t *testing.T) int64 {
			return x.take(ctx, t, "GET", "/files?path=/tmp/big", nil, "", e2bHeaders...)
		}},
		{"native download", true, func(ctx context.Context, t *testing.T) int64 {
			return x.take(ctx, t, "GET", "/v1/sandboxes/"+x.id+"/files?path=/tmp/big", nil, "")
		}},
		{"native upload", true, func(ctx context.Context, t *testing.T) int64 {
			x.take(ctx, t, "PUT", "/v1/sandboxes/"+x.id+"/files?path=/tmp/big", io.LimitReader(zeros{}, size), "application/octet-stream")
			return x.sizeOf(t, "/tmp/big")
		}},
		{"e2b process", false, func(ctx context.Context, t *testing.T) int64 {
			p := x.start(ctx, t, "", script)
			defer p.close()
			return p.rest(t)
		}},
		{"native lines", true, func(ctx context.Context, t *testing.T) int64 { return x.events(ctx, t, "application/x-ndjson", script) }},
		{"native server-sent events", true, func(ctx context.Context, t *testing.T) int64 { return x.events(ctx, t, "text/event-stream", script) }},
		{"native WebSocket", true, func(ctx context.Context, t *testing.T) int64 {
			s := x.socket(ctx, t, &api.ExecStart{Args: []string{"sh", "-c", script}})
			return s.rest(t)
		}},
	} {
		if r.long && !testenv.Soak() {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(20*time.Minute))
			defer cancel()
			began := time.Now()
			daemon := growth(t, x.f.status().PID)
			client := growth(t, os.Getpid())
			n := r.pass(ctx, t)
			d, c := daemon(), client()
			t.Logf("%d MiB in %.1f s; the daemon grew by %.1f MiB, the client by %.1f", n>>20, time.Since(began).Seconds(), mib(d), mib(c))
			if n != size {
				t.Errorf("%d bytes, want %d", n, size)
			}
			if d > mostGrowth || c > mostGrowth {
				t.Errorf("the daemon grew by %.1f MiB, the client by %.1f; %d are allowed", mib(d), mib(c), mostGrowth>>20)
			}
		})
	}
	x.f.run("exec", x.id, "--", "rm", "-f", "/tmp/big")
}

// growth looks at a process's memory from now on, and tells by how much it has grown at most.
func growth(t *testing.T, pid int) (most func() int64) {
	t.Helper()
	before := resident(t, pid)
	highest := before
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				highest = max(highest, resident(t, pid))
			case <-end:
				return
			}
		}
	}()
	stop := sync.OnceFunc(func() { close(end); <-ended })
	t.Cleanup(stop) // also of a test that has failed meanwhile
	return func() int64 {
		stop()
		return max(highest, resident(t, pid)) - before
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// ask makes a request of the daemon.
func (x *streamed) ask(ctx context.Context, t *testing.T, method, path string, body io.Reader, kind string, headers ...string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, x.url+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+x.token)
	r.Header.Set("Accept-Encoding", "identity")
	if kind != "" {
		r.Header.Set("Content-Type", kind)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := x.http.Do(r)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		t.Fatalf("%s %s: %s: %.300s", method, path, resp.Status, text)
	}
	return resp
}

// take makes a request and returns how many bytes the answer has.
func (x *streamed) take(ctx context.Context, t *testing.T, method, path string, body io.Reader, kind string, headers ...string) int64 {
	t.Helper()
	resp := x.ask(ctx, t, method, path, body, kind, headers...)
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, resp.Body)
	if err != nil {
		t.Errorf("%s %s broke off after %d bytes: %v", method, path, n, err)
	}
	return n
}

func (x *streamed) sizeOf(t *testing.T, path string) int64 {
	t.Helper()
	text := x.f.run("exec", x.id, "--", "stat", "-c", "%s", path)
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// events runs a script over the route for commands, and returns how much it has printed.
func (x *streamed) events(ctx context.Context, t *testing.T, accept, script string) (total int64) {
	t.Helper()
	body, err := json.Marshal(api.ExecRequest{Args: []string{"sh", "-c", script}, Base64: true, TimeoutSecs: 7200})
	if err != nil {
		t.Fatal(err)
	}
	resp := x.ask(ctx, t, "POST", "/v1/sandboxes/"+x.id+"/exec", bytes.NewReader(body), "application/json", "Accept", accept)
	defer resp.Body.Close()
	lines := bufio.NewReaderSize(resp.Body, 256<<10)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			t.Fatalf("no end after %d bytes: %v", total, err)
		}
		line = bytes.TrimPrefix(line, []byte("data: "))
		var e api.ExecEvent
		if len(line) == 0 || line[0] != '{' {
			continue
		}
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case "stdout":
			total += int64(len(e.Data))
		case "exit":
			return total
		case "start":
		default:
			t.Fatalf("%+v", e)
		}
	}
}

// process is one of E2B's streams: frames of flags, length and a message.
type process struct {
	body   io.ReadCloser
	frames *bufio.Reader
	cancel context.CancelFunc
	pid    uint32
	buf    []byte
}

// start runs a script as E2B's clients do, or comes to a process by its tag.
func (x *streamed) start(ctx context.Context, t *testing.T, tag, script string) *process {
	t.Helper()
	ask := map[string]any{"process": map[string]any{"cmd": "/bin/sh", "args": []string{"-c", script}}, "stdin": true}
	method := "Start"
	if tag != "" {
		ask["tag"] = tag
	}
	if script == "" {
		method, ask = "Connect", map[string]any{"process": map[string]any{"tag": tag}}
	}
	p := &process{}
	ctx, p.cancel = context.WithCancel(ctx)
	resp := x.rpc(ctx, t, method, framed(t, ask), "application/connect+json") //nolint:bodyclose // By close.
	p.body, p.frames = resp.Body, bufio.NewReaderSize(resp.Body, 64<<10)
	if _, data, err := p.next(); err != nil || p.pid == 0 {
		t.Fatalf("it begins with %q, %v", data, err)
	}
	return p
}

func (x *streamed) rpc(ctx context.Context, t *testing.T, method string, body []byte, kind string) *http.Response {
	t.Helper()
	return x.ask(ctx, t, "POST", "/process.Process/"+method, bytes.NewReader(body), kind,
		"E2b-Sandbox-Id", x.id, "E2b-Sandbox-Port", "49983", "Connect-Protocol-Version", "1", "Keepalive-Ping-Interval", "50")
}

func framed(t *testing.T, v any) []byte {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return append(bigendian.BigEndian.AppendUint32([]byte{0}, uint32(len(text))), text...)
}

// next is what the process has printed, or the words of its end.
func (p *process) next() (end, out string, err error) {
	var head [5]byte
	if _, err := io.ReadFull(p.frames, head[:]); err != nil {
		return "", "", err
	}
	n := int(bigendian.BigEndian.Uint32(head[1:]))
	if cap(p.buf) < n {
		p.buf = make([]byte, n)
	}
	if _, err := io.ReadFull(p.frames, p.buf[:n]); err != nil {
		return "", "", err
	}
	if head[0] != 0 {
		return "", "", fmt.Errorf("the stream ended: %s", p.buf[:n])
	}
	var e struct {
		Event struct {
			Start *struct{ PID uint32 }
			Data  *struct{ Stdout []byte }
			End   *struct{ Status string }
		}
	}
	if err := json.Unmarshal(p.buf[:n], &e); err != nil {
		return "", "", err
	}
	switch {
	case e.Event.Start != nil:
		p.pid = e.Event.Start.PID
	case e.Event.Data != nil:
		return "", string(e.Event.Data.Stdout), nil
	case e.Event.End != nil:
		return e.Event.End.Status, "", nil
	}
	return "", "", nil
}

// rest is how much the process prints until its end.
func (p *process) rest(t *testing.T) (total int64) {
	t.Helper()
	for {
		end, out, err := p.next()
		if err != nil {
			t.Errorf("no end after %d bytes: %v", total, err)
			return total
		}
		total += int64(len(out))
		if end != "" {
			return total
		}
	}
}

// line is what it prints next.
func (p *process) line() (string, error) {
	var line string
	for !strings.HasSuffix(line, "\n") {
		end, out, err := p.next()
		if err != nil || end != "" {
			return line, fmt.Errorf("it ended after %q: %s, %w", line, end, err)
		}
		line += out
	}
	return line, nil
}

// close leaves the process.
func (p *process) close() {
	p.cancel()
	_ = p.body.Close()
}

// socket is a command over a WebSocket.
type socket struct {
	conn *websocket.Conn
	ctx  context.Context //nolint:containedctx // Of one test.
}

func (x *streamed) socket(ctx context.Context, t *testing.T, start *api.ExecStart) *socket {
	t.Helper()
	conn, resp, err := websocket.Dial(ctx, x.url+"/v1/sandboxes/"+x.id+"/exec", &websocket.DialOptions{
		HTTPClient: x.http, HTTPHeader: http.Header{"Authorization": {"Bearer " + x.token}},
	})
	if resp != nil && resp.Body != nil {
		defer resp.Body.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	conn.SetReadLimit(1 << 20)
	s := &socket{conn, ctx}
	s.say(t, start)
	if e, _ := s.next(t); e.Type != "start" {
		t.Fatalf("it begins with %+v", e)
	}
	return s
}

func (s *socket) say(t *testing.T, v any) {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.conn.Write(s.ctx, websocket.MessageText, text); err != nil {
		t.Fatal(err)
	}
}

func (s *socket) next(t *testing.T) (e api.ExecEvent, out []byte) {
	t.Helper()
	kind, data, err := s.conn.Read(s.ctx)
	if err != nil {
		t.Fatalf("the WebSocket broke: %v", err)
	}
	if kind == websocket.MessageBinary {
		return e, data[1:]
	}
	if err := json.Unmarshal(data, &e); err != nil {
		t.Fatal(err)
	}
	return e, nil
}

func (s *socket) rest(t *testing.T) (total int64) {
	t.Helper()
	for {
		e, out := s.next(t)
		total += int64(len(out))
		if e.Type == "exit" {
			return total
		}
	}
}

// stopped: clients that read nothing of endless output hold nobody back, whichever way they came; when they leave, their
// processes are there, and have more to say.
func (x *streamed) stopped(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(3*time.Minute))
	defer cancel()
	const endless = "echo begun; exec cat /dev/zero"
	mute := []*process{x.start(ctx, t, "mute-1", endless), x.start(ctx, t, "mute-2", endless)}
	ws := x.socket(ctx, t, &api.ExecStart{Args: []string{"sh", "-c", endless}, Tag: "mute-3"})
	// Beside them, in the same sandbox.
	for range 5 {
		p := x.start(ctx, t, "", "read line; echo got $line")
		x.input(ctx, t, p.pid, "it\n")
		if line, err := p.line(); line != "got it\n" {
			t.Errorf("beside who reads nothing: %q, %v", line, err)
		}
		p.close()
	}
	if out := x.f.run("exec", x.id, "--", "echo", "beside"); out != "beside\n" {
		t.Errorf("beside who reads nothing: %q", out)
	}
	for _, p := range mute {
		p.close()
	}
	_ = ws.conn.CloseNow()
	for _, tag := range []string{"mute-1", "mute-2", "mute-3"} {
		p := x.start(ctx, t, tag, "")
		for seen := 0; seen < 1<<20; {
			end, out, err := p.next()
			if err != nil || end != "" {
				t.Fatalf("%s after its client has left: %q, %v", tag, end, err)
			}
			seen += len(out)
		}
		p.close()
		x.f.run("signal", x.id, tag, "KILL")
	}
}

// stalled: who reads nothing of a process for two minutes is let go, and who else reads it need not wait any longer.
func (x *streamed) stalled(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(4*time.Minute))
	defer cancel()
	mute := x.start(ctx, t, "stalled", "echo begun; exec cat /dev/zero")
	defer mute.close()
	other := x.start(ctx, t, "stalled", "")
	defer other.close()
	began := time.Now()
	for seen := 0; seen < 8<<20; {
		end, out, err := other.next()
		if err != nil || end != "" {
			t.Fatalf("beside a client that reads nothing: %d bytes, %q, %v", seen, end, err)
		}
		seen += len(out)
	}
	t.Logf("the other client had 8 MiB after %.0f s", time.Since(began).Seconds())
	x.f.run("signal", x.id, "stalled", "KILL")
}

// input is said to a process as E2B's clients do.
func (x *streamed) input(ctx context.Context, t *testing.T, pid uint32, text string) {
	t.Helper()
	body, err := json.Marshal(map[string]any{
		"process": map[string]any{"pid": pid}, "input": map[string]string{"stdin": base64.StdEncoding.EncodeToString([]byte(text))},
	})
	if err != nil {
		t.Fatal(err)
	}
	resp := x.rpc(ctx, t, "SendInput", body, "application/json")
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}

// many: so many streams are open at once, half of them E2B's, and each tells its own.
func (x *streamed) many(t *testing.T, n int) {
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(5*time.Minute))
	defer cancel()
	began := time.Now()
	grown := growth(t, x.f.status().PID)
	const script = "echo begun; read line; echo got $line"
	var opening sync.WaitGroup
	opening.Add(n)
	open := make(chan struct{})
	go func() { opening.Wait(); close(open) }()
	calls := make(chan struct{}, 32) // besides the streams, a sandbox takes 56 calls at a time
	atOnce(n, func(i int) {
		arrived := sync.OnceFunc(opening.Done)
		defer arrived() // also of one that fails
		var say func(text string)
		var hear func() string
		if i%2 == 0 {
			p := x.start(ctx, t, "", script)
			defer p.close()
			say = func(text string) { x.input(ctx, t, p.pid, text) }
			hear = func() string {
				line, err := p.line()
				if err != nil {
					return err.Error()
				}
				return line
			}
		} else {
			s := x.socket(ctx, t, &api.ExecStart{Args: []string{"sh", "-c", script}, Stdin: true})
			say = func(text string) { s.say(t, &api.ExecControl{Type: "stdin", Text: text}) }
			hear = func() string { _, out := s.next(t); return string(out) }
		}
		if line := hear(); line != "begun\n" {
			t.Errorf("stream %d: %q", i, line)
			return
		}
		arrived()
		heard := make(chan string, 1)
		go func() { defer close(heard); heard <- hear() }() // meanwhile: who does not read answers no ping
		<-open
		calls <- struct{}{}
		say(fmt.Sprintf("%d\n", i))
		<-calls
		if line := <-heard; line != fmt.Sprintf("got %d\n", i) {
			t.Errorf("stream %d: %q", i, line)
		}
	})
	t.Logf("%d streams were open at once; all were over after %.1f s; the daemon grew by %.1f MiB",
		n, time.Since(began).Seconds(), mib(grown()))
}

// atOnce does n things at a time.
func atOnce(n int, do func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { do(i) })
	}
	all.Wait()
}
