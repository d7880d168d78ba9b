package httpapi

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/host"
)

const (
	// maxBody bounds JSON bodies; files and code travel in streams, or in an eval's body.
	maxBody = 16 << 20
	// maxDepth bounds what is nested in them: no body of ours has more than three levels.
	maxDepth = 16
)

// decode reads one JSON object with known fields only, each once, and none of them null. An empty body is an empty object.
// The fields that v must have, and the bounds of their values, are told by v's tags.
func decode(w http.ResponseWriter, r *http.Request, v any) error {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return badBody(err)
	}
	if len(text) > 0 {
		if err := checkMedia(r.Header); err != nil {
			return err
		}
	}
	return decodeText(text, v)
}

// checkMedia allows a body that says nothing of itself.
func checkMedia(h http.Header) error {
	if encoding := h.Get("Content-Encoding"); encoding != "" && !strings.EqualFold(encoding, "identity") {
		return &api.Error{Code: api.CodeInvalid, Message: fmt.Sprintf("Content-Encoding is %.60q; send the body as it is", encoding)}
	}
	said := h.Get("Content-Type")
	if said == "" {
		return nil
	}
	media, params, err := mime.ParseMediaType(said)
	charset := params["charset"]
	if err == nil && media == "application/json" && (charset == "" || strings.EqualFold(charset, "utf-8")) {
		return nil
	}
	return &api.Error{
		Code: api.CodeInvalid, Message: fmt.Sprintf("Content-Type is %.100q; this route takes application/json", said),
		Hint: "with curl: -H 'Content-Type: application/json'",
	}
}

func decodeText(text []byte, v any) error {
	given := map[string]bool{}
	if len(text) > 0 { // blanks are no object
		var err error
		if given, err = scan(text); err != nil {
			return badBody(err)
		}
		if err := json.Unmarshal(text, v, json.RejectUnknownMembers(true)); err != nil {
			return badBody(err)
		}
	}
	return checkObject(reflect.ValueOf(v).Elem(), "", given)
}

// scan goes through a body before it is decoded. It returns what it gives, by JSON pointer, and finds what decoding would
// take for something else: null for a field that was left out.
func scan(text []byte) (given map[string]bool, err error) {
	given = map[string]bool{}
	d := jsontext.NewDecoder(bytes.NewReader(text))
	if k := d.PeekKind(); k != '{' && k != jsontext.KindInvalid {
		return nil, fmt.Errorf("it is %s", kindOf(k))
	}
	for {
		token, err := d.ReadToken()
		if err != nil {
			return nil, err
		}
		depth := d.StackDepth()
		kind, n := d.StackIndex(depth)
		switch {
		case depth == 0:
			if _, err := d.ReadToken(); !errors.Is(err, io.EOF) {
				return nil, errors.New("something follows the object")
			}
			return given, nil
		case depth > maxDepth:
			return nil, fmt.Errorf("nested deeper than %d levels", maxDepth)
		case token.Kind() == 'n':
			return nil, fmt.Errorf("%s is null; leave it out", where(d.StackPointer()))
		case kind == '{' && n%2 == 1: // a name
			given[string(d.StackPointer())] = true
		}
	}
}

func kindOf(k jsontext.Kind) string {
	switch k {
	case '"':
		return "a string"
	case '0':
		return "a number"
	case 't', 'f':
		return "true or false"
	case 'n':
		return "null"
	case '[', ']':
		return "an array"
	case '{', '}':
		return "an object"
	default:
		return "no JSON"
	}
}

// wanted says in a word what a field's type holds.
func wanted(t reflect.Type) string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		return "an array"
	case reflect.Map, reflect.Struct:
		return "an object"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return "a whole number"
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number, not a negative one"
	default:
		return "something else"
	}
}

func where(p jsontext.Pointer) string {
	var parts []string
	for token := range p.Tokens() {
		parts = append(parts, token)
	}
	return clip("field " + strings.Join(parts, "."))
}

