package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

// fakeServices are one service on a port of every sandbox; another port is public.
type fakeServices struct {
	address string
	dialled func(id string, port int)
}

const (
	privatePort = 8080
	publicPort  = 8081
)

func (f *fakeServices) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	if f.dialled != nil {
		f.dialled(id, port)
	}
	if port != privatePort && port != publicPort {
		return nil, fmt.Errorf("port %d: %w", port, host.ErrNoService)
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", f.address)
}

func (f *fakeServices) IsPublic(id string, port int) bool { return id == "sba" && port == publicPort }

// echoed is what the service in a sandbox was asked.
type echoed struct {
	Method, Host, URI, Proto, Body string
	Header                         http.Header
}

// echo is a service that answers with what it was asked, and some others.
func echo(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/ws":
		echoMessages(w, r)
		return
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
			if _, err := r.Body.Read(make([]byte, 1)); err != nil { // until the client has had it
				return
			}
		}
		return
	case "/away":
		w.Header().Set("Location", r.URL.Query().Get("to"))
		w.WriteHeader(http.StatusFound)
		return
	case "/early":
		w.Header().Set("Link", "</style.css>")
		w.WriteHeader(http.StatusEarlyHints)
	case "/hostile":
		w.Header().Set("Service-Worker-Allowed", "/")
		w.Header().Set("Clear-Site-Data", "*")
		w.Header().Set("X-Forkd-Error", "internal")
		w.Header().Add("Set-Cookie", "a=1; Domain=example.com; Path=/; HttpOnly")
		w.Header().Add("Set-Cookie", "b=2; Path=/v1/tokens")
	case "/unreadable": // for net/http, not for browsers
		w.Header().Set("Nel", `{"report_to":"a","max_age":9}`)
		w.Header().Set("Report-To", `{"group":"a","max_age":9,"endpoints":[{"url":"https://example.com"}]}`)
		w.Header().Add("Set-Cookie", "a b=1; Domain=box.test; Path=/")
		w.Header().Add("Set-Cookie", "=2; Path=/")
	case "/many":
		w.Header().Set("X-Many", strings.Repeat("x", maxAnswerHeader+1))
	}
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("X-Request-Id", "its own")
	w.Header().Set("Trailer", "X-End")
	_ = json.NewEncoder(w).Encode(echoed{r.Method, r.Host, r.RequestURI, r.Proto, string(body), r.Header})
	w.Header().Set("X-End", "yes")
}

func echoMessages(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"chat"}, InsecureSkipVerify: true})
	if err != nil {
		return
	}
	defer c.CloseNow() //nolint:errcheck // it may be closed already
	for {
		kind, p, err := c.Read(r.Context())
		if err != nil || c.Write(r.Context(), kind, bytes.ToUpper(p)) != nil {
			return
		}
	}
}

// ingressTest is a daemon with a service behind it.
type ingressTest struct {
	s     *Server
	url   string
	token string // that may use sba
}

func newIngress(t *testing.T, service http.Handler) *ingressTest {
	t.Helper()
	s, _ := guarded(t)
	behind := httptest.NewUnstartedServer(service)
	behind.Config.Protocols = everyProtocol()
	behind.Start()
	t.Cleanup(behind.Close)
	s.services = &fakeServices{address: behind.Listener.Addr().String()}
	s.Domain = "box.test"
	front := httptest.NewUnstartedServer(s.Patient(s.Handler()))
	front.Config.Protocols = everyProtocol()
	front.Start()
	t.Cleanup(front.Close)
	_, token := makeToken(t, s, access.Spec{Scope: access.Use, Sandbox: "sba"})
	return &ingressTest{s, front.URL, token}
}

func everyProtocol() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

func (x *ingressTest) path(port int, rest string) string {
	return fmt.Sprintf("%s/v1/sandboxes/sba/ports/%d%s", x.url, port, rest)
}

func (x *ingressTest) request(t *testing.T, method, url, body string, headers ...string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		if headers[i] == "Host" {
			req.Host = headers[i+1]
			continue
		}
		req.Header.Add(headers[i], headers[i+1])
	}
	return req
}

