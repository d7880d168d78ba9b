package wire

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAwakenRequest(t *testing.T) {
	for i, env := range []map[string]string{nil, {"A": "b", "": "", "C": string(make([]byte, 5000))}} {
		in := &AwakenRequest{
			SandboxID: "sb1", Index: 2, Count: 3, Hostname: "h", MachineID: "m", BootID: "b", Entropy: []byte{0, 255}, Env: env,
			Sever: i > 0,
		}
		for _, room := range [][]byte{nil, make([]byte, 4096)} {
			got, identity, err := ReadAwaken(bytes.NewReader(AppendAwaken(nil, in, []byte("{}"))), room)
			if err != nil || string(identity) != "{}" {
				t.Fatal(err, identity)
			}
			if diff := cmp.Diff(in, got); diff != "" {
				t.Error(diff)
			}
		}
	}
}

// Whoever asks for more than this agent knows must not be told that it was done.
func TestAwakenUnknownOptions(t *testing.T) {
	for _, options := range []string{"\x00\x00\x00\x00", "\x00\x00\x00\x03", "\x80\x00\x00\x01", "\x00\x00\x00\x01x", "\x00"} {
		b := append(AppendAwaken(nil, &AwakenRequest{SandboxID: "a"}, nil), options...)
		b[3] += byte(len(options))
		if _, _, err := ReadAwaken(bytes.NewReader(b), nil); err == nil {
			t.Errorf("options %q were taken", options)
		}
	}
}

func FuzzAwakenRequest(f *testing.F) {
	f.Add(AppendAwaken(nil, &AwakenRequest{SandboxID: "a", Sever: true}, nil))
	f.Add(AppendAwaken(nil, &AwakenRequest{SandboxID: "a", Env: map[string]string{"b": "c"}}, nil))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		req, identity, err := ReadAwaken(bytes.NewReader(b), nil)
		if err != nil {
			return
		}
		again, identity2, err := ReadAwaken(bytes.NewReader(AppendAwaken(nil, req, identity)), nil)
		if err != nil || !bytes.Equal(identity, identity2) || !cmp.Equal(req, again) {
			t.Fatalf("%v: %+v, %+v", err, req, again)
		}
	})
}
