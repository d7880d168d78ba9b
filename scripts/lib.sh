# Shared by the scripts beside it. Source it; it changes nothing by itself.
# shellcheck shell=bash

root_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The toolchain that is fetched when the machine has none: one line, also in toolchain.sha256.
pinned_go=1.26.8

# What is fetched for the TypeScript SDK when the machine's Node is too old, or has no npm.
pinned_node=22.20.0
pinned_npm=10.9.4

# Where else its package is tried.
pinned_deno=2.9.6
pinned_bun=1.4.5
pinned_esbuild=0.28.2

# go_wanted prints the oldest Go version that go.mod accepts.
go_wanted() {
	sed -n 's/^go \([0-9.]*\).*/\1/p' "$root_dir/go.mod"
}

# go_arch prints this machine's architecture as Go names it.
go_arch() {
	case $(uname -m) in
	x86_64) echo amd64 ;;
	aarch64) echo arm64 ;;
	*)
		echo "forkd: no build for $(uname -m): amd64 and arm64 are supported" >&2
		return 1
		;;
	esac
}

# toolchain_dir is where the fetched toolchain lives, shared by all clones of one user.
toolchain_dir() {
	local cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
	echo "${cache:-$root_dir/.tools}/forkd/go$pinned_go"
}

# at_least A B: version A is B or newer.
at_least() {
	[ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

# find_go prints the go command to use, or fails.
find_go() {
	local candidate version
	for candidate in "$(command -v go || true)" /usr/local/go/bin/go "$(toolchain_dir)/bin/go"; do
		[ -n "$candidate" ] && [ -x "$candidate" ] || continue
		# GOTOOLCHAIN=local: what is installed, not what it would download.
		version=$(cd / && GOTOOLCHAIN=local "$candidate" env GOVERSION 2>/dev/null) || continue
		version=${version#go}
		if at_least "${version%% *}" "$(go_wanted)"; then
			echo "$candidate"
			return 0
		fi
	done
	return 1
}

has() { command -v "$1" >/dev/null 2>&1; }

# download URL FILE
download() {
	if has curl; then
		curl --fail --silent --show-error --location --retry 3 --output "$2" "$1"
	else
		wget --quiet --tries=3 --output-document="$2" "$1"
	fi
}

# expected DIR FILE: DIR/FILE is the one that toolchain.sha256 names.
expected() {
	(cd "$1" && grep "  $2\$" "$root_dir/scripts/toolchain.sha256" | sha256sum --check --quiet --strict)
}
