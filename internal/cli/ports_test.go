package cli

import (
	"errors"
	"net"
	"strings"
	"sync"
	"testing"

	"forkd.dev/forkd/api"
)

// TestForwardEnds: a script sees that what it goes through is gone.
func TestForwardEnds(t *testing.T) {
	d := &canned{replies: map[string]any{
		"GET /v1/sandboxes/sb1": &api.Sandbox{ID: "sb1"},
		"GET /v1/events?follow=true&sandbox=sb1&tail=0&type=sandbox.ended&type=sandbox.failed": &api.Event{Type: "sandbox.ended"},
	}}
	code, stdout, stderr := d.run(t, "port-forward", "sb1", ":80")
	if code == 0 || !strings.Contains(stderr, "sandbox sb1 has ended") || !strings.Contains(stdout, "sb1:80") {
		t.Errorf("code %d, %s%s", code, stdout, stderr)
	}
}

var errNoAccept = errors.New("too many open files")

type failing struct{ net.Listener }

func (failing) Accept() (net.Conn, error) { return nil, errNoAccept }

// TestForwardFails: a listener that takes nobody any more is no end that was wanted.
func TestForwardFails(t *testing.T) {
	var open sync.WaitGroup
	if err := (&App{}).forward(t.Context(), nil, failing{}, "sb1", 80, &open); !errors.Is(err, errNoAccept) {
		t.Errorf("got %v", err)
	}
}
