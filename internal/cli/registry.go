package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
	"forkd.dev/forkd/internal/registry"
)

func (a *App) push() *cobra.Command {
	var noScrub bool
	var fingerprint string
	cmd := &cobra.Command{
		Use: "push SNAPSHOT REGISTRY/NAME:TAG", Short: "Bring a snapshot with all it stands on to a registry", Args: cobra.ExactArgs(2),
		Long: "Bring a snapshot with all it stands on to any registry for container images, as an artifact of its own kind. What the registry\n" +
			"has already is not sent again, so a branch sends what is its own, and a push that was broken off goes on where it ended.\n\n" +
			"Credentials are those of docker login. Secrets are looked for first, as by forkd pack; --no-scrub sends it as it is.\n" +
			"Without encryption registries are spoken to on this machine alone.",
		Example:           "  forkd push python-numpy ghcr.io/me/warm:numpy\n  forkd push python-numpy localhost:5000/warm:numpy --no-scrub",
		ValidArgsFunction: a.completeTags(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			login, err := loginFor(cmd.Context(), args[1])
			if err != nil {
				return err
			}
			scrub := !noScrub
			req := api.PushRequest{Ref: args[1], Scrub: &scrub, Login: login, Fingerprint: fingerprint}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				tell, stop := a.transfer()
				got, err := c.Push(cmd.Context(), args[0], req, tell)
				stop()
				if err != nil {
					return a.elsewhere(err, c, args[0])
				}
				return a.show(got, func(w io.Writer) error { return printPushed(w, args[0], got) })
			})
		},
	}
	cmd.Flags().BoolVar(&noScrub, "no-scrub", false, "send it as it is, without looking for secrets")
	addFingerprint(cmd, &fingerprint)
	return cmd
}

func addFingerprint(cmd *cobra.Command, value *string) {
	cmd.Flags().StringVar(value, "fingerprint", "", "of the registry's certificate, if it made that itself: another forkd's, as it prints it")
}

func printPushed(w io.Writer, tag string, got *api.Pushed) error {
	rows := [][]string{
		{"pull it by", got.Ref},
		{"sent", size(got.SentBytes) + "; " + size(got.ThereBytes) + " were there"},
	}
	if s := got.Scrub; s != nil {
		for _, f := range s.Found {
			rows = append(rows, []string{"removed", fmt.Sprintf("%s: %s (%s, %s)%s", f.Snapshot, oneLine(f.Path), f.What, size(f.Bytes), left(f.Left.Memory, f.Left.Disk))})
		}
		switch {
		case s.Skipped != "":
			rows = append(rows, []string{"secrets", "nobody looked for them: " + s.Skipped})
		case len(s.Found) == 0:
			rows = append(rows, []string{"secrets", "none found in the files of " + strings.Join(s.Looked, ", ")})
		}
		for _, l := range s.Limits {
			rows = append(rows, []string{"but", l})
		}
	}
	return table(w, "pushed | "+tag, rows)
}

func (a *App) pull() *cobra.Command {
	var req api.PullRequest
	cmd := &cobra.Command{
		Use: "pull REGISTRY/NAME:TAG[@sha256:DIGEST] [-t TAG]", Short: "Make snapshots of one in a registry", Args: cobra.ExactArgs(1),
		Long: "Make snapshots of one that forkd push has brought to a registry, or that another forkd serves: forkd serve is a registry of its\n" +
			"own snapshots at HOST:PORT/snapshots:TAG. Only what is not here is fetched, and a pull that was broken off goes on where it\n" +
			"ended. Nothing is registered until all of it is there and verified. By digest it is exactly what was pushed, whatever the\n" +
			"registry says.\n\n" +
			"What this host cannot run is refused before it is fetched; with --rewarm it is built from its recipe then.\n\n" +
			"Credentials are those of docker login; for another forkd, docker login with any name and a token of scope pull as the password.\n" +
			"A snapshot is a running machine: pull only what comes from somebody whose programs you would run.",
		Example: "  forkd pull ghcr.io/me/warm:numpy\n  forkd pull ghcr.io/me/warm@sha256:… -t numpy --rewarm\n" +
			"  forkd pull build-host:8889/snapshots:python-numpy --fingerprint sha256//…",
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req.Ref = args[0]
			if req.Login, err = loginFor(cmd.Context(), req.Ref); err != nil {
				return err
			}
			return a.withDaemon(cmd.Context(), func(c *client.Client) error {
				tell, stop := a.transfer()
				got, err := c.Pull(cmd.Context(), req, tell)
				stop()
				if err != nil {
					return err
				}
				return a.show(got, func(w io.Writer) error { return printPulled(w, got) })
			})
		},
	}
	cmd.Flags().StringVarP(&req.Tag, "tag", "t", "", "name of the snapshot here (default: the one that it had)")
	cmd.Flags().BoolVar(&req.Rewarm, "rewarm", false, "build it from its recipe if it cannot run here")
	addFingerprint(cmd, &req.Fingerprint)
	return cmd
}

