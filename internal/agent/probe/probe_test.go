package probe

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agent/agenttest"
	"forkd.dev/forkd/internal/guest/wire"
)

// serve answers each connection with what says makes of its request.
func serve(t *testing.T, says func(*http.Request) string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, says(req))
			}
			_ = c.Close()
		}
	}()
	return l.Addr().String()
}

func TestProbe(t *testing.T) {
	tests := []struct {
		name, says string
		status     int
		problem    string
	}{
		{"answers", "HTTP/1.1 204 No Content\r\n\r\n", 204, ""},
		{"answers without a reason", "HTTP/1.0 503\r\n", 503, ""},
		{"says nothing", "", 0, "no answer"},
		{"is something else", "SSH-2.0-OpenSSH_9.2\r\n", 0, "not an HTTP server"},
		{"has no end", strings.Repeat("x", 1<<20), 0, "not an HTTP server"},
		{"breaks off", "HTTP/1.1 2", 0, "not an HTTP server"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			address := serve(t, func(r *http.Request) string {
				if r.Method != http.MethodGet || r.RequestURI != "/a?b" || r.Host != "localhost:1" {
					t.Errorf("asked %s %s of %s", r.Method, r.RequestURI, r.Host)
				}
				return tt.says
			})
			var reply wire.ProbeReply
			req := wire.ProbeRequest{Address: address, Host: "localhost:1", Path: "/a?b"}
			if err := agenttest.Unary(t, handler(), req, &reply); err != nil {
				t.Fatal(err)
			}
			if reply.Status != tt.status || !strings.Contains(reply.Problem, tt.problem) || tt.problem == "" && reply.Problem != "" {
				t.Errorf("got %d and %q, want %d and %q", reply.Status, reply.Problem, tt.status, tt.problem)
			}
		})
	}
}

func handler() wire.Handler { return Service{}.Handlers()[wire.MethodProbe] }

// TestProbeGivesUp: a server that takes the request and never answers holds a probe for its time only.
func TestProbeGivesUp(t *testing.T) {
	done := make(chan struct{})
	address := serve(t, func(*http.Request) string {
		<-done
		return ""
	})
	defer close(done)
	var reply wire.ProbeReply
	if err := agenttest.Unary(t, handler(), wire.ProbeRequest{Address: address, Path: "/", TimeoutMS: 50}, &reply); err != nil {
		t.Fatal(err)
	}
	if reply.Status != 0 || !strings.Contains(reply.Problem, "timed out") {
		t.Errorf("got %+v", reply)
	}
}

func TestProbeNobodyThere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close()
	var reply wire.ProbeReply
	if err := agenttest.Unary(t, handler(), wire.ProbeRequest{Address: address, Path: "/"}, &reply); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(reply.Problem, "refused") {
		t.Errorf("got %+v", reply)
	}
}

// TestProbeRefusesWhatIsNoRequest: nothing a recipe says can add a header or a second request.
func TestProbeRefusesWhatIsNoRequest(t *testing.T) {
	for _, req := range []wire.ProbeRequest{
		{Address: "127.0.0.1:1", Path: ""},
		{Address: "127.0.0.1:1", Path: "/a\r\nX: y"},
		{Address: "127.0.0.1:1", Path: "/", Host: "a b"},
		{Address: "localhost:1", Path: "/"},
	} {
		if err := agenttest.Unary(t, handler(), req, nil); agenttest.Code(err) != wire.CodeInvalid {
			t.Errorf("%+v: %v", req, err)
		}
	}
}
