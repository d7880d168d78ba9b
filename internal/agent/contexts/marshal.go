package contexts

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"
)

// Python's marshal format, version 2, as far as the driver uses it: None, booleans, 32-bit integers, strings, bytes,
// tuples, dictionaries. In Go: nil, bool, int, number (encoding), string, []byte, []any, map[string]string (encoding) and []any of keys and
// values in turn (decoding).

type tuple []any

func appendValue(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, 'N')
	case bool:
		if v {
			return append(b, 'T')
		}
		return append(b, 'F')
	case int:
		return appendSize(append(b, 'i'), v)
	case string:
		return append(appendSize(append(b, 'u'), len(v)), v...)
	case []byte:
		return append(appendSize(append(b, 's'), len(v)), v...)
	case number:
		return v.append(b)
	case tuple:
		b = appendSize(append(b, '('), len(v))
		for _, e := range v {
			b = appendValue(b, e)
		}
		return b
	case map[string]string:
		if len(v) == 0 {
			return append(b, 'N')
		}
		b = append(b, '{')
		for key, value := range v {
			b = appendValue(appendValue(b, key), value)
		}
		return append(b, '0')
	default:
		panic(fmt.Sprintf("marshal: no encoding for %T", v)) // a bug of this package
	}
}

// number is a positive integer of any size, the lowest byte first.
type number []byte

// append writes digits of 15 bits, the lowest first, and no leading zeros.
func (n number) append(b []byte) []byte {
	at := len(b)
	b = appendSize(append(b, 'l'), 0)
	var bits, have uint32
	digits, significant := 0, 0
	for i := 0; i < len(n) || have > 0; {
		for have < 15 && i < len(n) {
			bits |= uint32(n[i]) << have
			have += 8
			i++
		}
		digit := bits & (1<<15 - 1)
		b = binary.LittleEndian.AppendUint16(b, uint16(digit))
		digits++
		if digit != 0 {
			significant = digits
		}
		bits >>= 15
		have -= min(have, 15)
	}
	b = b[:len(b)-2*(digits-significant)]
	binary.LittleEndian.PutUint32(b[at+1:], uint32(significant))
	return b
}

func appendSize(b []byte, n int) []byte { return binary.LittleEndian.AppendUint32(b, uint32(int32(n))) }

var errMarshal = errors.New("malformed message from the interpreter")

// maxDepth bounds the nesting of what the interpreter sends; user code can write into the channel too.
const maxDepth = 8

// parseValue decodes one value and returns what follows it.
func parseValue(b []byte, depth int) (any, []byte, error) {
	if len(b) == 0 || depth > maxDepth {
		return nil, nil, errMarshal
	}
	kind, b := b[0], b[1:]
	switch kind {
	case 'N':
		return nil, b, nil
	case 'T', 'F':
		return kind == 'T', b, nil
	case '{':
		return parseDict(b, depth)
	case 'i', 'u', 't', 's', '(':
	default:
		return nil, nil, errMarshal
	}
	if len(b) < 4 {
		return nil, nil, errMarshal
	}
	n, b := int(int32(binary.LittleEndian.Uint32(b))), b[4:]
	if kind == 'i' {
		return n, b, nil
	}
	// Every element takes a byte at least, so a count that is larger than the rest is a lie.
	if n < 0 || n > len(b) {
		return nil, nil, errMarshal
	}
	switch kind {
	case 'u', 't':
		return validText(b[:n]), b[n:], nil
	case 's':
		return append([]byte(nil), b[:n]...), b[n:], nil
	}
	list := make(tuple, 0, min(n, 64))
	for range n {
		var v any
		var err error
		if v, b, err = parseValue(b, depth+1); err != nil {
			return nil, nil, err
		}
		list = append(list, v)
	}
	return list, b, nil
}

func parseDict(b []byte, depth int) (any, []byte, error) {
	list := tuple{}
	for {
		if len(b) > 0 && b[0] == '0' && len(list)%2 == 0 {
			return list, b[1:], nil
		}
		v, rest, err := parseValue(b, depth+1)
		if err != nil {
			return nil, nil, err
		}
		list, b = append(list, v), rest
	}
}

// validText makes a string of Python's encoding, which lets lone surrogates through.
func validText(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	return string([]rune(string(b)))
}

// appendMessage makes a request. Its own length comes first in it.
func appendMessage(b []byte, op string, sequence int, args tuple) []byte {
	at := len(b)
	b = appendSize(append(b, '('), 4)
	b = appendSize(append(b, 'i'), 0)
	b = appendValue(b, op)
	b = appendValue(b, sequence)
	b = appendValue(b, args)
	binary.LittleEndian.PutUint32(b[at+6:], uint32(len(b)-at))
	return b
}

// parseReply takes a reply apart. Its number is -1 if it is a result that comes before the reply.
func parseReply(b []byte) (sequence int, reply any, err error) {
	v, rest, err := parseValue(b, 0)
	if err != nil {
		return 0, nil, err
	}
	list, ok := v.(tuple)
	if !ok || len(list) != 2 || len(rest) != 0 {
		return 0, nil, errMarshal
	}
	sequence, ok = list[0].(int)
	if !ok || sequence < -1 || sequence > math.MaxInt32 {
		return 0, nil, errMarshal
	}
	return sequence, list[1], nil
}
