package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

func (a *App) token() *cobra.Command {
	cmd := &cobra.Command{
		Use: "token", Short: "Make, list and revoke the tokens that open the daemon over TCP", Args: cobra.NoArgs,
		Long: "Make, list and revoke the tokens that open the daemon over TCP. Each has a scope, which includes those before it:\n\n" +
			"  read    look: lists, records, metrics\n" +
			"  use     work inside sandboxes: commands, code, files\n" +
			"  manage  make and end sandboxes and snapshots\n" +
			"  admin   tokens, the audit log, the host\n\n" +
			"The command line shows the token in FORKD_TOKEN to the daemon in FORKD_HOST, which is trusted by its FORKD_FINGERPRINT,\n" +
			"or by a certificate in the file FORKD_CA.",
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.tokenCreate(), a.tokenList(), a.tokenRevoke())
	return cmd
}

func (a *App) tokenCreate() *cobra.Command {
	var req api.TokenRequest
	var expires time.Duration
	cmd := &cobra.Command{
		Use: "create [NAME]", Short: "Make a token and print it, this once", Args: cobra.MaximumNArgs(1),
		Long: "Make a token and print it. It is not stored and cannot be shown again.",
		Example: "  forkd token create ci --scope manage --expires 720h\n" +
			"  forkd token create --sandbox sb-1a2b3c --scope use",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				req.Name = args[0]
			}
			if cmd.Flags().Changed("expires") && expires <= 0 {
				return usage("--expires is %s; give a time from now, such as 24h", expires)
			}
			req.TTLSeconds = expires.Seconds()
			a.socketOnly()
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				t, err := c.CreateToken(cmd.Context(), req)
				if err != nil {
					return err
				}
				return a.show(t, func(w io.Writer) error {
					a.progress("%s: %s", t.ID, describeToken(t))
					_, err := fmt.Fprintln(w, t.Token)
					return err
				})
			})
		},
	}
	cmd.Flags().StringVar(&req.Scope, "scope", "use", "read, use, manage or admin; or pull, for another forkd that takes snapshots from this one")
	cmd.Flags().StringVar(&req.Sandbox, "sandbox", "", "it opens this sandbox alone, and ends with it")
	cmd.Flags().BoolVar(&req.E2B, "e2b", false, "in the form that E2B's clients take for E2B_API_KEY")
	cmd.Flags().DurationVar(&expires, "expires", 0, "it is good for so long, such as 24h (default: until it is revoked)")
	_ = cmd.RegisterFlagCompletionFunc("scope", cobra.FixedCompletions([]string{"pull", "read", "use", "manage", "admin"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("sandbox", a.completeSandboxes(0))
	return cmd
}

func describeToken(t *api.Token) string {
	opens := "for all sandboxes"
	if t.Sandbox != "" {
		opens = "for sandbox " + t.Sandbox + " alone"
	}
	until := "until it is revoked"
	if t.ExpiresAtUnix > 0 {
		until = "until " + time.Unix(t.ExpiresAtUnix, 0).Format(time.RFC3339)
	}
	return fmt.Sprintf("scope %s, %s, %s", t.Scope, opens, until)
}

func (a *App) tokenList() *cobra.Command {
	var sandbox string
	cmd := &cobra.Command{
		Use: "ls", Short: "List tokens; what was told once is not shown again", Args: cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, c *client.Client, _ []string) error {
			list, err := c.Tokens(ctx, sandbox)
			if err != nil {
				return err
			}
			return a.show(list, func(w io.Writer) error { return printTokens(w, list) })
		}),
	}
	cmd.Flags().StringVar(&sandbox, "sandbox", "", "those of this one")
	_ = cmd.RegisterFlagCompletionFunc("sandbox", a.completeSandboxes(0))
	return cmd
}

func printTokens(w io.Writer, list []api.Token) error {
	var rows [][]string
	for _, t := range list {
		expires := "never"
		switch {
		case t.Expired:
			expires = "expired"
		case t.ExpiresAtUnix > 0:
			expires = "in " + time.Until(time.Unix(t.ExpiresAtUnix, 0)).Round(time.Second).String()
		}
		used := ""
		if t.UsedAtUnix > 0 {
			used = age(t.UsedAtUnix) + " ago"
		}
		rows = append(rows, []string{t.ID, t.Name, t.Scope, t.Sandbox, expires, used, age(t.CreatedAtUnix)})
	}
	return table(w, "ID | NAME | SCOPE | SANDBOX | EXPIRES | USED | AGE", rows)
}

func (a *App) tokenRevoke() *cobra.Command {
	var sandbox string
	cmd := &cobra.Command{
		Use: "revoke ID|NAME...", Short: "End tokens, those that they made, and what is being done with them", Args: cobra.MinimumNArgs(1),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			list, err := c.Tokens(ctx, sandbox)
			if err != nil {
				return err
			}
			var errs []error
			var ended []string
			for _, name := range args {
				id, err := pickToken(list, name)
				if err == nil && sandbox != "" {
					err = c.RevokeSandboxToken(ctx, sandbox, id)
				} else if err == nil {
					err = c.RevokeToken(ctx, id)
				}
				if err != nil {
					errs = append(errs, err)
					continue
				}
				ended = append(ended, id)
			}
			err = a.show(map[string][]string{"revoked": ended}, func(w io.Writer) error {
				for _, id := range ended {
					fmt.Fprintln(w, id)
				}
				return nil
			})
			return errors.Join(append(errs, err)...)
		}),
	}
	cmd.Flags().StringVar(&sandbox, "sandbox", "", "they are tokens of this one")
	_ = cmd.RegisterFlagCompletionFunc("sandbox", a.completeSandboxes(0))
	return cmd
}

// pickToken finds a token by its id, or by its name if only one has it.
func pickToken(list []api.Token, name string) (string, error) {
	var named []string
	for _, t := range list {
		if t.ID == name {
			return t.ID, nil
		}
		if t.Name == name {
			named = append(named, t.ID)
		}
	}
	switch len(named) {
	case 1:
		return named[0], nil
	case 0:
		return "", &hinted{fmt.Errorf("no token has the id or name %.80q", shortened(name)), "forkd token ls"}
	}
	return "", usage("%d tokens have the name %q; give an id: %s", len(named), name, strings.Join(named, ", "))
}

// shortened keeps a token that was given in the place of its id out of an error.
func shortened(name string) string {
	if strings.HasPrefix(name, "fkd_") || strings.HasPrefix(name, "e2b_") || len(name) > 64 {
		return name[:min(len(name), 8)] + "…"
	}
	return name
}
