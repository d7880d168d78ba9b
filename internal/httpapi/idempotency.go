package httpapi

import (
	"bytes"
	"container/list"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
)

// Bounds of what is remembered of requests that had a key. The oldest of a principal go first, then the oldest of all; what is
// being served stays.
const (
	keptReplies      = 4096
	keptPerPrincipal = 512
	keptBytes        = 32 << 20
	keptFor          = 24 * time.Hour
	maxKey           = 255
)

const idempotencyKey = "Idempotency-Key"

// replies remembers what was replied to requests with an Idempotency-Key, so that a client that heard no answer can ask again
// without doing it again. Only successes are kept: what failed has made nothing, and may be tried again with its key. A
// daemon that starts anew reads what an earlier one has kept.
type replies struct {
	file repliesFile

	mu    sync.Mutex
	by    map[replyKey]*list.Element
	order *list.List // of *kept, the oldest first
	bytes int
	of    map[string]int // how many a principal has
}

type replyKey struct{ principal, key string }

// kept is a request that is being served, or was.
type kept struct {
	name    replyKey
	request [sha256.Size]byte
	since   time.Time

	status int // 0: being served
	header http.Header
	body   []byte
}

func (k *kept) size() int { return len(k.body) + len(k.name.principal) + len(k.name.key) + 512 }

// keyed is h as the document says that it treats an Idempotency-Key.
func (s *Server) keyed(d *document, h handler) handler {
	if d.once {
		return s.once(h)
	}
	return never(h)
}

// once serves a request with a key by h if it is the first of its key, else with the reply that the first has had.
func (s *Server) once(h handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		given := r.Header.Values(idempotencyKey)
		if len(given) == 0 {
			return h(w, r)
		}
		if err := checkKey(given); err != nil {
			return err
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err != nil {
			return badBody(err)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		entry, first, err := s.replies.begin(principalOf(r.Context()), given[0], fingerprint(r, body), time.Now())
		if err != nil {
			if e, ok := errors.AsType[*api.Error](err); ok && e.Code != api.CodeKeyReused {
				w.Header().Set("Retry-After", "1")
			}
			return err
		}
		if !first {
			return entry.replay(w)
		}
		copied := &copying{ResponseWriter: w}
		kept := false
		defer func() {
			if !kept { // h has panicked
				s.replies.end(entry, copied)
			}
		}()
		if err := h(copied, r); err != nil {
			return err
		}
		// It is written down before it is sent: a client that has heard nothing of it may ask another daemon.
		kept = true
		s.replies.end(entry, copied)
		return copied.send()
	}
}

// never refuses a key where it would do nothing: whoever sends one relies on it.
func never(h handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if r.Header.Get(idempotencyKey) != "" && r.Method == http.MethodPost {
			return &api.Error{
				Code: api.CodeInvalid, Message: "this route knows no " + idempotencyKey, Hint: "/openapi.json says which routes do; leave it out here",
			}
		}
		return h(w, r)
	}
}

func checkKey(given []string) error {
	key := given[0]
	visible := !strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' })
	if len(given) == 1 && key != "" && len(key) <= maxKey && visible {
		return nil
	}
	return &api.Error{
		Code: api.CodeInvalid, Message: fmt.Sprintf("%s is to be given once, with 1 to %d visible ASCII characters", idempotencyKey, maxKey),
		Hint: "a random UUID does",
	}
}

// principalOf names whose keys they are: no token sees what another has been replied.
func principalOf(ctx context.Context) string {
	p := access.FromContext(ctx)
	return p.TokenID + " " + p.Name
}

func fingerprint(r *http.Request, body []byte) [sha256.Size]byte {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%s\n%s\n", r.Method, r.URL.EscapedPath(), r.URL.RawQuery)
	h.Write(body)
	return [sha256.Size]byte(h.Sum(nil))
}

