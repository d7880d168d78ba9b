package wire

import (
	"encoding/binary"
	"io"
)

// A fork's session may begin with its awakening, announced in the preamble: the request's JSON after its length, then, as
// often as the agent asks by an answer without a hello, the host's clock.

// maxAwaken bounds the request: environment, mostly.
const maxAwaken = MaxMessage

// AppendAwaken adds the request's JSON to the beginning of a session.
func AppendAwaken(b, request []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(request)))
	return append(b, request...)
}

// ReadAwaken reads it.
func ReadAwaken(r io.Reader) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > maxAwaken {
		return nil, Errorf(CodeInvalid, "a request of %d bytes; at most %d are allowed", n, maxAwaken)
	}
	request := make([]byte, n)
	_, err := io.ReadFull(r, request)
	return request, err
}

// ReadClock reads the answer to a question for the host's clock, for ParseClock.
func ReadClock(r io.Reader) ([]byte, error) {
	b := make([]byte, clockSize)
	_, err := io.ReadFull(r, b)
	return b, err
}
