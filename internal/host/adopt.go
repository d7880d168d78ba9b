package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/events"
	"forkd.dev/forkd/internal/guest/wire"
	"forkd.dev/forkd/internal/layout"
	"forkd.dev/forkd/internal/lineage"
	"forkd.dev/forkd/internal/memory"
)

const (
	// adoptParallel is how many machines are adopted at once: they are waited for, not worked on.
	adoptParallel = 32
	// reachTimeout is how long the start of a daemon waits for the agents of what it adopted.
	reachTimeout = 2 * time.Second
	reachAgain   = time.Second
)

// adoption is a machine that was adopted, before it is a sandbox again.
type adoption struct {
	left    *left
	record  *machineRecord
	machine engine.Machine
	disks   []string      // its own, the lowest first
	memory  *memory.Image // what it was restored from
	peer    *os.File      // of its link; may be nil
	lost    bool          // what its link's flows were is gone
}

// giveUp leaves an adopted machine to another daemon.
func (a *adoption) giveUp() {
	if a.peer != nil {
		_ = a.peer.Close()
	}
	if d, ok := a.machine.(engine.Detacher); ok {
		_ = d.Detach()
	}
	a.closeMemory()
}

func (a *adoption) closeMemory() {
	if a.memory != nil {
		_ = a.memory.Close()
	}
}

// adoptAll tries every machine; what was not adopted has its reason.
func (h *Host) adoptAll(ctx context.Context, found []*left) []*adoption {
	all := make([]*adoption, len(found))
	slots := make(chan struct{}, adoptParallel)
	var wg sync.WaitGroup
	for i, m := range found {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			all[i], m.reason = h.adoptOne(ctx, m)
		})
	}
	wg.Wait()
	return slices.DeleteFunc(all, func(a *adoption) bool { return a == nil })
}

func (h *Host) adoptOne(ctx context.Context, m *left) (*adoption, error) {
	rec, err := h.readRecord(ctx, m.dir)
	if err != nil {
		return nil, err
	}
	m.record = rec
	adopter, ok := h.cfg.Engine.(engine.Adopter)
	switch {
	case !slices.Contains(m.pids, rec.Ref.PID):
		return nil, errors.New("it is not the process that its record names")
	case !ok:
		return nil, fmt.Errorf("engine %s cannot adopt", h.cfg.Engine.Name())
	case h.known(rec.ID):
		return nil, errors.New("it is on disk: its daemon ended while it was being suspended or woken")
	case rec.Life.ends() && !rec.Expires.IsZero() && !time.Now().Before(rec.Expires):
		return nil, errors.New("its time to live is over")
	}
	got, err := adopter.Adopt(ctx, &engine.Adoption{
		Spec: rec.spec(m.dir), Ref: rec.Ref, Format: rec.Format, Paused: rec.State == lineage.Paused,
	})
	if err != nil {
		return nil, err
	}
	a := &adoption{left: m, record: rec, machine: got.Machine, memory: got.Memory, disks: ownDisks(m.dir, got.Disks), peer: got.Peer}
	if err := a.check(); err != nil {
		a.giveUp()
		return nil, err
	}
	m.adopted = rec.Ref.PID
	return a, nil
}

// check compares what the machine shows with what its daemon gave it. A VM process shows any file it likes as its memory,
// and others would be forked from that.
func (a *adoption) check() error {
	if len(a.disks) == 0 {
		return errors.New("its disk is none of its own")
	}
	if a.memory == nil {
		return errors.New("it shows no sealed image as its memory")
	}
	id, err := a.memory.ID()
	if err != nil {
		return err
	}
	if id != a.record.Mapped {
		return errors.New("its memory is not the image it was given")
	}
	return nil
}

func (h *Host) known(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.sandboxes[id]
	return ok
}

