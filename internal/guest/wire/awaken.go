package wire

import (
	"encoding/binary"
	"io"
	"time"
)

// A fork's session may begin with its awakening, announced in the preamble: the request after its length, then, as often
// as the agent asks by an answer without a hello, the host's clock. The request is not JSON, and the file with the fork's
// identity is made by the host, because reading and writing both takes code that runs in no fork otherwise: 4 byte
// big-endian lengths and numbers, in this order: sandbox id, hostname, machine id, boot id, entropy, identity file,
// index, count, number of variables, and name and value of each. A number of options may follow; an agent from before there
// were any refuses the request then.

// maxAwaken bounds the request: environment, mostly.
const maxAwaken = MaxMessage

// optionSever is AwakenRequest.Sever. What is not known is refused, since it was asked for.
const optionSever = 1

// AppendAwaken adds a request to the beginning of a session.
func AppendAwaken(b []byte, r *AwakenRequest, identity []byte) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0)
	for _, s := range []string{r.SandboxID, r.Hostname, r.MachineID, r.BootID, string(r.Entropy), string(identity)} {
		b = appendField(b, s)
	}
	b = binary.BigEndian.AppendUint32(b, uint32(r.Index))
	b = binary.BigEndian.AppendUint32(b, uint32(r.Count))
	b = binary.BigEndian.AppendUint32(b, uint32(len(r.Env)))
	for name, value := range r.Env {
		b = appendField(appendField(b, name), value)
	}
	if r.Sever {
		b = binary.BigEndian.AppendUint32(b, optionSever)
	}
	binary.BigEndian.PutUint32(b[at:], uint32(len(b)-at-4))
	return b
}

func appendField(b []byte, s string) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
	return append(b, s...)
}

// ReadAwaken reads a request. It and the identity share memory with room, if that is enough, and are valid as long.
func ReadAwaken(r io.Reader, room []byte) (req *AwakenRequest, identity []byte, err error) {
	if cap(room) < 4 {
		room = make([]byte, 4)
	}
	if _, err := io.ReadFull(r, room[:4]); err != nil {
		return nil, nil, err
	}
	n := binary.BigEndian.Uint32(room)
	switch {
	case n > maxAwaken:
		return nil, nil, Errorf(CodeInvalid, "a request of %d bytes; at most %d are allowed", n, maxAwaken)
	case int(n) <= cap(room):
		room = room[:n]
	default:
		room = make([]byte, n)
	}
	if _, err := io.ReadFull(r, room); err != nil {
		return nil, nil, err
	}
	if req, identity = parseAwaken(room); req == nil {
		return nil, nil, Errorf(CodeInvalid, "unreadable request to awaken")
	}
	return req, identity, nil
}

// parseAwaken returns nil for what is no request.
func parseAwaken(b []byte) (*AwakenRequest, []byte) {
	f := fields{b: b}
	req := &AwakenRequest{
		SandboxID: string(f.next()), Hostname: string(f.next()), MachineID: string(f.next()), BootID: string(f.next()),
		Entropy: f.next(),
	}
	identity := f.next()
	req.Index, req.Count = f.number(), f.number()
	if n := f.number(); n > 0 {
		req.Env = map[string]string{}
		for range n {
			if f.failed {
				break
			}
			name := string(f.next())
			req.Env[name] = string(f.next())
		}
	}
	if len(f.b) > 0 {
		req.Sever = f.number() == optionSever
		f.failed = f.failed || !req.Sever
	}
	if f.failed || len(f.b) > 0 {
		return nil, nil
	}
	return req, identity
}

type fields struct {
	b      []byte
	failed bool
}

func (f *fields) number() int {
	if f.failed || len(f.b) < 4 {
		f.failed = true
		return 0
	}
	n := int(int32(binary.BigEndian.Uint32(f.b)))
	f.b = f.b[4:]
	return n
}

func (f *fields) next() []byte {
	n := f.number()
	if n < 0 || n > len(f.b) {
		f.failed = true
	}
	if f.failed {
		return nil
	}
	v := f.b[:n]
	f.b = f.b[n:]
	return v
}

// ReadClock reads the answer to a question for the host's clock, for ParseClock.
func ReadClock(r io.Reader) ([]byte, error) {
	b := make([]byte, clockSize)
	_, err := io.ReadFull(r, b)
	return b, err
}

// identitySize is what the file has at least.
const identitySize = 512

// IdentityFile is the content of /run/forkd/identity.json, of the same size for everybody, so that it is overwritten in
// place and never cut or lengthened.
func IdentityFile(r *AwakenRequest, generation uint64, created time.Time) ([]byte, error) {
	b, err := Encode(&Identity{
		SandboxID: r.SandboxID, ForkIndex: r.Index, ForkCount: r.Count, SnapshotTag: r.SnapshotTag,
		Hostname: r.Hostname, Generation: generation, CreatedAt: created.UTC(),
	})
	if err != nil {
		return nil, err
	}
	for len(b) < identitySize-1 {
		b = append(b, ' ')
	}
	return append(b, '\n'), nil
}
