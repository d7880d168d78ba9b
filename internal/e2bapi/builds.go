package e2bapi

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/api"
	"forkd.dev/forkd/internal/access"
	"forkd.dev/forkd/internal/host"
	"forkd.dev/forkd/internal/httpapi"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/image/dockerfile"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network/egress"
)

const (
	keptBuilds  = 200
	maxLogs     = 20_000
	maxLogBytes = 1 << 20 // of one build: what steps print is theirs to choose
	maxUpload   = 8 << 30
	logsPerPage = 100
	forUpload   = "upload"
)

// builds are builds of templates, in progress and the last that ended. They go with the daemon.
type builds struct {
	mu    sync.Mutex
	all   map[string]*templateJob // by the build's id
	order []string
	wait  sync.WaitGroup
}

// templateJob is one.
type templateJob struct {
	id, tag string
	machine image.Machine // that was asked for

	mu     sync.Mutex
	lines  []int // which step, from 1, each line of its Dockerfile is of; 0: of the base
	status string
	logs   []buildLog
	said   int // bytes of logs
	reason *buildReason
}

// Statuses of builds as E2B names them.
const (
	buildWaiting = "waiting"
	buildRuns    = "building"
	buildReady   = "ready"
	buildError   = "error"
)

type buildLog struct {
	Time    time.Time `json:"timestamp"`
	Level   string    `json:"level"`
	Message string    `json:"message"`
	Step    string    `json:"step,omitempty"`
}

type buildReason struct {
	Message string     `json:"message"`
	Step    string     `json:"step,omitempty"`
	Logs    []buildLog `json:"logEntries,omitempty"`
}

func (j *templateJob) say(level, format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.logs) >= maxLogs || j.said >= maxLogBytes {
		return
	}
	words := fmt.Sprintf(format, args...)
	if j.said += len(words); len(j.logs) == maxLogs-1 || j.said >= maxLogBytes {
		level, words = "warn", "what comes after this is left out: it is too much"
	}
	j.logs = append(j.logs, buildLog{Time: time.Now().UTC(), Level: level, Message: words})
}

func (b *builds) add(j *templateJob) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all == nil {
		b.all = map[string]*templateJob{}
	}
	b.all[j.id], b.order = j, append(b.order, j.id)
	if len(b.order) > keptBuilds {
		delete(b.all, b.order[0])
		b.order = b.order[1:]
	}
}

func (b *builds) find(r *http.Request) (*templateJob, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	j := b.all[r.PathValue("build")]
	if j == nil || j.tag != tagOf(r.PathValue("template")) {
		return nil, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("build %.80q of template %.80q was not found", r.PathValue("build"), r.PathValue("template"))}
	}
	return j, nil
}

// Wait returns when no build is in progress any more.
func (s *Server) Wait() { s.builds.wait.Wait() }

func (s *Server) buildRoutes() []route {
	return []route{
		{"POST /v3/templates", access.Manage, s.newTemplate},
		{"POST /v2/templates", access.Manage, s.newTemplate},
		{"GET /templates/{template}/files/{hash}", access.Manage, s.uploadLink},
		{"POST /v2/templates/{template}/builds/{build}", access.Manage, s.startBuild},
		{"GET /templates/{template}/builds/{build}/status", access.Read, s.buildStatus},
		{"GET /templates/{template}/builds/{build}/logs", access.Read, s.buildLogs},
	}
}

