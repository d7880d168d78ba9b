package escapetest

import (
	"context"
	"fmt"
	"strings"
)

// Honest is what a policy that allows one domain lets through. An error says what did not get there.
func Honest() map[string]func(ctx context.Context, g Guest) (string, error) {
	heard := func(network, address, say, want string) func(context.Context, Guest) (string, error) {
		return func(ctx context.Context, g Guest) (string, error) {
			got, err := talk(ctx, g, network, address, say)
			if strings.Contains(got, want) {
				return got, nil
			}
			return got, fmt.Errorf("heard %q, not %q: %w", got, want, err)
		}
	}
	fetched := func(address string) func(context.Context, Guest) (string, error) {
		return func(ctx context.Context, g Guest) (string, error) {
			got, err := Fetch(ctx, g, address, Allowed, "")
			if strings.Contains(got, "served "+Allowed) {
				return got, nil
			}
			return got, fmt.Errorf("heard %q: %w", got, err)
		}
	}
	last := "GET / HTTP/1.1\r\nConnection: close\r\nHost: "
	posted := "POST / HTTP/1.1\r\nHost: " + Allowed + "\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
	return map[string]func(context.Context, Guest) (string, error){
		"a lookup":                   func(ctx context.Context, g Guest) (string, error) { return "", Look(ctx, g) },
		"HTTP":                       heard("tcp", Allowed4+":80", last+Allowed+"\r\n\r\n", "served "+Allowed),
		"HTTP, IPv6":                 heard("tcp", "["+Allowed6+"]:80", last+Allowed+"\r\n\r\n", "served "+Allowed),
		"HTTP, several at once":      heard("tcp", Allowed4+":80", posted+get(Allowed)+last+strings.ToUpper(Allowed)+"\r\n\r\n", "served "+strings.ToUpper(Allowed)),
		"HTTPS":                      fetched(Allowed4 + ":443"),
		"HTTPS, IPv6":                fetched("[" + Allowed6 + "]:443"),
		"HTTPS, another port":        fetched(Allowed4 + ":8443"),
		"a server that speaks first": heard("tcp", Allowed4+":22", "SSH-2.0-guest\r\n", "SSH-2.0-world\r\nSSH-2.0-guest"),
		"UDP that is allowed":        heard("udp", Allowed4+":9999", "echo me", "echo me"),
	}
}
