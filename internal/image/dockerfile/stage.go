package dockerfile

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/image"
)

// Base is what a stage stands on; exactly one is set.
type Base struct {
	Stage *Build // an earlier stage
	Ref   string // a recipe's base: "oci:python:3.12", "debian:bookworm", "image:NAME", "snapshot:TAG", …; "scratch"
}

// Op is something to do in the machine of a stage; exactly one of the pointers is set.
type Op struct {
	Line int
	Text string // of its instruction
	Run  *Run
	Copy *Copy
	Dir  *Dir
}

// Run is a command.
type Run struct {
	Argv []string
	Env  map[string]string // the image's and the arguments'; complete but for what every process of the user has
	Dir  string            // "" is /
	User string            // "" is root
}

// Copy puts files in place.
type Copy struct {
	Sources []string // below the context, or absolute in From
	Dest    string   // absolute; with a slash at its end it is a directory
	From    *Base    // nil: the context
	Inline  []Inline // documents written in the Dockerfile
	Chown   string
	Chmod   uint32 // 0: as the sources have it
	Add     bool   // unpack archives
}

// Inline is a file whose content is in the Dockerfile.
type Inline struct{ Name, Content string }

// Dir is a directory to be there.
type Dir struct{ Path string }

// Options say what to make of a Dockerfile.
type Options struct {
	Args   map[string]string // --build-arg
	Target string            // a stage's name or number; "": the last
}

// Build is a Dockerfile with its options: stages are evaluated one after the other, each when the configuration of what it
// stands on is known.
type Build struct {
	file   *File
	stage  int
	opts   Options
	global map[string]string // arguments before the first FROM
	memo   map[int]*Build
	used   map[string]bool // arguments that were declared
}

// Name is how messages call a stage.
func (b *Build) Name() string {
	if n := b.file.Stages[b.stage].Name; n != "" {
		return n
	}
	return strconv.Itoa(b.stage)
}

// Line is that of its FROM.
func (b *Build) Line() int { return b.file.Stages[b.stage].From.Line }

// Index is the stage's number.
func (b *Build) Index() int { return b.stage }

// platform are the arguments that are there without being given.
func platform() map[string]string {
	p := "linux/" + runtime.GOARCH
	return map[string]string{
		"TARGETPLATFORM": p, "TARGETOS": "linux", "TARGETARCH": runtime.GOARCH, "TARGETVARIANT": "",
		"BUILDPLATFORM": p, "BUILDOS": "linux", "BUILDARCH": runtime.GOARCH, "BUILDVARIANT": "",
	}
}

// isProxy: proxies need no ARG, and do not count for whether a step is the same.
func isProxy(name string) bool {
	switch strings.ToUpper(name) {
	case "HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY":
		return true
	}
	return false
}

// Target begins the evaluation with the stage that is asked for.
func (f *File) Target(opts Options) (*Build, error) {
	b := &Build{file: f, opts: opts, global: map[string]string{}, memo: map[int]*Build{}, used: map[string]bool{}}
	for _, in := range f.Args {
		if err := b.declare(in, b.argument, func(name, value string, has bool) {
			if has {
				b.global[name] = value
			}
		}); err != nil {
			return nil, err
		}
	}
	target := len(f.Stages) - 1
	if opts.Target != "" {
		target = f.find(opts.Target, len(f.Stages))
		if target < 0 {
			var names []string
			for i, s := range f.Stages {
				if s.Name != "" {
					names = append(names, s.Name)
				} else {
					names = append(names, strconv.Itoa(i))
				}
			}
			return nil, b.fault(0, "no stage %q; there are %s", shorten(opts.Target), strings.Join(names, ", "))
		}
	}
	return b.at(target), nil
}

// argument is one of those that FROM lines see: given before the first of them, or there without being given.
func (b *Build) argument(name string) (string, bool) {
	if v, ok := b.global[name]; ok {
		return v, true
	}
	v, ok := platform()[name]
	return v, ok
}

func (b *Build) at(stage int) *Build {
	if s, ok := b.memo[stage]; ok {
		return s
	}
	s := *b
	s.stage = stage
	b.memo[stage] = &s
	return &s
}

