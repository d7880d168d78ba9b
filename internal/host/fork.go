package host

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/disk"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/network/egress"
	"forkd.dev/forkd/internal/store"
	"forkd.dev/forkd/internal/undo"
)

// ForkSpec asks for children of a snapshot.
type ForkSpec struct {
	Tag         string
	N           int
	Labels      map[string]string
	Env         map[string]string
	IDIn        string        // a variable that is each child's own id; "": none
	TTL         time.Duration // 0: until killed
	CPUs        int           // 0: the snapshot's
	MemoryBytes int64
	Limits      Limits // zero ones: the snapshot's, if it has any
	MemoryWish  int64  // a limit of memory that may be made larger, or be none: see bounds
	Life        Life   // what ends it besides its time to live

	Egress   *egress.Policy // what they may reach; nil: as the snapshot says. See egressFor
	MayWiden bool           // also what the snapshot does not allow

	Workspace string // to be; set by CreateWorkspace
}

// ForkResult is one child, or why it is none.
type ForkResult struct {
	Index   int
	Sandbox View
	Err     error
}

// Fork makes n children. The error says why nothing was tried; what happened to each child is in the results. A
// child is in the table, and so can be talked to, only after its agent has confirmed its new identity.
func (h *Host) Fork(ctx context.Context, spec ForkSpec) (results []ForkResult, err error) {
	start := time.Now()
	mode := ModeCold
	defer func() { h.took(TimedFork, mode, cmp.Or(err, firstOf(results)), start) }()
	m, writing, forget, err := h.claim(spec.Tag)
	if err != nil {
		return nil, err
	}
	defer forget()
	if err := spec.check(m); err != nil {
		return nil, err
	}
	if spec.N > h.cfg.MaxForks {
		return nil, hint(fmt.Errorf("%w: %d children in one call, this daemon makes at most %d", ErrExhausted, spec.N, h.cfg.MaxForks),
			"fork fewer at once")
	}
	features, err := h.Features(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.Engine.Compatible(features.Format); err != nil {
		return nil, fmt.Errorf("fork %s: %w", m.Tag, err)
	}
	warnings, err := h.bounds(&spec, m.Limits, m.Engine.MemoryBytes, features)
	if err != nil {
		return nil, fmt.Errorf("fork %s: %w", m.Tag, err)
	}
	policy, err := egressFor(spec.Egress, m.Egress, spec.MayWiden)
	if err != nil {
		return nil, fmt.Errorf("fork %s: %w", m.Tag, err)
	}
	spec.Egress = &policy
	done, err := h.admit(ctx, m, writing, spec.N)
	if err != nil {
		return nil, err
	}
	defer done()
	waiting := time.Now()
	switch {
	case writing != nil:
		mode = ModeWriting
	case h.hot.has(m):
		mode = ModeHot
	}
	hot, err := h.acquire(ctx, m, writing)
	if err != nil {
		return nil, fmt.Errorf("fork %s: %w", m.Tag, err)
	}
	defer h.hot.release(hot)
	var waited time.Duration
	if writing != nil {
		waited = time.Since(waiting)
	}
	if err := h.hot.flattenFor(ctx, hot, spec.N); err != nil {
		return nil, fmt.Errorf("fork %s: %w", m.Tag, err)
	}
	from := &origin{tag: m.Tag, snapshot: m, writing: writing}

	results = make([]ForkResult, spec.N)
	slots := make(chan struct{}, h.cfg.Parallel)
	var wg sync.WaitGroup
	for i := range spec.N {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			results[i].Index = i
			began := time.Now()
			s, err := h.forkOne(ctx, spec, from, hot, i, start)
			h.took(TimedForkChild, "", err, began)
			if err != nil {
				results[i].Err = fmt.Errorf("fork child %d of %s: %w", i, m.Tag, err)
				return
			}
			results[i].Sandbox = s.view()
			results[i].Sandbox.Waited = waited
			results[i].Sandbox.Warnings = warnings
		})
	}
	wg.Wait()
	return results, nil
}

// firstOf is the first error of a fork's children.
func firstOf(results []ForkResult) error {
	for i := range results {
		if err := results[i].Err; err != nil {
			return err
		}
	}
	return nil
}

// Check says what is wrong with a request, whatever the snapshot.
func (spec ForkSpec) Check() error {
	if spec.N < 1 || spec.N > MaxForkN {
		return invalid("n is %d; a fork makes 1 to %d children", spec.N, MaxForkN)
	}
	if spec.TTL < 0 || spec.TTL > maxTTL {
		return invalid("ttl is %s; allowed is 0 (until killed) to %s", spec.TTL, maxTTL)
	}
	if err := checkPairs("label", spec.Labels, maxLabels); err != nil {
		return err
	}
	if err := spec.Life.check(); err != nil {
		return err
	}
	if err := checkLimits(spec.Limits); err != nil {
		return err
	}
	return checkEnv(spec.Env)
}

