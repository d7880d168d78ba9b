package host

import (
	"net/netip"
	"regexp"
	"strings"
	"testing"
)

func TestListening(t *testing.T) {
	tests := []struct {
		name, line string
		want       string // "" for none
	}{
		{"header", "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode", ""},
		{"loopback", "   0: 0100007F:1538 00000000:0000 0A 00000000:00000000 00:00000000 00000000   101        0 3123 1", "127.0.0.1:5432"},
		{"any", "   1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3124 1", "0.0.0.0:8080"},
		{"connected", "   2: 0100007F:1538 0100007F:9C40 01 00000000:00000000 00:00000000 00000000   101        0 3125 1", ""},
		{"loopback of IPv6", "   0: 00000000000000000000000001000000:1538 00000000000000000000000000000000:0000 0A 00000000:00000000", "[::1]:5432"},
		{"any of IPv6", "   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000", "[::]:80"},
		{"IPv4 in IPv6", "   0: 0000000000000000FFFF00000100007F:0050 00000000000000000000000000000000:0000 0A 00000000:00000000", "[::ffff:127.0.0.1]:80"},
		{"short", "0: 0100007F:1538", ""},
		{"not hex", "0: zz00007F:1538 x 0A", ""},
		{"no port", "0: 0100007F x 0A", ""},
		{"odd length", "0: 01007F:1538 x 0A", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			at, ok := listening(tt.line)
			if ok != (tt.want != "") || ok && at.String() != tt.want {
				t.Errorf("got %v %v, want %s", at, ok, tt.want)
			}
		})
	}
}

func TestCovers(t *testing.T) {
	tests := []struct {
		listener, want string
		covers         bool
	}{
		{"127.0.0.1:80", "[::]:80", true},
		{"[::1]:80", "[::]:80", true},
		{"10.0.0.1:80", "[::]:80", true},
		{"127.0.0.1:81", "[::]:80", false},
		{"127.0.0.1:80", "127.0.0.1:80", true},
		{"0.0.0.0:80", "127.0.0.1:80", true},
		{"[::]:80", "127.0.0.1:80", true},
		{"[::ffff:127.0.0.1]:80", "127.0.0.1:80", true},
		{"127.0.0.2:80", "127.0.0.1:80", false},
		{"[::1]:80", "127.0.0.1:80", false},
		{"0.0.0.0:80", "[::1]:80", false},
		{"[::]:80", "[::1]:80", true},
	}
	for _, tt := range tests {
		if got := covers(netip.MustParseAddrPort(tt.listener), netip.MustParseAddrPort(tt.want)); got != tt.covers {
			t.Errorf("%s for %s: got %v", tt.listener, tt.want, got)
		}
	}
}

func TestLogMatch(t *testing.T) {
	long := strings.Repeat("x", 4*maxTail)
	tests := []struct {
		name, pattern string
		writes        []string
		want          bool
	}{
		{"a line", "^ready$", []string{"starting\nready\n"}, true},
		{"in pieces", "^ready to serve$", []string{"starting\nrea", "dy to", " serve\n"}, true},
		{"without an end", "^login: $", []string{"login: "}, true},
		{"not across lines", "starting.*ready", []string{"starting\nready\n"}, false},
		{"nothing yet", "ready", []string{"starting\n"}, false},
		{"after a line without end", "ready$", []string{long, long, "ready\n"}, true},
		{"after many lines", "^ready$", []string{strings.Repeat("line\n", 10000), "ready\n"}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := logMatch{re: regexp.MustCompile(tt.pattern)}
			for _, w := range tt.writes {
				m.add([]byte(w))
			}
			if m.seen != tt.want {
				t.Errorf("seen: %v", m.seen)
			}
			if len(m.line) > maxTail {
				t.Errorf("keeps %d bytes", len(m.line))
			}
		})
	}
}
