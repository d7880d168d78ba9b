package guest_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
)

// A refusal of the first exchange arrives as what it is, and the channel is good for the next connection.
func TestAwakenFirstRefused(t *testing.T) {
	h := start(t)
	req := &wire.AwakenRequest{Hostname: "h", Entropy: make([]byte, 8), Env: map[string]string{"A": strings.Repeat("x", 100_000)}}
	_, _, err := guest.AwakenFirst(t.Context(), h.dial, 7, req)
	var refusal *wire.Error
	if !errors.As(err, &refusal) || refusal.Code != wire.CodeInvalid {
		t.Fatalf("got %v", err)
	}
	c := h.connect(t, 8)
	echo(t, c, "fine")
}

// A connection that ends anywhere in the first exchange leaves the channel usable.
func TestAwakenFirstCutAnywhere(t *testing.T) {
	h := start(t)
	for _, n := range []int{0, 1, 15, 16, 40, 48, 49, 50, 52, 53, 60, 100, 200} {
		_, _, err := guest.AwakenFirst(t.Context(), func(ctx context.Context) (net.Conn, error) {
			nc, err := h.dial(ctx)
			if err != nil {
				return nil, err
			}
			return &cut{Conn: nc, left: n}, nil
		}, 1, &wire.AwakenRequest{Hostname: "h", Entropy: make([]byte, 64)})
		if err == nil {
			t.Fatalf("cut after %d bytes: no error", n)
		}
		echo(t, h.connect(t, 2), "fine")
	}
}
