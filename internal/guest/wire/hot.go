package wire

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"time"
	"unicode/utf8"
)

// The messages on the way from a fork to its first answer are encoded and decoded here by hand, in the guest at least:
// there, everything runs for the first time on a cold translation cache, and encoding/json with its reflection came to
// a tenth of the time. The format stays JSON: whatever does not fit the fast way is left to encoding/json, and tests
// hold the two against each other.

// appender is a message that encodes itself.
type appender interface {
	appendJSON(b []byte) []byte
}

// parser is a message that decodes itself. False: try encoding/json.
type parser interface {
	parseJSON(b []byte) bool
}

// Encode is the JSON of a message.
func Encode(v any) ([]byte, error) {
	if a, ok := v.(appender); ok {
		return a.appendJSON(make([]byte, 0, 512)), nil
	}
	return json.Marshal(v)
}

// Decode reads the JSON of a message into v, a pointer to its zero value. It refuses what would become out of proportion.
func Decode(b []byte, v any) error {
	if p, ok := v.(parser); ok && p.parseJSON(b) {
		return nil
	}
	if err := plausible(b, v); err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return errors.New(Cut(err.Error(), maxJSONError)) // it quotes what it could not read
	}
	return nil
}

func (h *Hello) appendJSON(b []byte) []byte {
	b = append(b, `{"version":`...)
	b = strconv.AppendInt(b, int64(h.Version), 10)
	b = append(b, `,"agent":`...)
	b = appendString(b, h.Agent)
	b = append(b, `,"features":`...)
	b = appendStrings(b, h.Features)
	b = append(b, `,"generation":`...)
	b = strconv.AppendUint(b, h.Generation, 10)
	b = append(b, `,"bootId":`...)
	b = appendString(b, h.BootID)
	b = append(b, `,"phase":`...)
	b = appendString(b, h.Phase)
	if h.Awakened != nil {
		b = append(b, `,"awakened":`...)
		b = h.Awakened.appendJSON(b)
	}
	if e := h.Refusal; e != nil {
		b = append(b, `,"refusal":{"code":`...)
		b = appendString(b, e.Code)
		b = append(b, `,"message":`...)
		b = appendString(b, e.Message)
		b = append(b, '}')
	}
	return append(b, '}')
}

func (r *AwakenReport) appendJSON(b []byte) []byte {
	b = append(b, `{"renewed":`...)
	b = appendStrings(b, r.Renewed)
	if len(r.NotRenewed) > 0 {
		b = append(b, `,"notRenewed":[`...)
		for i := range r.NotRenewed {
			if i > 0 {
				b = append(b, ',')
			}
			b = r.NotRenewed[i].append(b)
		}
		b = append(b, ']')
	}
	if r.Severed != 0 {
		b = append(b, `,"severed":`...)
		b = strconv.AppendInt(b, int64(r.Severed), 10)
	}
	b = append(b, `,"ms":`...)
	b = appendMS(b, r.MS)
	return append(b, '}')
}

func (n *NotRenewed) append(b []byte) []byte {
	b = append(b, `{"what":`...)
	b = appendString(b, n.What)
	if n.PID != 0 {
		b = append(b, `,"pid":`...)
		b = strconv.AppendInt(b, int64(n.PID), 10)
	}
	b = append(b, `,"name":`...)
	b = appendString(b, n.Name)
	b = append(b, `,"why":`...)
	b = appendString(b, n.Why)
	return append(b, '}')
}

func (r *EvalResult) appendJSON(b []byte) []byte {
	b = append(b, '{')
	if r.Text != nil {
		b = append(b, `"text":`...)
		b = appendString(b, *r.Text)
		b = append(b, ',')
	}
	if e := r.Error; e != nil {
		b = append(b, `"error":{"name":`...)
		b = appendString(b, e.Name)
		b = append(b, `,"value":`...)
		b = appendString(b, e.Value)
		b = append(b, `,"traceback":`...)
		b = appendString(b, e.Traceback)
		b = append(b, `},`...)
	}
	b = append(b, `"executionCount":`...)
	b = strconv.AppendInt(b, int64(r.ExecutionCount), 10)
	b = append(b, `,"ms":`...)
	b = appendMS(b, r.MS)
	if r.ExitCode != nil {
		b = append(b, `,"exitCode":`...)
		b = strconv.AppendInt(b, int64(*r.ExitCode), 10)
	}
	return append(b, '}')
}

