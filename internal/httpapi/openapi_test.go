package httpapi

import (
	"bytes"
	"encoding/json"
	flags "flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
)

var update = flags.Bool("update", false, "write the golden files")

const openAPIFile = "../../api/openapi.json"

// TestOpenAPI: the document that is served is what the table and the types say. `make generate` writes it.
func TestOpenAPI(t *testing.T) {
	got := generate(t)
	if *update {
		if err := os.WriteFile(openAPIFile, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(got, api.OpenAPI) {
		t.Error("api/openapi.json is not what the operations and types say; write it with: make generate")
	}
}

// TestEveryRouteHasADocument keeps the two tables in step.
func TestEveryRouteHasADocument(t *testing.T) {
	all := documents()
	ids := map[string]string{}
	for _, op := range (&Server{}).operations() {
		if op.pattern == "/" {
			continue
		}
		d := all[op.pattern]
		if d == nil {
			t.Errorf("%s has no document: give it one in documents.go", op.pattern)
			continue
		}
		delete(all, op.pattern)
		if d.id == "" || len(d.replies) == 0 {
			t.Errorf("%s: a document has an id and replies", op.pattern)
		}
		if other := ids[d.id]; other != "" {
			t.Errorf("%s and %s are both %s", op.pattern, other, d.id)
		}
		ids[d.id] = op.pattern
		if op.summary == "" {
			t.Errorf("%s has no summary", op.pattern)
		}
	}
	for pattern := range all {
		t.Errorf("%s has a document and is no route", pattern)
	}
}

// The OpenAPI document, as far as we use it.
type (
	object = map[string]any
	array  = []any
)

func generate(t *testing.T) []byte {
	t.Helper()
	g := &generator{
		t: t, registry: huma.NewMapRegistry("#/components/schemas/", huma.DefaultSchemaNamer), comments: comments(t), types: map[string]reflect.Type{},
	}
	g.arrays()
	paths := map[string]object{}
	docs := documents()
	for _, op := range (&Server{}).operations() {
		d := docs[op.pattern]
		if d == nil || strings.HasSuffix(op.pattern, "...}") && !d.raw {
			continue
		}
		method, path, one := strings.Cut(strings.TrimSuffix(op.pattern, "{$}"), " ")
		if !one { // any, of which a document needs one
			method, path = http.MethodGet, strings.ReplaceAll(op.pattern, "...", "")
		}
		if paths[path] == nil {
			paths[path] = object{}
		}
		paths[path][strings.ToLower(method)] = g.operation(path, op, d)
	}
	schemas := g.components()
	var doc struct { // in the order in which people read it
		OpenAPI    string            `json:"openapi"`
		Info       object            `json:"info"`
		Servers    array             `json:"servers"`
		Security   array             `json:"security"`
		Tags       array             `json:"tags"`
		Paths      map[string]object `json:"paths"`
		Components object            `json:"components"`
	}
	doc.OpenAPI = "3.1.0"
	doc.Info = object{
		"title": "forkd", "version": api.Version, "license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"},
		"description": "Snapshots of warm machines, and sandboxes forked from them. Errors have one shape, and a code that decides the status.",
	}
	doc.Servers, doc.Security = array{object{"url": "/"}}, array{object{"token": array{}}}
	doc.Tags, doc.Paths = tags(), paths
	doc.Components = object{"schemas": schemas, "responses": object{"Error": errorResponse()}, "securitySchemes": securitySchemes()}
	text, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(text, '\n')
}

func securitySchemes() object {
	return object{"token": object{
		"type": "http", "scheme": "bearer",
		"description": "Of `forkd token create`. On the unix socket of the daemon's owner none is needed.",
	}}
}

func errorResponse() object {
	return object{
		"description": "A refusal, or a failure.",
		"content":     object{"application/json": object{"schema": object{"$ref": "#/components/schemas/Error"}}},
	}
}

type generator struct {
	t        *testing.T
	registry huma.Registry
	comments map[string]string // of "Type" and "Type.field"
	types    map[string]reflect.Type
}

// arrays: our lists are never null.
func (g *generator) arrays() {
	before := huma.DefaultArrayNullable
	huma.DefaultArrayNullable = false
	g.t.Cleanup(func() { huma.DefaultArrayNullable = before })
}

func (g *generator) operation(path string, op operation, d *document) object {
	o := object{"operationId": d.id, "summary": op.summary, "tags": array{tagOf(path)}, "x-forkd-scope": op.scope.String()}
	if d.about != "" {
		o["description"] = d.about
	}
	var parameters array
	for _, m := range regexp.MustCompile(`{(\w+)}`).FindAllStringSubmatch(path, -1) {
		parameters = append(parameters, pathParameter(path, m[1]))
	}
	for _, p := range d.query {
		parameters = append(parameters, parameterObject("query", p))
	}
	for _, p := range headersOf(d) {
		parameters = append(parameters, parameterObject("header", p))
	}
	if parameters != nil {
		o["parameters"] = parameters
	}
	if body := g.requestBody(d); body != nil {
		o["requestBody"] = body
	}
	replies := object{}
	for _, r := range d.replies {
		g.response(replies, r)
	}
	if reply, ok := replies["200"].(object); ok && slices.ContainsFunc(d.query, func(p parameter) bool { return p.name == "cursor" }) {
		reply["headers"] = pageHeaders()
	}
	for _, status := range refusals(op, path, d) {
		replies[fmt.Sprint(status)] = object{"$ref": "#/components/responses/Error"}
	}
	if d.socket != nil {
		var messages array
		for _, m := range d.socket {
			said := object{"from": m.from, "kind": "text", "description": m.about, "contentMediaType": "application/json"}
			if m.of == nil {
				said["kind"], said["contentMediaType"] = "binary", bytesType
			}
			said["schema"] = g.schema(m.of)
			messages = append(messages, said)
		}
		o["x-forkd-messages"] = messages
	}
	if op.scope == access.None {
		o["security"] = array{}
	}
	replies["default"] = object{"$ref": "#/components/responses/Error"}
	o["responses"] = replies
	return o
}

func pageHeaders() object {
	text := object{"type": "string"}
	return object{
		nextCursor: object{"description": "The cursor of the next page, if there is one.", "schema": text},
		"Link":     object{"description": "The next page, as rel=next.", "schema": text},
	}
}

// headersOf are those of an operation with the one that it may have in common with others.
func headersOf(d *document) []parameter {
	if !d.once {
		return d.headers
	}
	return append(slices.Clone(d.headers), parameter{
		name: idempotencyKey, pattern: fmt.Sprintf("^[ -~]{1,%d}$", maxKey),
		about: "What is asked again with its key, by the same principal and within a day, is not done again: the reply is the first one's, " +
			"with Idempotent-Replayed. 409 while that is being served; 400, key_reused, for another request.",
	})
}

// refusals are the statuses that follow from what an operation takes; every other is the default.
func refusals(op operation, path string, d *document) []int {
	all := []int{http.StatusBadRequest}
	if op.scope != access.None {
		all = append(all, http.StatusUnauthorized, http.StatusForbidden)
	}
	if strings.Contains(path, "{") {
		all = append(all, http.StatusNotFound)
	}
	return all
}

func (g *generator) response(into object, r response) {
	status := fmt.Sprint(r.status)
	out, _ := into[status].(object)
	if out == nil {
		about := r.about
		if about == "" {
			about = http.StatusText(r.status)
		}
		out = object{"description": about}
		into[status] = out
	}
	media := r.media
	if media == "" && r.of != nil {
		media = "application/json"
	}
	if media == "" {
		return
	}
	content, _ := out["content"].(object)
	if content == nil {
		content = object{}
		out["content"] = content
	}
	content[media] = object{"schema": g.schema(r.of)}
}

func (g *generator) requestBody(d *document) object {
	content := object{}
	if d.body != nil {
		content["application/json"] = object{"schema": g.schema(d.body)}
	}
	for _, media := range d.media {
		content[media] = object{"schema": object{}}
		if media == "multipart/form-data" {
			file := object{"type": "string", "contentMediaType": bytesType}
			content[media] = object{"schema": object{"type": "object", "properties": object{"file": object{
				"anyOf": []object{file, {"type": "array", "items": file}}, // a form with one is the same as a form with a list of one
			}}}}
		}
	}
	if len(content) == 0 {
		return nil
	}
	return object{"content": content, "required": d.body == nil || len(required(reflect.TypeOf(d.body))) > 0}
}

// schema of a value's type. nil: bytes.
func (g *generator) schema(of any) any {
	if of == nil {
		return object{}
	}
	t := reflect.TypeOf(of)
	g.note(t)
	if t == reflect.TypeFor[struct{}]() {
		return object{"type": "object", "additionalProperties": false}
	}
	return g.registry.Schema(t, true, "")
}

// note remembers the types that schemas are named after.
func (g *generator) note(t reflect.Type) {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		g.note(t.Elem())
	case reflect.Struct:
		if g.types[t.Name()] != nil || t.PkgPath() != reflect.TypeFor[api.Error]().PkgPath() {
			return
		}
		g.types[t.Name()] = t
		for f := range t.Fields() {
			g.note(f.Type)
		}
	default:
	}
}

