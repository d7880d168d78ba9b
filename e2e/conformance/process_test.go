package conformance

import (
	"bytes"
	"io"
	"testing"

	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
)

func shell(script string) wire.StartRequest {
	return wire.StartRequest{Process: wire.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", script}}}
}

func output(stdout, stderr io.Writer) call.Output { return call.Output{Stdout: stdout, Stderr: stderr} }

func TestOutput(t *testing.T) {
	g := newGuest(t)
	if got := g.sh("echo hi"); got != "hi\n" {
		t.Errorf("%q", got)
	}
}

// BenchmarkExec is the round trip of a command, as a client on this host sees it.
func BenchmarkExec(b *testing.B) {
	if suite.c == nil {
		b.Skip("run a test first, for its sandbox")
	}
	g := suite.c.Guest(suite.id)
	for b.Loop() {
		var out bytes.Buffer
		req := wire.StartRequest{Process: wire.ProcessConfig{Cmd: "/bin/true"}}
		if _, err := g.Run(b.Context(), req, nil, output(&out, &out), nil); err != nil {
			b.Fatal(err)
		}
	}
}