// Identity is /run/forkd/identity.json in a sandbox, by which its programs learn who they are.
type Identity struct {
	SandboxID   string    `json:"sandboxId"`
	ForkIndex   int       `json:"forkIndex"`
	ForkCount   int       `json:"forkCount"`
	SnapshotTag string    `json:"snapshotTag"`
	Hostname    string    `json:"hostname"`
	Generation  uint64    `json:"generation"`
	CreatedAt   time.Time `json:"createdAt"`
}

func (d *Identity) appendJSON(b []byte) []byte {
	b = append(b, `{"sandboxId":`...)
	b = appendString(b, d.SandboxID)
	b = append(b, `,"forkIndex":`...)
	b = strconv.AppendInt(b, int64(d.ForkIndex), 10)
	b = append(b, `,"forkCount":`...)
	b = strconv.AppendInt(b, int64(d.ForkCount), 10)
	b = append(b, `,"snapshotTag":`...)
	b = appendString(b, d.SnapshotTag)
	b = append(b, `,"hostname":`...)
	b = appendString(b, d.Hostname)
	b = append(b, `,"generation":`...)
	b = strconv.AppendUint(b, d.Generation, 10)
	b = append(b, `,"createdAt":"`...)
	b = appendTime(b, d.CreatedAt)
	return append(b, `"}`...)
}

// appendTime writes RFC 3339 in UTC with nanoseconds.
func appendTime(b []byte, t time.Time) []byte {
	t = t.UTC()
	year, month, day := t.Date()
	hour, minute, second := t.Clock()
	b = appendDigits(b, year, 4)
	b = append(b, '-')
	b = appendDigits(b, int(month), 2)
	b = append(b, '-')
	b = appendDigits(b, day, 2)
	b = append(b, 'T')
	b = appendDigits(b, hour, 2)
	b = append(b, ':')
	b = appendDigits(b, minute, 2)
	b = append(b, ':')
	b = appendDigits(b, second, 2)
	b = append(b, '.')
	b = appendDigits(b, t.Nanosecond(), 9)
	return append(b, 'Z')
}

func appendDigits(b []byte, n, width int) []byte {
	at := len(b)
	for range width {
		b = append(b, '0')
	}
	for i := at + width - 1; i >= at; i-- {
		b[i] = byte('0' + n%10)
		n /= 10
	}
	return b
}

// appendMS writes milliseconds to the microsecond, without the code that formats any float.
func appendMS(b []byte, ms float64) []byte {
	us := int64(ms*1000 + 0.5)
	b = strconv.AppendInt(b, us/1000, 10)
	if us %= 1000; us != 0 {
		b = append(b, '.')
		b = appendDigits(b, int(us), 3)
	}
	return b
}

func appendStrings(b []byte, list []string) []byte {
	if list == nil {
		return append(b, "null"...)
	}
	b = append(b, '[')
	for i, s := range list {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, s)
	}
	return append(b, ']')
}

// appendString quotes; bytes that are not UTF-8 become U+FFFD, as in encoding/json.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		size := 1
		if c >= utf8.RuneSelf {
			var r rune
			if r, size = utf8.DecodeRuneInString(s[i:]); r != utf8.RuneError || size > 1 {
				i += size
				continue
			}
		}
		b = append(b, s[from:i]...)
		switch {
		case c >= utf8.RuneSelf:
			b = append(b, "\ufffd"...)
		case c == '"', c == '\\':
			b = append(b, '\\', c)
		default:
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
		i += size
		from = i
	}
	b = append(b, s[from:]...)
	return append(b, '"')
}

// scanner reads the plain JSON that this program writes. It gives up, for encoding/json to take over, at everything
// else: white space, escapes beyond the usual, floats, other nesting, unknown keys.
type scanner struct {
	b      []byte
	failed bool
}

func (s *scanner) byte(c byte) bool {
	if s.failed || len(s.b) == 0 || s.b[0] != c {
		return false
	}
	s.b = s.b[1:]
	return true
}

func (s *scanner) need(c byte) {
	if !s.byte(c) {
		s.failed = true
	}
}

// object calls f with each key; f reads the value.
func (s *scanner) object(f func(key string)) {
	s.need('{')
	if s.byte('}') {
		return
	}
	for !s.failed {
		key := s.string()
		s.need(':')
		if s.failed {
			return
		}
		f(key)
		if s.byte('}') {
			return
		}
		s.need(',')
	}
}