// answered is the head of an answer.
type answered struct {
	StatusCode      int
	Status          string
	Header, Trailer http.Header
}

func (a *answered) cookies() []*http.Cookie { return (&http.Response{Header: a.Header}).Cookies() }

// do asks, and does not follow where it is sent.
func do(t *testing.T, req *http.Request) (*answered, string) {
	t.Helper()
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return &answered{resp.StatusCode, resp.Status, resp.Header, resp.Trailer}, string(body)
}

func asEchoed(t *testing.T, body string) (e echoed) {
	t.Helper()
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return e
}

func TestIngressPassesOn(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	for _, c := range []struct {
		name, method, url, host string
		uri, seen               string // what the service sees
	}{
		{"path", "GET", x.path(privatePort, "/"), "", "/", "localhost:8080"},
		{"escapes", "POST", x.path(privatePort, "/a%2Fb/%C3%A4?x=%20&y"), "", "/a%2Fb/%C3%A4?x=%20&y", "localhost:8080"},
		{"any method", "PROPFIND", x.path(privatePort, "/dav"), "", "/dav", "localhost:8080"},
		{"options", "OPTIONS", x.path(privatePort, "/x"), "", "/x", "localhost:8080"},
		{"host", "PUT", x.url + "/v1/sandboxes?x=1", "8080-sba.box.test", "/v1/sandboxes?x=1", "8080-sba.box.test"},
		{"host with a port, in capitals", "DELETE", x.url + "//a/../b", "8080-SBA.Box.Test:8443", "//a/../b", "8080-SBA.Box.Test:8443"},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := x.request(t, c.method, c.url, "some text", "X-Forkd-Token", x.token, "Host", c.host, "X-A", "1", "X-A", "2", "Connection", "X-Hop", "X-Hop", "h",
				"Authorization", "Basic Zm9v", "X-Forwarded-For", "1.2.3.4", "Forwarded", "for=1.2.3.4")
			if c.host == "" {
				req.Host = ""
			}
			resp, body := do(t, req)
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: %s", resp.Status, body)
			}
			e := asEchoed(t, body)
			if e.Method != c.method || e.URI != c.uri || e.Host != c.seen || e.Body != "some text" {
				t.Errorf("the service saw %+v", e)
			}
			if got := e.Header["X-A"]; len(got) != 2 || e.Header.Get("Authorization") != "Basic Zm9v" {
				t.Errorf("the service's headers: %v", e.Header)
			}
			if e.Header.Get("X-Hop") != "" || e.Header.Get("X-Forwarded-For") != "127.0.0.1" || e.Header.Get("Forwarded") != "" {
				t.Errorf("the service's headers: %v", e.Header)
			}
			if resp.Trailer.Get("X-End") != "yes" || resp.Header.Get("X-Request-Id") != "its own" || resp.Header.Get(errorHeader) != "" {
				t.Errorf("the answer has %v, %v", resp.Header, resp.Trailer)
			}
		})
	}
}

// Nothing of a token's form gets into a guest, wherever it stands.
func TestIngressWithholdsTokens(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	for _, port := range []int{privatePort, publicPort} {
		for _, headers := range [][]string{
			{"Authorization", "Bearer " + x.token},
			{"X-Forkd-Token", x.token},
			{"X-Forkd-Token", x.token, "Authorization", "Bearer " + x.token, "Cookie", "a=b; t=" + x.token, "X-Other", x.token},
			{"X-Forkd-Token", x.token, "Sec-WebSocket-Protocol", "chat, forkd.token." + x.token, "Referer", "http://x/?t=" + x.token},
		} {
			resp, body := do(t, x.request(t, "GET", x.path(port, "/?a=1&t="+x.token), "", headers...))
			if resp.StatusCode != http.StatusOK || strings.Contains(body, x.token[8:]) || !strings.Contains(body, "a=1") {
				t.Errorf("port %d, %v: %s: %s", port, headers[:1], resp.Status, body)
			}
		}
	}
}