// find is the index of the stage of a name or number among the first n, or -1.
func (f *File) find(name string, n int) int {
	for i, s := range f.Stages[:n] {
		if s.Name != "" && strings.EqualFold(s.Name, name) {
			return i
		}
	}
	if i, err := strconv.Atoi(name); err == nil && i >= 0 && i < n {
		return i
	}
	return -1
}

func (b *Build) fault(line int, format string, args ...any) error {
	return &image.FileError{Name: b.file.Name, Faults: []image.Fault{{Line: line, Message: fmt.Sprintf(format, args...)}}}
}

// Base is what the stage stands on.
func (b *Build) Base() (Base, error) {
	from := b.file.Stages[b.stage].From
	if p := from.flag("platform"); p != "" {
		p, err := expand(p, b.file.escape, b.argument)
		if err != nil {
			return Base{}, b.fault(from.Line, "FROM --platform: %s", err)
		}
		if want := "linux/" + runtime.GOARCH; p != want && !strings.HasPrefix(p, want+"/") {
			return Base{}, b.fault(from.Line, "FROM --platform=%s: machines of this host are %s", shorten(p), want)
		}
	}
	ref, err := expand(strings.Fields(from.Rest)[0], b.file.escape, b.argument)
	if err != nil {
		return Base{}, b.fault(from.Line, "FROM: %s", err)
	}
	if ref == "" {
		return Base{}, b.fault(from.Line, "FROM %s: the name is empty; give its argument a default, or --build-arg", from.Rest)
	}
	for i, s := range b.file.Stages[:b.stage] {
		if s.Name != "" && strings.EqualFold(s.Name, ref) {
			return Base{Stage: b.at(i)}, nil
		}
	}
	return Base{Ref: recipeBase(ref)}, nil
}

// schemes are the kinds of base a recipe knows; a FROM with another name means a registry's image.
var schemes = []image.Kind{
	image.KindOCI, image.KindLayout, image.KindDockerArchive, image.KindTar, image.KindImage, image.KindSnapshot,
}

// recipeBase is what FROM names, as a recipe's base. Debian's own names are our own Debian: the same packages as in the
// image of that name, without a registry.
func recipeBase(ref string) string {
	scheme, rest, ok := strings.Cut(ref, ":")
	switch {
	case ref == "scratch", ref == "debian:bookworm", ref == "debian:trixie":
		return ref
	case ok && slices.Contains(schemes, image.Kind(scheme)) && rest != "":
		return ref
	}
	return "oci:" + ref
}

// state is a stage in the middle of its evaluation.
type state struct {
	*Build
	config image.Config
	args   map[string]string // declared and with a value
	shell  []string
	cmdSet bool
	env    map[string]string // what commands get; nil: it has changed
}

// maxVariables bounds the variables and labels of an image, maxText their text together.
const (
	maxVariables = 1000
	maxText      = 512 << 10
)

// bounded says whether so much can be set.
func bounded(maps ...map[string]string) error {
	count, size := 0, 0
	for _, m := range maps {
		count += len(m)
		for k, v := range m {
			size += len(k) + len(v)
		}
	}
	if count > maxVariables || size > maxText {
		return fmt.Errorf("more than %d variables, arguments and labels, or %d bytes of them", maxVariables, maxText)
	}
	return nil
}

// Eval says what the stage does and what its configuration is afterwards, when it stands on something with that
// configuration.
func (b *Build) Eval(base image.Config) ([]Op, image.Config, error) {
	s := &state{Build: b, config: cloned(base), args: map[string]string{}, shell: []string{"/bin/sh", "-c"}}
	var ops []Op
	var faults []image.Fault
	for _, in := range b.file.Stages[b.stage].Instructions {
		op, err := s.instruction(in)
		if err == nil && slices.Contains([]string{"ENV", "ARG", "LABEL"}, in.Name) {
			err = bounded(s.config.Env, s.args, s.config.Labels)
		}
		if err != nil {
			if e, ok := err.(*image.FileError); ok { //nolint:errorlint // our own, never wrapped
				faults = append(faults, e.Faults...)
				continue
			}
			faults = append(faults, image.Fault{Line: in.Line, Message: in.Name + ": " + err.Error()})
			continue
		}
		if op != nil {
			op.Line, op.Text = in.Line, in.Text
			ops = append(ops, *op)
		}
	}
	if len(faults) > 0 {
		return nil, image.Config{}, &image.FileError{Name: b.file.Name, Faults: faults}
	}
	slices.Sort(s.config.Ports)
	return ops, s.config, nil
}