// clip bounds what an error repeats of a request.
func clip(s string) string {
	const most = 120
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

func badBody(err error) error {
	e := &api.Error{Code: api.CodeInvalid, Hint: "send one JSON object with the documented fields: see /docs"}
	semantic, _ := errors.AsType[*json.SemanticError](err)
	syntactic, _ := errors.AsType[*jsontext.SyntacticError](err)
	tooBig, _ := errors.AsType[*http.MaxBytesError](err)
	switch {
	case tooBig != nil:
		e.Message, e.Hint = fmt.Sprintf("the body has more than %d bytes", tooBig.Limit), ""
	case errors.Is(err, json.ErrUnknownName):
		e.Message = "body: unknown " + where(semantic.JSONPointer)
	case errors.Is(err, jsontext.ErrDuplicateName):
		e.Message = "body: " + where(syntactic.JSONPointer) + " is given twice"
	case errors.Is(err, io.ErrUnexpectedEOF):
		e.Message = "body: it ends in the middle"
	case syntactic != nil:
		e.Message = fmt.Sprintf("body: no JSON at byte %d: %s", syntactic.ByteOffset, clip(syntactic.Err.Error()))
	case semantic != nil && semantic.GoType != nil:
		e.Message = fmt.Sprintf("body: %s cannot be %s; give %s", where(semantic.JSONPointer), valueOf(semantic), wanted(semantic.GoType))
	default:
		e.Message = "body: " + clip(err.Error())
	}
	return e
}

// valueOf is what was given, or its kind where that is the fault.
func valueOf(e *json.SemanticError) string {
	if e.JSONKind == '0' && len(e.JSONValue) > 0 && len(e.JSONValue) < 40 {
		return string(e.JSONValue)
	}
	return kindOf(e.JSONKind)
}

// checkObject holds what was given against the fields' tags: those that are required, minimum, maximum, enum, minLength,
// minItems. They are in the OpenAPI document as well. Patterns are there only: those of names are held against by what
// knows the names.
func checkObject(v reflect.Value, at string, given map[string]bool) error {
	for _, name := range required(v.Type()) {
		if !given[at+"/"+name] {
			return &api.Error{Code: api.CodeInvalid, Message: "body: " + where(jsontext.Pointer(at+"/"+name)) + " is missing"}
		}
	}
	return checkFields(v, at, given)
}

func checkFields(v reflect.Value, at string, given map[string]bool) error {
	t := v.Type()
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		in := reflect.Indirect(v.Field(i))
		var err error
		switch path := at + "/" + name; {
		case f.Anonymous && name == "" && in.Kind() == reflect.Struct:
			err = checkFields(in, at, given)
		case !given[path]:
		case in.Kind() == reflect.Struct:
			err = checkObject(in, path, given)
		default:
			err = checkField(strings.ReplaceAll(path[1:], "/", "."), f.Tag, in)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func checkField(name string, tag reflect.StructTag, v reflect.Value) error {
	if allowed := tag.Get("enum"); allowed != "" {
		choice := strings.Split(allowed, ",")
		if !slices.Contains(choice, v.String()) {
			return fmt.Errorf("%w: %s is %.40q; give %s", host.ErrInvalid, name, v.String(), orList(choice))
		}
	}
	if v.Kind() == reflect.String && v.Len() == 0 && tag.Get("minLength") != "" || v.Kind() == reflect.Slice && v.Len() == 0 && tag.Get("minItems") != "" {
		return fmt.Errorf("%w: %s is empty", host.ErrInvalid, name)
	}
	least, most := tag.Get("minimum"), tag.Get("maximum")
	if least == "" && most == "" {
		return nil
	}
	n, text := numberOf(v)
	if low, err := strconv.ParseFloat(least, 64); err == nil && n < low {
		return fmt.Errorf("%w: %s is %s; the least is %s", host.ErrInvalid, name, text, least)
	}
	if high, err := strconv.ParseFloat(most, 64); err == nil && n > high {
		return fmt.Errorf("%w: %s is %s; the most is %s", host.ErrInvalid, name, text, most)
	}
	return nil
}

func numberOf(v reflect.Value) (float64, string) {
	switch {
	case v.CanInt():
		return float64(v.Int()), strconv.FormatInt(v.Int(), 10)
	case v.CanUint():
		return float64(v.Uint()), strconv.FormatUint(v.Uint(), 10)
	}
	return v.Float(), strconv.FormatFloat(v.Float(), 'g', -1, 64)
}

// orList is "a, b or c".
func orList(all []string) string {
	last := len(all) - 1
	if last < 1 {
		return strings.Join(all, "")
	}
	return strings.Join(all[:last], ", ") + " or " + all[last]
}

// required are the names in JSON of the fields that a body must have: those whose zero value is not left out.
func required(t reflect.Type) []string {
	var names []string
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	for f := range t.Fields() {
		tag := f.Tag.Get("json")
		name, options, _ := strings.Cut(tag, ",")
		switch {
		case !f.IsExported() || tag == "-":
		case f.Anonymous && name == "":
			names = append(names, required(f.Type)...)
		case !strings.Contains(options, "omitempty") && !strings.Contains(options, "omitzero"):
			names = append(names, name)
		}
	}
	return names
}
