package access

import "strings"

// maxID bounds what is taken for an id in what a stranger shows.
const maxID = 32

// ShownID is the id in what was shown as a token, whether it is one or not: it is no secret, and tells an administrator which
// one somebody tries that was revoked. "": there is none.
func ShownID(shown string) string {
	rest, ok := strings.CutPrefix(shown, prefix)
	id, _, more := strings.Cut(rest, "_")
	if !ok || !more || len(id) > maxID || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return ""
	}
	return id
}
