package httpapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"forkd.dev/forkd/api"
)

// example is a path of the document with names of nothing.
func example(path string) string {
	return strings.NewReplacer("{tag}", "nosuch", "{id}", "sbnosuch", "{ctx}", "c", "{process}", "1", "{watcher}", "w", "{name}", "nosuch",
		"{token}", "t", "{file...}", "", "{$}", "", "{ref}", "nosuch", "{digest}", "sha256:0").Replace(path)
}

// turnedDown sends a request, and returns the code of the error that comes back, which has its one shape.
func turnedDown(t *testing.T, h http.Handler, r *http.Request) (int, api.Error) {
	t.Helper()
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, r)
	var e api.Error
	if err := json.Unmarshal(rec.Body.Bytes(), &e); err != nil {
		t.Fatalf("%s %s: status %d, and the body is no error: %v: %.200q", r.Method, r.URL, rec.Code, err, rec.Body)
	}
	if e.Code == "" || e.Message == "" || e.Text != e.Message || e.RequestID == "" || rec.Code != status(e.Code) ||
		rec.Header().Get("Content-Type") != "application/json" || rec.Header().Get("X-Request-Id") != e.RequestID {
		t.Errorf("%s %s: not the shape of an error: status %d, %+v", r.Method, r.URL, rec.Code, e)
	}
	for _, inner := range []string{"json:", "jsontext", "Go ", " api.", "struct"} {
		if strings.Contains(e.Message, inner) {
			t.Errorf("%s %s: the message speaks of our insides: %s", r.Method, r.URL, e.Message)
		}
	}
	return rec.Code, e
}

// bodies calls f for every operation that takes a JSON body.
func bodies(t *testing.T, f func(t *testing.T, method, path string, schema object)) {
	t.Helper()
	doc := document3(t)
	for path, item := range doc["paths"].(object) {
		for method, op := range item.(object) {
			body, _ := op.(object)["requestBody"].(object)
			content, _ := body["content"].(object)
			media, ok := content["application/json"].(object)
			if !ok {
				continue
			}
			schema := media["schema"].(object)
			schema = inPlace(doc, schema).(object)
			t.Run(strings.ToUpper(method)+path, func(t *testing.T) { f(t, strings.ToUpper(method), example(path), schema) })
		}
	}
}

// inPlace is a schema with what it refers to.
func inPlace(doc object, v any) any {
	switch v := v.(type) {
	case object:
		if ref, ok := v["$ref"].(string); ok {
			return inPlace(doc, lookUp(doc, ref))
		}
		out := object{}
		for name, in := range v {
			out[name] = inPlace(doc, in)
		}
		return out
	case array:
		out := array{}
		for _, in := range v {
			out = append(out, inPlace(doc, in))
		}
		return out
	}
	return v
}

func document3(t *testing.T) object {
	t.Helper()
	var doc object
	if err := json.Unmarshal(api.OpenAPI, &doc); err != nil {
		t.Fatal(err)
	}
	return doc
}

// TestMalformedBodies: every body of every operation, malformed in every way that its schema knows, is refused as such,
// before anything else is looked at.
func TestMalformedBodies(t *testing.T) {
	handler := testServer(t)
	count := 0
	bodies(t, func(t *testing.T, method, path string, schema object) {
		good := minimal(schema)
		r := httptest.NewRequest(method, path, strings.NewReader(asJSON(t, good)))
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, r)
		if strings.Contains(rec.Body.String(), `"body: `) {
			t.Errorf("the least body %v is refused: %s", good, rec.Body)
		}
		for what, body := range malformed(t, schema) {
			if len(body) > maxBody && path != "/v1/sandboxes" { // one is enough: they are slow under the race detector
				continue
			}
			count++
			r := httptest.NewRequest(method, path, strings.NewReader(body))
			r.Header.Set("Content-Type", "application/json")
			if code, e := turnedDown(t, handler, r); code != http.StatusBadRequest || e.Code != api.CodeInvalid {
				t.Errorf("%s: %.100s: %d %s", what, body, code, e.Message)
			}
		}
	})
	if count < 500 {
		t.Errorf("only %d bodies were tried", count)
	}
	t.Logf("%d bodies", count)
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// minimal is the least object that a schema allows.
func minimal(schema object) object {
	out := object{}
	needed, _ := schema["required"].(array)
	for _, name := range needed {
		out[name.(string)] = value(schema["properties"].(object)[name.(string)].(object))
	}
	return out
}

