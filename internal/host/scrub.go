package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/call"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layer"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/pack"
	"forkd.dev/forkd/internal/store"
)

// A frozen machine cannot be scrubbed: its kernel has files in memory, and the tables of its disk, and what is changed below
// it would be read as it was or break. So a child is forked, which removes the files itself, and that is captured. Who looks
// is another child, whose memory then has what was read, and which ends.

// packable is a snapshot to be packed that is in no table.
type packable struct {
	snapshot store.Snapshot
	image    store.Image
	state    []byte
}

// finding is a file with a secret.
type finding struct {
	pack.Secret
	owner string
	mode  uint32
	clean []byte   // what is to be there instead; nil: nothing
	held  [][]byte // of what it held, to be searched for
}

const (
	scrubTimeout = 10 * time.Minute
	maxRead      = 2000 // files of one snapshot that are read for tokens
	scanDepth    = 5
	mostFound    = 1000
)

// scrub looks for secrets in a snapshot and in all it stands on. If there are any, clean is the snapshot without them; release
// lets go of what it stands on, and is never nil.
func (h *Host) scrub(ctx context.Context, m store.Snapshot) (rep *pack.Scrub, clean *packable, release func(), err error) {
	release = func() {}
	ctx, cancel := context.WithTimeoutCause(ctx, scrubTimeout, fmt.Errorf("%w: it took longer than %s", context.DeadlineExceeded, scrubTimeout))
	defer cancel()
	line, forget, err := h.claimLine(m)
	if err != nil {
		return nil, nil, release, err
	}
	defer forget()
	rep = &pack.Scrub{}
	var last []finding // of m
	var held [][][]byte
	for _, s := range line {
		found, limits, err := h.scan(ctx, s)
		if err != nil {
			return nil, nil, release, fmt.Errorf("snapshot %s: %w", s.Tag, err)
		}
		rep.Looked = append(rep.Looked, s.Tag)
		rep.Limits = append(rep.Limits, limits...)
		for _, f := range found {
			rep.Found, held = append(rep.Found, f.Secret), append(held, f.held)
		}
		last = found
	}
	if len(rep.Found) == 0 {
		return rep, nil, release, nil
	}
	rep.Flat = true
	clean, release, err = h.cleaned(ctx, m, last, rep)
	if err == nil {
		err = h.searchLeft(ctx, clean, held, rep)
	}
	return rep, clean, release, err
}

// child forks a child that reaches nothing, for as long as use takes. It ends by itself if this daemon does not come to it.
func (h *Host) child(ctx context.Context, m store.Snapshot, use func(s *sandbox, conn *guest.Conn) error) error {
	results, err := h.Fork(ctx, ForkSpec{Tag: m.Tag, N: 1, Labels: map[string]string{"forkd.purpose": "pack"}, Egress: &egress.Policy{}, TTL: scrubTimeout})
	if err == nil {
		err = results[0].Err
	}
	if err != nil {
		return err
	}
	id := results[0].Sandbox.ID
	defer func() {
		if err := h.Kill(context.WithoutCancel(ctx), id); err != nil && !errors.Is(err, ErrNotFound) {
			h.log.Warn("end a child that was asked for secrets", "sandbox", id, "error", err)
		}
	}()
	s, err := h.find(id)
	if err != nil {
		return err
	}
	conn, err := h.reachGuest(ctx, s)
	if err != nil {
		return err
	}
	return use(s, conn)
}

