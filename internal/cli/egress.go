package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/client"
)

// presets are the names of policies; the daemon knows what they stand for.
func presets() []string { return []string{"none", "dns-only", "packages", "open"} }

// egressFlags are those of every verb that makes sandboxes.
type egressFlags struct {
	preset      string
	allow, deny []string
	budget      string
}

func (f *egressFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.preset, "egress", "", "what each may reach: none, dns-only, packages or open (default: the snapshot's)")
	cmd.Flags().StringArrayVar(&f.allow, "allow", nil, "and what else, e.g. pypi.org, '*.example.com:443' or 10.1.2.3:5432/tcp (repeatable)")
	cmd.Flags().StringArrayVar(&f.deny, "deny", nil, "and what not, whatever else allows it (repeatable)")
	cmd.Flags().StringVar(&f.budget, "egress-budget", "", "bytes that each may send and receive in its life, e.g. 100MiB")
	completeWords(cmd, "egress", presets()...)
}

// policy is nil when none was asked for.
func (f *egressFlags) policy() (*api.Egress, error) {
	if f.preset == "" && len(f.allow) == 0 && len(f.deny) == 0 && f.budget == "" {
		return nil, nil //nolint:nilnil // That nothing was asked for is no error.
	}
	p := &api.Egress{Preset: f.preset, Allow: f.allow, Deny: f.deny}
	if f.budget != "" {
		var err error
		if p.BudgetBytes, err = parseSize(f.budget); err != nil {
			return nil, usage("--egress-budget: %w", err)
		}
	}
	return p, nil
}

const egressLong = `Show and change what a sandbox may reach outside of itself, and list what it did.

  forkd egress ID [show]                  what it may reach, and what it has come to
  forkd egress ID allow RULE…             let it reach more
  forkd egress ID deny RULE…              refuse something, whatever allows it
  forkd egress ID forget RULE…            drop rules that were given
  forkd egress ID set PRESET [--allow RULE] [--deny RULE] [--budget SIZE]
                                          begin anew: none, dns-only, packages or open
  forkd egress ID log [-f]                its flows: what it reached and what was refused

A rule is a name or an address with, if wanted, ports and a protocol: pypi.org, *.example.com:443, 10.1.2.0/24:5432/tcp,
[2001:db8::]/32:80-90/udp. What a change does not allow any more is cut at once. To let a sandbox reach more needs scope
admin.`

func (a *App) egress() *cobra.Command {
	var set egressFlags
	var follow bool
	var verdict string
	cmd := &cobra.Command{
		Use: "egress ID [show|allow|deny|forget|set|log] [RULE…]", Short: "Show and change what a sandbox may reach, and list what it did",
		Long: egressLong, Args: cobra.MinimumNArgs(1),
		Example:           "  forkd egress sbx2abc allow api.example.com:443\n  forkd egress sbx2abc set packages --budget 500MiB\n  forkd egress sbx2abc log -f",
		ValidArgsFunction: a.completeEgress,
		RunE: func(cmd *cobra.Command, args []string) error {
			id, action, rules := args[0], "show", args[1:]
			if len(rules) > 0 {
				action, rules = rules[0], rules[1:]
			}
			if err := checkEgressFlags(cmd, action); err != nil {
				return err
			}
			ctx := cmd.Context()
			with := func(do func(c *client.Client) (*api.EgressState, error)) error {
				return a.withDaemon(ctx, func(c *client.Client) error {
					state, err := do(c)
					if err != nil {
						return err
					}
					return a.show(state, func(w io.Writer) error { return printEgress(w, state) })
				})
			}
			change := func(change api.EgressChange) error {
				if len(rules) == 0 {
					return usage("give the rules to %s", action)
				}
				return with(func(c *client.Client) (*api.EgressState, error) { return c.ChangeEgress(ctx, id, change) })
			}
			switch action {
			case "show":
				if len(rules) > 0 {
					return usage("show takes nothing: %q", rules[0])
				}
				return with(func(c *client.Client) (*api.EgressState, error) { return c.Egress(ctx, id) })
			case "allow":
				return change(api.EgressChange{Allow: rules})
			case "deny":
				return change(api.EgressChange{Deny: rules})
			case "forget":
				return a.forgetRules(ctx, id, rules)
			case "set":
				if len(rules) != 1 {
					return usage("give the one preset to begin with: %s", strings.Join(presets(), ", "))
				}
				set.preset = rules[0]
				policy, err := set.policy()
				if err != nil {
					return err
				}
				return with(func(c *client.Client) (*api.EgressState, error) { return c.SetEgress(ctx, id, *policy) })
			case "log":
				if len(rules) > 0 {
					return usage("log takes nothing: %q", rules[0])
				}
				opts := client.FlowOptions{Follow: follow}
				if verdict != "" {
					opts.Verdicts = strings.Split(verdict, ",")
				}
				return a.withDaemon(ctx, func(c *client.Client) error { return a.printFlows(ctx, c, id, opts) })
			}
			return usage("%q is nothing that egress does: show, allow, deny, forget, set or log", action)
		},
	}
	cmd.Flags().StringArrayVar(&set.allow, "allow", nil, "with set: allow this as well (repeatable)")
	cmd.Flags().StringArrayVar(&set.deny, "deny", nil, "with set: deny this (repeatable)")
	cmd.Flags().StringVar(&set.budget, "budget", "", "with set: bytes that it may send and receive in its life, e.g. 100MiB")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "with log: go on with what happens")
	cmd.Flags().StringVar(&verdict, "verdict", "", "with log: only those that were allowed, refused or cut (or several, with commas)")
	completeWords(cmd, "verdict", "allowed", "refused", "cut")
	return cmd
}

