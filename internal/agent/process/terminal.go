package process

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/agent/account"
	"forkd.dev/forkd/internal/guest/wire"
)

// fallbackTerm is what programs take a terminal for whose kind is unknown to the guest: nearly all are like it.
const fallbackTerm = "xterm-256color"

// forTerminal adds what programs on a terminal expect to find in their environment and nobody has set. Kind is what the
// caller's terminal calls itself.
func forTerminal(env []string, kind string) []string {
	if account.Getenv(env, "TERM") == "" {
		if kind != "dumb" && !knowsTerm(env, kind) {
			kind = fallbackTerm
		}
		env = append(env, "TERM="+kind)
	}
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if account.Getenv(env, name) != "" {
			return env
		}
	}
	return append(env, "LANG=C.UTF-8") // what is typed and shown is UTF-8
}

// knowsTerm looks where ncurses does.
func knowsTerm(env []string, kind string) bool {
	if kind == "" || len(kind) > 64 || strings.ContainsAny(kind, "/\x00") || kind[0] == '.' {
		return false
	}
	dirs := []string{account.Getenv(env, "TERMINFO"), filepath.Join(account.Getenv(env, "HOME"), ".terminfo")}
	dirs = append(dirs, filepath.SplitList(account.Getenv(env, "TERMINFO_DIRS"))...)
	dirs = append(dirs, "/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo", "/usr/lib/terminfo")
	for _, dir := range dirs {
		if !filepath.IsAbs(dir) {
			continue
		}
		for _, letter := range []string{kind[:1], hex.EncodeToString([]byte(kind[:1]))} {
			if _, err := os.Stat(filepath.Join(dir, letter, kind)); err == nil {
				return true
			}
		}
	}
	return false
}

// loginShell is the user's, or the best there is. A name that begins with a dash makes every shell a login shell; on a
// terminal it is interactive.
func loginShell(u *account.User) (path string, argv []string, err error) {
	candidates := []string{"/bin/bash", "/usr/bin/bash", "/bin/sh", "/bin/ash", "/usr/bin/sh", "/bin/busybox", "/usr/bin/busybox"}
	if own := filepath.Base(u.Shell); filepath.IsAbs(u.Shell) && own != "nologin" && own != "false" && own != "true" {
		candidates = append([]string{u.Shell}, candidates...)
	}
	for _, path := range candidates {
		info, err := os.Stat(path)
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			continue
		}
		name := filepath.Base(path)
		if name == "busybox" {
			name = "sh"
		}
		return path, []string{"-" + name}, nil
	}
	return "", nil, wire.Errorf(wire.CodePrecondition,
		"this sandbox has no shell (looked for the one of /etc/passwd, bash, sh and busybox); run its programs with exec, or copy a static busybox to /bin/busybox")
}