// spec is what the machine was started from.
func (rec *machineRecord) spec(dir string) *engine.Spec {
	s := &engine.Spec{
		ID: rec.ID, Dir: dir, CPUs: rec.Format.CPUs, MemoryBytes: rec.Format.MemoryBytes, Disk: engine.Disk{Format: "qcow2"},
	}
	if len(rec.Disks) > 0 {
		s.Disk.Path = rec.Disks[len(rec.Disks)-1]
	}
	for _, img := range rec.Images {
		if img.Key == rec.Hot {
			s.Disk.Backing = img.Disks
		}
	}
	return s
}

// ownDisks are the files of a disk that are the machine's own, the lowest first; chain is top first.
func ownDisks(dir string, chain []string) []string {
	own := layout.MachineDisks(dir)
	var disks []string
	for _, f := range chain {
		if filepath.Dir(f) != own {
			break
		}
		disks = append(disks, f)
	}
	slices.Reverse(disks)
	return disks
}

// enterAdopted makes adopted machines sandboxes again and waits a little for their agents.
func (h *Host) enterAdopted(adopted []*adoption) {
	images := h.hot.restore(adopted)
	var wg sync.WaitGroup
	for _, a := range adopted {
		s := h.rebuild(a, images[a.record.Hot])
		a.closeMemory()
		h.mu.Lock()
		h.sandboxes[s.id] = s
		h.tell(events.SandboxAdopted, s, "")
		h.wait.Go(func() { h.watch(s, a.machine) })
		h.mu.Unlock()
		h.arm(s)
		h.record(s)
		reached := make(chan struct{})
		h.wait.Go(func() { h.reach(s, a.machine, reached) })
		wg.Go(func() {
			timer := time.NewTimer(reachTimeout)
			defer timer.Stop()
			select {
			case <-reached:
			case <-timer.C:
				h.log.Warn("an adopted sandbox does not answer yet", "sandbox", s.id)
			}
		})
		h.log.Info("adopted a sandbox", "sandbox", s.id, "pid", a.record.Ref.PID, "state", s.state)
	}
	wg.Wait()
}

// rebuild is the sandbox of an adopted machine.
func (h *Host) rebuild(a *adoption, hot *hotImage) *sandbox {
	rec := a.record
	s := rec.sandbox(rec.ID)
	s.format, s.machine, s.dir, s.hot, s.mapped = rec.Format, a.machine, a.left.dir, hot, rec.Mapped
	s.disks, s.nextDisk = a.disks, nextDisk(a.left.dir)
	s.ran.Lost = true // commands are not written down one by one
	h.adoptGroup(s, rec.Ref.PID)
	if a.lost {
		s.lost = 1
	}
	s.generation, s.state, s.from = rec.Generation+generationBlock, rec.State, h.originOf(rec)
	for _, m := range h.snapshots {
		if rec.Latest != "" && m.ID() == rec.Latest {
			if cut, ok := cutNow(rec.Disks, rec.Cut, a.disks); ok {
				s.latest, s.cut = &m, cut
			}
		}
	}
	return s
}

// originOf is the snapshot that a sandbox was forked from. One that was still being written then may be ready now, or
// has failed with its daemon.
func (h *Host) originOf(rec *machineRecord) *origin {
	o := &origin{tag: rec.From.Tag, snapshot: rec.From}
	if rec.From.Tag == "" { // it was suspended once: what it stands on has no tag
		o.tag = rec.From.Parent
	}
	if !rec.From.Memory.IsZero() {
		return o
	}
	if m, ok := h.snapshots[rec.From.Tag]; ok && m.CreatedAt.Equal(rec.From.CreatedAt) {
		o.snapshot = m
		return o
	}
	o.writing = &writing{
		m: rec.From, status: lineage.FailedSnap, err: errors.New("its daemon ended before it was written"), settled: make(chan struct{}),
	}
	close(o.writing.settled)
	return o
}

// cutNow is how many of a machine's disk files its latest branch holds, if that can be told: a daemon may have died
// after files were made one, or a new one was begun, and before it was written down.
func cutNow(recorded []string, cut int, now []string) (int, bool) {
	if cut < 0 || cut > len(recorded) {
		return 0, false
	}
	if cut <= len(now) && slices.Equal(recorded[:cut], now[:cut]) {
		return cut, true
	}
	above := recorded[cut:]
	if cut > 0 && len(now) > len(above) && now[0] == recorded[0] && slices.Equal(now[1:1+len(above)], above) {
		return 1, true
	}
	return 0, false
}