// checkEgressFlags refuses flags of another action: they would do nothing.
func checkEgressFlags(cmd *cobra.Command, action string) error {
	for flag, of := range map[string]string{"allow": "set", "deny": "set", "budget": "set", "follow": "log", "verdict": "log"} {
		if cmd.Flags().Changed(flag) && action != of {
			return usage("--%s is for %s, not for %s", flag, of, action)
		}
	}
	return nil
}

func (a *App) completeEgress(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
	switch {
	case len(args) == 1:
		return []string{"show", "allow", "deny", "forget", "set", "log"}, cobra.ShellCompDirectiveNoFileComp
	case len(args) == 2 && args[1] == "set":
		return presets(), cobra.ShellCompDirectiveNoFileComp
	}
	return a.completeSandboxes(1)(cmd, args, begun)
}

// forgetRules drops each rule from where it is.
func (a *App) forgetRules(ctx context.Context, id string, rules []string) error {
	if len(rules) == 0 {
		return usage("give the rules to forget")
	}
	return a.withDaemon(ctx, func(c *client.Client) error {
		state, err := c.Egress(ctx, id)
		if err != nil {
			return err
		}
		var change api.EgressChange
		for _, rule := range rules {
			found := false
			for _, of := range []struct {
				have []string
				drop *[]string
			}{{state.Allow, &change.RemoveAllow}, {state.Deny, &change.RemoveDeny}} {
				for _, have := range of.have {
					if strings.EqualFold(have, rule) {
						*of.drop, found = append(*of.drop, have), true
					}
				}
			}
			if !found {
				return &hinted{fmt.Errorf("sandbox %s has no rule %q", id, rule), "forkd egress " + id + " show"}
			}
		}
		if state, err = c.ChangeEgress(ctx, id, change); err != nil {
			return err
		}
		return a.show(state, func(w io.Writer) error { return printEgress(w, state) })
	})
}

// printEgress says it for people.
func printEgress(w io.Writer, s *api.EgressState) error {
	preset := s.Preset
	if preset == "" {
		preset = "none"
	}
	fmt.Fprintf(w, "preset   %s\n", preset)
	const most = 8 // the whole list of a preset is in the documentation, and in --json
	for i, rule := range s.Rules {
		if i == most && len(s.Rules) > most+1 {
			fmt.Fprintf(w, "           … %d more\n", len(s.Rules)-most)
			break
		}
		fmt.Fprintf(w, "           %s\n", printable(rule))
	}
	for _, rule := range s.Allow {
		fmt.Fprintf(w, "allow    %s\n", printable(rule))
	}
	for _, rule := range s.Deny {
		fmt.Fprintf(w, "deny     %s\n", printable(rule))
	}
	if s.BudgetLeftBytes != nil {
		fmt.Fprintf(w, "budget   %s, %s of it left\n", bytesOf(s.BudgetBytes), bytesOf(*s.BudgetLeftBytes))
	}
	fmt.Fprintf(w, "bytes    %s sent, %s received\n", bytesOf(s.SentBytes), bytesOf(s.ReceivedBytes))
	_, err := fmt.Fprintf(w, "flows    %d, %d of them open; %d attempts refused, %d cut; %d names asked for\n", s.Flows, s.FlowsOpen, s.FlowsRefused,
		s.FlowsCut, s.Questions)
	return err
}

func (a *App) printFlows(ctx context.Context, c *client.Client, id string, opts client.FlowOptions) error {
	err := c.Flows(ctx, id, opts, func(f api.Flow) error {
		if !a.json {
			_, err := io.WriteString(a.Out, flowLine(&f)+"\n")
			return err
		}
		text, err := json.Marshal(f)
		if err != nil {
			return err
		}
		_, err = a.Out.Write(escapeJSON(append(text, '\n')))
		return err
	})
	if opts.Follow {
		return unlessDone(ctx, err)
	}
	return err
}

// flowLine is a flow for people.
func flowLine(f *api.Flow) string {
	where := f.To
	switch {
	case f.Protocol == "dns":
		where = f.Name
	case f.Name != "" && where != "":
		where = f.Name + " (" + f.To + ")"
	case f.Name != "":
		where = f.Name
	}
	var more []string
	if f.Attempts > 1 {
		more = append(more, fmt.Sprintf("%d times", f.Attempts))
	}
	if f.Lost > 0 {
		more = append(more, fmt.Sprintf("%d before it not told", f.Lost))
	}
	if f.Protocol != "dns" && (f.Verdict == "allowed" || f.SentBytes+f.ReceivedBytes > 0) {
		more = append(more, fmt.Sprintf("%s sent, %s received", bytesOf(f.SentBytes), bytesOf(f.ReceivedBytes)))
	}
	if f.EndedAt == nil && f.Protocol != "dns" && f.Verdict == "allowed" {
		more = append(more, "open")
	}
	if f.Rule != "" {
		more = append(more, "rule "+f.Rule)
	}
	if f.Reason != "" {
		more = append(more, f.Reason)
	}
	return oneLine(fmt.Sprintf("%s  %-7s %-5s %s  %s", f.StartedAt.Local().Format(time.DateTime), f.Verdict, f.Protocol, where, strings.Join(more, "; ")))
}

// bytesOf is a size of which small ones matter, too.
func bytesOf(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	return size(n)
}
