package wire

import (
	"encoding/binary"
	"time"
)

// clockSize is nanoseconds since 1970, signed, big-endian.
const clockSize = 8

// AppendClock appends the answer to a question for the host's clock.
func AppendClock(b []byte, t time.Time) []byte {
	return binary.BigEndian.AppendUint64(b, uint64(t.UnixNano()))
}

// ParseClock reads it.
func ParseClock(b []byte) (time.Time, bool) {
	if len(b) != clockSize {
		return time.Time{}, false
	}
	return time.Unix(0, int64(binary.BigEndian.Uint64(b))), true
}
