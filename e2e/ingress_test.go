package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/testenv"
)

// shelf is a service that keeps what it is given: PUT a body, GET it again.
const shelf = `
import http.server, socket
held = [b""]
class Shelf(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def say(self, b):
        self.send_response(200)
        self.send_header("Content-Length", str(len(b)))
        self.end_headers()
        self.wfile.write(b)
    def do_PUT(self):
        held[0] = self.rfile.read(int(self.headers["Content-Length"]))
        self.say(b"%d\n" % len(held[0]))
    def do_GET(self):
        self.say(held[0] if self.path == "/kept" else f"{self.headers['Host']} {self.path}\n".encode())
    def log_message(self, *a): pass
class Server(http.server.ThreadingHTTPServer): address_family = socket.AF_INET6
Server(("::1", 8080), Shelf).serve_forever()
`

// TestIngress: a service in a sandbox is found, and reached by path, by name and by a port of this host.
func TestIngress(t *testing.T) {
	f := copied(t, "FORKD_DOMAIN=box.test")
	id := f.one()
	if r := f.try("ports", id); r.code != 0 || strings.Contains(r.stdout, "8080") {
		t.Errorf("ports: %+v", r)
	}
	program := filepath.Join(t.TempDir(), "shelf.py")
	if err := os.WriteFile(program, []byte(shelf), 0o600); err != nil {
		t.Fatal(err)
	}
	f.run("cp", program, id+":/root/shelf.py")
	// Who follows is told when it opens.
	followed := f.follow(t, "ports", "-f", "--json", id)
	f.run("exec", id, "--", "sh", "-c", "nohup python3 /root/shelf.py >/root/shelf.err 2>&1 &")
	followed.until(t, `"port": 8080`)
	var ports []api.Port
	f.json(&ports, "ports", id)
	if len(ports) != 1 || ports[0].Address != "::1" || ports[0].Process != "python3 /root/shelf.py" || ports[0].Public || ports[0].Host != "8080-"+id+".box.test" {
		t.Errorf("ports: %+v", ports)
	}

	body := bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // 1 MiB
	put := func(url string, to *http.Client) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := to.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if got, err := io.ReadAll(resp.Body); err != nil || string(got) != fmt.Sprintf("%d\n", len(body)) {
			t.Fatalf("PUT %s: %s %q, %v", url, resp.Status, got, err)
		}
	}
	get := func(url, name string, from *http.Client) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = name
		resp, err := from.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(got)
	}
	daemon, direct := f.http(t), &http.Client{}
	base := "http://daemon/v1/sandboxes/" + id + "/ports/8080"
	put(base+"/", daemon)
	if _, got := get(base+"/kept", "", daemon); sha256.Sum256([]byte(got)) != sha256.Sum256(body) {
		t.Errorf("%d bytes came back of %d", len(got), len(body))
	}
	if _, got := get(base+"/a%2Fb?c", "", daemon); got != "localhost:8080 /a%2Fb?c\n" {
		t.Errorf("by path: %q", got)
	}
	name := "8080-" + id + ".box.test"
	if _, got := get("http://daemon/x", name, daemon); got != name+" /x\n" {
		t.Errorf("by name: %q", got)
	}
	if code, got := get("http://daemon/v1/sandboxes/"+id+"/ports/81/", "", daemon); code != http.StatusBadGateway || !strings.Contains(got, "nothing listens") {
		t.Errorf("no service: %d %s", code, got)
	}

	forwarded := f.follow(t, "port-forward", id, ":8080", ":81")
	line := forwarded.until(t, " → "+id+":8080")
	address, _, _ := strings.Cut(line, " ")
	none, _, _ := strings.Cut(forwarded.until(t, " → "+id+":81"), " ")
	put("http://"+address+"/", direct)
	if _, got := get("http://"+address+"/kept", "", direct); got != string(body) {
		t.Errorf("%d bytes came back of %d", len(got), len(body))
	}
	if c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", none); err != nil {
		t.Error(err)
	} else {
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("a port on which nobody listens: read %d, %v", n, err)
		}
		_ = c.Close()
	}

	// What is public is so after the daemon has started anew, and for this sandbox alone.
	f.run("ports", id, "publish", "8080")
	f.run("daemon", "stop", "--keep")
	f.json(&ports, "ports", id)
	if len(ports) != 1 || !ports[0].Public {
		t.Errorf("after another start: %+v", ports)
	}
	f.run("branch", id, "-t", "shelf")
	child := f.forkOf("shelf", 1)[0].ID
	f.json(&ports, "ports", child)
	if len(ports) != 1 || ports[0].Public {
		t.Errorf("a child: %+v", ports)
	}
	if _, got := f.servicePage(t, child, 8080, "/kept"); got != string(body) {
		t.Errorf("a child's service: %d bytes came back of %d", len(got), len(body))
	}
	f.run("suspend", id)
	f.run("wake", id)
	f.json(&ports, "ports", id)
	if len(ports) != 1 || !ports[0].Public {
		t.Errorf("after a suspension: %+v", ports)
	}
	if _, got := f.servicePage(t, id, 8080, "/kept"); got != string(body) {
		t.Errorf("after a suspension: %d bytes came back of %d", len(got), len(body))
	}
	events := f.follow(t, "events", "-f", "--type", "sandbox.port_opened")
	events.until(t, "port=8080")
}

// http is a client of the daemon.
func (f *forkd) http(t testing.TB) *http.Client {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(f.home, "forkd.sock"))
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: testenv.Timeout(time.Minute)}
}

// following is a program that goes on until the test ends.
type following struct{ lines chan string }

// follow starts a command that goes on.
func (f *forkd) follow(t testing.TB, args ...string) *following {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, f.bin, args...)
	cmd.Env = append(append(os.Environ(), "FORKD_HOME="+f.home, "FORKD_HOST="), f.env...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	x := &following{make(chan string, 1000)}
	go func() {
		defer close(x.lines)
		for r := bufio.NewScanner(out); r.Scan(); {
			select {
			case x.lines <- r.Text():
			case <-ctx.Done():
				return
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
	})
	return x
}

// until waits for a line with a text.
func (x *following) until(t testing.TB, text string) string {
	t.Helper()
	timeout := time.After(testenv.Timeout(time.Minute))
	for {
		select {
		case line, ok := <-x.lines:
			if !ok {
				t.Fatalf("it ended before it said %q", text)
			}
			if strings.Contains(line, text) {
				return line
			}
		case <-timeout:
			t.Fatalf("it does not say %q", text)
		}
	}
}