// begin returns what is kept of a key, or a new entry that is to be ended.
func (s *replies) begin(principal, key string, request [sha256.Size]byte, now time.Time) (entry *kept, first bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun(now)
	s.forgetOld(now)
	name := replyKey{principal, key}
	if at, ok := s.by[name]; ok {
		entry = at.Value.(*kept)
		switch {
		case entry.request != request:
			return nil, false, &api.Error{
				Code: api.CodeKeyReused, Message: fmt.Sprintf("%s %.60q was given with another request", idempotencyKey, key), Hint: "give every request a key of its own",
			}
		case entry.status == 0:
			return nil, false, &api.Error{
				Code: api.CodeBusy, Message: fmt.Sprintf("the request with %s %.60q is still being served", idempotencyKey, key), Hint: "ask again in a moment",
			}
		}
		return entry, false, nil
	}
	if s.of[principal] >= keptPerPrincipal && !s.forgetOne(principal) || s.order.Len() >= keptReplies && !s.forgetOne("") {
		return nil, false, &api.Error{
			Code: api.CodeThrottled, Message: fmt.Sprintf("too many requests with an %s are being served", idempotencyKey), Hint: "wait until some are through",
		}
	}
	entry = &kept{name: name, request: request, since: now}
	s.add(entry)
	return entry, true, nil
}

// begun makes the books, with what an earlier daemon has kept. The caller holds mu, as for those below.
func (s *replies) begun(now time.Time) {
	if s.by != nil {
		return
	}
	s.by, s.order, s.of = map[replyKey]*list.Element{}, list.New(), map[string]int{}
	for _, entry := range s.file.read(now) {
		if at, ok := s.by[entry.name]; ok { // an older one that had been forgotten
			s.forget(at)
		}
		s.add(entry)
		if s.of[entry.name.principal] > keptPerPrincipal {
			s.forgetOne(entry.name.principal)
		}
		for (s.order.Len() > keptReplies || s.bytes > keptBytes) && s.forgetOne("") {
		}
	}
}

func (s *replies) add(entry *kept) {
	s.by[entry.name] = s.order.PushBack(entry)
	s.of[entry.name.principal]++
	s.bytes += entry.size()
}

// end keeps the reply of a request that succeeded, and forgets one that did not.
func (s *replies) end(entry *kept, reply *copying) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.by[entry.name]
	if reply.status < 200 || reply.status > 299 {
		s.forget(at)
		return
	}
	s.bytes -= entry.size()
	entry.status, entry.header, entry.body = reply.status, reply.header, reply.body.Bytes()
	s.bytes += entry.size()
	for s.bytes > keptBytes && s.forgetOne("") {
	}
	s.file.add(entry, s.order)
}

// forgetOld forgets what is older than keptFor.
func (s *replies) forgetOld(now time.Time) {
	for at := s.order.Front(); at != nil && now.Sub(at.Value.(*kept).since) > keptFor; {
		next := at.Next()
		if at.Value.(*kept).status != 0 {
			s.forget(at)
		}
		at = next
	}
}

// forgetOne forgets the oldest reply, of a principal if one is named, and reports whether there was any.
func (s *replies) forgetOne(principal string) bool {
	for at := s.order.Front(); at != nil; at = at.Next() {
		if k := at.Value.(*kept); k.status != 0 && (principal == "" || k.name.principal == principal) {
			s.forget(at)
			return true
		}
	}
	return false
}

func (s *replies) forget(at *list.Element) {
	k := s.order.Remove(at).(*kept)
	delete(s.by, k.name)
	s.bytes -= k.size()
	if s.of[k.name.principal]--; s.of[k.name.principal] == 0 {
		delete(s.of, k.name.principal)
	}
}

func (k *kept) replay(w http.ResponseWriter) error {
	id := w.Header().Get("X-Request-Id")
	maps.Copy(w.Header(), k.header)
	w.Header().Set("X-Request-Id", id)
	w.Header().Set("Idempotent-Replayed", "true")
	w.WriteHeader(k.status)
	_, err := w.Write(k.body)
	return err
}

// copying keeps what is replied, until it is sent.
type copying struct {
	http.ResponseWriter
	status int
	header http.Header
	body   bytes.Buffer
}

func (c *copying) WriteHeader(status int) {
	if c.status == 0 {
		c.status, c.header = status, c.Header().Clone()
	}
}

func (c *copying) Write(p []byte) (int, error) {
	c.WriteHeader(http.StatusOK)
	return c.body.Write(p)
}

func (c *copying) send() error {
	if c.status == 0 {
		return nil
	}
	c.ResponseWriter.WriteHeader(c.status)
	_, err := c.ResponseWriter.Write(c.body.Bytes())
	return err
}