// value is one that a schema allows.
func value(schema object) any {
	if choice, ok := schema["enum"].(array); ok {
		return choice[0]
	}
	switch schema["type"] {
	case "string":
		return "a"
	case "boolean":
		return true
	case "integer", "number":
		if least, ok := schema["minimum"].(float64); ok {
			return least
		}
		return 1
	case "array":
		return array{value(schema["items"].(object))}
	}
	return object{}
}

// malformed are bodies that break a schema, by what is wrong with them.
func malformed(t *testing.T, schema object) map[string]string {
	good := minimal(schema)
	whole := asJSON(t, good)
	out := map[string]string{
		"not JSON": "nonsense", "null": "null", "an array": "[]", "an array of it": "[" + whole + "]", "a string": `"a"`, "a number": "1",
		"true": "true", "cut off": whole[:len(whole)-1], "open": "{", "twice": whole + whole, "something after it": whole + "x",
		"a comment": "/**/" + whole, "a byte order mark": "\ufeff" + whole, "not UTF-8": "\xff\xfe", "single quotes": "{'a':1}",
		"a comma too much": strings.TrimSuffix(whole, "}") + ",}", "UTF-16": "{\x00\"\x00a\x00\"\x00", "NUL": "\x00", "a tab": "\t", "lines": " \r\n",
		"deep": strings.Repeat(`{"a":`, 100000) + "1" + strings.Repeat("}", 100000), "deep lists": strings.Repeat("[", 100000),
		"too large":    `{"nosuchfield":"` + strings.Repeat("a", maxBody) + `"}`,
		"blanks":       strings.Repeat(" ", maxBody+1),
		"NaN":          with(t, good, "nosuchfield", json.RawMessage("NaN")),
		"unknown":      with(t, good, "nosuchfield", 1),
		"unknown null": with(t, good, "nosuchfield", nil),
		"no name":      with(t, good, "", 1),
		"_proto_":      with(t, good, "__proto__", object{}),
	}
	needed, _ := schema["required"].(array)
	for _, name := range needed {
		without := maps.Clone(good)
		delete(without, name.(string))
		out["no "+name.(string)] = asJSON(t, without)
		out["empty"], out["empty object"] = "", "{}"
	}
	properties, _ := schema["properties"].(object)
	for name, p := range properties {
		p := p.(object)
		for _, bad := range wrong(p) {
			out[fmt.Sprintf("%s: %.40s", name, bad)] = with(t, good, name, json.RawMessage(bad))
		}
		fine := asJSON(t, value(p))
		rest := maps.Clone(good)
		delete(rest, name)
		out[name+" twice"] = fmt.Sprintf(`{%q:%s,%s`, name, fine, with(t, good, name, json.RawMessage(fine))[1:])
		out[name+" in capitals"] = with(t, rest, strings.ToUpper(name), json.RawMessage(fine))
		out[name+" without a value"] = fmt.Sprintf(`{%q}`, name)
		out[name+" without a name"] = fmt.Sprintf(`{%s:%s}`, name, fine)
	}
	return out
}

func with(t *testing.T, good object, name string, v any) string {
	t.Helper()
	all := make([]string, 0, len(good)+1)
	for _, k := range slices.Sorted(maps.Keys(good)) {
		if k != name {
			all = append(all, fmt.Sprintf("%q:%s", k, asJSON(t, good[k])))
		}
	}
	raw, ok := v.(json.RawMessage)
	if !ok {
		raw = json.RawMessage(asJSON(t, v))
	}
	return "{" + strings.Join(append(all, fmt.Sprintf("%q:%s", name, raw)), ",") + "}"
}

