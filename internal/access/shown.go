package access

import "strings"

// maxID bounds what is taken for an id in what a stranger shows.
const maxID = 32

const (
	idDigits  = 8
	e2bDigits = idDigits + 64
)

// ShownID is the id in what was shown as a token, whether it is one or not: it is no secret, and tells an administrator which
// one somebody tries that was revoked. "": there is none.
func ShownID(shown string) string {
	if digits, ok := strings.CutPrefix(shown, e2bPrefix); ok && len(digits) == e2bDigits && strings.Trim(digits, "0123456789abcdef") == "" {
		return idPrefix + digits[:idDigits]
	}
	rest, ok := strings.CutPrefix(shown, prefix)
	id, _, more := strings.Cut(rest, "_")
	if !ok || !more || len(id) > maxID || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return ""
	}
	return id
}
