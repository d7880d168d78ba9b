package image

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/image/debian"
)

// Recipe says how to make an image and warm it. ParseRecipe fills in the defaults and guarantees the bounds that the
// fields' comments name.
type Recipe struct {
	Name     string            // default: the name given to ParseRecipe
	Base     string            // "debian:bookworm", "oci:docker.io/library/alpine:3", …
	From     Base              // the same, read
	Packages []string          // Debian packages, without versions
	Files    []File            // copied in after the packages are installed
	Env      map[string]string // of the recipe's commands, the warm-up and every process of a sandbox
	WorkDir  string            // absolute; default "/root", or the user's home; of a base that is not Debian: "", its own
	User     string            // who runs the warm-up and a sandbox's processes; made when missing; default "root", or the base's: ""
	Run      []string          // shell commands, as root inside a VM, in order
	Network  *Network          // nil: none, or that of the snapshot it stands on
	Init     string            // "systemd": the image's own, started before the warm-up; default "": none
	Machine  Machine
	Limits   Limits
	Warmup   *Warmup // nil: the snapshot is of a freshly booted machine
}

// File is something to copy into the image: exactly one of Source and Content.
type File struct {
	Source  string // slash-separated, relative to the recipe's directory, which it does not leave; file or directory
	Content *string
	Path    string // absolute, in the image
	Mode    uint32 // 0: 0644, or 0755 when the source is executable
	Owner   string // "user", "user:group"; default "root:root"
}

// Machine is the size of the VM.
type Machine struct {
	CPUs        int
	MemoryBytes int64
	DiskBytes   int64 // the disk is sparse: this is what it can grow to
	DiskGiven   bool  // by the recipe: otherwise it is made larger when the base needs it
	CPUsGiven   bool  // by the recipe, as the memory: on a base that is a snapshot they must be the snapshot's
	MemoryGiven bool
}

// MachineOf is a machine of that size; what is 0 is as in a recipe that does not say.
func MachineOf(cpus int, memory int64) (Machine, error) {
	m := Machine{CPUs: DefaultCPUs, MemoryBytes: DefaultMemoryBytes, DiskBytes: DefaultDiskBytes}
	if cpus != 0 {
		m.CPUs = cpus
	}
	if memory != 0 {
		m.MemoryBytes = memory
	}
	switch {
	case m.CPUs < 1 || m.CPUs > maxCPUs:
		return m, fmt.Errorf("a machine of %d cpus: give 1 to %d", m.CPUs, maxCPUs)
	case m.MemoryBytes < minMemory || m.MemoryBytes > maxMemory || m.MemoryBytes%(1<<20) != 0:
		return m, fmt.Errorf("a machine of %d bytes of memory: give %s to %s, a multiple of 1MiB", m.MemoryBytes, sizeText(minMemory), sizeText(maxMemory))
	}
	return m, nil
}

// InitSystemd is the init of a recipe that wants systemd to run.
const InitSystemd = "systemd"

// Defaults of a recipe.
const (
	DefaultCPUs        = 1
	DefaultMemoryBytes = 512 << 20
	DefaultDiskBytes   = 8 << 30
)

const (
	maxRecipeBytes  = 1 << 20
	maxNameLength   = 63
	maxPathLength   = 1024
	maxListLength   = 1000
	maxTextLength   = 256 << 10
	maxEnvValue     = 32 << 10
	maxCPUs         = 64
	minMemory       = 128 << 20
	maxMemory       = 1 << 40
	minDisk         = 1 << 30
	maxDisk         = 16 << 40
	maxTimeout      = 24 * time.Hour
	maxReportedText = 60
)

