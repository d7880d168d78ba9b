package httpapi

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/guest/wire"
)

// TestBrokenCalls: a client is told why a call ends that the guest did not end, unless a frame is cut off.
func TestBrokenCalls(t *testing.T) {
	end, message := "Z\x00\x00\x00\x00", "M\x00\x00\x00\x02{}"
	for name, tt := range map[string]struct {
		guest string
		err   error
		want  string // of the client's error; empty: an end
	}{
		"ended":             {message + end, nil, ""},
		"ended, then broke": {message + end, errors.New("x"), ""},
		"refused":           {"X\x00\x00\x00\x27" + `{"code":"not_found","message":"nobody"}`, nil, "nobody"},
		"closed":            {message, nil, "without an answer"},
		"nothing":           {"", errors.New("the machine is gone"), "the machine is gone"},
		"broke":             {message, errors.New("the machine is gone"), "the call broke off: the machine is gone"},
		"in a header":       {message + "O\x00\x00", errors.New("x"), "unexpected EOF"},
		"in a frame":        {"O\x00\x00\x00\x05ab", errors.New("x"), "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			up, client := net.Pipe()
			below := readWriter{io.MultiReader(strings.NewReader(tt.guest), failing{tt.err}), io.Discard}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				pipe(t.Context(), up, below, func() { _ = up.Close() }, func() {})
			}()
			s := wire.NewStream(client)
			var err error
			for err == nil {
				_, _, err = s.Recv()
			}
			if tt.want == "" && !errors.Is(err, io.EOF) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("the client is told: %v, want %q", err, tt.want)
			}
			_ = s.Close()
			<-ended
		})
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) {
	if f.err == nil {
		return 0, io.EOF
	}
	return 0, f.err
}
