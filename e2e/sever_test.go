package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// talker has ten connections of IPv4, eight of IPv6 and two of UDP to somebody outside, each of which waits for an answer; a
// connection to itself over loopback; and a service that says how it is.
const talker = `
import http.server, json, socket, threading, time
ends, beats, lock = [], [0], threading.Lock()

def talk(n, family, kind, address):
    s = socket.socket(family, kind)
    s.connect((address, 7000))
    s.send(b"hello %d\n" % n)
    how = "?"
    try:
        if s.recv(100) != b"welcome\n":
            how = "no welcome"
        else:
            with lock: ends.append((n, "waits"))
            how = s.recv(100).decode()
            s.send(b"done %d\n" % n)
    except OSError as e:
        how = type(e).__name__
    with lock:
        if (n, "waits") in ends: ends.remove((n, "waits"))
        ends.append((n, how))

for n in range(20):
    family, address = (socket.AF_INET6, "2001:4860:4860::8844") if 10 <= n < 18 else (socket.AF_INET, "8.8.4.4")
    kind = socket.SOCK_DGRAM if n >= 18 else socket.SOCK_STREAM
    threading.Thread(target=talk, args=(n, family, kind, address), daemon=True).start()

def sent():
    for line in open("/proc/net/dev"):
        if "eth0:" in line: return int(line.split(":")[1].split()[9])

class Service(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with lock: text = json.dumps({"ends": sorted(ends), "beats": beats[0], "sent": sent()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *a): pass

inside = socket.create_server(("127.0.0.1", 9000))
def echo():
    c, _ = inside.accept()
    while True: c.sendall(c.recv(100))
threading.Thread(target=echo, daemon=True).start()
c = socket.create_connection(("127.0.0.1", 9000))
def beat():
    while True:
        c.sendall(b"x")
        assert c.recv(100) == b"x"
        beats[0] += 1
        time.sleep(0.2)
threading.Thread(target=beat, daemon=True).start()
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Service).serve_forever()
`

// talking is what it says.
type talking struct {
	Ends  [][2]any `json:"ends"`
	Beats int      `json:"beats"`
	Sent  int      `json:"sent"` // packets that left by its interface
}

func (v *talking) how() map[string]int {
	n := map[string]int{}
	for _, e := range v.Ends {
		n[fmt.Sprint(e[1])]++
	}
	return n
}

// listenerOutside is whom it talks to.
type listenerOutside struct {
	t     *testing.T
	where netip.AddrPort

	mu    sync.Mutex
	heard []string // lines, in order
	conns []net.Conn
	udp   []net.Addr
	pc    net.PacketConn
}

func listenOutside(t *testing.T, host string) *listenerOutside {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	o := &listenerOutside{t: t, where: l.Addr().(*net.TCPAddr).AddrPort()}
	if o.pc, err = (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			o.mu.Lock()
			o.conns = append(o.conns, c)
			o.mu.Unlock()
			serving.Go(func() { o.hear(c) })
		}
	})
	serving.Go(o.hearPackets)
	t.Cleanup(func() {
		_ = l.Close()
		_ = o.pc.Close()
		o.mu.Lock()
		for _, c := range o.conns {
			_ = c.Close()
		}
		o.mu.Unlock()
		serving.Wait()
	})
	return o
}

func (o *listenerOutside) hear(c net.Conn) {
	for r := bufio.NewScanner(c); r.Scan(); {
		o.say(r.Text())
		if strings.HasPrefix(r.Text(), "hello") {
			_, _ = io.WriteString(c, "welcome\n")
		}
	}
	o.say("end")
}

func (o *listenerOutside) hearPackets() {
	b := make([]byte, 100)
	for {
		n, from, err := o.pc.ReadFrom(b)
		if err != nil {
			return
		}
		o.say(strings.TrimSpace(string(b[:n])))
		if strings.HasPrefix(string(b[:n]), "hello") {
			o.mu.Lock()
			o.udp = append(o.udp, from)
			o.mu.Unlock()
			_, _ = o.pc.WriteTo([]byte("welcome\n"), from)
		}
	}
}

func (o *listenerOutside) say(line string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.heard = append(o.heard, line)
}

// answer lets all that wait go on.
func (o *listenerOutside) answer() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, c := range o.conns {
		_, _ = io.WriteString(c, "answer")
	}
	for _, a := range o.udp {
		_, _ = o.pc.WriteTo([]byte("answer"), a)
	}
}

func (o *listenerOutside) lines() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.heard)
}

