package cli

import (
	"context"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"forkd.dev/forkd/client"
)

func (a *App) shell() *cobra.Command {
	f := execFlags{stdin: true, tty: true}
	var keys, tag string
	cmd := &cobra.Command{
		Use: "shell ID", Short: "Open a shell in a sandbox", Args: cobra.ExactArgs(1),
		Long: "Open a login shell in a sandbox: the user's of /etc/passwd, else bash, sh or busybox. On a terminal it is\n" +
			"interactive; otherwise it reads commands from standard input. The exit code is the shell's.\n\n" +
			"ctrl-p ctrl-q (--detach-keys) leaves it running; come back with forkd attach. It goes on as well when the\n" +
			"connection to the daemon breaks; when this program's terminal is closed the shell is hung up.",
		Annotations:       map[string]string{guestCode: "yes"},
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: a.verb(func(ctx context.Context, c *client.Client, args []string) error {
			// What agents run that do not know how to find a shell.
			script := "exec $(command -v bash || echo /bin/sh) -l"
			if !term.IsTerminal(int(a.In.Fd())) {
				f.tty = false
			} else {
				script = "exec $(command -v bash || echo /bin/sh) -il"
			}
			req, err := f.request([]string{"/bin/sh", "-c", script})
			if err != nil {
				return err
			}
			req.Shell = true
			if tag != "" {
				req.Tag = &tag
			}
			if colours := a.Getenv("COLORTERM"); f.tty && colours != "" && req.Process.Envs["COLORTERM"] == "" {
				if req.Process.Envs == nil {
					req.Process.Envs = map[string]string{}
				}
				req.Process.Envs["COLORTERM"] = colours
			}
			if f.tty && a.errIsTerminal() && keys != "none" {
				a.progress("a shell in %s; leave it running: %s", args[0], keys)
			}
			return a.runIn(ctx, c, args[0], f, req, keys)
		}),
	}
	f.addWho(cmd)
	cmd.Flags().StringArrayVarP(&f.env, "env", "e", nil, "environment variable, KEY=VALUE (repeatable)")
	cmd.Flags().StringVar(&tag, "tag", "", "a name for the shell, for ps and attach")
	addDetachKeys(cmd, &keys, a.Getenv)
	return cmd
}