// scan looks for secrets in a child and in the snapshot's record.
func (h *Host) scan(ctx context.Context, m store.Snapshot) (found []finding, limits []string, err error) {
	tokens := pack.NewTokens()
	for name, value := range configEnv(m) {
		if what := tokens.Find([]byte(name + "=" + value)); what != "" {
			found = append(found, finding{Secret: pack.Secret{Snapshot: m.Tag, Path: "environment variable " + name, What: what, Bytes: int64(len(value))}, held: tokens.All([]byte(name + "=" + value))})
		}
	}
	if what := tokens.Find([]byte(m.RecipeText)); what != "" {
		found = append(found, finding{Secret: pack.Secret{Snapshot: m.Tag, Path: "recipe", What: what, Bytes: int64(len(m.RecipeText))}, held: tokens.All([]byte(m.RecipeText))})
	}
	found = append(found, inCommands(m, tokens)...)
	err = h.child(ctx, m, func(_ *sandbox, conn *guest.Conn) error {
		s := &scanner{conn: conn, tokens: tokens, tag: m.Tag}
		if err := s.run(ctx, m); err != nil {
			return err
		}
		found, limits = append(found, s.found...), s.limits
		return nil
	})
	return found, limits, err
}

// inCommands finds tokens in what was run in the sandbox that became m.
func inCommands(m store.Snapshot, tokens *pack.Tokens) (found []finding) {
	if m.Branch == nil || m.Branch.Ran == nil {
		return nil
	}
	for i, argv := range m.Branch.Ran.Commands {
		text := strings.Join(argv, " ")
		if what := tokens.Find([]byte(text)); what != "" {
			found = append(found, finding{Secret: pack.Secret{Snapshot: m.Tag, Path: fmt.Sprintf("command %d", i+1), What: what, Bytes: int64(len(text))}, held: tokens.All([]byte(text))})
		}
	}
	return found
}

func configEnv(m store.Snapshot) map[string]string {
	if m.Config == nil {
		return nil
	}
	return m.Config.Env
}

// scanner asks one guest. What it answers is not trusted: it names files of its own, and bounds hold whatever it says.
type scanner struct {
	conn   *guest.Conn
	tokens *pack.Tokens
	tag    string
	homes  []string
	read   int
	seen   map[string]bool
	found  []finding
	limits []string
}

func (s *scanner) run(ctx context.Context, m store.Snapshot) error {
	s.homes, s.seen = s.homesOf(ctx), map[string]bool{}
	dirs := slices.Concat(s.homes, []string{"/app", "/workspace", "/srv", "/run/secrets", "/code"})
	if m.Config != nil && path.IsAbs(m.Config.WorkDir) && path.Clean(m.Config.WorkDir) != "/" {
		dirs = append(dirs, m.Config.WorkDir)
	}
	for _, dir := range dirs {
		if err := s.dir(ctx, dir); err != nil {
			return fmt.Errorf("look into %s: %w", dir, err)
		}
	}
	return nil
}

// homesOf reads the home directories of the guest's users.
func (s *scanner) homesOf(ctx context.Context) []string {
	homes := []string{"/root"}
	text, err := call.Fetch(ctx, s.conn, wire.MethodFileRead, wire.ReadRequest{Path: "/etc/passwd", User: "root"}, 1<<20)
	if err != nil {
		return homes
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) == 7 && (strings.HasPrefix(f[5], "/home/") || strings.HasPrefix(f[5], "/Users/")) && !slices.Contains(homes, path.Clean(f[5])) && len(homes) < 64 {
			homes = append(homes, path.Clean(f[5]))
		}
	}
	return homes
}

func (s *scanner) dir(ctx context.Context, dir string) error {
	var list wire.EntriesReply
	var err error
	for depth := uint32(scanDepth); depth > 0; depth -= 2 {
		err = s.conn.Call(ctx, wire.MethodFileList, wire.ListDirRequest{Path: dir, Depth: depth, User: "root"}, &list)
		e, refused := errors.AsType[*wire.Error](err)
		if !refused {
			break
		}
		if e.Code != wire.CodeExhausted {
			return nil // it is not there, or no directory
		}
		s.limit("%s: %s has more files than can be listed to a depth of %d", s.tag, dir, depth)
	}
	if err != nil {
		return err
	}
	for _, e := range list.Entries {
		if err := s.file(ctx, e); err != nil {
			return err
		}
	}
	return nil
}

