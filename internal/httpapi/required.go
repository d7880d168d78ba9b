package httpapi

import (
	"reflect"
	"strings"
)

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
