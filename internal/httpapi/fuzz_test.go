package httpapi

import (
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
)

// bodyTypes are those of all bodies, in a fixed order.
func bodyTypes() []reflect.Type {
	byName := map[string]reflect.Type{}
	for _, d := range documents() {
		if d.body != nil {
			t := reflect.TypeOf(d.body)
			byName[t.String()] = t
		}
	}
	var all []reflect.Type
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		all = append(all, byName[name])
	}
	return all
}

// FuzzBody: whatever is sent as any body, it is refused as invalid, in words, or is an object that says the same to every
// other reader of JSON, and the same once more when it is written again.
func FuzzBody(f *testing.F) {
	types := bodyTypes()
	for i, t := range types {
		schema := reflect.New(t).Interface()
		text, err := json.Marshal(schema)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(i), text)
		f.Add(uint8(i), []byte(`{"a":{"b":[null,"\ud800"]},"a":1}x`))
	}
	for i, t := range types {
		switch t {
		case reflect.TypeFor[api.ForkRequest]():
			f.Add(uint8(i), []byte(`{"snapshot_tag":"t","n":3,"labels":{"a":"b"},"ttl_seconds":1.5e0,"limits":{"pids":7},"partial":true}`))
		case reflect.TypeFor[api.ExecRequest]():
			f.Add(uint8(i), []byte(`{"args":["true","\u0000é"],"env":{},"timeout_secs":0.1}`))
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, text []byte) {
		of := types[int(which)%len(types)]
		v := reflect.New(of)
		if err := decodeText(text, v.Interface()); err != nil {
			refusedInWords(t, err)
			return
		}
		if len(text) == 0 {
			return
		}
		if !utf8.Valid(text) || !json.Valid(text) || text[strings.IndexFunc(string(text), func(r rune) bool { return !strings.ContainsRune(" \t\r\n", r) })] != '{' {
			t.Fatalf("no JSON object is taken: %q", text)
		}
		plain := reflect.New(of)
		if err := json.Unmarshal(text, plain.Interface()); err != nil {
			t.Fatalf("others refuse it: %v", err)
		}
		if diff := cmp.Diff(plain.Interface(), v.Interface()); diff != "" {
			t.Fatalf("others read it otherwise: %s", diff)
		}
		again, err := json.Marshal(v.Interface())
		if err != nil {
			t.Fatal(err)
		}
		back := reflect.New(of)
		if err := decodeText(again, back.Interface()); err != nil {
			t.Fatalf("what it was read as is refused: %v: %s", err, again)
		}
	})
}

// refusedInWords: an error of ours, short, in valid text, that says nothing of our insides.
func refusedInWords(t *testing.T, err error) {
	t.Helper()
	e := toAPI(err)
	if e.Code != api.CodeInvalid || e.Message == "" || len(e.Message) > 600 || !utf8.ValidString(e.Message) {
		t.Fatalf("%s: %q", e.Code, e.Message)
	}
	if _, ok := errors.AsType[*json.SyntaxError](err); ok || strings.Contains(e.Message, "Go value") {
		t.Fatalf("the message speaks of our insides: %s", e.Message)
	}
}

// FuzzQuery: whatever stands behind a question mark, it is refused in words, or has the parameters that the document names, with
// values that mean what they say.
func FuzzQuery(f *testing.F) {
	docs := documents()
	patterns := slices.Sorted(maps.Keys(docs))
	for i, p := range patterns {
		f.Add(uint8(i), filled(docs[p].query)[1:])
		for _, q := range docs[p].query {
			f.Add(uint8(i), q.name+"=1&"+q.name+"=true")
		}
	}
	for _, q := range []string{"a;b", "%zz", "=", "&&", "limit=%31", "limit=1e3", "wait=0x1p-2", "wait=NaN", "label==", "path=%ff%00"} {
		f.Add(uint8(1), q)
	}
	f.Fuzz(func(t *testing.T, which uint8, raw string) {
		d := docs[patterns[int(which)%len(patterns)]]
		if err := d.checkQuery(raw); err != nil {
			refusedInWords(t, err)
			return
		}
		q, err := url.ParseQuery(raw)
		if err != nil {
			t.Fatalf("taken, and no query: %v", err)
		}
		for i := range d.query {
			p := &d.query[i]
			for _, v := range q[p.name] {
				var n float64
				if p.kind == boolean && v != "true" && v != "false" {
					t.Fatalf("%s is taken as %q", p.name, v)
				}
				if (p.kind == integer || p.kind == number) && (json.Unmarshal([]byte(v), &n) != nil && p.kind == integer || !p.unbounded() && n > p.most) {
					t.Fatalf("%s is taken as %q", p.name, v)
				}
			}
			delete(q, p.name)
		}
		if len(q) > 0 {
			t.Fatalf("taken, and unknown: %v", q)
		}
	})
}

// FuzzCursor: whatever is given as a cursor, it is refused, or the page is an end of the list.
func FuzzCursor(f *testing.F) {
	f.Add("", "")
	f.Add("5", "61")
	f.Add("1000", "3030303030")
	f.Add("1", "ff00")
	f.Add("-1", "AB")
	d := document{query: paged()}
	f.Fuzz(func(t *testing.T, limit, cursor string) {
		q := url.Values{"limit": {limit}, "cursor": {cursor}}.Encode()
		if err := d.checkQuery(q); err != nil {
			refusedInWords(t, err)
			return
		}
		all := things()
		w := httptest.NewRecorder()
		got, err := page(w, httptest.NewRequest(http.MethodGet, "/v1/things?"+q, http.NoBody), slices.Clone(all), thingKey)
		if err != nil {
			refusedInWords(t, err)
			return
		}
		rest := all[len(all)-len(got):]
		if w.Header().Get(nextCursor) == "" && !slices.Equal(rest, got) {
			t.Fatalf("the last page is no end of the list: %v", got)
		}
	})
}

// FuzzIdempotencyKey: whatever keys and bodies are sent, in whatever order, nothing is done twice for a key, and the books
// are right.
func FuzzIdempotencyKey(f *testing.F) {
	f.Add("k", "k", "a", "a")
	f.Add("k", "l", "a", "b")
	f.Add("", "\x00", "{}", "")
	f.Add(strings.Repeat("k", 256), " ", "é", "\xff")
	f.Fuzz(func(t *testing.T, key1, key2, body1, body2 string) {
		c := &counter{}
		for _, r := range []struct{ key, body string }{{key1, body1}, {key2, body2}, {key1, body1}, {key2, body2}} {
			before := c.made.Load()
			status, _, h := c.post(t, access.Owner(), r.body, r.key)
			replayed := h.Get("Idempotent-Replayed") == "true"
			switch made := c.made.Load() - before; {
			case status == http.StatusCreated && made == 1 != replayed:
			case status == http.StatusBadRequest && made == 0 && !replayed:
			default:
				t.Fatalf("%q: status %d, made %d, replayed %v", r, status, made, replayed)
			}
		}
		if key1 == key2 && c.made.Load() > 1 {
			t.Fatalf("%q was heeded %d times", key1, c.made.Load())
		}
		s := &c.s.replies
		if s.order == nil {
			return
		}
		s.forgetOld(time.Now().Add(keptFor + time.Hour))
		if s.bytes != 0 || len(s.by) != 0 || s.order.Len() != 0 {
			t.Fatalf("of nothing %d bytes are kept", s.bytes)
		}
	})
}