// TestChildrenHaveNoConnections: children of a parent in the middle of twenty conversations are told at once that theirs are over, say
// nothing in them, and go on with what is inside of them; the parent's twenty end well.
func TestChildrenHaveNoConnections(t *testing.T) {
	n := 6
	if testenv.Soak() {
		n = 50
	}
	v4, v6 := listenOutside(t, "127.0.0.1"), listenOutside(t, "::1")
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // The process of networks may be another user.
		t.Fatal(err)
	}
	log := filepath.Join(dir, "log")
	text, err := json.Marshal(map[string]any{"log": log, "names": map[string]any{}, "hosts": map[string]netip.AddrPort{
		"8.8.4.4:7000": v4.where, "[2001:4860:4860::8844]:7000": v6.where,
	}})
	if err != nil {
		t.Fatal(err)
	}
	stage := filepath.Join(dir, "stage.json")
	if err := os.WriteFile(stage, text, 0o644); err != nil { //nolint:gosec // As the directory.
		t.Fatal(err)
	}
	f := copied(t, "FORKD_NETWORK_OUTER="+stage)
	parent := f.forkOf(parentTag, 1, "--allow", "8.8.4.4/32:7000", "--allow", "[2001:4860:4860::8844]/128:7000")[0].ID
	program := filepath.Join(dir, "talker.py")
	if err := os.WriteFile(program, []byte(talker), 0o600); err != nil {
		t.Fatal(err)
	}
	f.run("cp", program, parent+":/root/talker.py")
	f.run("exec", parent, "--", "sh", "-c", "nohup python3 /root/talker.py >/root/talker.err 2>&1 &")
	before := untilTalking(t, f, parent, func(v *talking) bool { return v.how()["waits"] == 20 && v.Beats > 0 })
	// Until it has acknowledged the last that it was sent.
	quiet := untilTalking(t, f, parent, func(v *talking) bool {
		same := v.Sent == before.Sent
		before = v
		return same
	})
	said4, said6 := v4.lines(), v6.lines()
	f.run("branch", parent, "-t", "talking")
	children := f.forkOf("talking", n)
	eachOf(t, n, func(t testing.TB, i int) {
		child := children[i].ID
		v := untilTalking(t, f, child, func(v *talking) bool { return v.Beats > quiet.Beats+2 })
		if got := v.how()["ConnectionAbortedError"]; got != 20 {
			t.Errorf("child %d: its conversations ended so: %v", i, v.how())
		}
		if v.Sent != quiet.Sent {
			t.Errorf("child %d: %d packets left it", i, v.Sent-quiet.Sent)
		}
		if r := children[i].CloneReport; r == nil || !slices.Contains(r.Renewed, "connections") {
			t.Errorf("child %d: its report is %+v", i, r)
		}
		var state api.EgressState
		f.json(&state, "egress", child)
		if state.Flows != 0 || state.FlowsRefused != 0 || state.SentBytes != 0 {
			t.Errorf("child %d: its network has seen %+v", i, state)
		}
	})
	for _, o := range []struct{ before, now []string }{{said4, v4.lines()}, {said6, v6.lines()}} {
		if !slices.Equal(o.before, o.now) {
			t.Errorf("outside was heard %q, and then %q", o.before, o.now)
		}
	}
	v4.answer()
	v6.answer()
	v := untilTalking(t, f, parent, func(v *talking) bool { return v.how()["waits"] == 0 })
	if got := v.how()["answer"]; got != 20 {
		t.Errorf("the parent's conversations ended so: %v", v.how())
	}
	done := func() (n int) {
		for _, line := range append(v4.lines(), v6.lines()...) {
			if strings.HasPrefix(line, "done") {
				n++
			}
		}
		return n
	}
	deadline := time.Now().Add(testenv.Timeout(30 * time.Second))
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for done() < 20 && time.Now().Before(deadline) {
		<-tick.C
	}
	if n := done(); n != 20 {
		t.Errorf("the parent has answered in %d conversations of 20", n)
	}
}

// untilTalking asks a sandbox's service through the daemon until it is as wanted.
func untilTalking(t testing.TB, f *forkd, id string, as func(*talking) bool) *talking {
	t.Helper()
	var last string
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout(2*time.Minute))
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		v := &talking{}
		status, body := f.servicePage(t, id, 8080, "/")
		last = fmt.Sprint(status, " ", body)
		if status == http.StatusOK && json.Unmarshal([]byte(body), v) == nil && as(v) {
			return v
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: it says %s\n%s", id, last, f.try("exec", id, "--", "cat", "/root/talker.err").stdout)
		}
	}
}

// servicePage gets a page of a service in a sandbox through the daemon.
func (f *forkd) servicePage(t testing.TB, id string, port int, path string) (int, string) {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(f.home, "forkd.sock"))
	}}
	defer transport.CloseIdleConnections()
	url := fmt.Sprintf("http://daemon/v1/sandboxes/%s/ports/%d%s", id, port, path)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: transport, Timeout: testenv.Timeout(time.Minute)}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}
