package wire

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var strange = []string{"", "plain", "q\"b\\n\n\t\r\x00\x1f\x7f", "ünï→😀", "<&>", "\xff\xfe broken", "\u2028", string(make([]byte, 300))}

// What is encoded by hand must mean to encoding/json what it encodes itself.
func TestHotEncoding(t *testing.T) {
	now := time.Date(2026, 2, 3, 4, 5, 6, 70, time.UTC)
	var messages []any
	for _, s := range strange {
		messages = append(messages,
			&Hello{Version: 1, Agent: s, Features: []string{s, "x"}, Generation: 1<<64 - 1, BootID: s, Phase: s},
			&Hello{Awakened: &AwakenReport{Renewed: []string{s}}, Refusal: &Error{Code: s, Message: s}},
			&AwakenReport{Renewed: []string{s}, NotRenewed: []NotRenewed{{What: s, PID: 7, Name: s, Why: s}, {}}, Severed: 20, MS: 12.345},
			&EvalResult{Text: &s, Error: &EvalError{Name: s, Value: s, Traceback: s}, ExecutionCount: -3, MS: 0.001},
			&Identity{SandboxID: s, ForkIndex: 1, ForkCount: 2, SnapshotTag: s, Hostname: s, Generation: 9, CreatedAt: now},
		)
	}
	messages = append(messages, &Hello{}, &AwakenReport{}, &EvalResult{}, &EvalResult{MS: 1e6}, &AwakenReport{Renewed: []string{}})
	for _, m := range messages {
		b, err := Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		want, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		got := reflect.New(reflect.TypeOf(m).Elem()).Interface()
		expected := reflect.New(reflect.TypeOf(m).Elem()).Interface()
		if err := json.Unmarshal(b, got); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		if err := json.Unmarshal(want, expected); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(expected, got); diff != "" {
			t.Errorf("%T (-encoding/json +by hand):\n%s", m, diff)
		}
	}
}

// The fast way must be taken for what a host really sends, or it is of no use.
func TestHotDecodingIsTaken(t *testing.T) {
	for _, s := range strange {
		awaken := AwakenRequest{
			SandboxID: s, SnapshotTag: s, Index: 3, Count: 100, Hostname: s, MachineID: s, BootID: s, Entropy: make([]byte, 64),
			Env: map[string]string{s: s, "A": "b"}, Sever: true,
		}
		eval := EvalRequest{Context: s, Code: s, TimeoutMS: 5000, Env: map[string]string{s: s}}
		for _, m := range []any{&awaken, &eval} {
			b, err := json.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			got := reflect.New(reflect.TypeOf(m).Elem()).Interface()
			want := reflect.New(reflect.TypeOf(m).Elem()).Interface()
			if err := json.Unmarshal(b, want); err != nil {
				t.Fatal(err)
			}
			if !got.(parser).parseJSON(b) && s == "plain" {
				t.Fatalf("not taken: %s", b)
			}
			if err := Decode(b, got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-encoding/json +by hand):\n%s", b, diff)
			}
		}
	}
}

// Whatever the fast way accepts, encoding/json must accept and understand alike.
func FuzzHotDecoding(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"code":"1+1"}`, `{"code":"\u003c\n","timeoutMs":10,"env":{"A":"b"}}`, `{"code":"a","code":"b"}`, `{"timeoutMs":-0}`,
		`{"index":1,"count":2,"hostname":"h","entropy":"AAAA","wallClock":"2026-01-02T03:04:05.006Z","env":{}}`,
		`{"sever":true}`, `{"sever":false,"index":1}`, `{"sever":truey}`, `{"wallClock":"2024-02-30T00:00:00Z"}`, `{"code":"\ud83d"}`, `{"code":"` + "\xff" + `"}`, `{"index":00}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, m := range []any{&AwakenRequest{}, &EvalRequest{}} {
			if !m.(parser).parseJSON(b) {
				continue
			}
			want := reflect.New(reflect.TypeOf(m).Elem()).Interface()
			if err := json.Unmarshal(b, want); err != nil {
				t.Fatalf("%T: took %q, encoding/json did not: %v", m, b, err)
			}
			if diff := cmp.Diff(want, m); diff != "" {
				t.Fatalf("%T %q (-encoding/json +by hand):\n%s", m, b, diff)
			}
		}
	})
}
