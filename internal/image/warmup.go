package image

import (
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Warmup is what runs before the machine is frozen: the services are started, each when the one before is ready, then
// Command runs to its end, then Code is evaluated. At least one of the three is there.
type Warmup struct {
	Services []Service
	Command  []string // argv
	Context  string   // language of the context; "" without code
	Code     string   // to evaluate
	CodeFile string   // or a file of the recipe's directory with it
	Timeout  time.Duration
}

// Service is a command that goes on running in every child.
type Service struct {
	Name    string   // its tag in the process list; unique
	Command []string // argv
	User    string   // default: the recipe's
	Env     map[string]string
	WorkDir string  // absolute; default: the recipe's
	Ready   []Ready // awaited in this order; at least one
}

// Ready is how to tell that a service is up: all conditions that are given hold at the same time.
type Ready struct {
	Command  []string       // exits with 0
	Port     netip.AddrPort // something listens there; an unspecified address: on any
	File     string         // exists
	Log      string         // regular expression, matches a line of the service's output
	HTTP     *HTTPCheck
	Timeout  time.Duration
	Interval time.Duration
}

// HTTPCheck is a GET without a redirect being followed.
type HTTPCheck struct {
	Address netip.AddrPort
	Host    string // of the request
	Path    string // with the query
	Status  int    // that it must have; 0: any from 200 to 299
}

// URL is what is asked for.
func (c *HTTPCheck) URL() string { return "http://" + c.Host + c.Path }

// Defaults of a warm-up.
const (
	DefaultWarmupTimeout = 5 * time.Minute
	DefaultReadyTimeout  = 2 * time.Minute
	DefaultReadyInterval = 100 * time.Millisecond // a guest under emulation should spend its time on starting
	// DefaultService is the name of the service that "command" with "ready" makes.
	DefaultService = "service"
)

const (
	minInterval = 10 * time.Millisecond
	maxServices = 20
)

// languages are those that a context can have in any image that has their interpreter.
func languages() []string { return []string{"python", "javascript", "typescript", "shell"} }

// driverDirs are where the agent looks for drivers of further languages.
func driverDirs() []string { return []string{"/etc/forkd/contexts.d", "/usr/lib/forkd/contexts.d"} }

// speaks says whether a context can have the language, as far as the recipe tells.
func (r *Recipe) speaks(language string) bool {
	if language == "" || slices.Contains(languages(), language) { // an empty one is a fault of its own
		return true
	}
	return slices.ContainsFunc(r.Files, func(f File) bool {
		return slices.ContainsFunc(driverDirs(), func(dir string) bool {
			return f.Path == dir+"/"+language || f.Content == nil && strings.HasPrefix(dir+"/", f.Path+"/")
		})
	})
}

func (d *decoder) warmup(n *node) *Warmup {
	w := &Warmup{Timeout: DefaultWarmupTimeout}
	var alone Service // "command" with "ready"
	d.mapping(n, map[string]func(*node){
		"context": func(n *node) {
			if s, ok := d.text(n, maxNameLength); ok {
				if !namePattern.MatchString(s) {
					d.fault(n, "context %q is not the name of a language", short(s))
				}
				w.Context = s
			}
		},
		"code": func(n *node) {
			if s, ok := d.text(n, maxTextLength); ok {
				w.Code = s
			}
		},
		"code_file": func(n *node) { w.CodeFile = d.source(n) },
		"command":   func(n *node) { w.Command = d.argv(n, "command") },
		"ready":     func(n *node) { alone.Ready = d.readies(n) },
		"services":  func(n *node) { w.Services = d.services(n) },
		"timeout":   func(n *node) { w.Timeout = d.duration(n, "timeout") },
	})
	if !n.isMapping() {
		return w
	}
	context, command, services := n.has("context"), n.has("command"), n.has("services")
	code := n.has("code") || n.has("code_file")
	switch {
	case !context && !command && !services:
		d.fault(n, `warmup: give "context" with "code" or "code_file", or "command", or "services"`)
	case context && n.has("code") == n.has("code_file"):
		d.fault(n, `warmup: a context needs exactly one of "code" and "code_file"`)
	case code && !context:
		d.fault(n, `warmup: "code" needs a "context"`)
	}
	if !n.has("ready") {
		return w
	}
	switch {
	case services:
		d.fault(n, `warmup: "ready" belongs to a service: give each of "services" its own`)
	case !command:
		d.fault(n, `warmup: "ready" belongs to a command; code in a context is ready when it returns`)
	}
	alone.Name, alone.Command, w.Command = DefaultService, w.Command, nil
	w.Services = append(w.Services, alone)
	return w
}

func (d *decoder) services(n *node) []Service {
	var list []Service
	d.list(n, func(n *node) {
		var s Service
		d.mapping(n, map[string]func(*node){
			"name": func(n *node) {
				name, ok := d.text(n, maxNameLength)
				switch {
				case !ok:
					return
				case !namePattern.MatchString(name):
					d.fault(n, "name %q: use lower-case letters, digits, '.', '_' and '-'", short(name))
				case slices.ContainsFunc(list, func(s Service) bool { return s.Name == name }):
					d.fault(n, "service %q is there twice", name)
				}
				s.Name = name
			},
			"command": func(n *node) { s.Command = d.argv(n, "command") },
			"user": func(n *node) {
				if user, ok := d.text(n, maxNameLength); ok {
					if !ownerPattern.MatchString(user) {
						d.fault(n, "user %q is not a user name", short(user))
					}
					s.User = user
				}
			},
			"env":     func(n *node) { s.Env = d.env(n) },
			"workdir": func(n *node) { s.WorkDir = d.absolute(n) },
			"ready":   func(n *node) { s.Ready = d.readies(n) },
		})
		if n.isMapping() {
			for _, key := range []string{"name", "command", "ready"} {
				if !n.has(key) {
					d.fault(n, "service: key %q is missing", key)
				}
			}
		}
		list = append(list, s)
	})
	if n.isList() && (len(list) == 0 || len(list) > maxServices) {
		d.fault(n, "services: give 1 to %d", maxServices)
	}
	return list
}

// readies is one set of conditions, or a list of sets that are awaited one after the other.
func (d *decoder) readies(n *node) []Ready {
	if !n.isList() {
		return []Ready{d.ready(n)}
	}
	var list []Ready
	d.list(n, func(n *node) { list = append(list, d.ready(n)) })
	if len(list) == 0 {
		d.fault(n, "ready: names no condition")
	}
	return list
}

func (d *decoder) ready(n *node) Ready {
	r := Ready{Timeout: DefaultReadyTimeout, Interval: DefaultReadyInterval}
	conditions := map[string]func(*node){
		"command": func(n *node) { r.Command = d.argv(n, "command") },
		"port":    func(n *node) { r.Port = d.port(n) },
		"file":    func(n *node) { r.File = d.absolute(n) },
		"log": func(n *node) {
			if s, ok := d.text(n, 1000); ok {
				if _, err := regexp.Compile(s); err != nil {
					d.fault(n, "log: %s", err)
				}
				r.Log = s
			}
		},
		"http": func(n *node) { r.HTTP = d.http(n) },
	}
	fields := map[string]func(*node){
		"timeout": func(n *node) { r.Timeout = d.duration(n, "timeout") },
		"interval": func(n *node) {
			r.Interval = d.duration(n, "interval")
			if r.Interval > 0 && r.Interval < minInterval {
				d.fault(n, "interval: at least %s", minInterval)
			}
		},
	}
	given := false
	for key, read := range conditions {
		fields[key] = read
		given = given || n.isMapping() && n.has(key)
	}
	d.mapping(n, fields)
	if n.isMapping() && !given {
		d.fault(n, `ready: give at least one of "command", "port", "file", "log" and "http"`)
	}
	return r
}

// port is a port number, or an address with one.
func (d *decoder) port(n *node) netip.AddrPort {
	s, ok := d.scalar(n)
	if !ok {
		return netip.AddrPort{}
	}
	if at, err := netip.ParseAddrPort(s); err == nil && at.Port() != 0 {
		return at
	}
	if strings.ContainsAny(s, ":.") {
		d.fault(n, `port %q: write a number, or an address as in "127.0.0.1:80" or "[::1]:80"`, short(s))
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(d.integer(n, "port", 1, 65535)))
}

// http is an URL, or a mapping.
func (d *decoder) http(n *node) *HTTPCheck {
	c := &HTTPCheck{}
	if n.isScalar() {
		d.url(n, c)
		return c
	}
	d.mapping(n, map[string]func(*node){
		"url": func(n *node) { d.url(n, c) },
		"port": func(n *node) {
			port := d.integer(n, "port", 1, 65535)
			c.Address = netip.AddrPortFrom(loopback(), uint16(port))
			c.Host = "localhost:" + strconv.FormatInt(port, 10)
		},
		"path": func(n *node) {
			if s, ok := d.text(n, maxPathLength); ok {
				if s[0] != '/' || strings.ContainsAny(s, " \t\r\n#") {
					d.fault(n, "path %q: begin with a slash, and leave out blanks", short(s))
				}
				c.Path = s
			}
		},
		"status": func(n *node) { c.Status = int(d.integer(n, "status", 100, 599)) },
	})
	if !n.isMapping() {
		return c
	}
	if n.has("url") == n.has("port") || n.has("url") && n.has("path") {
		d.fault(n, `http: give "url", or "port" with or without "path"`)
	}
	if c.Path == "" {
		c.Path = "/"
	}
	return c
}

func loopback() netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 0, 1}) }

// url reads an URL whose host needs no name service: there is none yet.
func (d *decoder) url(n *node, c *HTTPCheck) {
	s, ok := d.text(n, maxPathLength)
	if !ok {
		return
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" || u.User != nil || u.Opaque != "" || strings.ContainsAny(s, " \t\r\n") {
		d.fault(n, `url %q: write it as "http://127.0.0.1:8080/path"`, short(s))
		return
	}
	address := loopback()
	if host := u.Hostname(); host != "localhost" {
		if address, err = netip.ParseAddr(host); err != nil {
			d.fault(n, "url %q: the host must be localhost or an address", short(s))
			return
		}
	}
	port := uint64(80)
	if text := u.Port(); text != "" {
		if port, err = strconv.ParseUint(text, 10, 16); err != nil || port == 0 {
			d.fault(n, "url %q: the port must be from 1 to 65535", short(s))
			return
		}
	}
	c.Address, c.Host, c.Path = netip.AddrPortFrom(address, uint16(port)), u.Host, u.RequestURI()
}