func (s *scanner) string() string {
	s.need('"')
	if s.failed {
		return ""
	}
	for i, c := range s.b {
		switch {
		case c == '"':
			text := s.b[:i]
			s.b = s.b[i+1:]
			return s.text(text)
		case c == '\\':
			return s.escaped(i)
		case c < ' ':
			s.failed = true
			return ""
		}
	}
	s.failed = true
	return ""
}

// text is a string, if it is UTF-8.
func (s *scanner) text(b []byte) string {
	if !utf8.Valid(b) {
		s.failed = true
		return ""
	}
	return string(b)
}

// escaped goes on with a string at its first backslash.
func (s *scanner) escaped(at int) string {
	text := append([]byte(nil), s.b[:at]...)
	for i := at; i < len(s.b); i++ {
		c := s.b[i]
		switch {
		case c == '"':
			s.b = s.b[i+1:]
			return s.text(text)
		case c < ' ':
			s.failed = true
			return ""
		case c != '\\':
			text = append(text, c)
			continue
		}
		i++
		if i >= len(s.b) {
			break
		}
		switch s.b[i] {
		case '"', '\\', '/':
			text = append(text, s.b[i])
		case 'n':
			text = append(text, '\n')
		case 't':
			text = append(text, '\t')
		case 'r':
			text = append(text, '\r')
		case 'u':
			// encoding/json writes <, > and & so, and control characters.
			if i+4 >= len(s.b) || s.b[i+1] != '0' || s.b[i+2] != '0' {
				s.failed = true
				return ""
			}
			hi, lo := unhex(s.b[i+3]), unhex(s.b[i+4])
			if hi < 0 || hi > 7 || lo < 0 {
				s.failed = true
				return ""
			}
			text = append(text, byte(hi<<4|lo))
			i += 4
		default:
			s.failed = true
			return ""
		}
	}
	s.failed = true
	return ""
}

func unhex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	default:
		return -1
	}
}

// int reads any whole number an int64 can hold, but for the smallest.
func (s *scanner) int() int64 {
	negative := s.byte('-')
	var n int64
	i := 0
	for ; i < len(s.b) && s.b[i] >= '0' && s.b[i] <= '9'; i++ {
		digit := int64(s.b[i] - '0')
		if n > (math.MaxInt64-digit)/10 {
			s.failed = true
			return 0
		}
		n = n*10 + digit
	}
	if i == 0 || i > 1 && s.b[0] == '0' {
		s.failed = true
		return 0
	}
	s.b = s.b[i:]
	if negative {
		return -n
	}
	return n
}

func (s *scanner) bool() bool {
	for _, word := range []string{"true", "false"} {
		if !s.failed && len(s.b) >= len(word) && string(s.b[:len(word)]) == word {
			s.b = s.b[len(word):]
			return word == "true"
		}
	}
	s.failed = true
	return false
}

// stringMap reads an object of strings into m, which it makes when nil.
func (s *scanner) stringMap(m map[string]string) map[string]string {
	if m == nil {
		m = map[string]string{}
	}
	s.object(func(key string) { m[key] = s.string() })
	return m
}

// done reports whether all was read.
func (s *scanner) done() bool { return !s.failed && len(s.b) == 0 }

func (r *AwakenRequest) parseJSON(b []byte) bool {
	s := scanner{b: b}
	v := AwakenRequest{}
	s.object(func(key string) {
		switch key {
		case "sandboxId":
			v.SandboxID = s.string()
		case "snapshotTag":
			v.SnapshotTag = s.string()
		case "index":
			v.Index = int(s.int())
		case "count":
			v.Count = int(s.int())
		case "hostname":
			v.Hostname = s.string()
		case "machineId":
			v.MachineID = s.string()
		case "bootId":
			v.BootID = s.string()
		case "entropy":
			var err error
			v.Entropy, err = base64.StdEncoding.DecodeString(s.string())
			s.failed = s.failed || err != nil
		case "env":
			v.Env = s.stringMap(v.Env)
		case "sever":
			v.Sever = s.bool()
		default:
			s.failed = true
		}
	})
	if s.done() {
		*r = v
	}
	return s.done()
}

func (r *EvalRequest) parseJSON(b []byte) bool {
	s := scanner{b: b}
	v := EvalRequest{}
	s.object(func(key string) {
		switch key {
		case "context":
			v.Context = s.string()
		case "language":
			v.Language = s.string()
		case "code":
			v.Code = s.string()
		case "timeoutMs":
			v.TimeoutMS = s.int()
		case "env":
			v.Env = s.stringMap(v.Env)
		default:
			s.failed = true
		}
	})
	if s.done() {
		*r = v
	}
	return s.done()
}
