// Package mountinfo reads the kernel's list of what is mounted where, /proc/PID/mountinfo (proc_pid_mountinfo(5)). It opens no file.
package mountinfo

import (
	"strconv"
	"strings"
)

// Mount is a line of the list.
type Mount struct {
	Root    string // what of the file system is mounted; "//deleted" at its end: it was removed
	At      string // the mount point
	Type    string // of the file system
	Options string // of the file system, by commas
}

// Parse reads lines of "id parent major:minor root point options … - type source options"; others are passed over.
func Parse(text string) []Mount {
	var all []Mount
	for line := range strings.Lines(text) {
		before, after, ok := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 1 {
			continue
		}
		m := Mount{Root: unescape(left[3]), At: unescape(left[4]), Type: right[0]}
		if len(right) > 2 {
			m.Options = right[2]
		}
		all = append(all, m)
	}
	return all
}

// unescape undoes the kernel's octal escapes of spaces and the like.
func unescape(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		if s[0] == '\\' && len(s) >= 4 {
			if n, err := strconv.ParseUint(s[1:4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				s = s[4:]
				continue
			}
		}
		b.WriteByte(s[0])
		s = s[1:]
	}
	return b.String()
}
