// Package mcp lets a model use forkd: a server of the Model Context Protocol whose tools and resources are the daemon's API.
// It is one more client of that API, speaks no protocol of its own and keeps nothing but output that was too long for an
// answer. The command line runs it; nobody else imports it.
package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"forkd.dev/forkd/client"
)

// Config is what a server depends on.
type Config struct {
	Version string
	// Connect finds the daemon; it is asked for each call, as a daemon may have been started anew meanwhile. The caller closes
	// the client.
	Connect func(ctx context.Context) (*client.Client, error)
}

const instructions = `forkd runs code in microVMs ("sandboxes") that are forked from warm snapshots in milliseconds.
Begin with list_snapshots, then spawn_sandboxes. Work with exec_command and eval_code (variables stay between calls), read_file,
write_file, list_files. Before something risky, or to try several ways from one state: fork_sandbox gives running copies of a
sandbox, with its files, processes and variables; branch_sandbox keeps its state as a snapshot to spawn from later.
Nothing that happens in a copy reaches the others. kill_sandbox what is not needed any more.
Output that is too long for an answer is kept: the answer has an output_id, and read_output reads on.`

// New makes a server for one client. Serve it over a transport of the protocol's.
func New(cfg Config) *mcp.Server {
	s := &server{cfg: cfg, kept: &outputs{}}
	m := mcp.NewServer(&mcp.Implementation{Name: "forkd", Title: "forkd microVM sandboxes", Version: cfg.Version}, &mcp.ServerOptions{
		Instructions: instructions, Capabilities: &mcp.ServerCapabilities{},
	})
	s.sandboxTools(m)
	s.snapshotTools(m)
	s.workTools(m)
	s.fileTools(m)
	s.resources(m)
	return m
}

// Serve speaks with one client over in and out until it leaves or ctx ends.
func Serve(ctx context.Context, cfg Config, in io.ReadCloser, out io.Writer) error {
	err := New(cfg).Run(ctx, &mcp.IOTransport{Reader: in, Writer: unclosed{out}})
	if ctx.Err() != nil || errors.Is(err, io.EOF) {
		return nil //nolint:nilerr // That is how it ends.
	}
	return err
}

// unclosed is an output that is not the transport's to close.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }

// server is what the tools of one client share.
type server struct {
	cfg  Config
	kept *outputs
}

// call is one call of a tool.
type call struct {
	*client.Client
	req  *mcp.CallToolRequest
	kept *outputs
	told float64
}

// progress tells the client how far it is, if it wants to know.
func (c *call) progress(ctx context.Context, done, total float64, format string, args ...any) {
	token := c.req.Params.GetProgressToken()
	if token == nil {
		return
	}
	c.told = max(done, c.told+1e-6)                                        // It must increase.
	_ = c.req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ // A client that is gone is told nothing.
		ProgressToken: token, Progress: c.told, Total: total, Message: fmt.Sprintf(format, args...),
	})
}

// wantsProgress reports whether anybody listens to progress.
func (c *call) wantsProgress() bool { return c.req.Params.GetProgressToken() != nil }

// hints of a tool, for clients that ask their user before some of them.
type hint int

const (
	reads    hint = iota // it changes nothing
	adds                 // it makes something
	destroys             // it may take something away
)

// maxAnswer bounds the text of an answer.
const maxAnswer = 48 << 10

// tool adds a tool. What do returns is the answer as JSON; a list becomes an object that has it as "result", as in the
// existing forkd's server. An answer that is too long is kept, and its beginning given.
func tool[In any](s *server, m *mcp.Server, name, about string, h hint, do func(ctx context.Context, c *call, in In) (any, error)) {
	no := false
	t := &mcp.Tool{Name: name, Description: about, Annotations: &mcp.ToolAnnotations{OpenWorldHint: &no, ReadOnlyHint: h == reads}}
	if h == adds {
		t.Annotations.DestructiveHint = &no
	}
	mcp.AddTool(m, t, func(ctx context.Context, req *mcp.CallToolRequest, in In) (*mcp.CallToolResult, any, error) {
		c, err := s.cfg.Connect(ctx)
		if err != nil {
			return nil, nil, explain(err)
		}
		defer c.Close()
		out, err := do(ctx, &call{Client: c, req: req, kept: s.kept}, in)
		if err != nil {
			return nil, nil, explain(err)
		}
		var pictures []mcp.Content
		if p, ok := out.(pictured); ok {
			out, pictures = p.answer, p.pictures
		}
		text, err := json.Marshal(out)
		if err != nil {
			return nil, nil, fmt.Errorf("encode the answer: %w", err)
		}
		if len(text) > 0 && text[0] == '[' {
			out, text = map[string]json.RawMessage{"result": text}, fmt.Appendf(nil, `{"result":%s}`, text)
		}
		if len(text) > maxAnswer {
			out = s.kept.cut("answer", string(text))
			if text, err = json.Marshal(out); err != nil {
				return nil, nil, fmt.Errorf("encode the answer: %w", err)
			}
		}
		return &mcp.CallToolResult{Content: append([]mcp.Content{&mcp.TextContent{Text: string(text)}}, pictures...)}, out, nil
	})
}

// pictured is an answer with pictures beside it.
type pictured struct {
	answer   any
	pictures []mcp.Content
}