// components are the named schemas, with the comments that the types have in the source.
func (g *generator) components() object {
	g.schema(api.Error{})
	requests := map[string]bool{}
	for _, d := range documents() {
		if d.body != nil {
			mark(requests, reflect.TypeOf(d.body))
		}
	}
	out := object{}
	for name, s := range g.registry.Map() {
		g.describe(name, s)
		if !requests[name] {
			s.AdditionalProperties = nil // a later version's replies may have more
		}
		out[name] = plainSchema(g.t, s)
	}
	return out
}

func mark(names map[string]bool, t reflect.Type) {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		mark(names, t.Elem())
	case reflect.Struct:
		names[t.Name()] = true
		for f := range t.Fields() {
			mark(names, f.Type)
		}
	default:
	}
}

// describe adds comments, and puts those of a field that refers to a type beside the reference.
func (g *generator) describe(name string, s *huma.Schema) {
	s.Description = g.comments[name]
	for property, p := range s.Properties {
		if text := g.comment(g.types[name], property); text != "" {
			p.Description = text
		}
	}
}

// comment of the field that has this name in JSON, also of an embedded type's.
func (g *generator) comment(t reflect.Type, property string) string {
	if t == nil {
		return ""
	}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" {
			in := f.Type
			if in.Kind() == reflect.Pointer {
				in = in.Elem()
			}
			if text := g.comment(in, property); text != "" {
				return text
			}
		}
		if name == property {
			return g.comments[t.Name()+"."+f.Name]
		}
	}
	return ""
}

