package cli

import (
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// setting is a flag that stands for a variable of the daemon's environment, which is where the daemon reads what it is told.
// Nothing secret is one: everybody on the host sees a command line.
type setting struct {
	flag, variable, usage string
	file                  bool   // the name of one
	word                  string // that is no file's name
	value                 string
	given                 func() bool
}

// settings are a daemon's.
type settings []*setting

// all are made anew for each command that starts a daemon.
func daemonSettings() settings {
	return settings{
		{flag: "bind", variable: "FORKD_BIND", usage: "serve TCP at this HOST:PORT as well; needs a token, and encrypts unless this host alone reaches it"},
		{flag: "tls-cert", variable: "FORKD_TLS_CERT", usage: "certificate for TCP, a PEM `file`; read again when it changes (default: one of its own)", file: true},
		{flag: "tls-key", variable: "FORKD_TLS_KEY", usage: "its key, a PEM `file`", file: true},
		{flag: "audit-log", variable: "FORKD_AUDIT_LOG", usage: "`file` in which it is written down who asked for what, or off (default: audit.log in the home)", file: true, word: "off"},
		{flag: "domain", variable: "FORKD_DOMAIN", usage: "serve ports of sandboxes at PORT-ID.`DOMAIN` as well; its names, *.DOMAIN, lead to the daemon"},
		{flag: "jail", variable: "FORKD_JAIL", usage: "each VM process in surroundings of its own: auto (as much as the host allows), on or off"},
	}
}

// addSettings gives a command the flags of a daemon's settings.
func (a *App) addSettings(cmd *cobra.Command) {
	all := daemonSettings()
	for _, x := range all {
		cmd.Flags().StringVar(&x.value, x.flag, "", x.usage+" (environment: "+x.variable+")")
		x.given = func() bool { return cmd.Flags().Changed(x.flag) }
	}
	a.settings = append(a.settings, all...)
}

// socketOnly has a daemon that this command starts serve its unix socket alone, whatever the environment says: the first
// token is made there, and without one there is no TCP.
func (a *App) socketOnly() {
	for _, variable := range []string{"FORKD_BIND", "FORKD_TLS_CERT", "FORKD_TLS_KEY"} {
		a.settings = append(a.settings, &setting{variable: variable, given: func() bool { return true }})
	}
}

// given are the flags that were given.
func (s settings) given() (flags []string) {
	for _, x := range s {
		if x.given() {
			flags = append(flags, "--"+x.flag)
		}
	}
	return flags
}

// text is a setting's value. A daemon works in another directory than who starts it.
func (x *setting) text() string {
	if x.file && x.value != "" && x.value != x.word {
		if abs, err := filepath.Abs(x.value); err == nil {
			return abs
		}
	}
	return x.value
}

// over is the environment with the flags in the place of their variables.
func (s settings) over(getenv func(string) string) func(string) string {
	return func(name string) string {
		for _, x := range s {
			if x.variable == name && x.given() {
				return x.text()
			}
		}
		return getenv(name)
	}
}

// environ is the same for a daemon that is started. A token to another daemon is not for it.
func (s settings) environ(env []string) []string {
	env = slices.DeleteFunc(slices.Clone(env), func(e string) bool { return strings.HasPrefix(e, "FORKD_TOKEN=") })
	for _, x := range s {
		if !x.given() {
			continue
		}
		env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, x.variable+"=") })
		env = append(env, x.variable+"="+x.text())
	}
	return env
}
