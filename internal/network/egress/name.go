package egress

import "strings"

// Canonical is a host's name in the form that rules are held against: lower case, without the dot at its end. Not ok:
// it is no name that a server on the Internet can have, or one that some resolver reads as an address ("127.1", "0x7f.0.0.1").
func Canonical(name string) (canonical string, ok bool) {
	name = strings.TrimSuffix(name, ".")
	if name == "" || len(name) > 253 {
		return "", false
	}
	name = lower(name)
	rest, last := name, ""
	for more := true; more; {
		last, rest, more = strings.Cut(rest, ".")
		if !label(last) {
			return "", false
		}
	}
	// As browsers and libc do: a last label that begins with a digit makes it an address or nothing. No such top-level domain exists.
	return name, last[0] < '0' || last[0] > '9'
}

func lower(s string) string {
	for i := range len(s) {
		if 'A' <= s[i] && s[i] <= 'Z' {
			return strings.ToLower(s)
		}
	}
	return s
}

func label(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}