var (
	namePattern  = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*$`)
	envPattern   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	userPattern  = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
	ownerPattern = regexp.MustCompile(`^([a-z_][a-z0-9_-]{0,31}|[0-9]{1,9})(:([a-z_][a-z0-9_-]{0,31}|[0-9]{1,9}))?$`)
	sizePattern  = regexp.MustCompile(`^([0-9]{1,12})\s*(KiB|MiB|GiB|TiB)$`)
)

// StandsAlone says why a text is no recipe that can be built without the files that lay beside it, which do not travel with it.
func StandsAlone(text []byte) error {
	r, err := ParseRecipe("recipe", text)
	if err != nil {
		return fmt.Errorf("it was made of something else than a recipe: %w", err)
	}
	for _, f := range r.Files {
		if f.Source != "" {
			return fmt.Errorf("its recipe has %q copied, and files that lie beside a recipe do not travel with it", f.Source)
		}
	}
	return nil
}

// ParseRecipe reads a recipe file. name is the file's name, for messages. The error is a *FileError with every
// fault, each with its line. It touches no file: sources are looked up by Resolve.
func ParseRecipe(name string, text []byte) (*Recipe, error) {
	d := &decoder{}
	r := &Recipe{
		Machine: Machine{CPUs: DefaultCPUs, MemoryBytes: DefaultMemoryBytes, DiskBytes: DefaultDiskBytes},
	}
	if root := d.document(text); root != nil {
		d.recipe(root, r)
	}
	if len(d.faults) > 0 {
		slices.SortStableFunc(d.faults, func(a, b Fault) int {
			if a.Line != b.Line {
				return a.Line - b.Line
			}
			return a.Column - b.Column
		})
		return nil, &FileError{Name: name, Faults: d.faults}
	}
	if r.From.Kind != KindDebian {
		return r, nil
	}
	if r.User == "" {
		r.User = "root"
	}
	if r.WorkDir == "" {
		r.WorkDir = "/root"
		if r.User != "root" {
			r.WorkDir = "/home/" + r.User
		}
	}
	return r, nil
}

func (d *decoder) recipe(n *node, r *Recipe) {
	hasBase := false
	var user, packages, context *node
	d.mapping(n, map[string]func(*node){
		"name": func(n *node) {
			if s, ok := d.text(n, maxNameLength); ok {
				if !namePattern.MatchString(s) {
					d.fault(n, "name %q: use lower-case letters, digits, '.', '_' and '-'", short(s))
				}
				r.Name = s
			}
		},
		"base": func(n *node) {
			hasBase = true
			if s, ok := d.text(n, maxBaseLength); ok {
				from, err := ParseBase(s)
				if err != nil {
					d.fault(n, "%s", err)
				}
				r.Base, r.From = s, from
			}
		},
		"packages": func(n *node) { packages, r.Packages = n, d.packages(n) },
		"files":    func(n *node) { d.list(n, func(n *node) { r.Files = append(r.Files, d.file(n)) }) },
		"env":      func(n *node) { r.Env = d.env(n) },
		"workdir":  func(n *node) { r.WorkDir = d.absolute(n) },
		"user": func(n *node) {
			if s, ok := d.text(n, maxNameLength); ok {
				if !ownerPattern.MatchString(s) {
					d.fault(n, "user %q is not a user name", short(s))
				}
				user, r.User = n, s
			}
		},
		"run": func(n *node) {
			d.list(n, func(n *node) {
				if s, ok := d.text(n, maxTextLength); ok {
					r.Run = append(r.Run, s)
				}
			})
		},
		"init": func(n *node) {
			if s, ok := d.text(n, maxNameLength); ok {
				if s != InitSystemd && s != "none" {
					d.fault(n, `init %q: "systemd", or "none", which is the default`, short(s))
				}
				if s == InitSystemd {
					r.Init = s
				}
			}
		},
		"machine": func(n *node) { d.machine(n, &r.Machine) },
		"limits":  func(n *node) { d.limits(n, &r.Limits) },
		"network": func(n *node) { r.Network = d.network(n) },
		"warmup":  func(n *node) { context, r.Warmup = n.key("context"), d.warmup(n) },
	})
	switch debianBase := r.From.Kind == KindDebian; {
	case r.From.Kind == "": // a fault of its own
	case debianBase && user != nil && !userPattern.MatchString(r.User):
		d.fault(user, "user %q is not a user name", short(r.User)) // it may have to be made
	case !debianBase && packages != nil:
		d.fault(packages, `packages are Debian's, and can be installed on a debian base only; use "run" with what base %s has`, short(r.Base))
	}
	if context != nil && r.From.Kind == KindDebian && !r.speaks(r.Warmup.Context) {
		d.fault(context, "context %q is not known: there are %s, and what the recipe's files have a driver for in %s", short(r.Warmup.Context),
			strings.Join(languages(), ", "), driverDirs()[0])
	}
	if !hasBase && n.isMapping() {
		d.fault(n, `key "base" is missing; for example: base: %s`, debian.Bases()[0].Name)
	}
}

func (d *decoder) packages(n *node) []string {
	var packages []string
	d.list(n, func(n *node) {
		s, ok := d.text(n, 200)
		switch {
		case !ok:
		case strings.ContainsAny(s, "=/ "):
			d.fault(n, "package %q: give the name only, without version or release", short(s))
		case !debian.ValidName(s):
			d.fault(n, "package %q: not a package name", short(s))
		case slices.Contains(packages, s):
			d.fault(n, "package %q is listed twice", s)
		default:
			packages = append(packages, s)
		}
	})
	return packages
}

func (d *decoder) file(n *node) File {
	var f File
	hasPath := false
	d.mapping(n, map[string]func(*node){
		"source":  func(n *node) { f.Source = d.source(n) },
		"content": func(n *node) { f.Content = d.content(n) },
		"path": func(n *node) {
			hasPath = true
			f.Path = d.absolute(n)
			if f.Path == "/" {
				d.fault(n, "path: name a file, not the root directory")
			}
		},
		"mode": func(n *node) { f.Mode = d.mode(n) },
		"owner": func(n *node) {
			if s, ok := d.text(n, maxNameLength); ok {
				if !ownerPattern.MatchString(s) {
					d.fault(n, `owner %q: write "user" or "user:group"`, short(s))
				}
				f.Owner = s
			}
		},
	})
	if n.isMapping() {
		if !hasPath {
			d.fault(n, `file: key "path" is missing`)
		}
		if n.has("source") == n.has("content") {
			d.fault(n, `file: give exactly one of "source" and "content"`)
		}
	}
	return f
}

