package contexts

import (
	"encoding/json"
	"strconv"

	"forkd.dev/forkd/internal/guest/wire"
)

// dialect is how the agent and the driver of a language write to each other. The protocol is that of docs/contexts.md;
// Python has its own encoding of it, and a shell only answers in it.
type dialect interface {
	// evaluate, facts, renew and ack append a request.
	evaluate(b []byte, sequence, count int, req *wire.EvalRequest, late bool) []byte
	facts(b []byte, sequence int, search bool) []byte
	renew(b []byte, sequence int, seed []byte, env map[string]string, ahead bool) []byte
	ack(b []byte) []byte
	// again follows a renewal on a clock that was ahead, when it is right once more.
	again(b []byte, sequence int) []byte
	// parse takes a message of the driver apart. It is a copy.
	parse(frame []byte) (message, error)
	// What the replies to requests say.
	fill(result *wire.EvalResult, reply any) error
	factsOf(reply any) *facts
	renewed(reply any) (done []string, failed []failure, err error)
}

// message is what a driver sends: the reply to the request of a number, or something on the way to it.
type message struct {
	sequence int // -1: not a reply
	reply    any
	result   *wire.Result // shown by the code
	wait     bool         // the driver waits until what it sent and printed has arrived
}

// failure is a random state that could not be renewed.
type failure struct{ name, why string }

// marshalled is Python's.
type marshalled struct{}

func (marshalled) evaluate(b []byte, sequence, count int, req *wire.EvalRequest, late bool) []byte {
	return appendMessage(b, "eval", sequence, tuple{"<eval " + strconv.Itoa(count) + ">", req.Code, expression(req.Code), req.Env, late})
}

func (marshalled) facts(b []byte, sequence int, search bool) []byte {
	return appendMessage(b, "facts", sequence, tuple{search})
}

func (marshalled) renew(b []byte, sequence int, seed []byte, env map[string]string, _ bool) []byte {
	return appendMessage(b, "renew", sequence, tuple{
		number(seed[:forRandom]), seed[forRandom+forOpenSSL:], seed[forRandom : forRandom+forOpenSSL], env,
	})
}

func (marshalled) ack(b []byte) []byte { return appendMessage(b, "ack", 0, tuple{}) }

func (marshalled) again(b []byte, _ int) []byte { return b }

func (marshalled) parse(frame []byte) (message, error) {
	n, reply, err := parseReply(frame)
	if err != nil || n >= 0 {
		return message{sequence: n, reply: reply}, err
	}
	result, err := shown(reply)
	return message{sequence: n, result: result, wait: true}, err
}

// shown makes a result of the driver's: representations, other MIME types, whether it is the main one, what was omitted.
func shown(v any) (*wire.Result, error) {
	fields, ok := v.(tuple)
	if !ok || len(fields) < 4 {
		return nil, errMarshal
	}
	data, ok1 := fields[0].(tuple)
	extra, ok2 := fields[1].(tuple)
	isMain, ok3 := fields[2].(bool)
	omitted, ok4 := fields[3].(tuple)
	if !ok1 || !ok2 || !ok3 || !ok4 {
		return nil, errMarshal
	}
	r := &wire.Result{Main: isMain}
	for name, value := range pairs(data) {
		setRepresentation(r, name, value)
	}
	for name, value := range pairs(extra) {
		if r.Extra == nil {
			r.Extra = map[string]json.RawMessage{}
		}
		r.Extra[name] = valid(value)
	}
	for _, o := range omitted {
		if o, ok := o.(tuple); ok && len(o) == 3 {
			format, _ := o[0].(string)
			size, _ := o[1].(int)
			limit, _ := o[2].(int)
			r.Omitted = append(r.Omitted, wire.Omitted{Format: format, Bytes: int64(size), Limit: int64(limit)})
		}
	}
	return r, nil
}

// pairs are the strings of a dictionary.
func pairs(list tuple) func(yield func(k, v string) bool) {
	return func(yield func(k, v string) bool) {
		for i := 0; i+1 < len(list); i += 2 {
			k, ok1 := list[i].(string)
			v, ok2 := list[i+1].(string)
			if ok1 && ok2 && !yield(k, v) {
				return
			}
		}
	}
}

func setRepresentation(r *wire.Result, name, value string) {
	switch name {
	case "text":
		r.Text = value
	case "html":
		r.HTML = value
	case "markdown":
		r.Markdown = value
	case "svg":
		r.SVG = value
	case "png":
		r.PNG = value
	case "jpeg":
		r.JPEG = value
	case "pdf":
		r.PDF = value
	case "latex":
		r.LaTeX = value
	case "javascript":
		r.JavaScript = value
	case "json":
		r.JSON = valid(value)
	case "data":
		r.Data = valid(value)
	case "chart":
		r.Chart = valid(value)
	}
}

// valid is JSON as it is, and anything else as a string.
func valid(text string) json.RawMessage {
	if json.Valid([]byte(text)) {
		return json.RawMessage(text)
	}
	b, _ := json.Marshal(text) //nolint:errchkjson // a string
	return b
}

func (marshalled) fill(result *wire.EvalResult, reply any) error { return fill(result, reply) }

func (marshalled) factsOf(reply any) *facts { return parseFacts(reply) }

func (marshalled) renewed(reply any) (done []string, failed []failure, err error) {
	fields, ok := reply.(tuple)
	if !ok || len(fields) < 2 {
		return nil, nil, errMarshal
	}
	names, ok1 := fields[0].(tuple)
	failures, ok2 := fields[1].(tuple)
	if !ok1 || !ok2 {
		return nil, nil, errMarshal
	}
	for _, v := range names {
		name, _ := v.(string)
		done = append(done, name)
	}
	for _, v := range failures {
		f, ok := v.(tuple)
		if !ok || len(f) != 2 {
			return nil, nil, errMarshal
		}
		name, _ := f[0].(string)
		why, _ := f[1].(string)
		failed = append(failed, failure{name, why})
	}
	return done, failed, nil
}
