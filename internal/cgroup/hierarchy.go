package cgroup

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/mountinfo"
)

// mount is a mounted hierarchy of groups.
type mount struct {
	version     int
	controllers []Controller // of version 1
	root        string       // the group that is at its mount point: "/" but in containers
	at          string       // the mount point
}

// parseMounts reads /proc/self/mountinfo.
func parseMounts(text string) []mount {
	var all []mount
	for _, at := range mountinfo.Parse(text) {
		m := mount{root: at.Root, at: at.At}
		switch at.Type {
		case "cgroup2":
			m.version = 2
		case "cgroup":
			m.version = 1
			for o := range strings.SplitSeq(at.Options, ",") {
				switch o {
				case "memory", "cpu", "cpuacct", "pids":
					m.controllers = append(m.controllers, Controller(o))
				case "blkio":
					m.controllers = append(m.controllers, IO)
				}
			}
		default:
			continue
		}
		all = append(all, m)
	}
	return all
}

// parseGroups reads /proc/PID/cgroup, "number:controllers:path": the group in each controller's hierarchy, that of
// version 2 under "".
func parseGroups(text string) map[Controller]string {
	groups := map[Controller]string{}
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 || !strings.HasPrefix(f[2], "/") {
			continue
		}
		if f[1] == "" {
			groups[""] = f[2]
			continue
		}
		for c := range strings.SplitSeq(f[1], ",") {
			if c == "blkio" {
				c = string(IO)
			}
			groups[Controller(c)] = f[2]
		}
	}
	return groups
}

// dir is where a group of a hierarchy is found below its mount point; false: it is outside of what is mounted.
func (m mount) dir(group string) (string, bool) {
	if m.root == "/" {
		return path.Join(m.at, group), !outside(group)
	}
	if group == m.root {
		return m.at, true
	}
	rest, ok := strings.CutPrefix(group, m.root+"/")
	return path.Join(m.at, rest), ok && !outside(rest)
}

func outside(group string) bool { return slices.Contains(strings.Split(group, "/"), "..") }

// ancestor is what there is to know of a group of version 2 above the daemon's, or of the daemon's own.
type ancestor struct {
	dir         string
	controllers []Controller // that it could hand down
	writable    bool
	root        bool // the host's: processes and groups may be side by side there
	others      bool // processes are in it besides the daemon
	own         bool // it is the daemon's own group
	threaded    bool
	taken       bool // groups of this name are made in it already
}

// wanted are the controllers that a place should have.
func wanted() []Controller { return []Controller{Memory, CPU, PIDs, IO} }

// choose says where groups can be made: the nearest above the daemon that can hand down all that is wanted, or else the one
// with the most; its own only if there is nothing above, for the daemon has to move out of it first. -1: nowhere, and
// why. A group with processes in it can hand down nothing.
func choose(up []ancestor) (best int, why string) {
	best, most := -1, 0
	var reasons []string
	for i, a := range up {
		var reason string
		switch {
		case !a.writable:
			reason = "is not writable for this user"
		case a.threaded:
			reason = "is for threads only"
		case a.others && !a.root:
			reason = "has processes of its own in it"
		}
		if reason != "" {
			reasons = append(reasons, fmt.Sprintf("%s %s", a.dir, reason))
			continue
		}
		if a.taken { // What a place hands down its children can hand down as well, and would be chosen next time.
			return i, ""
		}
		n := 0
		for _, c := range wanted() {
			if slices.Contains(a.controllers, c) {
				n++
			}
		}
		if n == 0 {
			reasons = append(reasons, a.dir+" has no controllers")
			continue
		}
		if a.own && !a.root && best >= 0 {
			continue
		}
		if n > most {
			best, most = i, n
		}
	}
	if best < 0 {
		return -1, strings.Join(reasons, "; ")
	}
	return best, ""
}
