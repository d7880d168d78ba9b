package host

import (
	"encoding/json"
	"testing"
	"time"

	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/store"
)

// FuzzSuspended: what a suspended sandbox was, once it was damaged, is refused, or is a sandbox that is written down as it
// was read.
func FuzzSuspended(f *testing.F) {
	text, err := json.Marshal(keptSandbox{
		Tag: "t", Index: 1, Count: 2, Hostname: "h", Labels: map[string]string{"a": "b"}, Created: time.Unix(1, 0).UTC(),
		Report: &wire.AwakenReport{Renewed: []string{"kernel_entropy"}}, Limits: Limits{CPUs: 0.5}, Life: Life{Idle: time.Minute},
		Ran: store.Ran{Commands: [][]string{{"sh", "-c", "true"}}, More: 1, Lost: true},
	})
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][]byte{text, text[:len(text)/2], []byte(`{}`), []byte(`null`), []byte(`{"report":null,"expires":"9999-12-31T23:59:59Z"}`)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var k keptSandbox
		if json.Unmarshal(text, &k) != nil {
			return
		}
		first, err := json.Marshal(k.sandbox("sbx").kept())
		if err != nil {
			t.Fatalf("%q cannot be written down again: %v", text, err)
		}
		var again keptSandbox
		if err := json.Unmarshal(first, &again); err != nil {
			t.Fatalf("%s cannot be read again: %v", first, err)
		}
		if second, err := json.Marshal(again.sandbox("sbx").kept()); err != nil || string(second) != string(first) {
			t.Errorf("%s became %s (%v)", first, second, err)
		}
	})
}
