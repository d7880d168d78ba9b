package contexts

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strconv"

	"forkd.dev/forkd/internal/guest/wire"
)

// spoken is the protocol of docs/contexts.md in JSON: each message after its length, 4 bytes big-endian.
type spoken struct{}

// request is a message to a driver.
type request struct {
	Op       string            `json:"op"`
	ID       int               `json:"id,omitempty"`
	Name     string            `json:"name,omitempty"`
	Code     *string           `json:"code,omitempty"`
	Language string            `json:"language,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
	Late     bool              `json:"late,omitempty"`
	Search   bool              `json:"search,omitempty"`
	Seed     string            `json:"seed,omitempty"`
	Ahead    bool              `json:"ahead,omitempty"`
	Again    bool              `json:"again,omitempty"`
}

// answer is a message of a driver.
type answer struct {
	ID      int             `json:"id"`
	Ready   *ready          `json:"ready"`
	Result  *wire.Result    `json:"result"`
	Sync    bool            `json:"sync"`
	Text    *string         `json:"text"`
	Error   *wire.EvalError `json:"error"`
	Status  *int            `json:"status"`
	Facts   []fact          `json:"facts"`
	Renewed []string        `json:"renewed"`
	Failed  []fact          `json:"failed"`
}

// ready is a driver's first message.
type ready struct {
	Version string   `json:"version"`
	Ops     []string `json:"ops"`   // besides eval: "facts", "renew"
	Clock   bool     `json:"clock"` // renew wants the clock ahead
}

type fact struct {
	What string `json:"what"`
	Name string `json:"name"`
	Why  string `json:"why"`
}

func appendFrame(b []byte, r *request) []byte {
	text, err := json.Marshal(r)
	if err != nil {
		panic(fmt.Sprintf("encode a request to a driver: %v", err)) // strings and numbers
	}
	b = binary.BigEndian.AppendUint32(b, uint32(len(text)))
	return append(b, text...)
}

func (spoken) evaluate(b []byte, sequence, count int, req *wire.EvalRequest, late bool) []byte {
	language := ""
	if !req.Compiled && req.Language == typescript {
		language = typescript
	}
	return appendFrame(b, &request{
		Op: "eval", ID: sequence, Name: "<eval " + strconv.Itoa(count) + ">", Code: &req.Code, Language: language, Env: req.Env, Late: late,
	})
}

func (spoken) facts(b []byte, sequence int, search bool) []byte {
	return appendFrame(b, &request{Op: "facts", ID: sequence, Search: search})
}

func (spoken) renew(b []byte, sequence int, seed []byte, env map[string]string, ahead bool) []byte {
	return appendFrame(b, &request{Op: "renew", ID: sequence, Seed: base64.StdEncoding.EncodeToString(seed[:forRandom+forOpenSSL]), Env: env, Ahead: ahead})
}

func (spoken) ack(b []byte) []byte { return appendFrame(b, &request{Op: "ack"}) }

func (spoken) again(b []byte, sequence int) []byte {
	return appendFrame(b, &request{Op: "renew", ID: sequence, Again: true})
}

func (spoken) parse(frame []byte) (message, error) {
	a := &answer{}
	if err := json.Unmarshal(frame, a); err != nil {
		return message{}, errMarshal
	}
	if a.Result != nil || a.Sync {
		return message{sequence: -1, result: a.Result, wait: a.Sync}, nil
	}
	return message{sequence: a.ID, reply: a}, nil
}

func (spoken) fill(result *wire.EvalResult, reply any) error {
	a, ok := reply.(*answer)
	if !ok {
		return errMarshal
	}
	result.Text, result.Error, result.ExitCode = a.Text, a.Error, a.Status
	if a.Status != nil && *a.Status != 0 && a.Error == nil {
		result.Error = &wire.EvalError{Name: wire.ErrorExitStatus, Value: strconv.Itoa(*a.Status)}
	}
	return nil
}

func (spoken) factsOf(reply any) *facts {
	a, ok := reply.(*answer)
	if !ok {
		return nil
	}
	return &facts{others: a.Facts, searched: true}
}

func (spoken) renewed(reply any) (done []string, failed []failure, err error) {
	a, ok := reply.(*answer)
	if !ok {
		return nil, nil, errMarshal
	}
	for _, f := range a.Failed {
		failed = append(failed, failure{f.Name, f.Why})
	}
	return a.Renewed, failed, nil
}