func TestIngressAccess(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	_, other := makeToken(t, x.s, access.Spec{Scope: access.Use, Sandbox: "sbb"})
	_, reader := makeToken(t, x.s, access.Spec{Scope: access.Read})
	_, anybodys := makeToken(t, x.s, access.Spec{Scope: access.Use})
	for _, c := range []struct {
		name, url string
		headers   []string
		want      int
	}{
		{"nobody", x.path(privatePort, "/"), nil, 401},
		{"the service's own authorization", x.path(privatePort, "/"), []string{"Authorization", "Bearer its-own"}, 401},
		{"a wrong token", x.path(privatePort, "/"), []string{"X-Forkd-Token", "fkd_tk00000000_x"}, 401},
		{"two tokens", x.path(privatePort, "/"), []string{"X-Forkd-Token", x.token, "X-Forkd-Token", x.token}, 401},
		{"its token", x.path(privatePort, "/"), []string{"X-Forkd-Token", x.token}, 200},
		{"anybody's token", x.path(privatePort, "/"), []string{"Authorization", "Bearer " + anybodys}, 200},
		{"another's token", x.path(privatePort, "/"), []string{"X-Forkd-Token", other}, 403},
		{"a reader's", x.path(privatePort, "/"), []string{"X-Forkd-Token", reader}, 403},
		{"public", x.path(publicPort, "/"), nil, 200},
		{"public, with the service's own authorization", x.path(publicPort, "/"), []string{"Authorization", "Bearer its-own"}, 200},
		{"public, by a name for it", x.url + "/v1/sandboxes/name/ports/8081/", nil, 401},
		{"public, of another", x.url + "/v1/sandboxes/sbb/ports/8081/", nil, 401},
		{"a port like it", x.url + "/v1/sandboxes/sba/ports/08081/", nil, 401},
		{"by host, nobody", x.url + "/", []string{"Host", "8080-sba.box.test"}, 401},
		{"by host, its token", x.url + "/", []string{"Host", "8080-sba.box.test", "X-Forkd-Token", x.token}, 200},
		{"by host, another's", x.url + "/", []string{"Host", "8080-sba.box.test", "X-Forkd-Token", other}, 403},
		{"by host, public", x.url + "/", []string{"Host", "8081-sba.box.test"}, 200},
		{"no such port", x.path(81, "/"), []string{"X-Forkd-Token", x.token}, 502},
		{"no port", x.path(0, "/"), []string{"X-Forkd-Token", x.token}, 400},
		{"no sandbox", x.url + "/v1/sandboxes/sbz/ports/8080/", []string{"X-Forkd-Token", anybodys}, 404},
		{"the API by the domain itself", x.url + "/healthz", []string{"Host", "box.test"}, 200},
		{"the API by a name of no sandbox", x.url + "/v1/sandboxes", []string{"Host", "www.box.test"}, 401},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, body := do(t, x.request(t, "GET", c.url, "", c.headers...))
			if resp.StatusCode != c.want {
				t.Errorf("%s, want %d: %s", resp.Status, c.want, body)
			}
			if resp.StatusCode >= 400 {
				var e api.Error
				if err := json.Unmarshal([]byte(body), &e); err != nil || e.Code == "" {
					t.Errorf("not an error of the API's: %s", body)
				}
			}
		})
	}
}

// What a service answers is kept to the service: below the daemon's own origin it could speak for that.
func TestIngressConfines(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	resp, _ := do(t, x.request(t, "GET", x.path(publicPort, "/hostile"), ""))
	h := resp.Header
	if h.Get("Service-Worker-Allowed") != "" || h.Get("Clear-Site-Data") != "" || h.Get(errorHeader) != "" || !strings.HasPrefix(h.Get("Content-Security-Policy"), "sandbox ") {
		t.Errorf("the answer has %v", h)
	}
	const prefix = "/v1/sandboxes/sba/ports/8081/"
	for _, c := range resp.cookies() {
		if c.Domain != "" || !strings.HasPrefix(c.Path, prefix) {
			t.Errorf("a cookie for %s%s", c.Domain, c.Path)
		}
	}
	resp, _ = do(t, x.request(t, "GET", x.url+"/hostile", "", "Host", "8081-sba.box.test"))
	if c := resp.cookies(); len(c) != 2 || c[0].Domain != "" || c[0].Path != "/" || resp.Header.Get("Content-Security-Policy") != "" {
		t.Errorf("the answer has %v", resp.Header)
	}
	for name, req := range map[string]*http.Request{
		"by path": x.request(t, "GET", x.path(publicPort, "/unreadable"), ""),
		"by host": x.request(t, "GET", x.url+"/unreadable", "", "Host", "8081-sba.box.test"),
	} {
		resp, _ := do(t, req)
		if got := resp.Header.Values("Set-Cookie"); len(got) > 0 || name == "by path" && resp.Header.Get("Nel")+resp.Header.Get("Report-To") != "" {
			t.Errorf("%s: the answer has %v", name, resp.Header)
		}
	}
	for to, want := range map[string]string{
		"/there?x=1":                    prefix + "there?x=1",
		"there":                         "there",
		"http://localhost:8081/a":       prefix + "a",
		"http://127.0.0.1:8081/a%2Fb":   prefix + "a%2Fb",
		"https://example.com/elsewhere": "https://example.com/elsewhere",
		"//example.com/x":               "//example.com/x",
	} {
		resp, _ := do(t, x.request(t, "GET", x.path(publicPort, "/away?to="+url.QueryEscape(to)), ""))
		if got := resp.Header.Get("Location"); got != want {
			t.Errorf("sent to %s: %s, want %s", to, got, want)
		}
	}
}

func TestIngressWebSocket(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	for name, c := range map[string]struct {
		url     string
		options websocket.DialOptions
	}{
		"header":    {x.path(privatePort, "/ws"), websocket.DialOptions{HTTPHeader: http.Header{"X-Forkd-Token": {x.token}}, Subprotocols: []string{"chat"}}},
		"a browser": {x.path(privatePort, "/ws"), websocket.DialOptions{Subprotocols: []string{"forkd.token." + x.token, "chat"}}},
		"by host":   {x.url + "/ws", websocket.DialOptions{Host: "8081-sba.box.test", Subprotocols: []string{"chat"}}},
	} {
		t.Run(name, func(t *testing.T) {
			conn, _, err := websocket.Dial(t.Context(), strings.Replace(c.url, "http", "ws", 1), &c.options) //nolint:bodyclose // it is the connection
			if err != nil {
				t.Fatal(err)
			}
			defer conn.CloseNow() //nolint:errcheck // it may be closed already
			if conn.Subprotocol() != "chat" {
				t.Errorf("the service chose %q", conn.Subprotocol())
			}
			for _, text := range []string{"a", strings.Repeat("b", 20000)} {
				if err := conn.Write(t.Context(), websocket.MessageText, []byte(text)); err != nil {
					t.Fatal(err)
				}
				if _, got, err := conn.Read(t.Context()); err != nil || string(got) != strings.ToUpper(text) {
					t.Fatalf("%.20q, %v", got, err)
				}
			}
		})
	}
}

// Server-sent events arrive as they are sent, also while the request's body is under way.
func TestIngressEvents(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	r, w := io.Pipe()
	defer w.Close()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, x.path(publicPort, "/events"), r)
	if err != nil {
		t.Fatal(err)
	}
	var p http.Protocols
	p.SetUnencryptedHTTP2(true) // whose clients read an answer while they write
	transport := &http.Transport{Protocols: &p}
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for i := range 3 {
		if !lines.Scan() || lines.Text() != fmt.Sprintf("data: %d", i) || !lines.Scan() {
			t.Fatalf("event %d: %q, %v", i, lines.Text(), lines.Err())
		}
		if _, err := w.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
}