func (s *scanner) limit(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if len(s.limits) < 20 && !slices.Contains(s.limits, text) {
		s.limits = append(s.limits, text)
	}
}

func (s *scanner) file(ctx context.Context, e wire.EntryInfo) error {
	if e.Type != wire.TypeFile || e.SymlinkTarget != nil || e.Size <= 0 || s.seen[e.Path] || len(s.found) >= mostFound || !path.IsAbs(e.Path) {
		return nil
	}
	s.seen[e.Path] = true
	f := finding{Secret: pack.Secret{Snapshot: s.tag, Path: e.Path, Bytes: e.Size}, owner: e.Owner, mode: e.Mode}
	if f.What = pack.SecretFile(e.Path, s.homes); f.What != "" || strings.HasPrefix(e.Path, "/run/secrets/") {
		if f.What == "" {
			f.What = "secret"
		}
		if e.Size <= 64<<10 {
			text, err := call.Fetch(ctx, s.conn, wire.MethodFileRead, wire.ReadRequest{Path: e.Path, User: "root"}, 128<<10)
			if _, refused := errors.AsType[*wire.Error](err); err != nil && !refused {
				return err
			}
			f.held = append(s.tokens.All(text), pack.Lines(text)...)
		}
		s.found = append(s.found, f)
		return nil
	}
	if !pack.MayHoldToken(e.Path, e.Size) {
		return nil
	}
	if s.read++; s.read > maxRead {
		s.limit("%s: only %d files were read for tokens", s.tag, maxRead)
		return nil
	}
	text, err := call.Fetch(ctx, s.conn, wire.MethodFileRead, wire.ReadRequest{Path: e.Path, User: "root"}, 512<<10)
	if _, refused := errors.AsType[*wire.Error](err); refused {
		return nil
	}
	if err != nil {
		return err
	}
	if f.What = s.tokens.Find(text); f.What != "" {
		f.clean, f.held = s.tokens.Redact(text), s.tokens.All(text)
		s.found = append(s.found, f)
	}
	return nil
}

// cleaned makes the snapshot without what was found in it, standing on nothing: its layers hold what a child has now, and not
// what that was made of.
func (h *Host) cleaned(ctx context.Context, m store.Snapshot, found []finding, rep *pack.Scrub) (*packable, func(), error) {
	release := func() {}
	img, err := h.imagesOf([]store.Snapshot{m})
	if err != nil {
		return nil, release, err
	}
	var step store.Snapshot
	err = h.child(ctx, m, func(s *sandbox, conn *guest.Conn) error {
		if err := erase(ctx, conn, found, rep); err != nil {
			return err
		}
		if err := zeroFree(ctx, conn, rep); err != nil {
			return err
		}
		step, err = h.captureClean(ctx, s, conn, m)
		return err
	})
	if err != nil {
		return nil, release, err
	}
	defer func() {
		if err := h.removeStep(step.Tag, ""); err != nil {
			h.log.Warn("remove what was packed", "step", step.Tag, "error", err)
		}
	}()
	state, err := h.store.State(step)
	if err != nil {
		return nil, release, err
	}
	hold, err := h.layers.Hold(ctx)
	if err != nil {
		return nil, release, err
	}
	release = func() {
		hold()
		h.collect(context.WithoutCancel(ctx))
	}
	p, err := h.flat(ctx, m, step, img[0], state)
	if err != nil {
		release()
		return nil, func() {}, err
	}
	rep.Limits = append(rep.Limits, "nobody has looked for the content of files that were removed before: their blocks may still be on the disk")
	return p, release, nil
}

// erase overwrites the files in place and removes them, and writes what is to be there instead.
func erase(ctx context.Context, conn *guest.Conn, found []finding, rep *pack.Scrub) error {
	var files []string
	for _, f := range found {
		if path.IsAbs(f.Path) {
			files = append(files, f.Path)
		}
	}
	if len(files) == 0 {
		return nil
	}
	for chunk := range slices.Chunk(files, 100) {
		out := &tail{}
		end, err := call.Run(ctx, conn, wire.StartRequest{
			Process: wire.ProcessConfig{Cmd: "shred", Args: append([]string{"-f", "-n", "0", "-z", "--"}, chunk...)}, TimeoutMS: scrubTimeout.Milliseconds(), User: "root",
		}, nil, call.Output{Stdout: out, Stderr: out}, nil)
		if _, refused := errors.AsType[*wire.Error](err); err != nil && !refused {
			return err
		}
		if err != nil || end.Code() != 0 {
			rep.Limits = append(rep.Limits, "the image has no program shred that works: files were removed, but their blocks may still be on the disk")
			break
		}
	}
	for _, f := range found {
		if !path.IsAbs(f.Path) {
			continue
		}
		if err := conn.Call(ctx, wire.MethodFileRemove, wire.PathRequest{Path: f.Path, User: "root"}, &struct{}{}); err != nil {
			return fmt.Errorf("remove %.200s: %w", f.Path, err)
		}
		if f.clean == nil {
			continue
		}
		mode := f.mode & 0o7777
		req := wire.WriteRequest{Path: f.Path, User: f.owner, Mode: &mode}
		if err := call.Upload(ctx, conn, wire.MethodFileWrite, req, strings.NewReader(string(f.clean)), nil); err != nil {
			return fmt.Errorf("write %.200s without its tokens: %w", f.Path, err)
		}
	}
	return nil
}

// zeroFree has the guest overwrite its free memory: what was removed had been read, and written anew.
func zeroFree(ctx context.Context, conn *guest.Conn, rep *pack.Scrub) error {
	// What dd reads into is zero, and free again when it ends. At most 1 GiB each, since not every kernel reads more at once.
	const script = `n=$(($(sed -n 's/^MemFree: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 1024 - 24))
while [ "$n" -gt 0 ]; do
	if [ "$n" -gt 1024 ]; then m=1024; else m=$n; fi
	dd if=/dev/zero of=/dev/null bs="${m}M" count=1 2>/dev/null || exit 1 &
	pids="$pids $!" n=$((n - m))
done
for p in $pids; do wait "$p" || exit 1; done`
	out := &tail{}
	end, err := call.Run(ctx, conn, wire.StartRequest{
		Process: wire.ProcessConfig{Cmd: "sh", Args: []string{"-c", script}}, TimeoutMS: scrubTimeout.Milliseconds(), User: "root",
	}, nil, call.Output{Stdout: out, Stderr: out}, nil)
	if _, refused := errors.AsType[*wire.Error](err); err != nil && !refused {
		return err
	}
	if err != nil || end.Code() != 0 {
		rep.Limits = append(rep.Limits, "free memory was not overwritten: sh, sed or dd of the image could not do it")
	}
	return nil
}

// searchLeft looks for what was removed in the memory and on the disk of what will be packed, and says in the report where it
// is still.
func (h *Host) searchLeft(ctx context.Context, clean *packable, held [][][]byte, rep *pack.Scrub) error {
	texts := slices.Concat(held...)
	memory, disk := pack.NewSearch(texts), pack.NewSearch(texts)
	if err := h.layers.Apply(ctx, clean.snapshot.Memory, memory); err != nil {
		return fmt.Errorf("search memory: %w", err)
	}
	if err := h.layers.Apply(ctx, clean.snapshot.ImageDisk, disk); err != nil {
		return fmt.Errorf("search the disk: %w", err)
	}
	if len(texts) > pack.MostSought {
		rep.Limits = append(rep.Limits, fmt.Sprintf("memory and disk were searched for %d of the %d texts that were in what was removed", pack.MostSought, len(texts)))
	}
	n, left := 0, false
	for i := range rep.Found {
		l := &rep.Found[i].Left
		for range held[i] {
			l.Memory, l.Disk, n = l.Memory+memory.Left(n), l.Disk+disk.Left(n), n+1
		}
		left = left || l.Memory+l.Disk > 0
	}
	if left {
		rep.Limits = append(rep.Limits, "what is left in memory is there for whoever forks this: programs have it, or the agent that was told to run a command. Make it "+
			"worthless, or give it to children alone, when they are forked")
	}
	return nil
}

// captureClean keeps a child as it is now, as a step that nobody finds.
func (h *Host) captureClean(ctx context.Context, s *sandbox, conn *guest.Conn, m store.Snapshot) (store.Snapshot, error) {
	if err := conn.Quiesce(ctx, wire.QuiesceRequest{Settle: true}); err != nil { // dirty pages reach the disk
		return m, errors.Join(fmt.Errorf("settle: %w", err), s.unfreeze(ctx))
	}
	if err := s.unfreeze(ctx); err != nil {
		return m, fmt.Errorf("settle: %w", err)
	}
	b := &branch{h: h, s: s, began: time.Now(), mode: BranchDiff, reason: "to be packed"}
	b.describe = func(r *store.Snapshot) { r.Source, r.Branch = "scrubbed of "+m.ID(), nil }
	if err := b.take(ctx, BranchSpec{Tag: newStepTag()}); err != nil {
		return m, err
	}
	if err := b.w.wait(ctx); err != nil {
		h.dropFailedStep(b.w.m.Tag)
		return m, err
	}
	return h.snapshot(b.w.m.Tag)
}

// flat is a snapshot with the content of step and the record of m, on an image that is its whole disk.
func (h *Host) flat(ctx context.Context, m, step store.Snapshot, img store.Image, state []byte) (*packable, error) {
	mem, err := h.layers.Merge(ctx, step.Memory, layer.Digest{})
	if err != nil {
		return nil, fmt.Errorf("merge memory: %w", err)
	}
	dsk, err := h.layers.Merge(ctx, step.Disk, layer.Digest{})
	if err != nil {
		return nil, fmt.Errorf("merge disk: %w", err)
	}
	top, err := h.layers.Write(ctx, layer.WriteSpec{PageSize: dsk.PageSize, Size: dsk.Size, Parent: dsk.Digest, From: strings.NewReader("")})
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte("forkd image of a scrubbed disk\n" + dsk.Digest.String()))
	img.ID, img.Disk, img.DiskBytes, img.OwnBytes, img.StoredBytes = hex.EncodeToString(sum[:]), dsk.Digest, dsk.Size, dsk.OwnBytes, dsk.StoredBytes
	img.Config = redactConfig(img.Config)
	c := withLayers(m, mem, top)
	c.CreatedAt, c.Source, c.Parent, c.ParentID, c.Formerly = time.Now().UTC().Round(time.Millisecond), "scrubbed of "+m.ID(), "", "", nil
	c.Image, c.ImageDisk, c.Tool, c.Engine, c.Talked = img.ID, dsk.Digest, h.cfg.Version, step.Engine, step.Talked
	tokens := pack.NewTokens()
	c.RecipeText, c.Config, c.Branch = string(tokens.Redact([]byte(m.RecipeText))), redactConfig(m.Config), redactRan(m.Branch, tokens)
	c = c.WithState(state)
	if lineage.IsStep(c.Tag) {
		return nil, invalid("%s is a step of a build", c.Tag)
	}
	return &packable{snapshot: c, image: img, state: state}, nil
}

// redactConfig is a configuration whose environment has no tokens.
func redactConfig(c *store.Config) *store.Config {
	if c == nil {
		return nil
	}
	out, tokens := *c, pack.NewTokens()
	out.Env = map[string]string{}
	for name, value := range c.Env {
		if tokens.Find([]byte(name+"="+value)) == "" {
			out.Env[name] = value
		}
	}
	return &out
}