// env is what a child's processes begin with.
func (spec ForkSpec) env(id string) map[string]string {
	if spec.IDIn == "" {
		return maps.Clone(spec.Env)
	}
	env := map[string]string{}
	maps.Copy(env, spec.Env)
	env[spec.IDIn] = id
	return env
}

func (spec ForkSpec) check(m store.Snapshot) error {
	if err := spec.Check(); err != nil {
		return err
	}
	if spec.CPUs != 0 && spec.CPUs != m.Engine.CPUs {
		return hint(invalid("cpus: %d asked, but a fork has the machine of its snapshot, and %s has %d", spec.CPUs, m.Tag,
			m.Engine.CPUs), "set machine.cpus in the recipe and build another snapshot")
	}
	if spec.MemoryBytes != 0 && spec.MemoryBytes != m.Engine.MemoryBytes {
		return hint(invalid("memory: %s asked, but a fork has the machine of its snapshot, and %s has %s",
			mib(spec.MemoryBytes), m.Tag, mib(m.Engine.MemoryBytes)), "set machine.memory in the recipe and build another snapshot")
	}
	return nil
}

func checkPairs(what string, pairs map[string]string, most int) error {
	if len(pairs) > most {
		return invalid("%d %ss; at most %d are allowed", len(pairs), what, most)
	}
	for k, v := range pairs {
		if k == "" || len(k) > 256 || len(v) > maxValue || hasControl(k) || strings.ContainsRune(v, 0) {
			return invalid("%s %.40q: keys have 1 to 256 printable characters, values at most %d bytes and no NUL", what, k, maxValue)
		}
	}
	return nil
}

func checkEnv(env map[string]string) error {
	for k := range env {
		if strings.ContainsRune(k, '=') {
			return invalid("environment variable %.40q has = in its name", k)
		}
	}
	return checkPairs("environment variable", env, maxEnv)
}

func hasControl(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f })
}

// forkOne makes one child, or leaves nothing of it.
func (h *Host) forkOne(ctx context.Context, spec ForkSpec, from *origin, hot *hotImage, index int, start time.Time) (*sandbox, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	var u undo.Stack
	defer u.Run()

	id := newID()
	dir, err := h.machineDir()
	if err != nil {
		return nil, err
	}
	u.Add(func() { _ = os.RemoveAll(dir) })
	s := &sandbox{
		id: id, tag: from.tag, from: from, index: index, count: spec.N, hostname: id, labels: maps.Clone(spec.Labels),
		env: spec.env(id), created: time.Now(), dir: dir, hot: hot, state: lineage.Running, generation: 1,
		workspace: spec.Workspace, limits: spec.Limits, life: spec.Life.with(spec.TTL), egress: spec.Egress.Clone(), talked: from.snapshot.Talked,
	}
	u.Add(func() { _ = s.cgroup.Remove() })
	if err := h.restore(ctx, s); err != nil {
		return nil, s.orLimit(err)
	}
	u.Add(func() {
		_ = s.machine.Close()
		h.cfg.Networks.Detach(s.id)
	})
	if err := s.awaken(ctx, from.snapshot.Protocol, h.cfg.Patience); err != nil {
		return nil, withConsole(s.orLimit(err), s.machine.Console())
	}
	u.Add(func() { _ = s.conn.Close() })
	if err := h.connect(ctx, s); err != nil {
		return nil, err
	}
	if err := s.bound(ctx); err != nil {
		return nil, err
	}
	s.ready = time.Since(start)
	if err := h.enter(s, spec.TTL); err != nil { //nolint:contextcheck // what is watched outlives the fork
		return nil, err
	}
	u.Keep()
	return s, nil
}

// restore starts the machine of a sandbox from its hot image, with a new disk over that.
func (h *Host) restore(ctx context.Context, s *sandbox) error {
	var u undo.Stack
	defer u.Run()
	overlay := diskPath(s.dir, 0)
	if err := os.Mkdir(filepath.Dir(overlay), 0o700); err != nil {
		return fmt.Errorf("create disk: %w", err)
	}
	below := s.hot.disks
	if err := disk.CreateOverlay(overlay, below[0], diskFormat(below)); err != nil {
		return fmt.Errorf("create disk: %w", err)
	}
	checkpoint := h.hot.memory(s.hot)
	mapped, err := checkpoint.Memory.ID()
	if err != nil {
		return err
	}
	group, err := h.group(s)
	if err != nil {
		return err
	}
	defer group.Close()
	spec := &engine.Spec{
		ID: s.id, Dir: s.dir, CPUs: checkpoint.Format.CPUs, MemoryBytes: checkpoint.Format.MemoryBytes,
		Disk:   engine.Disk{Path: overlay, Format: "qcow2", Backing: below},
		Cgroup: group,
	}
	attached, err := h.attach(s, spec, &u)
	if err != nil {
		return err
	}
	defer attached()
	machine, err := h.cfg.Engine.Restore(ctx, spec, checkpoint)
	if err != nil {
		return fmt.Errorf("restore machine: %w", err)
	}
	u.Keep()
	s.machine, s.format, s.mapped, s.disks, s.nextDisk = machine, checkpoint.Format, mapped, []string{overlay}, 1
	return nil
}