// Clients of gRPC speak HTTP/2 alone, and so do its services.
func TestIngressGRPC(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: &p}
	defer transport.CloseIdleConnections()
	for kind, proto := range map[string]string{"application/grpc+proto": "HTTP/2.0", "text/plain": "HTTP/1.1"} {
		resp, err := transport.RoundTrip(x.request(t, "POST", x.path(publicPort, "/"), "message", "Content-Type", kind, "TE", "trailers"))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		e := asEchoed(t, string(body))
		if err != nil || resp.ProtoMajor != 2 || e.Proto != proto || e.Body != "message" || resp.Trailer.Get("X-End") != "yes" {
			t.Errorf("%s: %v, answered by %s with %+v, %v", kind, err, resp.Proto, e, resp.Trailer)
		}
	}
}

func TestIngressFailures(t *testing.T) {
	x := newIngress(t, http.HandlerFunc(echo))
	resp, body := do(t, x.request(t, "GET", x.path(publicPort, "/many"), ""))
	if resp.StatusCode != http.StatusBadGateway || resp.Header.Get(errorHeader) != "bad_gateway" {
		t.Errorf("an answer with too large a header: %s %s", resp.Status, body)
	}
	resp, _ = do(t, x.request(t, "GET", x.path(publicPort, "/early"), ""))
	if resp.StatusCode != http.StatusOK {
		t.Errorf("an answer after a hint: %s", resp.Status)
	}
	// What speaks no HTTP, and what hangs up.
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for _, text := range []string{"SSH-2.0-x\r\n", ""} {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, text)
			_ = c.Close()
		}
	}()
	x.s.services = &fakeServices{address: l.Addr().String()}
	for _, what := range []string{"no HTTP", "no answer"} {
		resp, body := do(t, x.request(t, "GET", x.path(publicPort, "/"), ""))
		var e api.Error
		if err := json.Unmarshal([]byte(body), &e); err != nil || resp.StatusCode != http.StatusBadGateway || e.Code != api.CodeBadGateway || e.Hint == "" {
			t.Errorf("%s: %s %s", what, resp.Status, body)
		}
	}
}

// Many requests under way keep nobody else out of a sandbox for long, and strangers leave room for who has a token.
func TestIngressLimits(t *testing.T) {
	release := make(chan struct{})
	x := newIngress(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	results := make(chan int, 2*maxIngress)
	ask := func(headers ...string) {
		go func() {
			resp, err := http.DefaultTransport.RoundTrip(x.request(t, "GET", x.path(publicPort, "/"), "", headers...))
			if err != nil {
				results <- 0
				return
			}
			_ = resp.Body.Close()
			results <- resp.StatusCode
		}()
	}
	for range maxIngress/2 + 10 {
		ask()
	}
	for range 10 {
		if status := <-results; status != http.StatusTooManyRequests {
			t.Fatalf("one too many: %d", status)
		}
	}
	close(release)
	for range maxIngress / 2 {
		if status := <-results; status != http.StatusOK {
			t.Fatalf("an early one: %d", status)
		}
	}
	// A client may have its answer a moment earlier.
	left := func() string {
		x.s.passing.mu.Lock()
		defer x.s.passing.mu.Unlock()
		if len(x.s.passing.open) == 0 && x.s.passing.strangers == 0 {
			return ""
		}
		return fmt.Sprint(x.s.passing.open, x.s.passing.strangers)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(10 * time.Second); left() != ""; {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("still counted:", left())
		}
	}
}

// A client that leaves ends the request at the service.
func TestIngressClientLeaves(t *testing.T) {
	began, ended := make(chan struct{}), make(chan struct{})
	x := newIngress(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
		close(ended)
	}))
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-began
		cancel()
	}()
	req := x.request(t, "GET", x.path(publicPort, "/"), "").WithContext(ctx)
	if _, err := http.DefaultTransport.RoundTrip(req); !errors.Is(err, context.Canceled) { //nolint:bodyclose // there is none
		t.Fatalf("got %v", err)
	}
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the service is still asked")
	}
}