// nextDisk is the number of a machine's next disk file.
func nextDisk(dir string) int {
	next := 0
	entries, err := os.ReadDir(layout.MachineDisks(dir))
	if err != nil {
		return next
	}
	for _, e := range entries {
		if n, err := strconv.Atoi(strings.TrimSuffix(e.Name(), ".qcow2")); err == nil && n >= next {
			next = n + 1
		}
	}
	return next
}

// reach connects to the agent of an adopted machine and ends what the daemon before had begun in it, however long it
// takes. A paused one is reached when it runs again.
func (h *Host) reach(s *sandbox, machine engine.Machine, reached chan<- struct{}) {
	defer close(reached)
	if s.is(lineage.Paused) {
		return
	}
	ctx, stop := untilDead(h.life, machine)
	defer stop()
	tick := time.NewTicker(reachAgain)
	defer tick.Stop()
	for {
		err := s.greet(ctx)
		if err == nil || ctx.Err() != nil || errors.Is(err, lineage.ErrState) {
			return
		}
		h.log.Warn("reach an adopted sandbox", "sandbox", s.id, "error", err)
		if _, refused := errors.AsType[*wire.Error](err); refused {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// greet lets the guest's processes run, if the daemon before had stopped them, and sets its clock.
func (s *sandbox) greet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, thawTimeout)
	defer cancel()
	conn, err := s.guest(ctx)
	if err != nil {
		return err
	}
	if !slices.Contains(conn.Hello().Features, wire.FeatureThaw) {
		return nil // of an older forkd, which captured no running machines
	}
	return s.goAgain(ctx, conn)
}

// keptPrefix marks hot images whose memory ended with an earlier daemon: forks do not find them and have the image made
// anew; their disks stay as long as machines stand on them.
const keptPrefix = "kept "

// restore enters the hot images that adopted machines stand on, by key. Each machine is a user of its own.
func (c *hotCache) restore(adopted []*adoption) map[string]*hotImage {
	pool := map[memory.ID]*memory.Image{}
	for _, a := range adopted {
		pool[a.record.Mapped] = a.memory
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	records := newestRecords(adopted)
	images := map[string]*hotImage{}
	for _, a := range adopted {
		for _, rec := range a.record.Images {
			if _, ok := images[rec.Key]; !ok {
				images[rec.Key] = c.restoreOne(records[rec.Key], images, pool)
			}
		}
		e := images[a.record.Hot]
		e.users++
		if e.checkpoint == nil { // what its own branches are over
			e.checkpoint = shared(a.record.Format, a.memory)
		}
	}
	return images
}

// newestRecords are what is known of the images, by key. One that had pages over another's memory may have got its own
// after some machines were restored from it, and their records do not say so. What a machine has of its own is right over
// that as well as over what it maps itself, but not the other way round: the pages are lacking there.
func newestRecords(adopted []*adoption) map[string]imageRecord {
	records := map[string]imageRecord{}
	for _, a := range adopted {
		for _, rec := range a.record.Images {
			have, ok := records[rec.Key]
			if !ok || have.Pages && !rec.Pages && slices.Equal(have.Below, rec.Below) {
				records[rec.Key] = rec
			}
		}
	}
	return records
}

// restoreOne makes a hot image of its record. The caller holds mu; what it stands on is in images already.
func (c *hotCache) restoreOne(rec imageRecord, images map[string]*hotImage, pool map[memory.ID]*memory.Image) *hotImage {
	e := &hotImage{
		key: rec.Key, tag: rec.Tag, image: rec.Image, bytes: rec.Bytes, layer: rec.Layer, own: rec.Own, disks: rec.Disks,
		ready: make(chan struct{}), used: time.Now(),
	}
	close(e.ready)
	for _, key := range rec.Below {
		images[key].users++
		e.below = append(e.below, images[key])
	}
	if image := pool[rec.Memory]; image != nil {
		e.checkpoint = shared(rec.Format, image)
	}
	state, ok := c.stateOf(rec.Key)
	if ok && e.checkpoint != nil && !rec.Pages {
		e.checkpoint.State = state
	} else if !strings.HasPrefix(e.key, keptPrefix) {
		e.key = keptPrefix + e.key
		e.layer = [32]byte{} // nobody stands on memory that is not all there
	}
	c.entries[e.key] = e
	if _, ok := c.bases[e.image]; !ok {
		b := &hotBase{ready: make(chan struct{})}
		close(b.ready)
		c.bases[e.image] = b
	}
	return e
}

// shared is a checkpoint with a hold of its own on an image, nil if there is none to be had.
func shared(format engine.Format, image *memory.Image) *engine.Checkpoint {
	own, err := image.Share()
	if err != nil {
		return nil
	}
	return &engine.Checkpoint{Format: format, Memory: own}
}

// stateOf is the device state of a snapshot, by id.
func (c *hotCache) stateOf(id string) ([]byte, bool) {
	for _, m := range c.h.snapshots {
		if m.ID() != id {
			continue
		}
		state, err := c.h.store.State(m)
		return state, err == nil
	}
	return nil, false
}

// standsOn reports whether some image has the file among its disks. The caller holds mu.
func (c *hotCache) standsOn(file string) bool {
	for _, e := range c.entries {
		if slices.Contains(e.disks, file) {
			return true
		}
	}
	return false
}

// Leave stops the host without ending its sandboxes: they run on for the next one. What is being written of branches is
// waited for as long as ctx lasts.
func (h *Host) Leave(ctx context.Context) error {
	h.mu.Lock()
	h.closed = true
	var all []*sandbox
	for id, s := range h.sandboxes {
		all = append(all, s)
		delete(h.sandboxes, id)
	}
	var unsettled []*writing
	for _, w := range h.writing {
		unsettled = append(unsettled, w)
	}
	h.mu.Unlock()
	for _, w := range unsettled {
		if err := w.wait(ctx); err != nil && ctx.Err() != nil {
			break
		}
	}
	h.die()
	// A copy that was cut short lets its machine run well again. That needs the machine, which is given up below.
	for _, w := range unsettled {
		<-w.settled
	}
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, s := range all {
		wg.Go(func() { errs[i] = h.leave(s) })
	}
	wg.Wait()
	h.wait.Wait()
	h.hot.leave()
	h.cfg.Groups.Close()
	return errors.Join(errors.Join(errs...), h.cfg.Networks.Leave(context.WithoutCancel(ctx)), context.Cause(ctx))
}

// leave gives up a sandbox's machine, or ends it if that cannot be: nobody would know it any more.
func (h *Host) leave(s *sandbox) error {
	h.record(s)
	s.mu.Lock()
	machine, conn, state := s.machine, s.conn, s.state
	s.mu.Unlock()
	if machine == nil { // suspended: all of it is on disk
		s.mu.Lock()
		s.disarm()
		s.mu.Unlock()
		return nil
	}
	detacher, ok := machine.(engine.Detacher)
	_, adopts := h.cfg.Engine.(engine.Adopter)
	if !ok || !adopts || state == lineage.Failed {
		return h.end(s)
	}
	s.mu.Lock()
	s.ended = true
	s.disarm()
	s.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
	}
	return detacher.Detach()
}

// leave drops what nobody uses and closes what is held; files that machines stand on stay for the next host.
func (c *hotCache) leave() {
	c.evict()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.entries {
		if e.checkpoint != nil {
			closeMemory(e.checkpoint)
		}
		for _, r := range e.retired {
			_ = r.Close()
		}
	}
	for image := range c.bases {
		if path := c.h.cfg.Home.HotBase(image); !c.standsOn(path) {
			_ = os.Remove(path)
		}
	}
	clear(c.entries)
	clear(c.bases)
}
