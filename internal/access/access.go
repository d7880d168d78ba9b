// Package access says who a request comes from and what that one may do: scopes, principals, tokens and where they are
// kept, and who has shown too many wrong ones. It knows nothing of HTTP or of machines; package httpapi asks it before
// every operation.
package access

import "fmt"

// Scope is what a principal may do. Each scope includes those before it, but for Pull, which is for one thing alone.
type Scope int

// Scopes.
const (
	None   Scope = iota // nothing: what needs no token, such as a health check
	Pull                // take snapshots, with all that they hold, from the daemon's registry, and nothing else; Manage and Admin may, too
	Read                // look: lists, records, metrics; nothing inside a sandbox
	Use                 // work inside sandboxes: commands, code, files
	Manage              // make and end them: build, fork, branch, pause, remove
	Admin               // tokens, the audit log, the host
)

var names = []string{"none", "pull", "read", "use", "manage", "admin"}

func (s Scope) String() string {
	if s < 0 || int(s) >= len(names) {
		return fmt.Sprintf("Scope(%d)", int(s))
	}
	return names[s]
}

// ParseScope reads a scope's name. "none" is none that anybody can be given.
func ParseScope(name string) (Scope, error) {
	for i, n := range names[1:] {
		if n == name {
			return Scope(i + 1), nil
		}
	}
	return None, fmt.Errorf("scope %.40q: give pull, read, use, manage or admin", name)
}

// Principal is who a request comes from.
type Principal struct {
	Name    string // for the audit log: "owner", or a token's name
	Scope   Scope
	Sandbox string // a token of this sandbox opens it and nothing else; "": any
	TokenID string // "": no token, but the owner on the unix socket

	stranger bool
}

// Owner is who reaches the daemon's unix socket: the kernel has checked.
func Owner() Principal { return Principal{Name: "owner", Scope: Admin} }

// May reports whether p may do what needs scope; sandbox is the one that it is done to, or "".
func (p Principal) May(need Scope, sandbox string) bool {
	if need == None {
		return true
	}
	if p.Sandbox != "" && p.Sandbox != sandbox {
		return false
	}
	if need == Pull {
		// What is in a snapshot is more than a list of it: those who may look have none, nor who works in sandboxes.
		return p.Sandbox == "" && (p.Scope == Pull || p.Scope >= Manage)
	}
	return p.Scope >= need
}
