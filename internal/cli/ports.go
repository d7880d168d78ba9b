package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/guest/wire"
)

const portsLong = `List the TCP ports on which services in a sandbox listen, and say who may connect to them.

  forkd ports ID                 what is listened on
  forkd ports ID -f              go on as ports are opened and closed
  forkd ports ID publish PORT…   let everybody connect who reaches the daemon, without a token
  forkd ports ID hide PORT…      only who has a token

Services are reached below /v1/sandboxes/ID/ports/PORT/ of the daemon, by name where it has a domain (forkd serve --domain),
and by forkd port-forward.`

func (a *App) ports() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "ports ID [publish|hide PORT…]", Short: "List the ports on which services in a sandbox listen", Long: portsLong,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeSandboxes(1),
		Example: "  forkd ports sbx2abc -f\n  forkd ports sbx2abc publish 8080",
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, id := cmd.Context(), args[0]
			if len(args) > 1 {
				return a.changePorts(ctx, id, args[1], args[2:], follow)
			}
			return a.withDaemon(ctx, func(c *client.Client) error {
				tell := func(list []api.Port) error {
					return a.show(list, func(w io.Writer) error { return printPorts(w, list) })
				}
				if follow {
					return unlessDone(ctx, c.FollowPorts(ctx, id, tell))
				}
				list, err := c.Ports(ctx, id)
				if err != nil {
					return err
				}
				return tell(list)
			})
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with the whole list whenever it changes")
	return cmd
}

func (a *App) changePorts(ctx context.Context, id, action string, texts []string, follow bool) error {
	switch {
	case action != "publish" && action != "hide":
		return usage("%q is nothing to do with ports: give publish or hide", action)
	case follow:
		return usage("--follow lists, and %s does not", action)
	case len(texts) == 0:
		return usage("give the ports to %s", action)
	}
	var ports []int
	for _, text := range texts {
		port, err := portOf(text)
		if err != nil {
			return err
		}
		ports = append(ports, port)
	}
	return a.withDaemon(ctx, func(c *client.Client) error {
		for _, port := range ports {
			if err := c.SetPort(ctx, id, port, api.PortChange{Public: action == "publish"}); err != nil {
				return err
			}
		}
		return nil
	})
}

func printPorts(w io.Writer, list []api.Port) error {
	var rows [][]string
	for _, p := range list {
		address, who, process := p.Address, "token", p.Process
		if address == "" {
			address = "nobody listens"
		}
		if p.Public {
			who = "everybody"
		}
		if p.PID != 0 {
			process = fmt.Sprintf("%s (%d)", process, p.PID)
		}
		rows = append(rows, []string{strconv.Itoa(p.Port), address, who, process})
	}
	return table(w, "PORT | ADDRESS | OPEN TO | PROCESS", rows)
}

func portOf(text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, usage("port %q: give a number from 1 to 65535", text)
	}
	return int(n), nil
}

const forwardLong = `Listen on ports of this host and connect who comes to services in a sandbox: anything over TCP.

A port is given as LOCAL:REMOTE, as REMOTE alone for the same number at both ends, or as :REMOTE for any free one here. It goes
on until it is interrupted or the sandbox ends. The service need not run yet: who connects too early is hung up on.`

func (a *App) portForward() *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use: "port-forward ID [LOCAL:]REMOTE…", Short: "Connect ports of this host to services in a sandbox", Long: forwardLong,
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeSandboxes(1),
		Example: "  forkd port-forward sbx2abc 8080:80\n  forkd port-forward sbx2abc 5432 :6379",
		RunE: func(cmd *cobra.Command, args []string) error {
			var pairs []forward
			for _, text := range args[1:] {
				f, err := parseForward(text)
				if err != nil {
					return err
				}
				pairs = append(pairs, f)
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				return a.forwardAll(cmd.Context(), c, args[0], address, pairs)
			})
		},
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "address of this host to listen on")
	return cmd
}

// forward is a port here and one in a sandbox.
type forward struct{ local, remote int }