func printPulled(w io.Writer, got *api.Pulled) error {
	if got.Rewarm != "" && len(got.New) == 0 {
		return hereAlready(w, got.Snapshot.Tag)
	}
	if got.Rewarm != "" {
		return table(w, "tag | "+got.Snapshot.Tag, [][]string{{"built from its recipe", got.Rewarm}, {"from", got.Ref}})
	}
	if err := printUnpacked(w, &got.Unpacked); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "from %s\n", got.Ref)
	return err
}

// hereAlready is said where a recipe was to be built that has been.
func hereAlready(w io.Writer, tag string) error {
	_, err := fmt.Fprintf(w, "%s is here already, built from the same recipe; remove it to have it built anew: forkd rmi %s\n", tag, tag)
	return err
}

// verifyRemote checks what is in a registry.
func (a *App) verifyRemote(ctx context.Context, c *client.Client, ref string) error {
	login, err := loginFor(ctx, ref)
	if err != nil {
		return err
	}
	tell, stop := a.transfer()
	got, err := c.VerifyRemote(ctx, api.PullRequest{Ref: ref, Login: login}, tell)
	stop()
	if err != nil {
		return err
	}
	return a.show(got, func(w io.Writer) error {
		return table(w, "registry | "+got.Ref, [][]string{
			{"snapshots", strings.Join(got.Snapshots, " → ")},
			{"read", fmt.Sprintf("%s in %d members; everything is as its digests say", size(got.Bytes), got.Members)},
		})
	})
}

// remoteRef reports whether an argument that is no file's name is meant for a registry: the part before the first slash is a
// host's.
func remoteRef(arg string) bool {
	host, _, ok := strings.Cut(arg, "/")
	if !ok || !strings.ContainsAny(host, ".:") && host != "localhost" || host == "." || host == ".." {
		return false
	}
	_, err := registry.Reference(arg)
	return err == nil
}

// loginFor is what this user's docker configuration has for a registry: the daemon may be another user's.
func loginFor(ctx context.Context, ref string) (*api.RegistryLogin, error) {
	c, err := registry.DockerCredentials(ctx, ref)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return nil, nil //nolint:nilnil // There is none, which is no error.
	}
	l := api.RegistryLogin(*c)
	return &l, nil
}

// transfer shows the progress of one: bytes on a terminal alone, in one line that changes.
func (a *App) transfer() (tell func(api.TransferEvent), stop func()) {
	f, ok := a.Err.(*os.File)
	watched := ok && term.IsTerminal(int(f.Fd()))
	shown := false
	clean := func() {
		if shown {
			fmt.Fprint(a.Err, "\r\x1b[K")
			shown = false
		}
	}
	return func(e api.TransferEvent) {
		switch {
		case e.Message != "":
			clean()
			a.progress("%s  %-9s %s", e.Time.Local().Format("15:04:05"), e.Step, oneLine(e.Message))
		case watched && e.TotalBytes > 0:
			fmt.Fprintf(a.Err, "\r\x1b[K%-9s %s of %s (%d %%)", e.Step, size(e.DoneBytes), size(e.TotalBytes), 100*e.DoneBytes/e.TotalBytes)
			shown = true
		}
	}, clean
}
