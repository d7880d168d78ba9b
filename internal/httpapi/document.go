package httpapi

//go:generate go test -count=1 -run ^TestOpenAPI$ . -update

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
)

// document is what is said of an operation beyond its summary: what it takes and what it gives. The OpenAPI document is
// made of it, and requests are held against it: see strict.
type document struct {
	id      string // the operation's name in the document, and of the function in clients that are made of it
	about   string // what the summary does not say
	query   []parameter
	headers []parameter
	body    any       // a value of the JSON body's type; nil: there is no such body
	once    bool      // it takes an Idempotency-Key
	raw     bool      // requests are somebody else's to understand
	socket  []message // what travels once the connection is a WebSocket
	media   []string  // types of a body that is not JSON
	replies []response
}

// message is one kind of what is said over a WebSocket.
type message struct {
	from  string // "client", "server"
	of    any    // a value of the type that is JSON in a text message; nil: a binary message
	about string
}

// response is one kind of reply that an operation gives. Refusals need none: they have one shape.
type response struct {
	status int
	of     any    // a value of its type; nil: an empty body, or one that is no JSON
	media  string // "": JSON, if there is a value
	about  string // "": what the status says
}

// kind of a parameter's value.
type kind int

const (
	text kind = iota
	boolean
	integer
	number
)

// parameter is one of the query, or a header.
type parameter struct {
	name     string
	about    string
	kind     kind
	repeated bool // may be given more than once
	required bool
	least    float64 // of a number; both 0: no bounds
	most     float64
	unit     string   // of a number
	pattern  string   // of a text
	form     string   // what the pattern means, in words
	oneOf    []string // texts that are allowed; empty: any
}

// strict refuses, before h sees it, a request that is not what the document says.
func (d *document) strict(h handler) handler {
	if d.raw {
		return h
	}
	return func(w http.ResponseWriter, r *http.Request) error {
		if err := d.checkQuery(r.URL.RawQuery); err != nil {
			return err
		}
		if err := d.checkBody(w, r); err != nil {
			return err
		}
		return h(w, r)
	}
}

// checkBody refuses a body where there is to be none, or an empty object at most. Others are h's to read.
func (d *document) checkBody(w http.ResponseWriter, r *http.Request) error {
	if r.ContentLength == 0 || d.media != nil {
		return nil
	}
	switch d.body.(type) {
	case struct{}:
		return decode(w, r, &struct{}{})
	case nil:
		var one [1]byte
		if n, err := io.ReadFull(http.MaxBytesReader(w, r.Body, maxBody), one[:]); n > 0 || !errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: this route takes no body", host.ErrInvalid)
		}
	}
	return nil
}

// otherMethods answers for a path that is served, but not with the request's method.
func otherMethods(mux *http.ServeMux, none handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		var allowed []string
		for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"} {
			other := &http.Request{Method: method, URL: r.URL, Host: r.Host}
			if _, pattern := mux.Handler(other); pattern != "/" && pattern != "" {
				allowed = append(allowed, method)
			}
		}
		if len(allowed) == 0 {
			return none(w, r)
		}
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		return &api.Error{
			Code: api.CodeMethod, Message: fmt.Sprintf("%.200q cannot be asked with %.40s; it answers %s", r.URL.Path, r.Method, strings.Join(allowed, ", ")),
		}
	}
}

func (d *document) checkQuery(raw string) error {
	q, err := url.ParseQuery(raw)
	if err != nil {
		return fmt.Errorf("%w: query: %w", host.ErrInvalid, err)
	}
	names := make([]string, 0, len(d.query))
	for i := range d.query {
		p := &d.query[i]
		names = append(names, p.name)
		if err := p.check(q[p.name]); err != nil {
			return err
		}
	}
	for name := range q {
		if !slices.Contains(names, name) {
			return unknownParameter(name, names)
		}
	}
	return nil
}

func unknownParameter(name string, known []string) error {
	if len(known) == 0 {
		return fmt.Errorf("%w: query has %.60q; this route takes no parameters", host.ErrInvalid, name)
	}
	return fmt.Errorf("%w: query has %.60q; known are %s", host.ErrInvalid, name, strings.Join(known, ", "))
}

func (p *parameter) check(values []string) error {
	switch {
	case len(values) == 0 && p.required:
		return fmt.Errorf("%w: the query has no %s; add ?%s=… to the URL", host.ErrInvalid, p.name, p.name)
	case len(values) > 1 && !p.repeated:
		return fmt.Errorf("%w: %s is given %d times; give it once", host.ErrInvalid, p.name, len(values))
	}
	for _, v := range values {
		if want := p.wants(v); want != "" {
			return fmt.Errorf("%w: %s is %.40q; give %s", host.ErrInvalid, p.name, v, want)
		}
	}
	return nil
}

// wants is what should have been given in place of v, or empty.
func (p *parameter) wants(v string) string {
	switch p.kind {
	case boolean:
		if v != "true" && v != "false" {
			return "true or false"
		}
	case integer:
		// No sign, no leading zeros: one number has one way to be written.
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || strconv.FormatInt(n, 10) != v || !p.within(float64(n)) {
			return p.bounds(cmp.Or(p.unit, "a whole number"))
		}
	case number:
		n, err := strconv.ParseFloat(v, 64)
		if err != nil || strings.ContainsAny(v, "xXpP_") || !p.within(n) {
			return p.bounds(cmp.Or(p.unit, "a number"))
		}
	case text:
		if len(p.oneOf) > 0 && !slices.Contains(p.oneOf, v) {
			return orList(p.oneOf)
		}
		if p.pattern != "" && !p.matches(v) {
			return cmp.Or(p.form, "what matches "+p.pattern)
		}
	}
	return ""
}

// matches compiles the pattern, which is short, each time: it is asked for once a request at most.
func (p *parameter) matches(v string) bool {
	re, err := regexp.Compile(p.pattern)
	return err == nil && re.MatchString(v)
}

func (p *parameter) unbounded() bool { return p.least == 0 && p.most == 0 }

// within is false for what is not a number.
func (p *parameter) within(n float64) bool {
	return p.unbounded() && n == n || n >= p.least && n <= p.most
}

func (p *parameter) bounds(what string) string {
	if p.unbounded() {
		return what
	}
	return fmt.Sprintf("%s from %s to %s", what, plain(p.least), plain(p.most))
}

func plain(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }
