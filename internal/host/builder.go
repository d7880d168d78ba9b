package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// buildStep is one step of a build that goes on in a running machine.
type buildStep struct {
	key   string // of the machine after it
	title string
	do    func(ctx context.Context, m *builder) error
	// Those that are not kept are done again, with the next that is, when a build resumes before them.
	kept bool
	// describe completes the record of what is kept, which is that of what it stands on otherwise; may be nil.
	describe func(*store.Snapshot)
	// settled: it is what children are forked of, so its machine comes to rest first.
	settled bool
}

// builder is the machine of a build, forked from the snapshot that the build goes on from.
type builder struct {
	h    *Host
	b    *build
	from store.Snapshot
	s    *sandbox
	conn *guest.Conn

	services []int // processes of what it stands on, which go on running
	writing  []*branch
	undo     undo.Stack
}

// chain does steps on top of a root, from the last one that was done before, and returns the snapshot of the last, which must
// be kept; it is held until forget is called. What was done stays done, whatever fails after it.
func (b *build) chain(ctx context.Context, root store.Snapshot, steps []buildStep) (store.Snapshot, func(), error) {
	defer b.h.trimSteps(context.WithoutCancel(ctx))
	start := 0
	m, forget := root, func() {}
	if !b.spec.NoCache {
		for i, s := range slices.Backward(steps) {
			if !s.kept {
				continue
			}
			if found, release, ok := b.h.step(s.key); ok {
				m, forget, start = found, release, i+1
				break
			}
		}
	}
	names := numbered(b.prefix, steps)
	for i, s := range steps[:start] {
		if s.title != "" {
			b.progress(Event{Step: stepWord, Message: names[i] + " " + s.title, Cached: true, Title: s.title})
		}
	}
	if start > 0 {
		b.h.used(m.Tag)
	}
	if start == len(steps) {
		return m, forget, nil
	}
	defer forget()
	machine, err := b.startBuilder(ctx, m)
	if err != nil {
		return m, nil, err
	}
	defer machine.close()
	for i := start; i < len(steps); i++ {
		began, s := time.Now(), &steps[i]
		if s.title != "" {
			b.say(stepWord, "%s %s", names[i], s.title)
		}
		if err := machine.step(ctx, s); err != nil {
			machine.await(ctx)
			if errors.Is(err, ErrStep) {
				err = hint(err, "look at the machine as it was before: forkd run %s -- COMMAND", machine.before(m).Tag)
			}
			return m, nil, b.h.explainFull(err)
		}
		if s.title != "" {
			took := time.Since(began)
			b.progress(Event{Step: stepWord, Message: fmt.Sprintf("%s done in %.1f s", names[i], took.Seconds()), Title: s.title, Took: took})
		}
	}
	last, forgetLast, err := machine.last(ctx, steps[len(steps)-1].key)
	if err != nil {
		return m, nil, b.h.explainFull(err)
	}
	return last, forgetLast, nil
}

// numbered are the names of steps in the progress of a build.
func numbered(prefix string, steps []buildStep) []string {
	total := 0
	for _, s := range steps {
		if s.title != "" {
			total++
		}
	}
	names := make([]string, len(steps))
	n := 0
	for i, s := range steps {
		if s.title != "" {
			n++
		}
		names[i] = fmt.Sprintf("[%s%d/%d]", prefix, n, total)
	}
	return names
}

// stepWord is how progress calls a step.
const stepWord = "step"

// startBuilder forks the machine of a build.
func (b *build) startBuilder(ctx context.Context, m store.Snapshot) (_ *builder, err error) {
	h := b.h
	bl := &builder{h: h, b: b, from: m}
	defer func() {
		if err != nil {
			err = fmt.Errorf("go on from %s: %w", m.Tag, err)
			bl.undo.Run()
		}
	}()
	if err := m.Engine.Compatible(b.features.Format); err != nil {
		return nil, err
	}
	m, _, forget, err := h.claim(m.Tag)
	if err != nil {
		return nil, err
	}
	bl.undo.Add(forget)
	admitted, err := h.admit(ctx, m, nil, 1)
	if err != nil {
		return nil, err
	}
	bl.undo.Add(admitted)
	hot, err := h.hot.acquire(ctx, m)
	if err != nil {
		return nil, err
	}
	bl.undo.Add(func() { h.hot.release(hot) })
	dir, err := h.machineDir()
	if err != nil {
		return nil, err
	}
	bl.undo.Add(func() { _ = os.RemoveAll(dir) })
	s := &sandbox{
		id: newID(), tag: m.Tag, from: &origin{tag: m.Tag, snapshot: m}, count: 1, hostname: parentName, created: time.Now(),
		dir: dir, hot: hot, state: lineage.Running, generation: 1, builder: true, egress: b.commandNetwork(m.Egress), talked: m.Talked,
	}
	bl.s = s
	bl.undo.Add(func() { _ = s.cgroup.Remove() })
	if err := h.restore(ctx, s); err != nil {
		return nil, err
	}
	bl.undo.Add(func() {
		s.mu.Lock()
		s.ended = true
		s.mu.Unlock()
		_ = s.machine.Close()
		h.cfg.Networks.Detach(s.id)
	})
	if err := s.awaken(ctx, m.Protocol, h.cfg.Patience); err != nil {
		return nil, withConsole(err, s.machine.Console())
	}
	bl.conn = s.conn
	bl.undo.Add(func() { _ = s.conn.Close() })
	if err := h.connect(ctx, s); err != nil {
		return nil, err
	}
	if !slices.Contains(bl.conn.Hello().Features, wire.FeatureSteps) {
		return nil, hint(fmt.Errorf("%w: the agent of that snapshot is of an older forkd and cannot end what a step leaves running", ErrUnsupported),
			"build that snapshot again, with --replace")
	}
	var there wire.EndProcessesReply
	if err := bl.conn.Call(ctx, wire.MethodEndProcesses, wire.EndProcessesRequest{List: true}, &there); err != nil {
		return nil, err
	}
	bl.services = there.PIDs
	if b.prepare != nil {
		if err := b.prepare(ctx, bl); err != nil {
			return nil, err
		}
	}
	return bl, nil
}

// close ends the machine. Steps that are being written are finished without it.
func (bl *builder) close() { bl.undo.Run() }

// step does one step and keeps the machine as it is then.
func (bl *builder) step(ctx context.Context, s *buildStep) error {
	alive, stop := untilDead(ctx, bl.s.machine)
	defer stop()
	if err := s.do(alive, bl); err != nil {
		if errors.Is(err, ErrStep) || ctx.Err() != nil { // its output says more than the machine could
			return causeOr(ctx, err)
		}
		return withConsole(deathOr(bl.s.machine, causeOr(alive, err)), bl.s.machine.Console())
	}
	if !s.kept {
		return nil
	}
	if err := bl.keep(ctx, s); err != nil {
		return fmt.Errorf("keep the machine after %s: %w", s.title, err)
	}
	return nil
}

// keep captures the machine and has it written while the build goes on.
func (bl *builder) keep(ctx context.Context, s *buildStep) error {
	if s.settled {
		if err := bl.settle(ctx); err != nil {
			return err
		}
	}
	// What comes next stands on what was before, and not on what that stood on, so that each has its own pages only.
	bl.await(ctx)
	br := &branch{h: bl.h, s: bl.s, mode: BranchDiff, reason: "a step of a build", build: bl.b}
	br.describe = func(m *store.Snapshot) {
		// What its commands may reach is not for who looks at a step.
		m.Source, m.Branch, m.Egress = s.key, nil, bl.from.Egress
		if s.describe != nil {
			s.describe(m)
		}
	}
	if err := br.take(ctx, BranchSpec{Tag: newStepTag()}); err != nil {
		return err
	}
	bl.writing = append(bl.writing, br)
	return nil
}

// settle has dirty pages written and leaves the machine a moment of rest, as before every freeze of a parent.
func (bl *builder) settle(ctx context.Context) error {
	alive, stop := untilDead(ctx, bl.s.machine)
	defer stop()
	if err := bl.conn.Quiesce(alive, wire.QuiesceRequest{Settle: true}); err != nil {
		return errors.Join(fmt.Errorf("settle: %w", causeOr(alive, err)), bl.s.unfreeze(ctx))
	}
	if err := bl.s.unfreeze(ctx); err != nil {
		return fmt.Errorf("settle: %w", err)
	}
	return rest(alive)
}

// await returns when what was kept is written, or ctx ends; it is written all the same then.
func (bl *builder) await(ctx context.Context) {
	for _, br := range bl.writing {
		if err := br.w.wait(ctx); err != nil && ctx.Err() == nil {
			bl.h.dropFailedStep(br.w.m.Tag)
		}
	}
}

// before is the last step that was kept, or what the machine was forked from.
func (bl *builder) before(from store.Snapshot) store.Snapshot {
	for _, br := range slices.Backward(bl.writing) {
		if m, err := bl.h.snapshot(br.w.m.Tag); err == nil {
			return m
		}
	}
	return from
}

// last waits until all is written and returns the snapshot of a key.
func (bl *builder) last(ctx context.Context, key string) (store.Snapshot, func(), error) {
	bl.await(ctx)
	last := bl.writing[len(bl.writing)-1]
	if err := last.w.wait(ctx); err != nil {
		return store.Snapshot{}, nil, fmt.Errorf("store the machine: %w", err)
	}
	m, forget, ok := bl.h.step(key)
	if !ok {
		return m, nil, fmt.Errorf("the last step: %w: it was removed meanwhile", ErrNotFound)
	}
	bl.h.used(m.Tag)
	return m, forget, nil
}

// endProcesses ends what a step left running, as a container's end would, but nothing that was there before.
func (bl *builder) endProcesses(ctx context.Context) error {
	err := bl.conn.Call(ctx, wire.MethodEndProcesses, wire.EndProcessesRequest{Keep: bl.services}, &wire.EndProcessesReply{})
	if err != nil {
		return fmt.Errorf("end what it left running: %w", err)
	}
	return nil
}

// command is what a step runs.
type command struct {
	argv []string
	env  map[string]string
	dir  string
	user string
}

// run runs a command to its end, and ends what it left running. Failing is the user's fault.
func (bl *builder) run(ctx context.Context, c command) error {
	out := &stepOutput{say: func(line string) { bl.b.progress(Event{Step: "output", Message: line}) }}
	req := wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: c.argv[0], Args: c.argv[1:], Envs: c.env}, TimeoutMS: stepTimeout.Milliseconds(), User: c.user,
	}
	if req.User == "" {
		req.User = "root"
	}
	if c.dir != "" {
		req.Process.Cwd = &c.dir
	}
	end, err := call.Run(ctx, bl.conn, req, nil, call.Output{Stdout: out, Stderr: out}, nil)
	out.flush()
	if err != nil {
		return err
	}
	if err := bl.endProcesses(ctx); err != nil {
		return err
	}
	switch {
	case end.Code() == 0:
		return nil
	case end.Error != "" && end.Error != end.Status:
		return fmt.Errorf("%w: %s%s", ErrStep, end.Error, output(&out.tail))
	}
	return fmt.Errorf("%w: %s%s", ErrStep, end.Status, output(&out.tail))
}

// stepOutput passes on lines, as many as anybody reads, and keeps the last of all for an error.
type stepOutput struct {
	say   func(string)
	mu    sync.Mutex
	tail  tail
	line  []byte
	lines int
}

const (
	maxStepLines  = 5000
	maxOutputLine = 4 << 10
)

func (o *stepOutput) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, _ = o.tail.Write(p)
	if o.lines >= maxStepLines {
		return len(p), nil
	}
	for rest := p; len(rest) > 0; {
		i := bytes.IndexByte(rest, '\n')
		if i < 0 {
			o.line = append(o.line, rest...)
			break
		}
		o.line = append(o.line, rest[:i]...)
		o.emit()
		rest = rest[i+1:]
	}
	if len(o.line) > maxOutputLine {
		o.emit()
	}
	return len(p), nil
}

func (o *stepOutput) emit() {
	if o.lines++; o.lines <= maxStepLines {
		o.say(strings.ToValidUTF8(string(o.line[:min(len(o.line), maxOutputLine)]), "?"))
	}
	if o.lines == maxStepLines {
		o.say("… more output is not shown")
	}
	o.line = o.line[:0]
}

func (o *stepOutput) flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.line) > 0 {
		o.emit()
	}
}

// extract puts an archive's content over the root directory; directories that are there stay as they are.
func (bl *builder) extract(ctx context.Context, write func(io.Writer) error) error {
	r, w := io.Pipe()
	go func() { _ = w.CloseWithError(write(w)) }()
	defer r.Close()
	ctx, from, stop := steadily(ctx, r)
	defer stop()
	return call.Upload(ctx, bl.conn, wire.MethodExtract, wire.ExtractRequest{Path: "/", KeepDirs: true}, from, nil)
}

// read returns a file of the machine, empty if there is none.
func (bl *builder) read(ctx context.Context, name string, most int) ([]byte, error) {
	b, err := call.Fetch(ctx, bl.conn, wire.MethodFileRead, wire.ReadRequest{Path: name, User: "root", Length: int64(most)}, most)
	if e, ok := errors.AsType[*wire.Error](err); ok && e.Code == wire.CodeNotFound {
		return nil, nil
	}
	return b, err
}

// isDir says whether a path is a directory, or a link to one.
func (bl *builder) isDir(ctx context.Context, name string) (bool, error) {
	const mostLinks = 40
	for range mostLinks {
		var reply wire.EntryReply
		err := bl.conn.Call(ctx, wire.MethodFileStat, wire.PathRequest{Path: name, User: "root"}, &reply)
		if e, ok := errors.AsType[*wire.Error](err); ok && (e.Code == wire.CodeNotFound || e.Code == wire.CodeInvalid) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		target := reply.Entry.SymlinkTarget
		if target == nil {
			return reply.Entry.Type == wire.TypeDirectory, nil
		}
		if path.IsAbs(*target) {
			name = path.Clean(*target)
			continue
		}
		name = path.Join(path.Dir(name), *target)
	}
	return false, nil
}

const maxDatabase = 4 << 20 // of users

// owner finds the numbers of "user", "user:group" or numbers, in the machine's own databases.
func (bl *builder) owner(ctx context.Context, text string) (uid, gid int, err error) {
	if text == "" {
		return 0, 0, nil
	}
	user, group, hasGroup := strings.Cut(text, ":")
	uid, err = strconv.Atoi(user)
	gid = uid
	if err != nil {
		passwd, err := bl.read(ctx, "/etc/passwd", maxDatabase)
		if err != nil {
			return 0, 0, err
		}
		entry := lookUp(passwd, user, 4)
		if entry == nil {
			return 0, 0, invalid("there is no user %q in /etc/passwd", user)
		}
		uid, _ = strconv.Atoi(entry[2])
		gid, _ = strconv.Atoi(entry[3])
	}
	if !hasGroup {
		return uid, gid, nil
	}
	if gid, err = strconv.Atoi(group); err == nil {
		return uid, gid, nil
	}
	groups, err := bl.read(ctx, "/etc/group", maxDatabase)
	if err != nil {
		return 0, 0, err
	}
	entry := lookUp(groups, group, 3)
	if entry == nil {
		return 0, 0, invalid("there is no group %q in /etc/group", group)
	}
	gid, _ = strconv.Atoi(entry[2])
	return uid, gid, nil
}

func lookUp(database []byte, name string, fields int) []string {
	for line := range strings.Lines(string(database)) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) >= fields && f[0] == name {
			return f
		}
	}
	return nil
}

// imageConfigPath is where the agent reads how the processes of an image are started.
const imageConfigPath = "/etc/forkd/image.json"

// configure sets how processes of the machine are started from now on.
func (bl *builder) configure(ctx context.Context, config any) error {
	text, err := json.MarshalIndent(config, "", "\t")
	if err != nil {
		return err
	}
	mode := uint32(0o644)
	if err := call.Upload(ctx, bl.conn, wire.MethodFileWrite, wire.WriteRequest{Path: imageConfigPath, User: "root", Mode: &mode},
		bytes.NewReader(append(text, '\n')), nil); err != nil {
		return fmt.Errorf("write %s: %w", imageConfigPath, err)
	}
	return bl.conn.Call(ctx, wire.MethodConfigure, struct{}{}, nil)
}