// diskPath is the n-th disk file of a machine. They have a directory of their own: it is all of the machine's directory
// that the VM process may open.
func diskPath(dir string, n int) string {
	return filepath.Join(dir, "disk", strconv.Itoa(n)+".qcow2")
}

// diskFormat is the format of the nearest of a chain of disks, whose last is an image's.
func diskFormat(chain []string) string {
	if len(chain) == 1 {
		return "raw"
	}
	return "qcow2"
}

// awaken gives the child its own identity and waits for the confirmation. Whatever fails here, the caller kills the
// machine: a child that kept its parent's entropy must never run user code (invariant 4).
// Protocol is the version that the agent in the snapshot speaks.
func (s *sandbox) awaken(ctx context.Context, protocol int, within time.Duration) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("the guest did not confirm its new identity within %s", within))
	defer cancel()
	ctx, stop := untilDead(ctx, s.machine)
	defer stop()
	// Connections that were its parent's have ended with the confirmation. An agent that could not have ended them would have
	// had no network to begin them on.
	defer func() {
		if err == nil {
			s.talked = false
		}
	}()
	if protocol >= wire.Version {
		conn, report, err := guest.AwakenFirst(ctx, s.machine.DialGuest, s.generation, identity(s, s.env))
		if err != nil {
			return fmt.Errorf("awaken: %w", s.because(ctx, err))
		}
		s.conn, s.report = conn, report
		return nil
	}
	conn, err := guest.Dial(ctx, s.machine.DialGuest, s.generation)
	if err != nil {
		return fmt.Errorf("reach the agent: %w", s.because(ctx, err))
	}
	report, err := conn.Awaken(ctx, identity(s, s.env))
	if err != nil {
		return errors.Join(fmt.Errorf("awaken: %w", s.because(ctx, err)), conn.Close())
	}
	s.conn, s.report = conn, report
	return nil
}

// because explains a call that failed: by the end of its context, by the machine's death, or by itself.
func (s *sandbox) because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return deathOr(s.machine, err)
}

func causeOr(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// identity is drawn from the host's generator for this child alone.
func identity(s *sandbox, env map[string]string) *wire.AwakenRequest {
	entropy := make([]byte, 128)
	_, _ = rand.Read(entropy) // crypto/rand never fails: it aborts the program instead
	machineID := make([]byte, 16)
	_, _ = rand.Read(machineID)
	return &wire.AwakenRequest{
		SandboxID: s.id, SnapshotTag: s.tag, Index: s.index, Count: s.count, Hostname: s.hostname, Sever: s.talked,
		MachineID: hex.EncodeToString(machineID), BootID: newUUID(), Entropy: entropy, Env: env,
	}
}

func newID() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return lineage.SandboxID(b)
}

func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // version 4, variant 1
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

// machineDir makes a private directory of random name.
func (h *Host) machineDir() (string, error) {
	var b [12]byte
	_, _ = rand.Read(b[:])
	dir := filepath.Join(h.cfg.Home.Machines(), hex.EncodeToString(b[:]))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("make machine directory: %w", err)
	}
	return dir, nil
}

// enter puts an awakened child into the table and starts to watch it. Its hot image gets one more user.
func (h *Host) enter(s *sandbox, ttl time.Duration) error {
	if ttl > 0 {
		s.expires = s.created.Add(ttl)
	}
	if err := h.remember(s); err != nil {
		return err
	}
	changed, err := h.enterTable(s)
	if changed {
		h.record(s)
	}
	if err == nil {
		h.arm(s)
	}
	return err
}

// enterTable reports whether what the child was forked from has another record by now.
func (h *Host) enterTable(s *sandbox) (changed bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false, ErrClosed
	}
	from, err := h.originNow(s.from)
	if err != nil {
		return false, err
	}
	changed = from != s.from
	s.from = from
	h.hot.retain(s.hot)
	h.sandboxes[s.id] = s
	h.tell(events.SandboxForked, s, "") // before its watcher or anybody else can tell of it
	machine := s.machine
	h.wait.Go(func() { h.watch(s, machine) })
	return changed, nil
}