// A client that takes nothing of an answer ends the request, and frees its place.
func TestIngressStalls(t *testing.T) {
	ended := make(chan struct{})
	x := newIngress(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		defer close(ended)
		for piece := make([]byte, 1<<20); ; {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	}))
	x.s.Stall = 100 * time.Millisecond
	conn := dialRaw(t, x)
	sayRaw(t, conn, "/v1/sandboxes/sba/ports/8081/")
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal("the service still writes")
	}
}

// A service may be silent for longer than a client may take nothing.
func TestIngressSilence(t *testing.T) {
	const quiet = 100 * time.Millisecond
	x := newIngress(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for range 2 {
			_, _ = io.WriteString(w, "something")
			_ = http.NewResponseController(w).Flush()
			<-time.After(5 * quiet)
		}
	}))
	x.s.Stall = quiet
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	second := &http.Transport{Protocols: &p}
	defer second.CloseIdleConnections()
	for name, transport := range map[string]http.RoundTripper{"HTTP/1": http.DefaultTransport, "HTTP/2": second} {
		resp, err := transport.RoundTrip(x.request(t, "GET", x.path(publicPort, "/"), ""))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || string(body) != "somethingsomething" {
			t.Errorf("%s: %q, %v", name, body, err)
		}
	}
	// The connection is as good as before.
	conn := dialRaw(t, x)
	answers := bufio.NewReader(conn)
	for _, path := range []string{"/v1/sandboxes/sba/ports/8081/", "/healthz"} {
		sayRaw(t, conn, path)
		resp, err := http.ReadResponse(answers, nil)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
}

func dialRaw(t *testing.T, x *ingressTest) net.Conn {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(x.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func sayRaw(t *testing.T, conn net.Conn, path string) {
	t.Helper()
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
		t.Fatal(err)
	}
}

func TestHostOf(t *testing.T) {
	s := &Server{Domain: "box.test"}
	for name, want := range map[string]string{
		"8080-sba.box.test": "sba 8080 true", "8080-SBA.Box.Test.:443": "sba 8080 true", "8080-sba-b.box.test": "sba-b 8080 true",
		"box.test": "", "www.box.test": "", "-sba.box.test": "", "x-sba.box.test": "", "8080-sba.box.test.evil": "", "8080-sba": "", "[::1]:80": "", "": "",
		"8080-sbabox.test": "", "-1-sba.box.test": "", "80.80-sba.box.test": "",
	} {
		id, port, ok := s.hostOf(name)
		got := ""
		if ok {
			got = fmt.Sprint(id, " ", port, " ", ok)
		}
		if got != want {
			t.Errorf("%q is %q, want %q", name, got, want)
		}
	}
}

// Whatever stands in a request, no token gets out of it.
func FuzzWithhold(f *testing.F) {
	const token = "fkd_tk01234567_abcdefghijklmnopqrstuvwxyz234567"
	f.Add("Cookie", "a="+token, "/?t="+token)
	f.Add("0A", token, "/")
	f.Add("Sec-Websocket-Protocol", "a,forkd.token."+token, "/"+url.QueryEscape(token))
	f.Add("X", "fkd_"+token, "/v1/sandboxes/sba/ports/80/x?"+token+"=1")
	f.Fuzz(func(t *testing.T, name, value, uri string) {
		u, err := url.ParseRequestURI(uri)
		if err != nil {
			return
		}
		in := &http.Request{Method: http.MethodGet, URL: u, Header: http.Header{name: {value}}, Host: "x"}
		out := in.Clone(t.Context())
		rewrite(&httputil.ProxyRequest{In: in, Out: out}, &ingressTo{byHost: true}, "sba", 80)
		if access.Shows(out.URL.RawQuery) {
			t.Errorf("the query is %q", out.URL.RawQuery)
		}
		for n, values := range out.Header {
			for _, v := range values {
				if access.Shows(v) {
					t.Errorf("%s: %q", n, v)
				}
			}
		}
	})
}
