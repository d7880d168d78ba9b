package image

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"path"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/image/debian"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// environment is what processes of the image get: the recipe's variables over a few defaults.
func (p *Plan) environment() map[string]string {
	home := "/root"
	if p.Recipe.User != "root" {
		home = "/home/" + p.Recipe.User
	}
	env := map[string]string{"PATH": defaultPath, "HOME": home, "LANG": "C.UTF-8", "USER": p.Recipe.User}
	maps.Copy(env, p.Recipe.Env)
	return env
}

// buildEnvironment is what package scripts get.
func buildEnvironment() map[string]string {
	return map[string]string{
		"PATH": "/" + toolsDir + ":" + defaultPath, "HOME": "/root", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive",
		"DEBCONF_NONINTERACTIVE_SEEN": "true", "DEBIAN_PRIORITY": "critical", "TERM": "dumb",
	}
}

// Steps is what must run inside, in this order, each successfully, after WriteRootfs's stream was extracted to an
// empty file system that is now the root. The recipe's commands come after that, in a machine that boots it.
func (p *Plan) Steps() []Step {
	if p.foreign != nil {
		return nil // nothing of such an image is ours to change
	}
	var steps []Step
	add := func(name, script string) {
		steps = append(steps, Step{Name: name, Argv: []string{"/bin/sh", "-ec", script}, Env: buildEnvironment(), Dir: "/"})
	}
	add("prepare packages", p.preinstScript())
	add("configure packages", p.configureScript())
	add("compile Python code", compileScript)
	if p.Recipe.User != "root" {
		add("make user "+p.Recipe.User, userScript(p.Recipe.User))
	}
	if script := p.filesScript(); script != "" {
		add("copy files", script)
	}
	add("clean up", cleanScript)
	return steps
}

// preinstScript runs the preinst scripts of the base system, which dpkg would have run before unpacking.
func (p *Plan) preinstScript() string {
	var b strings.Builder
	b.WriteString(`cd /
export DPKG_MAINTSCRIPT_NAME=preinst DPKG_ADMINDIR=/var/lib/dpkg DPKG_ROOT= DPKG_RUNNING_VERSION=1.21.0
pre() {
	for script in "/var/lib/dpkg/info/$1.preinst" "/var/lib/dpkg/info/$1:$2.preinst"; do
		if [ -x "$script" ]; then
			DPKG_MAINTSCRIPT_PACKAGE=$1 DPKG_MAINTSCRIPT_ARCH=$2 "$script" install || { echo "$1: preinst failed" >&2; exit 1; }
		fi
	done
}
`)
	// /etc/passwd and /etc/group come from base-passwd's preinst, and everything else may need them.
	names := []string{"base-passwd"}
	for _, pkg := range newGraph(p.packages).order(p.packages[:p.system]) {
		if pkg.Name != "base-passwd" {
			names = append(names, pkg.Name)
		}
	}
	for _, name := range names {
		fmt.Fprintf(&b, "pre %s %s\n", name, p.arch)
	}
	return b.String()
}

