package httpapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
)

// counter serves POST /make, which makes one thing more each time.
type counter struct {
	s     Server
	made  atomic.Int64
	begun chan struct{} // each request says so, and then waits for go
	goOn  chan struct{}
	err   error
}

func (c *counter) handle(w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if c.begun != nil {
		c.begun <- struct{}{}
		<-c.goOn
	}
	if c.err != nil {
		return c.err
	}
	w.Header().Set("X-Of-It", "yes")
	return Reply(w, http.StatusCreated, fmt.Sprintf("%d of %s", c.made.Add(1), body))
}

// post answers with the status, and the text or the error's code.
func (c *counter) post(t *testing.T, who access.Principal, body string, keys ...string) (int, string, http.Header) {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/make", strings.NewReader(body))
	r = r.WithContext(access.With(r.Context(), who))
	for _, k := range keys {
		r.Header.Add(idempotencyKey, k)
	}
	w := httptest.NewRecorder()
	w.Header().Set("X-Request-Id", "req-"+body)
	if err := c.s.once(c.handle)(w, r); err != nil {
		writeError(w, err, "req")
		var e api.Error
		if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		return w.Code, string(e.Code), w.Header()
	}
	return w.Code, strings.Trim(w.Body.String(), "\"\n"), w.Header()
}

func TestReplay(t *testing.T) {
	c := &counter{}
	ann, bob := access.Principal{Name: "x", TokenID: "ann"}, access.Principal{Name: "x", TokenID: "bob"}
	for i, tt := range []struct {
		who      access.Principal
		body     string
		keys     []string
		status   int
		text     string
		replayed bool
	}{
		{ann, "a", []string{"k"}, 201, "1 of a", false},
		{ann, "a", []string{"k"}, 201, "1 of a", true},
		{ann, "b", []string{"k"}, 400, "key_reused", false},
		{ann, "a", nil, 201, "2 of a", false},
		{bob, "a", []string{"k"}, 201, "3 of a", false},
		{ann, "a", []string{"k2"}, 201, "4 of a", false},
		{ann, "a", []string{"k"}, 201, "1 of a", true},
		{ann, "a", []string{""}, 400, "invalid", false},
		{ann, "a", []string{"k", "k"}, 400, "invalid", false},
		{ann, "a", []string{"ü"}, 400, "invalid", false},
		{ann, "a", []string{strings.Repeat("k", 256)}, 400, "invalid", false},
		{ann, "a", []string{strings.Repeat("k", 255)}, 201, "5 of a", false},
	} {
		status, text, h := c.post(t, tt.who, tt.body, tt.keys...)
		if status != tt.status || text != tt.text || (h.Get("Idempotent-Replayed") == "true") != tt.replayed {
			t.Errorf("%d: %d %s, replayed %q; want %d %s", i, status, text, h.Get("Idempotent-Replayed"), tt.status, tt.text)
		}
		if tt.replayed && (h.Get("X-Of-It") != "yes" || h.Get("X-Request-Id") != "req-a" || h.Get("Content-Type") != "application/json") {
			t.Errorf("%d: headers %v", i, h)
		}
	}
}

func TestKeyInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &counter{begun: make(chan struct{}), goOn: make(chan struct{})}
		done := make(chan string)
		go func() {
			_, text, _ := c.post(t, access.Owner(), "a", "k")
			done <- text
		}()
		<-c.begun
		if status, code, h := c.post(t, access.Owner(), "a", "k"); status != http.StatusConflict || code != "busy" || h.Get("Retry-After") == "" {
			t.Errorf("while it is served: %d %s %v", status, code, h)
		}
		close(c.goOn)
		if text := <-done; text != "1 of a" {
			t.Error(text)
		}
		if _, text, _ := c.post(t, access.Owner(), "a", "k"); text != "1 of a" {
			t.Error(text)
		}
	})
}

// TestFailureFreesTheKey: what has made nothing is done when it is asked again.
func TestFailureFreesTheKey(t *testing.T) {
	c := &counter{err: host.ErrBusy}
	if status, code, _ := c.post(t, access.Owner(), "a", "k"); status != http.StatusConflict || code != "busy" {
		t.Errorf("%d %s", status, code)
	}
	c.err = nil
	if status, text, _ := c.post(t, access.Owner(), "b", "k"); status != http.StatusCreated || text != "1 of b" {
		t.Errorf("%d %s", status, text)
	}
	panicking := func(http.ResponseWriter, *http.Request) error { panic(http.ErrAbortHandler) }
	func() {
		defer func() { _ = recover() }()
		r := httptest.NewRequest(http.MethodPost, "/make", http.NoBody)
		r.Header.Set(idempotencyKey, "p")
		_ = c.s.once(panicking)(httptest.NewRecorder(), r)
	}()
	if n := c.s.replies.order.Len(); n != 1 {
		t.Errorf("%d are kept; one succeeded", n)
	}
}

func TestRepliesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &counter{}
		s := &c.s.replies
		for p := range 20 {
			for k := range keptPerPrincipal + 10 {
				c.post(t, access.Principal{TokenID: fmt.Sprint(p)}, "a", fmt.Sprint(k))
			}
		}
		if s.order.Len() != keptReplies || len(s.by) != keptReplies {
			t.Errorf("%d replies are kept, %d found; the most is %d", s.order.Len(), len(s.by), keptReplies)
		}
		for p, n := range s.of {
			if n > keptPerPrincipal || n <= 0 {
				t.Errorf("principal %s has %d", p, n)
			}
		}
		big := strings.Repeat("x", keptBytes/4)
		for k := range 8 {
			c.post(t, access.Owner(), big, fmt.Sprint("big", k))
		}
		if s.bytes > keptBytes || s.bytes < keptBytes/4 {
			t.Errorf("%d bytes are kept; the most is %d", s.bytes, keptBytes)
		}
		time.Sleep(keptFor + time.Second) //nolint:forbidigo // in a bubble
		if _, text, h := c.post(t, access.Owner(), big, "big7"); h.Get("Idempotent-Replayed") != "" || text == "" {
			t.Error("a reply is kept for ever")
		}
		if s.order.Len() != 1 {
			t.Errorf("%d are kept after a day", s.order.Len())
		}
		s.forget(s.order.Front())
		if s.bytes != 0 || len(s.of) != 0 || len(s.by) != 0 {
			t.Errorf("of nothing there are %d bytes, %v, %v", s.bytes, s.of, s.by)
		}
	})
}

// TestManyInUse: what is being served is never forgotten, so there is a bound to that as well.
func TestManyInUse(t *testing.T) {
	var s replies
	for k := range keptPerPrincipal {
		if _, first, err := s.begin("p", fmt.Sprint(k), [32]byte{}, time.Now()); err != nil || !first {
			t.Fatal(first, err)
		}
	}
	if _, _, err := s.begin("p", "one more", [32]byte{}, time.Now()); err == nil || toAPI(err).Code != api.CodeThrottled {
		t.Errorf("one more: %v", err)
	}
	if _, _, err := s.begin("q", "k", [32]byte{}, time.Now()); err != nil {
		t.Errorf("another principal: %v", err)
	}
}

// TestKeysWhereTheyDoNothing: a route that would not heed a key refuses it.
func TestKeysWhereTheyDoNothing(t *testing.T) {
	h := testServer(t)
	for pattern, d := range documents() {
		method, path, _ := strings.Cut(pattern, " ")
		if method != http.MethodPost || d.once {
			continue
		}
		body := "{}"
		if d.media != nil || d.body == nil {
			body = ""
		}
		r := httptest.NewRequest(method, example(path)+filled(d.query), strings.NewReader(body))
		r.Header.Set(idempotencyKey, "k")
		if code, e := turnedDown(t, h, r); code != http.StatusBadRequest || !strings.Contains(e.Message, idempotencyKey) {
			t.Errorf("%s: %d %s", pattern, code, e.Message)
		}
	}
}

// restarted is the same routes in another daemon of the same home.
func (c *counter) restarted(path string) *counter {
	next := &counter{}
	next.s.KeepReplies(path, slog.New(slog.DiscardHandler))
	next.made.Store(c.made.Load())
	return next
}