func parseForward(text string) (f forward, err error) {
	local, remote, both := strings.Cut(text, ":")
	if !both {
		remote = local
	}
	if f.remote, err = portOf(remote); err != nil {
		return f, usage("forward %q: %w; give LOCAL:REMOTE", text, err)
	}
	if local == "" || local == "0" {
		return f, nil
	}
	if f.local, err = portOf(local); err != nil {
		return f, usage("forward %q: %w; give LOCAL:REMOTE", text, err)
	}
	return f, nil
}

// Forwarded is a line of port-forward --json.
type forwarded struct {
	Local   string `json:"local"`
	Sandbox string `json:"sandbox_id"`
	Port    int    `json:"port"`
}

// forwardAll listens on all before it serves any.
func (a *App) forwardAll(ctx context.Context, c *client.Client, id, address string, pairs []forward) error {
	s, err := c.Sandbox(ctx, id)
	if err != nil {
		return err
	}
	user := ctx // who may end what can only be ended so
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var listeners []net.Listener
	defer func() {
		for _, l := range listeners {
			_ = l.Close()
		}
	}()
	for _, f := range pairs {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(f.local)))
		if err != nil {
			return &hinted{fmt.Errorf("listen on this host's port %d: %w", f.local, cause(err)), fmt.Sprintf("another port: forkd port-forward %s :%d", id, f.remote)}
		}
		listeners = append(listeners, l)
	}
	for i, f := range pairs {
		line := forwarded{Local: listeners[i].Addr().String(), Sandbox: s.ID, Port: f.remote}
		if err := a.show(line, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%s → %s:%d\n", line.Local, line.Sandbox, line.Port)
			return err
		}); err != nil {
			return err
		}
	}
	var serving sync.WaitGroup
	defer serving.Wait()
	stop := context.AfterFunc(ctx, func() {
		for _, l := range listeners {
			_ = l.Close()
		}
	})
	defer stop()
	for i, f := range pairs {
		serving.Go(func() { cancel(a.forward(ctx, c, listeners[i], s.ID, f.remote, &serving)) })
	}
	serving.Go(func() { a.endWithSandbox(ctx, c, s.ID, cancel) })
	<-ctx.Done()
	return unlessDone(user, context.Cause(ctx))
}

// endWithSandbox stops when the sandbox has ended.
func (a *App) endWithSandbox(ctx context.Context, c *client.Client, id string, cancel context.CancelCauseFunc) {
	none := 0
	opts := client.EventOptions{Follow: true, Tail: &none, Sandboxes: []string{id}, Types: []string{"sandbox.ended", "sandbox.failed"}}
	err := c.Events(ctx, opts, func(api.Event) error { return fmt.Errorf("sandbox %s has ended", id) })
	if err != nil && ctx.Err() == nil {
		cancel(err)
	}
}

// cause is the innermost error of an operation of package net, without what is said already.
func cause(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Err
	}
	return err
}

// forward connects who comes, until the listener is closed; open are the connections.
func (a *App) forward(ctx context.Context, c *client.Client, l net.Listener, id string, port int, open *sync.WaitGroup) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		open.Go(func() {
			defer conn.Close()
			if err := carry(ctx, c, conn, id, port); err != nil && ctx.Err() == nil {
				fmt.Fprintf(a.Err, "forkd: connection from %s to port %d: %s\n", conn.RemoteAddr(), port, reason(err))
			}
		})
	}
}

func reason(err error) string {
	if e, ok := errors.AsType[*wire.Error](err); ok {
		return printable(e.Message)
	}
	return printable(err.Error())
}

// carry connects to the service and copies both ways until both have ended.
func carry(ctx context.Context, c *client.Client, conn net.Conn, id string, port int) error {
	service, err := c.DialPort(ctx, id, port)
	if err != nil {
		return err
	}
	defer service.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close(); _ = service.Close() })
	defer stop()
	up := make(chan struct{})
	go func() {
		defer close(up)
		if _, err := io.Copy(service, conn); err == nil {
			_ = service.CloseWrite()
		} else {
			_ = service.Close() // who connected is gone
		}
	}()
	if _, err := io.Copy(conn, service); err == nil {
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	} else {
		_ = conn.Close()
	}
	<-up
	return nil
}