// configureScript configures the base system, then unpacks what dpkg must unpack itself, and configures the rest.
func (p *Plan) configureScript() string {
	var b strings.Builder
	b.WriteString("dpkg=\"dpkg --force-unsafe-io --force-confdef --force-confold\"\n")
	b.WriteString("$dpkg --configure")
	configured := map[*debian.Package]bool{}
	for _, pkg := range p.packages[:p.system] {
		b.WriteString(" " + pkg.Name)
		configured[pkg] = true
	}
	// A package that arrives as a .deb is there only if it has a preinst script, which is not known before it was
	// opened. unpack collects them, so that dpkg reads its database once for as many as possible.
	fmt.Fprintf(&b, `
cd /%s 2>/dev/null || exec $dpkg --configure -a
debs=
unpack() {
	[ -z "$debs" ] || $dpkg --unpack $debs
	debs=
}
add() {
	[ ! -e "$1.deb" ] || debs="$debs $1.deb"
}
# before PACKAGE DEPENDENCY...: dpkg unpacks a package only when its Pre-Depends are configured.
done=
before() {
	[ -e "$1.deb" ] || return 0
	shift
	list=
	for name; do
		case " $done " in *" $name "*) continue ;; esac
		list="$list $name"
	done
	[ -n "$list" ] || return 0
	unpack
	$dpkg --configure $list
	done="$done$list"
}
`, debsDir)
	g := newGraph(p.packages)
	for _, pkg := range g.order(p.packages[p.system:]) {
		var before []string
		for _, q := range g.order(g.preDepends(pkg)) {
			if !configured[q] {
				before = append(before, q.Name)
			}
		}
		if len(before) > 0 {
			fmt.Fprintf(&b, "before %s %s\n", pkg.Name, strings.Join(before, " "))
		}
		fmt.Fprintf(&b, "add %s\n", pkg.Name)
	}
	b.WriteString("unpack\nexec $dpkg --configure -a\n")
	return b.String()
}

func userScript(user string) string {
	return `id -u ` + user + ` >/dev/null 2>&1 || useradd --create-home --shell /bin/bash ` + user + "\n"
}

// filesScript gives the staged files their places. Directories that exist keep their mode and owner.
func (p *Plan) filesScript() string {
	var b strings.Builder
	for i, f := range p.files {
		to, owner := quote(f.Path), quote(f.Owner)
		if f.Dir {
			fmt.Fprintf(&b, "[ -d %s ] || { mkdir -p %s; chmod %04o %s; chown %s %s; }\n", to, to, f.Mode, to, owner, to)
			continue
		}
		from := "/" + path.Join(stagingDir, strconv.Itoa(i))
		fmt.Fprintf(&b, "mkdir -p %s; rm -f %s; mv %s %s; chown %s %s; chmod %04o %s\n",
			quote(path.Dir(f.Path)), to, from, to, owner, to, f.Mode, to)
	}
	return b.String()
}

// quote makes s one word of a shell script.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// maintscriptHelper stands before dpkg's own dpkg-maintscript-helper while packages are configured. What that does
// concerns upgrades: with no old version it checks its arguments for a third of a second (in an emulated machine) and
// does nothing. tzdata and debian-archive-keyring call it 76 times.
const maintscriptHelper = `#!/bin/sh
rest=no
n=0
action=
old=
for arg; do
	if [ $rest = no ]; then
		if [ "$arg" = -- ]; then rest=yes; fi
		continue
	fi
	n=$((n + 1))
	case $n in
	1) action=$arg ;;
	2) old=$arg ;;
	esac
done
case "$rest $DPKG_MAINTSCRIPT_NAME $action $old" in
"yes preinst install " | "yes postinst configure ") exit 0 ;;
esac
exec /usr/bin/dpkg-maintscript-helper "$@"
`

// cleanScript removes what only the build needed, and what must not be the same in two machines.
const cleanScript = `rm -rf /var/cache/forkd /usr/sbin/policy-rc.d
rm -f /var/lib/systemd/random-seed /var/lib/dbus/machine-id
: > /etc/machine-id
rm -rf /var/cache/apt/* /var/lib/apt/lists/* /var/cache/debconf/*-old /var/lib/dpkg/*-old /var/cache/ldconfig/aux-cache
find /var/log -type f -delete
find /tmp /var/tmp -mindepth 1 -delete
mkdir -p /var/cache/apt/archives/partial /var/lib/apt/lists/partial
# Free blocks are given back to the host, so that they are not stored; it is no fault when the disk cannot.
fstrim / 2>/dev/null || true
`

func copyHash(w io.Writer, r io.Reader) (sum string, n int64, err error) {
	h := sha256.New()
	n, err = io.Copy(io.MultiWriter(w, h), r)
	return hex.EncodeToString(h.Sum(nil)), n, err
}