func (s *Server) newTemplate(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Name   string   `json:"name"`
		Alias  string   `json:"alias"`
		Tags   []string `json:"tags"`
		CPUs   int      `json:"cpuCount"`
		Memory int64    `json:"memoryMB"`
		Free   int64    `json:"minFreeDiskMb"`
	}
	if err := body(w, r, &req); err != nil {
		return err
	}
	name := req.Name
	if name == "" {
		name = req.Alias
	}
	if name == "" {
		return invalid("name is missing")
	}
	if len(req.Tags) > 1 || len(req.Tags) == 1 && strings.Contains(name, ":") {
		return unsupported("tags: a template has one tag here, which is part of its name")
	}
	if len(req.Tags) == 1 {
		name += ":" + req.Tags[0]
	}
	if err := lineage.CheckTag(tagOf(name)); err != nil {
		return err
	}
	machine, err := machineOf(req.CPUs, req.Memory, req.Free)
	if err != nil {
		return err
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	j := &templateJob{
		id: fmt.Sprintf("%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:16]), tag: tagOf(name), machine: machine,
		status: buildWaiting,
	}
	s.builds.add(j)
	return httpapi.Reply(w, http.StatusAccepted, map[string]any{
		"templateID": j.tag, "buildID": j.id, "public": false, "names": []string{j.tag}, "tags": []string{"default"}, "aliases": []string{j.tag},
	})
}

// usualDisk is what a disk can grow to where nothing is asked for.
const usualDisk = 8 << 30

// machineOf is the machine that a template is to have; zeros are for this daemon to choose.
func machineOf(cpus int, memoryMB, freeMB int64) (m image.Machine, err error) {
	switch {
	case cpus < 0 || cpus > 64:
		return m, invalid("cpuCount is %d; give 1 to 64", cpus)
	case memoryMB < 0 || memoryMB > 1<<20 || memoryMB > 0 && memoryMB < 128:
		return m, invalid("memoryMB is %d; give 128 to %d", memoryMB, 1<<20)
	case freeMB < 0 || freeMB > 8<<20:
		return m, invalid("minFreeDiskMb is %d; give 0 to %d", freeMB, 8<<20)
	}
	m.CPUs, m.MemoryBytes = cpus, memoryMB<<20
	if freeMB > 0 {
		m.DiskBytes = usualDisk + freeMB<<20
	}
	return m, nil
}

// Files of a build's context are uploaded by their digest, to a link that opens nothing else, for a while.

var digestPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (s *Server) uploadPath(hash string) (string, error) {
	if !digestPattern.MatchString(hash) {
		return "", invalid("hash is %.80q: give the 64 digits of a SHA-256", hash)
	}
	return filepath.Join(s.Uploads, hash), nil
}

func (s *Server) uploadLink(w http.ResponseWriter, r *http.Request) error {
	hash := r.PathValue("hash")
	file, err := s.uploadPath(hash)
	if err != nil {
		return err
	}
	if _, err := os.Stat(file); err == nil {
		return httpapi.Reply(w, http.StatusCreated, map[string]any{"present": true})
	}
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	until := strconv.FormatInt(time.Now().Add(linkTime).Unix(), 10)
	return httpapi.Reply(w, http.StatusCreated, map[string]any{
		"present": false,
		"url":     fmt.Sprintf("%s://%s/templates/files/%s?until=%s&token=%s", scheme, r.Host, hash, until, s.Seed.Token(forUpload, hash+" "+until)),
	})
}

// linkTime is how long an upload may be begun.
const linkTime = time.Hour

// linked reports whether an upload has such a link.
func (s *Server) linked(r *http.Request, shown string) bool {
	until := r.URL.Query().Get("until")
	at, err := strconv.ParseInt(until, 10, 64)
	return err == nil && time.Now().Unix() <= at && s.Seed.Is(shown, forUpload, r.PathValue("hash")+" "+until)
}

// uploads is the route that such a link leads to.
func (s *Server) uploads() *http.ServeMux {
	return s.plane(httpapi.Operation{
		Fail:    failPlain,
		Shown:   func(r *http.Request) (string, bool) { return inAddress(r, "token") },
		Sandbox: func(*http.Request) string { return "" },
		Known: func(r *http.Request, shown string) (access.Token, bool) {
			return access.Token{ID: "e2b-upload", Name: "e2b-upload", Scope: access.Manage}, s.linked(r, shown)
		},
	}, []route{{"PUT /templates/files/{hash}", access.Manage, s.takeUpload}})
}

// takeUpload keeps the first upload of a digest: builds of others may rely on what it has by now.
func (s *Server) takeUpload(w http.ResponseWriter, r *http.Request) (err error) {
	file, err := s.uploadPath(r.PathValue("hash"))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(s.Uploads, 0o700); err != nil {
		return fmt.Errorf("keep an upload: %w", err)
	}
	f, err := os.CreateTemp(s.Uploads, "part-*")
	if err != nil {
		return fmt.Errorf("keep an upload: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = io.Copy(f, http.MaxBytesReader(w, r.Body, maxUpload))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("keep an upload: %w", err)
	}
	if err := os.Link(f.Name(), file); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("keep an upload: %w", err)
	}
	return empty(w, http.StatusOK)
}

// uploadsKept is how long the files of a build are kept that no build has used since.
const uploadsKept = 30 * 24 * time.Hour

// SweepUploads removes what nobody has used for long, and what an earlier daemon has not taken whole. It is called before any
// request is served.
func SweepUploads(dir string, now time.Time) error {
	list, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range list {
		info, infoErr := e.Info()
		if infoErr == nil && digestPattern.MatchString(e.Name()) && now.Sub(info.ModTime()) <= uploadsKept {
			continue
		}
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// templateSpec is what to build.
type templateSpec struct {
	FromImage    string          `json:"fromImage"`
	FromTemplate string          `json:"fromTemplate"`
	Registry     json.RawMessage `json:"fromImageRegistry"`
	Force        bool            `json:"force"`
	Start        string          `json:"startCmd"`
	Ready        string          `json:"readyCmd"`
	Steps        []templateStep  `json:"steps"`
}

type templateStep struct {
	Type  string   `json:"type"`
	Args  []string `json:"args"`
	Hash  string   `json:"filesHash"`
	Force bool     `json:"force"`
}

func (s *Server) startBuild(w http.ResponseWriter, r *http.Request) error {
	var spec templateSpec
	if err := body(w, r, &spec); err != nil {
		return err
	}
	j, err := s.builds.find(r)
	if err != nil {
		return err
	}
	if present(spec.Registry) {
		return unsupported("fromImageRegistry: registries are opened by the docker configuration of the daemon's user here")
	}
	f, err := s.dockerfileOf(&spec)
	if err != nil {
		return err
	}
	j.mu.Lock()
	begun := j.status != buildWaiting
	if !begun {
		j.status, j.lines = buildRuns, f.lines
	}
	j.mu.Unlock()
	if begun {
		return &api.Error{Code: api.CodeWrongState, Message: fmt.Sprintf("build %s has begun already", j.id)}
	}
	if _, ok := snapshotIn(f.text); ok && j.machine != (image.Machine{}) {
		j.say("warn", "cpuCount, memoryMB and minFreeDiskMb are not used: a template that stands on another has its machine")
	}
	httpapi.NoteCreated(r, "snapshot", j.tag)
	s.builds.wait.Go(func() {
		err := s.build(s.Life, j, &spec, f)
		j.mu.Lock()
		defer j.mu.Unlock()
		if j.status = buildReady; err == nil {
			return
		}
		e := *httpapi.ToAPI(err)
		step := j.stepOf(e.Message)
		if errors.Is(err, host.ErrWarmup) {
			step = "finalize"
		}
		e.Message = linePattern.ReplaceAllString(e.Message, "") // of a file that nobody has written
		j.status, j.reason = buildError, &buildReason{Message: words(&e), Step: step}
		j.logs = append(j.logs, buildLog{time.Now().UTC(), "error", words(&e), step})
	})
	return empty(w, http.StatusAccepted)
}

var linePattern = regexp.MustCompile(`\btemplate:(\d+): `)

// stepOf finds which step a message is about. It is called with mu held.
func (j *templateJob) stepOf(message string) string {
	m := linePattern.FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	line, err := strconv.Atoi(m[1])
	if err != nil || line < 1 || line > len(j.lines) || j.lines[line-1] == 0 {
		return "base"
	}
	return strconv.Itoa(j.lines[line-1])
}

// baseOf is what FROM says, and how processes of it are started.
func (s *Server) baseOf(spec *templateSpec) (from, user, dir string, err error) {
	template := spec.FromTemplate
	switch strings.TrimSuffix(spec.FromImage, ":latest") {
	case "e2bdev/base":
		template = "base"
	case "e2bdev/code-interpreter":
		template = "code-interpreter-v1"
	}
	if template == "" {
		if spec.FromImage == "" || strings.ContainsAny(spec.FromImage, " \t\r\n") {
			return "", "", "", invalid("fromImage is %.80q, and fromTemplate is missing", spec.FromImage)
		}
		return spec.FromImage, "user", "/home/user", nil
	}
	v, err := s.findTemplate(template)
	if err != nil {
		return "", "", "", fmt.Errorf("from %s: %w", template, s.missingTemplate(tagOf(template), err))
	}
	user = "root"
	if v.Config != nil {
		dir = v.Config.WorkDir
		if v.Config.User != "" {
			user = v.Config.User
		}
	}
	if dir == "" {
		dir = "/home/" + user
		if user == "root" {
			dir = "/root"
		}
	}
	return "snapshot:" + v.Tag, user, dir, nil
}

// makeUser gives an image the shell that clients run everything in, and the user that processes run as on E2B.
const makeUser = `set -e
[ -x /bin/bash ] || ! command -v apk >/dev/null || apk add --no-cache bash >/dev/null
[ -x /bin/bash ] || { echo "the image has no /bin/bash, in which E2B's clients run every command" >&2; exit 1; }
id -u user >/dev/null 2>&1 || useradd --create-home --shell /bin/bash user 2>/dev/null || adduser -D -s /bin/bash user 2>/dev/null || {
	n=1000
	while grep -q "^[^:]*:[^:]*:$n:" /etc/passwd /etc/group; do n=$((n + 1)); done
	echo "user:x:$n:$n::/home/user:/bin/bash" >>/etc/passwd
	echo "user:x:$n:" >>/etc/group
	mkdir -p /home/user
	chown "$n:$n" /home/user
}
if command -v sudo >/dev/null; then mkdir -p /etc/sudoers.d; echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' >/etc/sudoers.d/user; fi`

// toolOf is the program that a client's own way to wait needs and the image may not have, "": none.
func toolOf(ready string) (program, debian string) {
	switch {
	case strings.HasPrefix(ready, `curl -s -o /dev/null -w "%{http_code}" `):
		return "curl", "curl"
	case strings.HasPrefix(ready, "pgrep "):
		return "pgrep", "procps"
	}
	return "", ""
}

// installTool has E2B's images' programs in others, too: $1 or the package $2 with it.
const installTool = `command -v "$1" >/dev/null && exit 0
if command -v apt-get >/dev/null; then apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$2"
elif command -v apk >/dev/null; then apk add --no-cache "$2"; fi >/dev/null
command -v "$1" >/dev/null || { echo "the ready command needs $1, which the image does not have" >&2; exit 1; }`

// templateText is a template as a Dockerfile.
type templateText struct {
	text   []byte
	lines  []int          // as templateJob has them
	titles map[int]string // as host.DockerfileSpec has them
}

// dockerfileOf makes a Dockerfile of a template: its steps are those of one.
func (s *Server) dockerfileOf(spec *templateSpec) (*templateText, error) {
	from, user, dir, err := s.baseOf(spec)
	if err != nil {
		return nil, err
	}
	f := &templateText{titles: map[int]string{}}
	var b bytes.Buffer
	write := func(step int, title, text string) {
		for line := range strings.SplitSeq(text, "\n") {
			b.WriteString(line + "\n")
			f.lines = append(f.lines, step)
			if title != "" {
				f.titles[len(f.lines)] = title
			}
		}
	}
	write(0, "", "FROM "+from)
	if !strings.HasPrefix(from, "snapshot:") {
		write(0, "the user named user", "USER root\nRUN "+list("/bin/sh", "-c", makeUser))
	}
	if program, pkg := toolOf(spec.Ready); program != "" {
		write(0, program+" for the ready command", "USER root\nRUN "+list("/bin/sh", "-c", installTool, "sh", program, pkg))
	}
	write(0, "", "USER "+user+"\nWORKDIR "+literal(dir))
	for i, step := range spec.Steps {
		line, err := step.line(&user, &dir)
		if err != nil {
			return nil, fmt.Errorf("step %d: %w", i+1, err)
		}
		write(i+1, step.title(), line)
	}
	f.text = b.Bytes()
	return f, nil
}

// title is what a step is called in logs and errors, as its client has written it.
func (t *templateStep) title() string {
	args := slices.DeleteFunc(slices.Clone(t.Args), func(a string) bool { return a == "" })
	if t.Type == "RUN" && len(args) > 1 {
		args = []string{args[0], "(as " + args[1] + ")"}
	}
	const longest = 200
	text := []rune(strings.Join(strings.Fields(t.Type+" "+strings.Join(args, " ")), " "))
	if len(text) > longest {
		text = append(text[:longest-1], '…')
	}
	return string(text)
}

// literal keeps a Dockerfile from substituting variables.
func literal(text string) string {
	return strings.NewReplacer(`\`, `\\`, `$`, `\$`, ` `, `\ `, "\n", `\n`).Replace(text)
}

func quoted(text string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`).Replace(text) + `"`
}

// words of a command or file names, in JSON, which no substitution changes.
func list(items ...string) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(items) // of strings it never fails
	return strings.TrimSpace(b.String())
}

// notInNames is what no name of a user has, and a Dockerfile would take for something else.
const notInNames = " \t$\\"

func (t *templateStep) line(user, dir *string) (string, error) {
	arg := func(i int) string {
		if i < len(t.Args) {
			return t.Args[i]
		}
		return ""
	}
	for i, a := range t.Args {
		if (t.Type != "RUN" || i > 0) && strings.ContainsAny(a, "\r\n\x00") {
			return "", invalid("%s %.60q: a line break in it", t.Type, a)
		}
	}
	switch t.Type {
	case "RUN":
		argv := []string{"/bin/bash", "-l", "-c", arg(0)}
		if as := arg(1); as != "" && as != *user {
			if strings.ContainsAny(as, notInNames) {
				return "", invalid("RUN as %.80q", as)
			}
			// Of a Dockerfile's user there is one at a time; this is for one command.
			return fmt.Sprintf("USER %s\nRUN %s\nUSER %s", as, list(argv...), *user), nil
		}
		return "RUN " + list(argv...), nil
	case "ENV":
		if len(t.Args) == 0 || len(t.Args)%2 != 0 {
			return "", invalid("ENV has %d arguments; give names and values", len(t.Args))
		}
		line := []string{"ENV"}
		for i := 0; i < len(t.Args); i += 2 {
			line = append(line, t.Args[i]+"="+quoted(t.Args[i+1]))
		}
		return strings.Join(line, " "), nil
	case "WORKDIR":
		if *dir = arg(0); !path.IsAbs(*dir) {
			return "", invalid("WORKDIR %.80q is not absolute", *dir)
		}
		return "WORKDIR " + literal(*dir), nil
	case "USER":
		if *user = arg(0); *user == "" || strings.ContainsAny(*user, notInNames) {
			return "", invalid("USER %.80q", *user)
		}
		return "USER " + *user, nil
	case "COPY":
		return t.copy(*user)
	}
	return "", unsupported("%.40q is no step that is known here: COPY, RUN, ENV, WORKDIR and USER are", t.Type)
}

func (t *templateStep) copy(user string) (string, error) {
	if len(t.Args) < 2 || !digestPattern.MatchString(t.Hash) {
		return "", invalid("COPY: give a source, a destination and filesHash")
	}
	line := "COPY"
	owner := user
	if len(t.Args) > 2 && t.Args[2] != "" {
		owner = t.Args[2]
	}
	for _, word := range append([]string{owner}, t.Args[2:]...) {
		if strings.ContainsAny(word, notInNames) {
			return "", invalid("COPY: %.80q is no owner and no mode", word)
		}
	}
	if owner != "root" {
		line += " --chown=" + owner
	}
	if len(t.Args) > 3 && t.Args[3] != "" {
		line += " --chmod=" + t.Args[3]
	}
	source := t.Hash + "/" + strings.TrimPrefix(path.Clean(t.Args[0]), "/")
	return line + " " + list(source, t.Args[1]), nil
}

// contextOf is the files of a template's steps, each below the digest that it was uploaded by.
func (s *Server) contextOf(dir string, spec *templateSpec) (*dockerfile.Context, error) {
	spool, err := os.OpenFile(filepath.Join(dir, "context"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("read uploads: %w", err)
	}
	c := dockerfile.NewContext(spool)
	seen := map[string]bool{}
	left := int64(maxUpload)
	for i, step := range spec.Steps {
		if step.Type != "COPY" || seen[step.Hash] {
			continue
		}
		seen[step.Hash] = true
		if err := s.addUpload(c, step.Hash, &left); err != nil {
			return nil, errors.Join(fmt.Errorf("step %d: %w", i+1, err), c.Close())
		}
	}
	return c, nil
}

// addUpload adds an upload to the context, of which so many bytes are left.
func (s *Server) addUpload(c *dockerfile.Context, hash string, left *int64) error {
	file, err := s.uploadPath(hash)
	if err != nil {
		return err
	}
	f, err := os.Open(file)
	if errors.Is(err, os.ErrNotExist) {
		return invalid("the files %.12s… were not uploaded", hash)
	}
	if err != nil {
		return fmt.Errorf("read an upload: %w", err)
	}
	defer f.Close()
	now := time.Now()
	_ = os.Chtimes(file, now, now) // it is in use; one that is swept is uploaded again
	in := bufio.NewReader(f)
	var source io.Reader = in
	if magic, err := in.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		if source, err = gzip.NewReader(in); err != nil {
			return invalid("the upload %.12s…: %v", hash, err)
		}
	}
	t := tar.NewReader(source)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return invalid("the upload %.12s… is no tar stream: %v", hash, err)
		}
		if *left -= h.Size; *left < 0 {
			return invalid("the upload %.12s…: the files of a build have more than %d bytes", hash, int64(maxUpload))
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if name == "" {
			continue
		}
		if err := c.Add(hash+"/"+name, h, t); err != nil {
			return invalid("the upload %.12s…: %.200q: %v", hash, h.Name, err)
		}
	}
}

// build makes the snapshot: of the steps, with what is to be started running in it.
func (s *Server) build(ctx context.Context, j *templateJob, spec *templateSpec, f *templateText) error {
	dir, err := s.Host.TempDir("template-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	files, err := s.contextOf(dir, spec)
	if err != nil {
		return err
	}
	defer files.Close()
	var above egress.Policy
	base, onTemplate := snapshotIn(f.text)
	if onTemplate {
		above = s.Host.SnapshotEgress(base)
	}
	network := s.networkOn(above)
	warmup, err := warmupOf(spec)
	if err != nil {
		return err
	}
	d := &host.DockerfileSpec{Name: templateFile, Text: f.text, Titles: f.titles, Context: files, Network: network, Warmup: warmup}
	if !onTemplate {
		d.Machine = j.machine
	}
	force := spec.Force
	for _, step := range spec.Steps {
		force = force || step.Force
	}
	say := func(e host.Event) {
		words := e.Message
		if e.Cached && e.Title != "" {
			words += " (done before)"
		}
		j.say("info", "[%s] %s", e.Step, words)
	}
	_, err = s.Host.Build(ctx, host.BuildSpec{Tag: j.tag, Replace: true, NoCache: force, Dockerfile: d, MayWiden: true}, say)
	return err
}

// networkOn is what a template's steps, and the sandboxes of it, may reach: what the snapshot that it stands on denies stays
// denied.
func (s *Server) networkOn(above egress.Policy) *image.Network {
	return &image.Network{
		Build: egress.Merge(&egress.Policy{Preset: s.Egress}, &above), Sandboxes: egress.Merge(&egress.Policy{}, &above),
	}
}

// snapshotIn is the snapshot on which a Dockerfile of dockerfileOf stands, if it is one.
func snapshotIn(text []byte) (tag string, ok bool) {
	first, _, _ := strings.Cut(string(text), "\n")
	return strings.CutPrefix(first, "FROM snapshot:")
}

// templateFile is what messages call the Dockerfile that a template's steps are made into.
const templateFile = "template"

// usualWait is how long a command that is started is given where nothing says when it is ready, as on E2B.
const usualWait = "sleep 20"

// warmupOf has a command run in every sandbox of a template, nil: none. It is a recipe's; JSON is YAML.
func warmupOf(spec *templateSpec) (*image.Warmup, error) {
	if spec.Start == "" && spec.Ready == "" {
		return nil, nil
	}
	ready := spec.Ready
	if ready == "" {
		ready = usualWait
	}
	ready = withoutTools(ready)
	warmup := map[string]any{"timeout": "15m"}
	if spec.Start != "" {
		check := map[string]any{"command": shell(ready), "timeout": "10m", "interval": "500ms"}
		warmup["services"] = []any{map[string]any{"name": "start", "command": shell(spec.Start), "ready": check}}
	} else {
		warmup["command"] = shell("for n in $(seq 1200); do (" + ready + "\n) && exit 0; sleep 0.5; done; exit 1")
	}
	text, err := json.Marshal(map[string]any{"base": "debian:bookworm", "warmup": warmup})
	if err != nil {
		return nil, err
	}
	r, err := image.ParseRecipe(templateFile, text)
	if err != nil {
		return nil, invalid("startCmd or readyCmd: %v", err)
	}
	return r.Warmup, nil
}

// shell is how E2B runs a command.
func shell(command string) []string { return []string{"/bin/bash", "-l", "-c", command} }

var readyPort = regexp.MustCompile(`^\[ -n "\$\(ss -Htuln sport = :(\d{1,5})\)" \]$`)

// withoutTools is the clients' own way to wait for a port, without ss, which few images have.
func withoutTools(ready string) string {
	m := readyPort.FindStringSubmatch(ready)
	if m == nil {
		return ready
	}
	port, err := strconv.ParseUint(m[1], 10, 16)
	if err != nil {
		return ready
	}
	// Listening is 0A of TCP, 07 of UDP.
	return fmt.Sprintf("grep -qsE ': [0-9A-F]+:%04X [0-9A-F]+:[0-9A-F]+ (0A|07) ' /proc/net/tcp /proc/net/tcp6 /proc/net/udp /proc/net/udp6", port)
}

func (s *Server) buildStatus(w http.ResponseWriter, r *http.Request) error {
	j, err := s.builds.find(r)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	offset, _ := strconv.Atoi(q.Get("logsOffset"))
	limit, err := strconv.Atoi(q.Get("limit"))
	if err != nil || limit < 1 || limit > logsPerPage {
		limit = logsPerPage
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	// Only what comes after: clients ask on until a reply has nothing.
	logs := j.logs[min(max(offset, 0), len(j.logs)):]
	logs = logs[:min(limit, len(logs))]
	lines := []string{}
	for _, l := range logs {
		lines = append(lines, l.Message)
	}
	out := map[string]any{
		"templateID": j.tag, "buildID": j.id, "status": j.status, "logs": lines, "logEntries": append([]buildLog{}, logs...),
	}
	if j.reason != nil {
		out["reason"] = j.reason
	}
	return httpapi.Reply(w, http.StatusOK, out)
}

func (s *Server) buildLogs(w http.ResponseWriter, r *http.Request) error {
	j, err := s.builds.find(r)
	if err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return httpapi.Reply(w, http.StatusOK, map[string]any{"logs": append([]buildLog{}, j.logs...)})
}
