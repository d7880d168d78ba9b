package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/mcp"
)

func (a *App) mcp() *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   "mcp",
		Short: "Let a model use sandboxes: a server of the Model Context Protocol",
		Long: "Serve the Model Context Protocol: tools that make sandboxes, run commands and code in them, read and write\n" +
			"files, fork and branch. Without --http it speaks over standard input and output, to the program that started\n" +
			"it (forkd mcp install writes that into a client's configuration), and may do what you may. With --http it serves\n" +
			"streamable HTTP at /mcp; each client shows a token (forkd token create) and may do what that one may.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if address != "" {
				return a.serveMCP(cmd.Context(), address)
			}
			return mcp.Serve(cmd.Context(), mcp.Config{Version: a.Version, Connect: a.connectFor}, a.In, a.Out)
		},
	}
	cmd.Flags().StringVar(&address, "http", "", "serve HTTP at this `ADDRESS` of this host: 127.0.0.1:8890")
	cmd.AddCommand(a.mcpInstall())
	return cmd
}

const (
	mcpPath       = "/mcp"
	headerTimeout = 10 * time.Second
	closeTimeout  = 5 * time.Second
)

// connectFor is connect, and takes FORKD_URL as well, which configurations of the existing forkd's server have.
func (a *App) connectFor(ctx context.Context) (*client.Client, error) {
	if url := a.Getenv("FORKD_URL"); url != "" && a.Getenv("FORKD_HOST") == "" {
		return a.connectTo(ctx, url)
	}
	return a.connect(ctx)
}

// serveMCP serves HTTP on loopback: tokens travel in it unencrypted.
func (a *App) serveMCP(ctx context.Context, address string) error {
	if at, err := netip.ParseAddrPort(strings.Replace(address, "localhost:", "127.0.0.1:", 1)); err != nil || !at.Addr().IsLoopback() {
		return &hinted{
			usage("--http %.100q: not an address and port of this host, and tokens do not travel unencrypted to others", address),
			"forkd mcp --http 127.0.0.1:8890, behind a proxy that encrypts if others are to reach it",
		}
	}
	c, err := a.connectFor(ctx) // which starts a daemon
	if err != nil {
		return err
	}
	daemon := c.Address()
	c.Close()
	mux := http.NewServeMux()
	mux.Handle(mcpPath, mcp.Handler(mcp.HTTPConfig{Version: a.Version, Connect: func(ctx context.Context, token string) (*client.Client, error) {
		return a.connectAs(ctx, daemon, token)
	}}))
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", address, err)
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout, BaseContext: func(net.Listener) context.Context { return ctx }}
	stop := context.AfterFunc(ctx, func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if server.Shutdown(end) != nil {
			_ = server.Close()
		}
	})
	defer stop()
	a.progress("http://%s%s (Ctrl-C ends it)", l.Addr(), mcpPath)
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", address, err)
	}
	return nil
}

// connectAs is a client that shows a token, which the daemon has found to be good.
func (a *App) connectAs(ctx context.Context, daemon, token string) (*client.Client, error) {
	c, err := client.Open(client.Config{Address: daemon, Token: token, CA: a.Getenv("FORKD_CA"), Fingerprint: a.Getenv("FORKD_FINGERPRINT")})
	if err != nil {
		return nil, err
	}
	_, err = c.Version(ctx)
	if e, ok := errors.AsType[*api.Error](err); ok && e.Code == api.CodeDenied { // One sandbox's token, which opens nothing else.
		err = nil
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// answered asks a question that is answered with yes or no on the terminal.
func (a *App) answered(question string) (bool, error) {
	fmt.Fprintf(a.Err, "%s [y/N] ", question)
	var line strings.Builder
	for b := make([]byte, 1); ; {
		n, err := a.In.Read(b)
		if n > 0 && b[0] != '\n' {
			line.WriteByte(b[0])
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return false, fmt.Errorf("read the answer: %w", err)
		}
		if err != nil || b[0] == '\n' {
			break
		}
	}
	switch strings.ToLower(strings.TrimSpace(line.String())) {
	case "y", "yes":
		return true, nil
	}
	return false, nil
}
