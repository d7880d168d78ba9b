package mcp

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

// daemon is a server in a daemon's place, and how to reach it.
func daemon(t *testing.T, handler http.Handler) func(context.Context) (*client.Client, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "d.sock")
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(handler)
	s.Listener = l
	s.Start()
	t.Cleanup(s.Close)
	return func(context.Context) (*client.Client, error) { return client.New("unix://" + path) }
}

// session is a client of a server of ours.
func session(t *testing.T, connect func(context.Context) (*client.Client, error)) *mcp.ClientSession {
	t.Helper()
	here, there := mcp.NewInMemoryTransports()
	s, err := New(Config{Version: "test", Connect: connect}).Connect(t.Context(), there, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := mcp.NewClient(&mcp.Implementation{Name: "test"}, nil).Connect(t.Context(), here, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Close()
		_ = s.Wait()
	})
	return c
}

func called(t *testing.T, c *mcp.ClientSession, tool string, args any) (text string, isError bool) {
	t.Helper()
	r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		t.Fatalf("%s: %v", tool, err)
	}
	content, ok := r.Content[0].(*mcp.TextContent)
	if !ok {
		t.Fatalf("%s: %T", tool, r.Content[0])
	}
	return content.Text, r.IsError
}

// TestEveryCodeSaysWhatToDo: a refusal's status, code and message reach the model, the command line's hints do not.
func TestEveryCodeSaysWhatToDo(t *testing.T) {
	refusal := &api.Error{}
	c := session(t, daemon(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
		_ = json.NewEncoder(w).Encode(refusal)
	})))
	for _, code := range []api.Code{
		api.CodeInvalid, api.CodeNotFound, api.CodeDenied, api.CodeUnauthorized, api.CodeThrottled, api.CodeKeyReused, api.CodeMethod,
		api.CodeUnacceptable, api.CodeExists, api.CodeWrongState, api.CodeBusy, api.CodeUnsupported, api.CodeUnavailable, api.CodeExhausted,
		api.CodeNoCapacity, api.CodeIncompatible, api.CodeCorrupt, api.CodeTimeout, api.CodeInternal, api.CodeBadGateway,
	} {
		*refusal = api.Error{Code: code, Message: "sandbox sbx: no", Hint: "forkd ls", Console: "panic: here"}
		text, isError := called(t, c, "get_sandbox", map[string]any{"sandbox_id": "sbx"})
		if !isError || !strings.HasPrefix(text, "418 "+string(code)+": sandbox sbx: no\n") || !strings.Contains(text, "panic: here") || strings.Contains(text, "forkd ls") {
			t.Errorf("%s: %v %q", code, isError, text)
		}
	}
}

// TestLongAnswer: an answer of any tool is bounded, and its rest can be read.
func TestLongAnswer(t *testing.T) {
	tags := make([]api.Snapshot, 2000)
	for i := range tags {
		tags[i].Tag = "größer"
	}
	c := session(t, daemon(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(tags) })))
	text, isError := called(t, c, "list_snapshots", nil)
	var cut shortened
	if err := json.Unmarshal([]byte(text), &cut); err != nil || isError || len(text) > maxAnswer || cut.OutputID == "" {
		t.Fatalf("%v %.200q", err, text)
	}
	whole, offset := cut.Head, len(cut.Head)
	for offset != 0 {
		text, _ := called(t, c, "read_output", map[string]any{"output_id": cut.OutputID, "stream": cut.Stream, "offset": offset, "limit": 9999})
		var part readOutputOut
		if err := json.Unmarshal([]byte(text), &part); err != nil || !utf8.ValidString(part.Text) {
			t.Fatalf("%v %.200q", err, text)
		}
		whole, offset = whole+part.Text, part.NextOffset
	}
	var list struct{ Result []api.Snapshot }
	if err := json.Unmarshal([]byte(whole), &list); err != nil || len(list.Result) != len(tags) || len(whole) != cut.Bytes {
		t.Errorf("%v, %d of %d bytes", err, len(whole), cut.Bytes)
	}
}

// TestKeptOutputs: what is kept is bounded, the oldest goes, and texts are cut between characters.
func TestKeptOutputs(t *testing.T) {
	o := &outputs{}
	first := o.keep(map[string]string{"stdout": strings.Repeat("a", maxKept)})
	var last string
	for range maxAll / maxKept {
		last = o.keep(map[string]string{"stdout": strings.Repeat("b", maxKept)})
	}
	if _, err := o.find(first, "stdout"); err == nil {
		t.Error("the oldest is still there")
	}
	if _, err := o.find(last, "stdout"); err != nil || o.size > maxAll {
		t.Errorf("the newest: %v; %d bytes", err, o.size)
	}
	if _, err := o.find(last, "stderr"); err == nil || !strings.Contains(err.Error(), "stdout") {
		t.Errorf("another stream: %v", err)
	}
	for n := range 8 {
		if p := part("äöü", 0, n); !utf8.ValidString(p) || len(p) > n {
			t.Errorf("part of %d: %q", n, p)
		}
		if p := "äöü"[start("äöü", n):]; !utf8.ValidString(p) {
			t.Errorf("from %d: %q", n, p)
		}
	}
	c := captured{}
	for range 3 {
		c.add(strings.Repeat("ä", maxKept/2))
	}
	if c.text.Len() > maxKept || int64(c.text.Len())+c.lost != 3*maxKept {
		t.Errorf("captured %d, lost %d", c.text.Len(), c.lost)
	}
}

// TestHTTPWantsATokenThatIsGood: the daemon judges each request's token, and a session is for who began it.
func TestHTTPWantsATokenThatIsGood(t *testing.T) {
	open := daemon(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("[]")) }))
	s := httptest.NewServer(Handler(HTTPConfig{Version: "test", Connect: func(ctx context.Context, token string) (*client.Client, error) {
		if !strings.HasPrefix(token, "good") {
			return nil, &api.Error{Code: api.CodeUnauthorized, Message: "the token is unknown"}
		}
		return open(ctx)
	}}))
	defer s.Close()
	ask := func(token, session, origin string) (int, string) {
		t.Helper()
		body := `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`
		if session != "" {
			body = `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		for name, value := range map[string]string{"Authorization": token, "Mcp-Session-Id": session, "Origin": origin} {
			if value != "" {
				req.Header.Set(name, value)
			}
		}
		resp, err := s.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.StatusCode, resp.Header.Get("Mcp-Session-Id")
	}
	status, id := ask("Bearer good1", "", "")
	if status != http.StatusOK || id == "" {
		t.Fatalf("a good token: %d %q", status, id)
	}
	for _, c := range []struct {
		what, token, session, origin string
		want                         int
	}{
		{"its session", "Bearer good1", id, "", http.StatusOK},
		{"another's session", "Bearer good2", id, "", http.StatusForbidden},
		{"a bad token", "Bearer bad", "", "", http.StatusUnauthorized},
		{"a bad token with a session", "Bearer bad", id, "", http.StatusUnauthorized},
		{"no token", "", "", "", http.StatusUnauthorized},
		{"a page of another origin", "Bearer good1", "", "https://evil.example", http.StatusForbidden},
	} {
		if status, _ := ask(c.token, c.session, c.origin); status != c.want {
			t.Errorf("%s: %d; want %d", c.what, status, c.want)
		}
	}
}