// plainSchema is a schema without what only Go's side knows.
func plainSchema(t *testing.T, s *huma.Schema) object {
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var out object
	if err := json.Unmarshal(text, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func pathParameter(path, name string) object {
	what := map[string]string{
		"tag": "A snapshot's tag.", "id": "A sandbox's id.", "ctx": "A context's id.", "process": "A process's pid, or its tag.",
		"watcher": "A watcher's id.", "name": "A name.",
	}[name]
	if name == "id" && !strings.Contains(path, "/sandboxes/") {
		what = "An id."
	}
	schema := object{"type": "string", "minLength": 1}
	if name == "name" {
		schema["pattern"] = tagPattern
	}
	return object{"name": name, "in": "path", "required": true, "description": what, "schema": schema}
}

func parameterObject(in string, p parameter) object {
	var schema object
	switch p.kind {
	case boolean:
		schema = object{"type": "boolean"}
	case integer:
		schema = object{"type": "integer", "format": "int64"}
	case number:
		schema = object{"type": "number", "format": "double"}
	case text:
		schema = object{"type": "string"}
	}
	if !p.unbounded() {
		schema["minimum"], schema["maximum"] = p.least, p.most
	}
	if p.pattern != "" {
		schema["pattern"] = p.pattern
	}
	if len(p.oneOf) > 0 {
		schema["enum"] = p.oneOf
	}
	o := object{"name": p.name, "in": in, "description": p.about, "schema": schema}
	if p.required {
		o["required"] = true
	}
	if p.repeated {
		o["schema"], o["explode"] = object{"type": "array", "items": schema}, true
	}
	return o
}

var sections = []struct{ name, about string }{
	{"host", "The daemon and what it runs on."},
	{"snapshots", "Frozen machines, the images they stand on, and what makes them."},
	{"sandboxes", "Machines forked from snapshots."},
	{"processes", "Commands and processes in a sandbox."},
	{"contexts", "Interpreters with a state."},
	{"files", "A sandbox's files."},
}

func tags() array {
	var out array
	for _, s := range sections {
		out = append(out, object{"name": s.name, "description": s.about})
	}
	return out
}

func tagOf(path string) string {
	_, sub, _ := strings.Cut(path, "/sandboxes/{id}/")
	switch {
	case strings.HasPrefix(sub, "files"):
		return "files"
	case strings.HasPrefix(sub, "contexts"), sub == "eval":
		return "contexts"
	case strings.HasPrefix(sub, "processes"), sub == "exec", sub == "call":
		return "processes"
	case strings.HasPrefix(path, "/v1/sandboxes"), strings.HasPrefix(path, "/v1/workspaces"):
		return "sandboxes"
	case strings.HasPrefix(path, "/v1/snapshots"), strings.HasPrefix(path, "/v1/images"), path == "/v1/builds", path == "/v1/tree":
		return "snapshots"
	}
	return "host"
}

// comments are those of the types of package api, and of their fields.
func comments(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	files, err := fs.Glob(os.DirFS("../../api"), "*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join("../../api", name), nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			decl, ok := n.(*ast.GenDecl)
			if !ok {
				return true
			}
			for _, spec := range decl.Specs {
				if ts, ok := spec.(*ast.TypeSpec); ok {
					doc := decl.Doc
					if ts.Doc != nil {
						doc = ts.Doc
					}
					out[ts.Name.Name] = sentence(doc)
					fields(out, ts)
				}
			}
			return true
		})
	}
	return out
}

func fields(out map[string]string, ts *ast.TypeSpec) {
	st, ok := ts.Type.(*ast.StructType)
	if !ok {
		return
	}
	for _, f := range st.Fields.List {
		for _, name := range f.Names {
			out[ts.Name.Name+"."+name.Name] = sentence(f.Comment)
		}
	}
}

func sentence(c *ast.CommentGroup) string {
	return strings.Join(strings.Fields(c.Text()), " ")
}

// TestDocumentIsWhole: what the document refers to is in it.
func TestDocumentIsWhole(t *testing.T) {
	var doc any
	if err := json.Unmarshal(api.OpenAPI, &doc); err != nil {
		t.Fatal(err)
	}
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case object:
			if ref, ok := v["$ref"].(string); ok && lookUp(doc, ref) == nil {
				t.Errorf("%s is not in the document", ref)
			}
			for _, k := range slices.Sorted(maps.Keys(v)) {
				walk(v[k])
			}
		case array:
			for _, e := range v {
				walk(e)
			}
		}
	}
	walk(doc)
}

func lookUp(doc any, ref string) any {
	for part := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
		o, ok := doc.(object)
		if !ok {
			return nil
		}
		doc = o[part]
	}
	return doc
}