// cloned is a configuration whose parts may be changed.
func cloned(c image.Config) image.Config {
	c.Env, c.Labels = maps.Clone(c.Env), maps.Clone(c.Labels)
	if c.Env == nil {
		c.Env = map[string]string{}
	}
	if c.Labels == nil {
		c.Labels = map[string]string{}
	}
	c.Ports = slices.Clone(c.Ports)
	return c
}

// Unused are the build arguments that no ARG declared in what was evaluated, sorted.
func (b *Build) Unused() []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(b.opts.Args)) {
		if !b.used[name] && !isProxy(name) {
			names = append(names, name)
		}
	}
	return names
}

func (s *state) get(name string) (string, bool) {
	if v, ok := s.config.Env[name]; ok {
		return v, true
	}
	v, ok := s.args[name]
	return v, ok
}

func (s *state) expand(text string) (string, error) { return expand(text, s.file.escape, s.get) }

func (s *state) instruction(in Instruction) (*Op, error) {
	switch in.Name {
	case "RUN":
		return s.run(in)
	case "COPY", "ADD":
		return s.copy(in)
	case "ENV":
		return nil, s.pairs(in, func(k, v string) { s.config.Env[k], s.env = v, nil })
	case "LABEL":
		return nil, s.pairs(in, func(k, v string) { s.config.Labels[k] = v })
	case "ARG":
		return nil, s.declare(in, s.get, func(name, value string, has bool) {
			if has {
				s.args[name], s.env = value, nil
			}
		})
	case "WORKDIR":
		return s.workdir(in)
	case "USER":
		v, err := s.expand(in.Rest)
		if err != nil {
			return nil, err
		}
		if !ownerPattern.MatchString(v) {
			return nil, fmt.Errorf("%q is no user: write NAME, NAME:GROUP or numbers", shorten(v))
		}
		s.config.User = v
		return nil, nil //nolint:nilnil // nothing to do in the machine
	case "CMD", "ENTRYPOINT":
		argv := in.JSON
		if argv == nil {
			argv = append(slices.Clone(s.shell), in.Rest)
		}
		if in.Name == "CMD" {
			s.config.Cmd, s.cmdSet = argv, true
			return nil, nil //nolint:nilnil // nothing to do in the machine
		}
		s.config.Entrypoint = argv
		if !s.cmdSet {
			s.config.Cmd = nil // the base's CMD are arguments of the base's ENTRYPOINT
		}
		return nil, nil //nolint:nilnil // nothing to do in the machine
	case "EXPOSE":
		return nil, s.expose(in)
	case "SHELL":
		if in.JSON == nil {
			return nil, errors.New(`write it as a list: SHELL ["/bin/bash", "-c"]`)
		}
		s.shell = in.JSON
		return nil, nil //nolint:nilnil // nothing to do in the machine
	}
	return nil, errors.New("cannot be carried out")
}

// ownerPattern is a user or user:group, as names or numbers.
var ownerPattern = regexp.MustCompile(`^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?)(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$`)