// TestReplayByTheNextDaemon: what one daemon has replied the next one replies, whatever has become of the file's end.
func TestReplayByTheNextDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "replies.jsonl")
		ann, bob := access.Principal{TokenID: "ann"}, access.Principal{TokenID: "bob"}
		c := (&counter{}).restarted(path)
		want := func(who access.Principal, body, key, text string, replayed bool) {
			t.Helper()
			_, got, h := c.post(t, who, body, key)
			if got != text || (h.Get("Idempotent-Replayed") == "true") != replayed {
				t.Errorf("%s %s: %q, replayed %q; want %q", key, body, got, h.Get("Idempotent-Replayed"), text)
			}
			if replayed && (h.Get("X-Of-It") != "yes" || h.Get("X-Request-Id") != "req-"+body) {
				t.Errorf("%s: headers %v", key, h)
			}
		}
		want(ann, "a", "k", "1 of a", false)
		want(ann, "a", "l", "2 of a", false)
		c = c.restarted(path)
		want(ann, "a", "k", "1 of a", true)
		want(ann, "b", "k", "key_reused", false)
		want(bob, "a", "k", "3 of a", false)
		c.err = host.ErrBusy
		want(ann, "a", "refused", "busy", false)
		c = c.restarted(path)
		want(ann, "a", "refused", "4 of a", false)
		want(bob, "a", "k", "3 of a", true)

		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append([]byte("{}\n\x00\n"), text[:len(text)-5]...), 0o600); err != nil { // the last one is torn
			t.Fatal(err)
		}
		c = c.restarted(path)
		want(ann, "a", "l", "2 of a", true)
		want(ann, "a", "refused", "5 of a", false)
		c = c.restarted(path)
		want(ann, "a", "refused", "5 of a", true)
		time.Sleep(keptFor + time.Second) //nolint:forbidigo // in a bubble
		c = c.restarted(path)
		want(ann, "a", "k", "6 of a", false)
		if text, err := os.ReadFile(path); err != nil || bytes.Count(text, []byte("\n")) != 1 {
			t.Errorf("after a day the file has %q, %v", text, err)
		}
		// A file that cannot be written takes nothing from this daemon.
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		c = c.restarted(path)
		want(ann, "a", "k", "7 of a", false)
		want(ann, "a", "k", "7 of a", true)
	})
}

// TestRepliesFileIsBounded: what is forgotten goes from the file, too.
func TestRepliesFileIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "replies.jsonl")
	c := (&counter{}).restarted(path)
	big := strings.Repeat("x", leastRewritten/keptPerPrincipal/2)
	for k := range 5 * keptPerPrincipal { // five times what is kept
		c.post(t, access.Owner(), big, fmt.Sprint(k))
	}
	info, err := os.Stat(path)
	if err != nil || info.Size() > 5*leastRewritten/2 || info.Mode() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
	c = c.restarted(path)
	for _, tt := range []struct {
		key      int
		replayed bool
	}{{5*keptPerPrincipal - 1, true}, {4 * keptPerPrincipal, true}, {3 * keptPerPrincipal, false}} { // the last, as new, displaces the oldest
		if _, _, h := c.post(t, access.Owner(), big, fmt.Sprint(tt.key)); (h.Get("Idempotent-Replayed") == "true") != tt.replayed {
			t.Errorf("the key %d: replayed %v, want %v", tt.key, !tt.replayed, tt.replayed)
		}
	}
	c.s.replies.check(t)
}

// FuzzReplies: whatever is in the file, it is read, the books are right, and what is done from then on is found again.
func FuzzReplies(f *testing.F) {
	seed := &kept{name: replyKey{"owner ", "k"}, since: time.Now(), status: 201, header: http.Header{"X": {"y"}}, body: []byte(`"1 of a"`)}
	line, err := seed.line()
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range [][]byte{nil, line, line[:len(line)/2], append(line, line...), []byte("null\n{}\n"), []byte("\x00\xff")} {
		f.Add(s)
	}
	path := filepath.Join(f.TempDir(), "replies.jsonl")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		c := (&counter{}).restarted(path)
		key := "of this test"
		_, first, _ := c.post(t, access.Owner(), "a", key)
		c.s.replies.check(t)
		c = c.restarted(path)
		if _, again, h := c.post(t, access.Owner(), "a", key); again != first || h.Get("Idempotent-Replayed") != "true" {
			t.Errorf("after %q: %q became %q", text, first, again)
		}
		c.s.replies.check(t)
	})
}

// check holds the books against each other.
func (s *replies) check(t *testing.T) {
	t.Helper()
	bytes, of := 0, 0
	for at := s.order.Front(); at != nil; at = at.Next() {
		bytes += at.Value.(*kept).size()
	}
	for _, n := range s.of {
		of += n
	}
	if bytes != s.bytes || of != s.order.Len() || len(s.by) != of || bytes > keptBytes || of > keptReplies {
		t.Fatalf("%d replies, %d found, %d of principals; %d bytes, said to be %d", s.order.Len(), len(s.by), of, bytes, s.bytes)
	}
}