// wrong are texts of values that a schema does not allow.
func wrong(p object) []string {
	of := map[string][]string{
		"string": {`"\ud800"`, "\"\xff\"", "\"\n\"", `"\x41"`, `"a`}, "boolean": {"tru", "True"}, "integer": {"1.5", "1e400", "9223372036854775808", "01", "+1", "0x1"},
		"number": {"1e400", "01", ".5", "Infinity"}, "array": {"[", "[,]", "[null]"}, "object": {"{", `{"a":null}`, `{"a":"b","a":"c"}`},
	}
	good := map[string]string{"string": `"1"`, "boolean": "true", "integer": "1", "number": "1.5", "array": "[]", "object": "{}"}
	kind, _ := p["type"].(string)
	if _, ok := p["$ref"]; ok { // all that are named are objects
		kind = "object"
	}
	out := append([]string{"null", "[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]"}, of[kind]...)
	for other, text := range good {
		if other != kind && text != "" && (kind != "number" || other != "integer") {
			out = append(out, text)
		}
	}
	if least, ok := p["minimum"].(float64); ok {
		out = append(out, plain(least-1), plain(-1e18))
	}
	if most, ok := p["maximum"].(float64); ok {
		out = append(out, plain(most+1), plain(1e18))
	}
	if pattern, ok := p["pattern"].(string); ok {
		out = append(out, `"a/b"`, `"-a"`, `"a b"`, `"é"`, `"`+strings.Repeat("a", 65)+`"`)
		if !strings.Contains(pattern, "?$") {
			out = append(out, `""`)
		}
	}
	if _, ok := p["minLength"]; ok {
		out = append(out, `""`)
	}
	if _, ok := p["minItems"]; ok {
		out = append(out, "[]")
	}
	if _, ok := p["enum"]; ok {
		out = append(out, `""`, `"nosuch"`)
	}
	if items, ok := p["items"].(object); ok {
		for _, bad := range wrong(items) {
			out = append(out, "["+bad+"]")
		}
	}
	if within, ok := p["properties"].(object); ok {
		out = append(out, `{"nosuchfield":1}`)
		for name, inner := range within {
			for _, bad := range wrong(inner.(object)) {
				out = append(out, fmt.Sprintf("{%q:%s}", name, bad))
			}
		}
	}
	if values, ok := p["additionalProperties"].(object); ok {
		for _, bad := range wrong(values) {
			out = append(out, `{"a":`+bad+"}")
		}
	}
	return out
}

func TestMediaOfBodies(t *testing.T) {
	handler := testServer(t)
	bodies(t, func(t *testing.T, method, path string, schema object) {
		body := asJSON(t, minimal(schema))
		send := func(header, said string) *http.Request {
			r := httptest.NewRequest(method, path, strings.NewReader(body))
			r.Header.Set(header, said)
			return r
		}
		for _, media := range []string{
			"text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml", "application/jsonx",
			"application/json; charset=latin1", "json", ";", "application/json, text/plain",
		} {
			if code, e := turnedDown(t, handler, send("Content-Type", media)); code != http.StatusBadRequest || !strings.Contains(e.Message, "application/json") {
				t.Errorf("Content-Type %s: %d %s", media, code, e.Message)
			}
		}
		for _, media := range []string{"application/json; charset=utf-8", "Application/JSON", `application/json;charset="UTF-8"`} {
			rec := httptest.NewRecorder()
			handler.ServeHTTP(rec, send("Content-Type", media))
			if strings.Contains(rec.Body.String(), "Content-Type") {
				t.Errorf("Content-Type %s is refused: %s", media, rec.Body)
			}
		}
		if code, e := turnedDown(t, handler, send("Content-Encoding", "gzip")); code != http.StatusBadRequest || !strings.Contains(e.Message, "Content-Encoding") {
			t.Errorf("gzip: %d %s", code, e.Message)
		}
	})
}

