package image

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseWarmup(t *testing.T) {
	const text = `base: debian:bookworm
warmup:
  services:
    - name: db
      command: [postgres, -D, /data]
      user: postgres
      env: {PGDATA: /data}
      workdir: /data
      ready:
        - {port: "[::1]:5432", file: /run/x, interval: 1s}
        - {command: psql, timeout: 5s}
    - name: web
      command: serve
      ready: {http: "http://localhost:8080/health?a=b", log: ^up$}
    - name: api
      command: serve
      ready: {http: {port: 81, status: 401}}
  command: [fill, cache]
  context: python
  code: import this
`
	got, err := ParseRecipe("r", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	shell := func(s string) []string { return []string{"/bin/sh", "-c", s} }
	want := &Warmup{
		Services: []Service{
			{
				Name: "db", Command: []string{"postgres", "-D", "/data"}, User: "postgres", Env: map[string]string{"PGDATA": "/data"}, WorkDir: "/data",
				Ready: []Ready{
					{Port: netip.MustParseAddrPort("[::1]:5432"), File: "/run/x", Timeout: DefaultReadyTimeout, Interval: time.Second},
					{Command: shell("psql"), Timeout: 5 * time.Second, Interval: DefaultReadyInterval},
				},
			},
			{
				Name: "web", Command: shell("serve"),
				Ready: []Ready{{
					HTTP: &HTTPCheck{Address: netip.MustParseAddrPort("127.0.0.1:8080"), Host: "localhost:8080", Path: "/health?a=b"},
					Log:  "^up$", Timeout: DefaultReadyTimeout, Interval: DefaultReadyInterval,
				}},
			},
			{
				Name: "api", Command: shell("serve"),
				Ready: []Ready{{
					HTTP:    &HTTPCheck{Address: netip.MustParseAddrPort("127.0.0.1:81"), Host: "localhost:81", Path: "/", Status: 401},
					Timeout: DefaultReadyTimeout, Interval: DefaultReadyInterval,
				}},
			},
		},
		Command: []string{"fill", "cache"}, Context: "python", Code: "import this", Timeout: DefaultWarmupTimeout,
	}
	if d := cmp.Diff(want, got.Warmup, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); d != "" {
		t.Error(d)
	}
}

func TestParseWarmupFaults(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"no services", "services: []", `r:3: services: give 1 to 20`},
		{"empty service", "services: [{}]", `r:3: service: key "name" is missing
r:3: service: key "command" is missing
r:3: service: key "ready" is missing`},
		{"service twice", "services:\n  - &x {name: a, command: b, ready: {port: 1}}\n  - {name: a, command: b, ready: {port: 1}}", `r:4: anchors and aliases are not supported`},
		{"same name", "services:\n  - {name: a, command: b, ready: {port: 1}}\n  - {name: a, command: b, ready: {port: 1}}", `r:5: service "a" is there twice`},
		{"bad service", "services:\n  - name: A b\n    command: []\n    user: x y\n    workdir: a\n    restart: yes\n    ready: {}", `r:4: name "A b": use lower-case letters, digits, '.', '_' and '-'
r:5: command: names no program
r:6: user "x y" is not a user name
r:7: path "a": write an absolute path without "..", "//" or a slash at the end
r:8: key "restart" is not known; known here: command, env, name, ready, user, workdir
r:9: ready: give at least one of "command", "port", "file", "log" and "http"`},
		{"ready of nothing", "services: [{name: a, command: b, ready: {port: 1}}]\n  ready: {port: 2}", `r:3: warmup: "ready" belongs to a service: give each of "services" its own`},
		{"ready list", "command: x\n  ready: []", `r:4: ready: names no condition`},
		{"ready only times", "command: x\n  ready: {timeout: 5s, interval: 1ms}", `r:4: ready: give at least one of "command", "port", "file", "log" and "http"
r:4: interval: at least 10ms`},
		{"ports", "command: x\n  ready:\n  - port: 70000\n  - port: localhost:80\n  - port: 1.2.3.4\n  - port: 127.0.0.1:0\n  - port: x", `r:5: port "70000": must be a whole number from 1 to 65535
r:6: port "localhost:80": write a number, or an address as in "127.0.0.1:80" or "[::1]:80"
r:7: port "1.2.3.4": write a number, or an address as in "127.0.0.1:80" or "[::1]:80"
r:8: port "127.0.0.1:0": write a number, or an address as in "127.0.0.1:80" or "[::1]:80"
r:9: port "x": must be a whole number from 1 to 65535`},
		{"http", "command: x\n  ready:\n  - http: https://localhost/\n  - http: http://db/\n  - http: http://localhost:0/\n  - http: {}\n  - http: {url: http://localhost/, path: /x}\n  - http: {port: 1, path: x, status: 20, method: PUT}", `r:5: url "https://localhost/": write it as "http://127.0.0.1:8080/path"
r:6: url "http://db/": the host must be localhost or an address
r:7: url "http://localhost:0/": the port must be from 1 to 65535
r:8: http: give "url", or "port" with or without "path"
r:9: http: give "url", or "port" with or without "path"
r:10: path "x": begin with a slash, and leave out blanks
r:10: status "20": must be a whole number from 100 to 599
r:10: key "method" is not known; known here: path, port, status, url`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ParseRecipe("r", []byte("base: debian:bookworm\nwarmup:\n  "+c.text+"\n"))
			faults, ok := errors.AsType[*FileError](err)
			if !ok {
				t.Fatalf("got %v", err)
			}
			if d := cmp.Diff(c.want, faults.Error()); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestContextOfDriver: a language that forkd does not have needs its driver among the recipe's files, or a base that may
// have it.
func TestContextOfDriver(t *testing.T) {
	for _, c := range []struct {
		text string
		ok   bool
	}{
		{"base: debian:bookworm", false},
		{"base: debian:bookworm\nfiles: [{source: perl, path: /etc/forkd/contexts.d/perl}]", true},
		{"base: debian:bookworm\nfiles: [{source: perl, path: /etc/forkd/contexts.d/ruby}]", false},
		{"base: debian:bookworm\nfiles: [{source: drivers, path: /usr/lib/forkd/contexts.d}]", true},
		{"base: debian:bookworm\nfiles: [{source: tree, path: /usr/lib}]", true},
		{"base: image:mine", true},
	} {
		_, err := ParseRecipe("r", []byte(c.text+"\nwarmup: {context: perl, code: x}\n"))
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.text, err)
		}
	}
}
