package access

import "regexp"

// form is what secrets look like, anywhere in a text.
var form = regexp.MustCompile(`fkd_[a-z0-9]+_[a-z2-7]{20,}|e2b_[0-9a-f]{40,}`)

// Shows reports whether a text has something of a token's form in it, whether it is one or not.
func Shows(text string) bool { return form.MatchString(text) }

// IsForm reports whether a text looks like a token, good or not.
func IsForm(text string) bool { return ShownID(text) != "" || Shows(text) }
