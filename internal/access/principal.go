package access

import (
	"context"
	"fmt"
)

type contextKey struct{}

// With returns a context in which FromContext finds p.
func With(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, contextKey{}, p)
}

// FromContext is who a request comes from: nobody, who may do what needs nothing, unless With said otherwise.
func FromContext(ctx context.Context) Principal {
	p, _ := ctx.Value(contextKey{}).(Principal)
	return p
}

// Peer is who is at the other end of the daemon's unix socket: the kernel says which user. The daemon's own and root are
// its owner. Another is a stranger, whom no token helps either: he is there because somebody opened the socket's
// directory too far.
func Peer(uid, own int) Principal {
	switch uid {
	case own:
		return Owner()
	case 0:
		return Principal{Name: "root", Scope: Admin}
	}
	return Principal{Name: fmt.Sprintf("uid %d", uid), stranger: true}
}

// Stranger reports whether p is refused everything, whatever token is shown.
func (p Principal) Stranger() bool { return p.stranger }