// TestNoBody: where the document has no body, none is taken.
func TestNoBody(t *testing.T) {
	handler := testServer(t)
	for pattern, d := range documents() {
		method, path, _ := strings.Cut(pattern, " ")
		if d.body != nil || d.media != nil || d.raw {
			continue
		}
		r := httptest.NewRequest(method, example(path)+filled(d.query), strings.NewReader("{}"))
		if code, e := turnedDown(t, handler, r); code != http.StatusBadRequest || !strings.Contains(e.Message, "no body") {
			t.Errorf("%s: %d %s", pattern, code, e.Message)
		}
	}
}

// filled is a query with what is required.
func filled(all []parameter) string {
	q := url.Values{}
	for _, p := range all {
		if p.required {
			q.Set(p.name, "a")
		}
	}
	return "?" + q.Encode()
}

// TestMalformedQueries: of every parameter of every operation, values that it cannot have; and parameters that no
// operation has.
func TestMalformedQueries(t *testing.T) {
	handler := testServer(t)
	for pattern, d := range documents() {
		if d.raw {
			continue
		}
		method, path, _ := strings.Cut(pattern, " ")
		queries := []string{"nosuch=1", "nosuch", "%zz", "a;b", "=1"}
		for i := range d.query {
			p := &d.query[i]
			if !p.repeated {
				queries = append(queries, p.name+"=true&"+p.name+"=true")
			}
			queries = append(queries, strings.ToUpper(p.name)+"=1")
			for _, v := range misfits(p) {
				queries = append(queries, url.Values{p.name: {v}}.Encode())
			}
		}
		for _, q := range queries {
			r := httptest.NewRequest(method, example(path)+filled(d.query)+"&"+q, http.NoBody)
			if code, e := turnedDown(t, handler, r); code != http.StatusBadRequest || e.Code != api.CodeInvalid {
				t.Errorf("%s?%s: %d %s", pattern, q, code, e.Message)
			}
		}
	}
}

func misfits(p *parameter) []string {
	var out []string
	switch p.kind {
	case boolean:
		out = []string{"", "1", "yes", "True", "null", "maybe", " true"}
	case integer:
		out = []string{"", "x", "1.5", "01", "+1", "1e3", "0x10", "9223372036854775808", " 1"}
	case number:
		out = []string{"", "x", "NaN", "Inf", "0x1p4", "1_0", "1e999"}
	case text:
		if len(p.oneOf) > 0 {
			out = []string{"", "nosuch"}
		}
	}
	if p.kind != text && !p.unbounded() {
		out = append(out, plain(p.least-1), plain(p.most+1))
	}
	return out
}

// TestMethods: a path that is served says with which methods when it is asked with another.
func TestMethods(t *testing.T) {
	handler := testServer(t)
	served := map[string][]string{}
	for _, op := range (&Server{}).operations() {
		method, path, ok := strings.Cut(op.pattern, " ")
		if !ok || path+"/{path...}" == ingressPattern { // other methods are sent on to what is below, where the service is
			continue
		}
		served[path] = append(served[path], method)
		if method == "GET" {
			served[path] = append(served[path], "HEAD")
		}
	}
	for path, methods := range served {
		for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "NOSUCH"} {
			if slices.Contains(methods, method) {
				continue
			}
			r := httptest.NewRequest(method, example(path), http.NoBody)
			rec := httptest.NewRecorder()
			handler.ServeHTTP(rec, r)
			got := strings.Split(rec.Header().Get("Allow"), ", ")
			slices.Sort(got)
			slices.Sort(methods)
			if diff := cmp.Diff(methods, got); rec.Code != http.StatusMethodNotAllowed || diff != "" {
				t.Errorf("%s %s: %d, Allow %s", method, path, rec.Code, diff)
			}
			if code, e := turnedDown(t, handler, r); method != "HEAD" && (code != http.StatusMethodNotAllowed || e.Code != api.CodeMethod) {
				t.Errorf("%s %s: %d %s", method, path, code, e.Code)
			}
		}
	}
	if code, _ := turnedDown(t, handler, httptest.NewRequest(http.MethodPost, "/v1/nosuch", http.NoBody)); code != http.StatusNotFound {
		t.Errorf("a path that nobody serves: %d", code)
	}
}
