package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) env() *cobra.Command {
	cmd := &cobra.Command{
		Use: "env", Short: "Print what other programs' clients have to know to use this daemon", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.envE2B())
	return cmd
}

// usualBind is where a daemon serves TCP that is asked to without an address.
const usualBind = "127.0.0.1:8889"

func (a *App) envE2B() *cobra.Command {
	var bind, scope string
	var expires time.Duration
	cmd := &cobra.Command{
		Use: "e2b", Short: "Print the environment in which E2B's clients use this daemon", Args: cobra.NoArgs,
		Long: "Print the environment in which E2B's own clients, unmodified, use this daemon: for a shell's eval. A token is made for\n" +
			"each call. A daemon that does not serve TCP begins to, on this host alone, until it ends.",
		Example: "  eval \"$(forkd env e2b)\"\n  python3 -c 'from e2b import Sandbox; print(Sandbox.create().commands.run(\"id\").stdout)'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("expires") && expires <= 0 {
				return usage("--expires is %s; give a time from now, such as 24h", expires)
			}
			a.socketOnly()
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				req := api.TokenRequest{Name: "e2b", Scope: scope, TTLSeconds: expires.Seconds(), E2B: true}
				token, err := c.CreateToken(cmd.Context(), req)
				if err != nil {
					return err
				}
				address, err := a.address(cmd.Context(), c, bind)
				if err != nil {
					return errors.Join(err, c.RevokeToken(cmd.Context(), token.ID))
				}
				a.missingTemplates(cmd.Context(), c)
				return a.printEnv(address, token)
			})
		},
	}
	cmd.Flags().StringVar(&bind, "bind", usualBind, "where to serve TCP, HOST:PORT, if the daemon does not already")
	cmd.Flags().StringVar(&scope, "scope", "manage", "of the token: read, use, manage or admin")
	cmd.Flags().DurationVar(&expires, "expires", 0, "the token is good for so long, such as 24h (default: until it is revoked)")
	_ = cmd.RegisterFlagCompletionFunc("scope", cobra.FixedCompletions([]string{"read", "use", "manage", "admin"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// address is where the daemon is reached over TCP.
func (a *App) address(ctx context.Context, c *client.Client, bind string) (string, error) {
	if host := a.Getenv("FORKD_HOST"); host != "" {
		if u, err := url.Parse(host); err == nil && u.Scheme != "unix" {
			return host, nil
		}
	}
	v, err := c.Listen(ctx, bind)
	if e, ok := errors.AsType[*api.Error](err); ok && e.Code == api.CodeUnavailable && bind == usualBind {
		v, err = c.Listen(ctx, "127.0.0.1:0") // the usual port is another's
	}
	if err != nil {
		return "", err
	}
	if v.Fingerprint != "" {
		a.progress("E2B's clients trust no certificate of the daemon's own (%s): give it one, or bind to this host alone", v.Fingerprint)
	}
	return v.Address, nil
}

// missingTemplates says which of the templates are not there that E2B's clients ask for when they are told nothing.
func (a *App) missingTemplates(ctx context.Context, c *client.Client) {
	for _, tag := range e2bTemplates() {
		_, err := c.SnapshotInfo(ctx, tag)
		if e, ok := errors.AsType[*api.Error](err); ok && e.Code == api.CodeNotFound {
			a.progress("the template %s is not built yet: %s build %s -t %s", tag, a.Name, tag, tag)
		}
	}
}

func (a *App) printEnv(address string, token *api.Token) error {
	list := [][2]string{{"E2B_API_URL", address}, {"E2B_SANDBOX_URL", address}, {"E2B_API_KEY", token.Token}}
	out := map[string]string{}
	for _, v := range list {
		out[v[0]] = v[1]
	}
	return a.show(out, func(w io.Writer) error {
		a.progress("%s: %s", token.ID, describeToken(token))
		for _, v := range list {
			if _, err := fmt.Fprintf(w, "export %s=%s\n", v[0], v[1]); err != nil {
				return err
			}
		}
		return nil
	})
}
