package wire

import (
	"encoding/json"
	"math"
	"testing"
)

func TestThawDecodingIsTaken(t *testing.T) {
	want := ThawRequest{Freeze: 1 << 40, SandboxID: "sb-0123", UnixNano: math.MaxInt64}
	b, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got := ThawRequest{}
	if !got.parseJSON(b) || got != want {
		t.Errorf("got %+v of %s", got, b)
	}
}

// Whatever the fast way accepts, encoding/json must accept and understand alike.
func FuzzThawDecoding(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"freeze":1,"sandboxId":"x","unixNano":-1}`, `{"freeze":-1}`, `{"freeze":-0}`, `{"unixNano":9223372036854775808}`,
		`{"unixNano":92233720368547758070}`, `{"freeze":01}`, `{"freeze":}`, `{"unixNano":1,"unixNano":2}`, `{"freeze":1}x`, `{"a":1}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, want := ThawRequest{}, ThawRequest{}
		if !got.parseJSON(b) {
			return
		}
		if err := json.Unmarshal(b, &want); err != nil || got != want {
			t.Fatalf("took %q as %+v, encoding/json: %+v, %v", b, got, want, err)
		}
	})
}