func (d *decoder) content(n *node) *string {
	s, ok := d.scalar(n)
	if !ok {
		return nil
	}
	if len(s) > maxTextLength {
		d.fault(n, "content: longer than %d bytes; use a source file", maxTextLength)
	}
	return &s
}

// mode reads an octal file mode, quoted or not: YAML itself would take 0644 as a decimal or an octal number depending
// on its version.
func (d *decoder) mode(n *node) uint32 {
	s, ok := d.scalar(n)
	if !ok {
		return 0
	}
	v, err := strconv.ParseUint(strings.TrimPrefix(s, "0o"), 8, 32)
	if err != nil || v == 0 || v > 0o7777 {
		d.fault(n, "mode %q: write it in octal, for example \"0755\"", short(s))
	}
	return uint32(v)
}

func (d *decoder) env(n *node) map[string]string {
	env := map[string]string{}
	d.entries(n, func(key string, k, v *node) {
		if !envPattern.MatchString(key) || len(key) > 300 {
			d.fault(k, "env %q is not a variable name", short(key))
			return
		}
		s, ok := d.scalar(v)
		if !ok {
			return
		}
		if strings.ContainsRune(s, 0) || len(s) > maxEnvValue {
			d.fault(v, "env %s: value has a NUL or is longer than %d bytes", key, maxEnvValue)
			return
		}
		env[key] = s
	})
	return env
}

func (d *decoder) machine(n *node, m *Machine) {
	d.mapping(n, map[string]func(*node){
		"cpus": func(n *node) { m.CPUs, m.CPUsGiven = int(d.integer(n, "cpus", 1, maxCPUs)), true },
		"memory": func(n *node) {
			m.MemoryBytes, m.MemoryGiven = d.size(n, "memory", minMemory, maxMemory), true
		},
		"disk": func(n *node) {
			m.DiskBytes, m.DiskGiven = d.size(n, "disk", minDisk, maxDisk), true
		},
	})
}

func (d *decoder) size(n *node, what string, least, most int64) int64 {
	s, ok := d.scalar(n)
	if !ok {
		return 0
	}
	m := sizePattern.FindStringSubmatch(s)
	if m == nil {
		d.fault(n, "%s %q: write a whole number with a unit, for example \"512MiB\" or \"4GiB\"", what, short(s))
		return 0
	}
	v, _ := strconv.ParseInt(m[1], 10, 64)
	shift := map[string]int{"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[m[2]]
	if v > most>>shift || v<<shift < least {
		d.fault(n, "%s %q: must be from %s to %s", what, s, sizeText(least), sizeText(most))
		return 0
	}
	if v<<shift%(1<<20) != 0 {
		d.fault(n, "%s %q: must be a multiple of 1MiB", what, s)
		return 0
	}
	return v << shift
}

func sizeText(v int64) string {
	switch {
	case v%(1<<40) == 0:
		return strconv.FormatInt(v>>40, 10) + "TiB"
	case v%(1<<30) == 0:
		return strconv.FormatInt(v>>30, 10) + "GiB"
	default:
		return strconv.FormatInt(v>>20, 10) + "MiB"
	}
}

// argv is a command: a list of arguments, or a string for the shell.
func (d *decoder) argv(n *node, what string) []string {
	if n.isScalar() {
		if s, ok := d.text(n, maxTextLength); ok {
			return []string{"/bin/sh", "-c", s}
		}
		return nil
	}
	var argv []string
	d.list(n, func(n *node) {
		if s, ok := d.scalar(n); ok {
			if strings.ContainsRune(s, 0) || len(s) > maxTextLength {
				d.fault(n, "%s: argument has a NUL or is longer than %d bytes", what, maxTextLength)
			}
			argv = append(argv, s)
		}
	})
	if n.isList() && (len(argv) == 0 || argv[0] == "") {
		d.fault(n, "%s: names no program", what)
	}
	return argv
}

func (d *decoder) duration(n *node, what string) time.Duration {
	s, ok := d.scalar(n)
	if !ok {
		return 0
	}
	v, err := time.ParseDuration(s)
	if err != nil || v <= 0 || v > maxTimeout {
		d.fault(n, "%s %q: write a time up to 24h with a unit, for example \"90s\"", what, short(s))
	}
	return v
}

// absolute is a path inside the image.
func (d *decoder) absolute(n *node) string {
	s, ok := d.text(n, maxPathLength)
	if !ok {
		return ""
	}
	if s[0] != '/' || path.Clean(s) != s || strings.ContainsAny(s, "\n\r") {
		d.fault(n, "path %q: write an absolute path without \"..\", \"//\" or a slash at the end", short(s))
	}
	return s
}

// source is a path in the recipe's directory.
func (d *decoder) source(n *node) string {
	s, ok := d.text(n, maxPathLength)
	if !ok {
		return ""
	}
	clean := path.Clean(s)
	if s[0] == '/' || clean == ".." || strings.HasPrefix(clean, "../") || strings.ContainsAny(s, "\\\n\r") {
		d.fault(n, "source %q: must be below the recipe's directory", short(s))
	}
	return clean
}