var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]*$`)

func (s *state) pairs(in Instruction, set func(k, v string)) error {
	list, err := pairs(in.Rest, s.file.escape)
	if err != nil {
		return err
	}
	// All values are of the time before the line: ENV a=1 b=$a.
	var done [][2]string
	for _, p := range list {
		k, err := s.expand(p[0])
		if err != nil {
			return err
		}
		v, err := s.expand(p[1])
		if err != nil {
			return err
		}
		if in.Name == "ENV" && !variable.MatchString(k) {
			return fmt.Errorf("%q is not a variable's name", shorten(k))
		}
		done = append(done, [2]string{k, v})
	}
	for _, p := range done {
		set(p[0], p[1])
	}
	return nil
}

// declare reads an ARG line: what --build-arg says, else the default, else what the lines before FROM say.
func (b *Build) declare(in Instruction, get func(string) (string, bool), set func(name, value string, has bool)) error {
	for _, word := range rawWords(in.Rest, b.file.escape) {
		name, fallback, has := strings.Cut(word, "=")
		if !variable.MatchString(name) {
			return b.fault(in.Line, "ARG %s: write ARG NAME or ARG NAME=DEFAULT", shorten(word))
		}
		b.used[name] = true
		value := ""
		var err error
		if has {
			if value, err = expand(fallback, b.file.escape, get); err != nil {
				return b.fault(in.Line, "ARG: %s", err)
			}
		}
		if v, ok := b.opts.Args[name]; ok {
			value, has = v, true
		} else if !has {
			value, has = b.argument(name)
		}
		set(name, value, has)
	}
	return nil
}

func (s *state) workdir(in Instruction) (*Op, error) {
	v, err := s.expand(in.Rest)
	if err != nil {
		return nil, err
	}
	if v == "" {
		return nil, errors.New("the path is empty")
	}
	s.config.WorkDir = s.absolute(v)
	return &Op{Dir: &Dir{Path: s.config.WorkDir}}, nil
}

// absolute is a path of the machine, relative ones below the working directory.
func (s *state) absolute(p string) string {
	if !path.IsAbs(p) {
		p = path.Join("/", s.config.WorkDir, p)
	}
	return path.Clean(p)
}

func (s *state) expose(in Instruction) error {
	for _, w := range rawWords(in.Rest, s.file.escape) {
		v, err := s.expand(w)
		if err != nil {
			return err
		}
		for port := range strings.FieldsSeq(v) {
			number, proto, ok := strings.Cut(port, "/")
			if !ok {
				proto = "tcp"
			}
			first, last, _ := strings.Cut(number, "-")
			for _, n := range []string{first, last} {
				if p, err := strconv.Atoi(n); n != "" && (err != nil || p < 1 || p > 65535) || first == "" {
					return fmt.Errorf("%q is no port", shorten(port))
				}
			}
			if proto = strings.ToLower(proto); proto != "tcp" && proto != "udp" && proto != "sctp" {
				return fmt.Errorf("%q: a port is of tcp, udp or sctp", shorten(port))
			}
			if e := number + "/" + proto; !slices.Contains(s.config.Ports, e) {
				s.config.Ports = append(s.config.Ports, e)
			}
		}
	}
	return nil
}

// environment is what a command gets: arguments, over them the image's. Commands share it, and nobody changes it.
func (s *state) environment() map[string]string {
	if s.env == nil {
		s.env = map[string]string{}
		maps.Copy(s.env, s.args)
		maps.Copy(s.env, s.config.Env)
	}
	return s.env
}

func (s *state) run(in Instruction) (*Op, error) {
	r := &Run{Env: s.environment(), Dir: s.config.WorkDir, User: s.config.User}
	switch {
	case in.JSON != nil:
		r.Argv = in.JSON
	case len(in.Heredocs) == 1 && strings.TrimSpace(heredocOnly.ReplaceAllString(in.Rest, "")) == "":
		// A document alone is the script. One with an interpreter of its own is run by that, which reads it from a file.
		doc := in.Heredocs[0].Content
		if strings.HasPrefix(doc, "#!") {
			r.Argv = []string{"/bin/sh", "-c", scriptRunner, "sh", doc}
			break
		}
		r.Argv = append(slices.Clone(s.shell), doc)
	default:
		var script strings.Builder
		script.WriteString(in.Rest)
		for _, h := range in.Heredocs {
			script.WriteString("\n" + h.Content + h.Name)
		}
		if len(in.Heredocs) > 0 {
			script.WriteString("\n")
		}
		r.Argv = append(slices.Clone(s.shell), script.String())
	}
	return &Op{Run: r}, nil
}

var heredocOnly = regexp.MustCompile(`<<-?["']?[A-Za-z0-9_.-]+["']?`)

// scriptRunner puts its first argument into a file and runs that.
const scriptRunner = `f=$(mktemp) && printf %s "$1" >"$f" && chmod 0700 "$f" && "$f"; r=$?; rm -f "$f"; exit $r`

func (s *state) copy(in Instruction) (*Op, error) {
	c := &Copy{Add: in.Name == "ADD"}
	var err error
	words := slices.Clone(in.JSON)
	if words == nil {
		words = rawWords(in.Rest, s.file.escape)
	}
	for i, w := range words {
		if in.JSON != nil {
			words[i], err = expandDocument(w, s.file.escape, s.get) // it has no quotes of its own
		} else {
			words[i], err = s.expand(w)
		}
		if err != nil {
			return nil, err
		}
	}
	if len(words) < 2 {
		return nil, errors.New("it needs a source and a destination")
	}
	if err := s.copyFlags(in, c); err != nil {
		return nil, err
	}
	dest := words[len(words)-1]
	docs := in.Heredocs
	for _, w := range words[:len(words)-1] {
		if m := heredocWord.FindStringSubmatch(w); m != nil && len(docs) > 0 {
			content := docs[0].Content
			if docs[0].Expand {
				if content, err = expandDocument(content, s.file.escape, s.get); err != nil {
					return nil, err
				}
			}
			c.Inline = append(c.Inline, Inline{docs[0].Name, content})
			docs = docs[1:]
			continue
		}
		if c.Add && isRemote(w) {
			return nil, fmt.Errorf("%s: what is in the network cannot be added: a build's machine has none; download it into the context and COPY it", shorten(w))
		}
		if w == "" {
			return nil, errors.New("a source is empty")
		}
		c.Sources = append(c.Sources, w)
	}
	if dest == "" {
		return nil, errors.New("the destination is empty")
	}
	slash := strings.HasSuffix(dest, "/") || path.Base(dest) == "."
	c.Dest = s.absolute(dest)
	if slash && c.Dest != "/" {
		c.Dest += "/"
	}
	if len(c.Sources)+len(c.Inline) > 1 && !strings.HasSuffix(c.Dest, "/") {
		return nil, fmt.Errorf("the destination of several sources is a directory: write %s/", shorten(dest))
	}
	return &Op{Copy: c}, nil
}

func (s *state) copyFlags(in Instruction, c *Copy) error {
	for _, f := range in.Flags {
		v, err := s.expand(f.Value)
		if err != nil {
			return err
		}
		switch f.Name {
		case "chown":
			if !ownerPattern.MatchString(v) {
				return fmt.Errorf("--chown=%s: write NAME, NAME:GROUP or numbers", shorten(v))
			}
			c.Chown = v
		case "chmod":
			mode, err := strconv.ParseUint(v, 8, 32)
			if err != nil || mode == 0 || mode > 0o7777 {
				return fmt.Errorf("--chmod=%s: write it in octal, for example 0755", shorten(v))
			}
			c.Chmod = uint32(mode)
		case "from":
			base, err := s.from(v)
			if err != nil {
				return err
			}
			c.From = base
		}
	}
	return nil
}

// from is a stage before this one, or another image.
func (s *state) from(v string) (*Base, error) {
	if v == "" {
		return nil, errors.New("--from is empty")
	}
	if i := s.file.find(v, s.stage); i >= 0 {
		return &Base{Stage: s.at(i)}, nil
	}
	if s.file.find(v, len(s.file.Stages)) >= 0 {
		return nil, fmt.Errorf("--from=%s: that stage comes later", shorten(v))
	}
	return &Base{Ref: recipeBase(v)}, nil
}

func isRemote(s string) bool {
	for _, p := range []string{"http://", "https://", "ftp://", "git://", "git@", "ssh://"} {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return strings.HasSuffix(s, ".git") && strings.Contains(s, "://")
}

// CountedEnv is an environment without what does not count for whether a step is the same.
func CountedEnv(env map[string]string) map[string]string {
	out := maps.Clone(env)
	maps.DeleteFunc(out, func(name, _ string) bool { return isProxy(name) })
	return out
}

// Refs are what the FROM lines and the --from flags name that is no stage, as recipes name bases, as far as it can be told
// without evaluating a stage.
func (f *File) Refs(args map[string]string) ([]string, error) {
	b, err := f.Target(Options{Args: args})
	if err != nil {
		return nil, err
	}
	var refs []string
	for i, s := range f.Stages {
		base, err := b.at(i).Base()
		if err != nil {
			return nil, err
		}
		if base.Ref != "" {
			refs = append(refs, base.Ref)
		}
		for _, in := range s.Instructions {
			if from := in.flag("from"); in.Name == "COPY" && from != "" && f.find(from, len(f.Stages)) < 0 {
				refs = append(refs, recipeBase(from))
			}
		}
	}
	return refs, nil
}
